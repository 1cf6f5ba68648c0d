"""A folder becomes the model that was saved, or an error that names what does not fit."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import lm
from lm.data.kinds import BytesConfig
from lm.data.tokenizer.tokenizer import Tokenizer
from lm.errors import CheckpointError, ConfigError
from lm.generation.load import pick_device
from lm.generation.remodeling import remodel
from lm.nn.batch import Batch
from lm.nn.transformer import DecoderLM, build_model
from lm.ops import defaults
from lm.schema import Tree
from lm.storage.checkpoint import Piece
from lm.storage.manifest import MANIFEST
from lm.storage.model_folder import copy_weights, save_model
from tests.nn.models import BIASED, config, redrawn
from tests.runs import save_checkpoint
from tests.test_heap import held_mib, on_linux

TOKENS = torch.arange(20).view(2, 10)


def test_a_model_whose_routers_are_wider_has_the_dtype_of_its_other_weights(tmp_path: Path) -> None:
    """Seen to fail: float32, as their balancing biases stand first in the file; and in bf16 for a layer that is there twice."""
    saved = lm.save(redrawn(config(vocab_size=320, ffn=BIASED)).to(torch.bfloat16), BytesConfig().build(), tmp_path / "m")
    try:
        for default in (torch.float32, torch.bfloat16):
            torch.set_default_dtype(default)  # as Lightning does for a step of bf16-true, in which a teacher is loaded
            dtypes = {name: p.dtype for name, p in lm.load(saved, device="cpu")[0].named_parameters()}
            assert {name for name, dtype in dtypes.items() if dtype != torch.bfloat16} == {
                f"blocks.{i}.ffn.router.correction_bias" for i in range(3)
            }
    finally:
        torch.set_default_dtype(torch.float32)
    deeper = load_file(remodel(saved, tmp_path / "deeper", layers=[0, 1, 2, 2]).folder / "model.safetensors")
    bias = "blocks.{}.ffn.router.correction_bias"
    assert torch.equal(deeper[bias.format(3)], deeper[bias.format(2)]) and deeper[bias.format(3)].dtype == torch.float32


def test_an_embedding_that_an_adapter_has_narrower_leaves_the_parent_as_wide_as_it_is(model_folder: Path, tokenizer: Tokenizer) -> None:
    """As of trainer.precision=bf16-true adapter.whole=[embed] beside a parent in float32."""
    parent, _ = lm.load(model_folder, device="cpu")
    weights = dict(parent.named_parameters()) | {"embed.weight": parent.embed.weight.to(torch.bfloat16)}
    save_model(model_folder.parent / "tuned", parent.cfg.tree(), weights, tokenizer.save, {})
    loaded, _ = lm.load(model_folder.parent / "tuned", device="cpu")
    for name, p in loaded.named_parameters():
        assert torch.equal(p, weights[name].float()), name


@pytest.mark.parametrize("tied", [True, False])
def test_loaded_model_gives_the_logits_of_the_saved_one(tmp_path: Path, tokenizer: Tokenizer, tied: bool) -> None:
    model = redrawn(config(vocab_size=320, head={"tied": tied}, dropout=0.5))
    save_model(tmp_path / "m", model.cfg.tree(), dict(model.named_parameters()), tokenizer.save, {})
    loaded, its_tokenizer = lm.load(tmp_path / "m", device="cpu")
    assert not loaded.training
    assert torch.equal(loaded(Batch(TOKENS)), model(Batch(TOKENS)))
    assert its_tokenizer.hash == tokenizer.hash
    assert (loaded.head.weight is loaded.embed.weight) is tied
    assert all(p.requires_grad for p in loaded.parameters())


def test_run_folder_and_checkpoint_folder_load_too(model_folder: Path, model: DecoderLM, tokenizer: Tokenizer, tmp_path: Path) -> None:
    pieces = [Piece.whole(name, "weight", p) for name, p in model.named_parameters()]
    pieces += [Piece.whole(name, "exp_avg", p) for name, p in model.named_parameters()]
    save_checkpoint(tmp_path / "step-00000007", pieces, {"model": model.cfg.tree(), "step": 7}, tokenizer.save)
    for folder in (model_folder.parent, tmp_path / "step-00000007"):
        loaded, its_tokenizer = lm.load(str(folder), device="cpu")
        assert torch.equal(loaded(Batch(TOKENS)), model(Batch(TOKENS)))
        assert its_tokenizer.hash == tokenizer.hash


def test_dtype_is_the_one_that_was_saved(tmp_path: Path, tokenizer: Tokenizer, model: DecoderLM) -> None:
    weights = {name: p.bfloat16() for name, p in model.named_parameters()}
    save_model(tmp_path / "m", model.cfg.tree(), weights, tokenizer.save, {})
    loaded, _ = lm.load(tmp_path / "m", device="cpu")
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
    assert loaded(Batch(TOKENS)).dtype == torch.bfloat16


def test_averages_of_a_checkpoint_have_the_dtype_of_its_weights(tmp_path: Path, tokenizer: Tokenizer, model: DecoderLM) -> None:
    """As validation has seen them, and model/ has them. Seen to fail: float32, twice the memory, in all that reads a checkpoint."""
    pieces = [Piece.whole(name, "weight", p.bfloat16()) for name, p in model.named_parameters()]
    pieces += [Piece.whole(name, "ema", p + 1) for name, p in model.named_parameters()]
    save_checkpoint(tmp_path / "step-00000007", pieces, {"model": model.cfg.tree(), "step": 7}, tokenizer.save)
    loaded = dict(lm.load(tmp_path / "step-00000007", device="cpu")[0].named_parameters())
    for name, p in model.named_parameters():
        assert loaded[name].dtype == torch.bfloat16 and torch.equal(loaded[name], (p + 1).bfloat16())


@on_linux
def test_a_model_that_is_loaded_as_int8_is_not_held_as_float32_too(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Seen to fail: a process of 221 M parameters held 1,024 MiB to its end, 392 without."""
    model = build_model(config(vocab_size=320, d_model=512, n_layers=14), seed=0)
    mib = sum(p.numel() for p in model.parameters()) / 2**18
    save_model(tmp_path / "m", model.cfg.tree(), dict(model.named_parameters()), tokenizer.save, {})
    del model
    before = held_mib()
    prepared, _ = lm.load(tmp_path / "m", device="cpu", dtype="int8")
    assert held_mib() - before < mib / 2 > 25
    assert prepared.vocab_size == 320


def test_weights_that_are_copied_are_let_go_of_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """None is there twice, so that a model takes no more memory to load than it and its largest weight."""
    model = build_model(config(), seed=0)
    weights = {name: torch.full_like(p, 2.0) for name, p in model.named_parameters()}
    left = []
    for p in model.parameters():
        monkeypatch.setattr(p, "copy_", lambda other, p=p: (left.append(len(weights)), p.data.copy_(other)))
    copy_weights(model.named_parameters(), weights, "here")
    assert left == [*reversed(range(len(left)))] and len(left) > 5
    assert all((p == 2).all() for p in model.parameters())


Change = Callable[[dict[str, Tensor]], object]
MISFITS: dict[str, tuple[Change, str]] = {
    "missing": (lambda w: w.pop("blocks.1.ffn.up.weight"), r"blocks\.1\.ffn\.up\.weight is missing there"),
    "unknown": (lambda w: w.update(extra=torch.ones(1)), "extra is 1 there and missing in the model"),
    "head of a tied model": (
        lambda w: w.update({"head.weight": torch.ones(320, 32)}),
        r"head\.weight is 320x32 there and missing",
    ),
    "misshapen": (lambda w: w.update({"norm.weight": torch.ones(7)}), r"norm\.weight is 7 there and 32 in the model"),
    "many": (lambda w: [w.pop(name) for name in list(w) if ".ffn." in name], r"(ffn.*){5} \(5 of 9\)"),
    "none": (lambda w: w.clear(), r"blocks\.0\.attention\.q\.weight is missing"),
}


@pytest.mark.parametrize("change, expected", MISFITS.values(), ids=MISFITS.keys())
def test_weights_that_do_not_fit_are_named(tmp_path: Path, model: DecoderLM, tokenizer: Tokenizer, change: Change, expected: str) -> None:
    weights: dict[str, Tensor] = dict(model.named_parameters())
    change(weights)
    save_model(tmp_path / "m", model.cfg.tree(), weights, tokenizer.save, {})
    with pytest.raises(CheckpointError, match=expected):
        lm.load(tmp_path / "m", device="cpu")


CONFIGS: dict[str, tuple[Tree, str]] = {
    "misspelt key": ({"d_mode": 3}, r"d_mode: there is no such key\. Did you mean 'd_model'"),
    "out of range": ({"d_model": -1}, r"d_model: -1 does not fit"),
    "unknown kind": ({"norm": {"kind": "rns"}}, r"norm\.kind: 'rns' is not an option"),
    "no vocabulary": ({"vocab_size": None}, "vocab_size .* is null"),
}


@pytest.mark.parametrize("change, expected", CONFIGS.values(), ids=CONFIGS.keys())
def test_bad_config_of_a_model_folder_is_told_with_its_place(
    tmp_path: Path, model: DecoderLM, tokenizer: Tokenizer, change: Tree, expected: str
) -> None:
    save_model(tmp_path / "m", model.cfg.tree() | change, dict(model.named_parameters()), tokenizer.save, {})
    with pytest.raises(CheckpointError, match=f"{tmp_path}/m: model.*{expected}"):
        lm.load(tmp_path / "m", device="cpu")


def test_tokenizer_that_does_not_fit_is_refused_with_both_numbers(tmp_path: Path) -> None:
    model = redrawn(config())
    save_model(tmp_path / "m", model.cfg.tree(), dict(model.named_parameters()), BytesConfig().build().save, {})
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: 259 tokens .* 61 rows"):
        lm.load(tmp_path / "m", device="cpu")


def test_missing_tokenizer_is_a_checkpoint_error(tmp_path: Path, model: DecoderLM) -> None:
    save_model(tmp_path / "m", model.cfg.tree(), dict(model.named_parameters()), lambda folder: None, {})
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        lm.load(tmp_path / "m", device="cpu")


def test_damaged_file_is_named(model_folder: Path) -> None:
    path = model_folder / "config.json"
    tree = json.loads(path.read_text())
    tree["model"]["embed"]["scale"] = 2.0
    path.write_text(json.dumps(tree))
    assert (model_folder / MANIFEST).is_file()
    with pytest.raises(CheckpointError, match=r"config\.json"):
        lm.load(model_folder, device="cpu")


def test_a_mac_has_one_gpu_and_needs_a_torch_that_computes_right_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    for since, name, why in (("2.0", "mps:1", "a Mac has one GPU"), ("99.9", "mps", "torch before 99.9 computes wrongly there")):
        monkeypatch.setattr(defaults, "MAC_SINCE", since)
        with pytest.raises(ConfigError, match=f"{name} was asked for, and {why}"):
            pick_device(name)
    monkeypatch.setattr(defaults, "MAC_SINCE", "2.0")
    assert pick_device("mps:0").type == "mps"


def test_device_that_is_not_there_is_refused(model_folder: Path) -> None:
    untyped: Any = None
    for name in ("gpu", "meta", "xla:0", untyped):  # torch knows all but the first by name
        with pytest.raises(ConfigError, match=f"{name!r} is not a device"):
            lm.load(model_folder, device=name)
    if not torch.backends.mps.is_available():
        with pytest.raises(ConfigError, match="mps was asked for, and torch finds no GPU of a Mac here"):
            lm.load(model_folder, device="mps")
    missing = f"cuda:{torch.cuda.device_count()}"
    with pytest.raises(ConfigError, match=f"{missing} was asked for"):
        lm.load(model_folder, device=missing)
