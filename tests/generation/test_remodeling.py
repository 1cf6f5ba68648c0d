"""Another architecture that begins with a model's weights."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from lm.cli.compose.remodeled import remodeled
from lm.data.tokenizer.tokenizer import Tokenizer
from lm.errors import ConfigError
from lm.generation.load import load
from lm.generation.remodeling import Remodeled, remodel
from lm.nn.model_config import ModelConfig, model_config
from lm.nn.transformer import EncoderDecoderConfig
from lm.schema import from_tree
from lm.storage.model_folder import read_config, save_model
from lm.testing.models import random_model
from tests.conftest import Lm
from tests.generation.conftest import Save
from tests.nn.models import BASE, CONV, config, redrawn, with_kinds

MOE = ["model/ffn=moe", "model.ffn.n_experts=4"]
MIXTURE = {"kind": "moe", "n_experts": 4, "top_k": 2, "expert": {"hidden": 16, "bias": True}}
GROUPED = {"n_heads": 4, "n_kv_heads": 2, "qkv_bias": True, "out_bias": True}


def changed(folder: Path, overrides: list[str]) -> ModelConfig:
    return model_config(remodeled(read_config(folder)["model"], str(folder), overrides))


def made(folder: Path, *overrides: str, **options: Any) -> tuple[Remodeled, dict[str, Tensor], dict[str, Tensor]]:
    """What a model became, its new weights and its old ones."""
    cfg = changed(folder, [*overrides]) if overrides else None
    found = remodel(folder, folder.with_name("new"), cfg, overwrite=True, **options)
    return found, load_file(found.folder / "model.safetensors"), load_file(folder / "model.safetensors")


@pytest.mark.parametrize("ffn", [{}, {"gated": False, "bias": True, "activation": "gelu", "hidden": 24}], ids=["gated", "plain, biases"])
def test_experts_begin_as_the_feed_forward(save: Save, ffn: dict[str, Any]) -> None:
    """Of any of them a token gets the same, and their weights sum to 1."""
    found, new, old = made(save("a", 1, ffn=ffn), *MOE)
    assert found.apart < 1e-6 and found.agrees
    for i in range(4):
        for name in ("up", "down"):
            assert torch.equal(new[f"blocks.1.ffn.experts.{name}"][i], old[f"blocks.1.ffn.{name}.weight"])
            if ffn:
                assert torch.equal(new[f"blocks.1.ffn.experts.{name}_bias"][i], old[f"blocks.1.ffn.{name}.bias"])
    assert found.drawn == {"blocks.*.ffn.router.weight": sum(new[name].numel() for name in new if "router" in name)} and not found.left
    assert found.kept + found.made + sum(found.drawn.values()) == found.n_parameters == sum(w.numel() for w in new.values())


def test_a_mixture_with_layers_that_stay_dense_and_a_shared_expert(save: Save) -> None:
    """The file of an option leaves the first layer dense; the shared expert is new and adds nothing yet."""
    found, new, old = made(save("a", 1), "model/ffn=deepseek_moe", "model.ffn.n_experts=4")
    assert found.agrees
    assert torch.equal(new["blocks.0.ffn.up.weight"], old["blocks.0.ffn.up.weight"])
    assert not new["blocks.1.ffn.shared.down.weight"].any() and new["blocks.1.ffn.shared.up.weight"].any()
    assert made(save("b", 1), *MOE, "model.ffn.every=2")[0].agrees


def test_heads_of_keys_and_values(save: Save) -> None:
    folder = save("a", 1, attention=GROUPED)
    found, new, old = made(folder, "model.attention.n_kv_heads=4")
    assert found.agrees and found.made > 0
    found, new, old = made(folder, "model.attention.n_kv_heads=1")
    assert not found.agrees
    for name in ("k.weight", "k.bias", "v.weight", "v.bias"):
        first, second = old[f"blocks.2.attention.{name}"].chunk(2)
        torch.testing.assert_close(new[f"blocks.2.attention.{name}"], (first + second) / 2)
    same = save("b", 1, attention=GROUPED)
    model, tokenizer = load(same, "cpu")
    for block in model.blocks:
        for linear in (block.attention.k, block.attention.v):
            for p in linear.parameters():
                p.data = p.data[: len(p) // 2].repeat(2, *[1] * (p.ndim - 1))
    save_model(same, model.cfg.tree(), dict(model.named_parameters()), tokenizer.save, {})
    assert made(same, "model.attention.n_kv_heads=1")[0].agrees  # of heads that are alike the mean is each of them


def test_heads_of_layers_that_read_the_keys_of_another_or_have_keys_for_values(save: Save) -> None:
    """Seen to fail: each layer was asked for keys and values of its own."""
    folder = save("a", 1, attention={"n_heads": 4, "n_kv_heads": 2, "values": "keys", "shared_layers": 1})
    found, new, _ = made(folder, "model.attention.n_kv_heads=4")
    assert found.agrees and new["blocks.1.attention.k.weight"].shape == (32, 32) and "blocks.2.attention.k.weight" not in new
    found, new, old = made(folder, "model.attention.shared_layers=0")
    assert not found.drawn and not found.left  # each begins with the matrices of what it has read, of its own input
    assert torch.equal(new["blocks.2.attention.k.weight"], old["blocks.1.attention.k.weight"])
    assert "blocks.*.attention.v.weight" in made(folder, "model.attention.shared_layers=0", "model.attention.values=own")[0].drawn


def test_layers_are_repeated_left_out_and_reordered(save: Save) -> None:
    folder = save("a", 1)
    found, new, old = made(folder, layers=[2, 0, 0])
    assert not found.agrees and found.left == {"blocks.1": sum(old[name].numel() for name in old if name.startswith("blocks.1."))}
    for new_layer, old_layer in enumerate([2, 0, 0]):
        for name in (name for name in new if name.startswith(f"blocks.{new_layer}.")):
            assert torch.equal(new[name], old[name.replace(f"blocks.{new_layer}.", f"blocks.{old_layer}.")])
    assert made(folder, layers=[0, 1, 2])[0].apart == 0.0


@pytest.mark.parametrize("layers", [[1], [2, 0, 1], [1, 2]])
def test_the_vectors_of_distances_stay_with_the_first_layer(save: Save, layers: list[int]) -> None:
    """All layers have them. Seen to fail: they were drawn where another layer became the first, and what all had learned was lost."""
    distances = {"n_buckets": 4, "max_distance": 8}
    found, new, old = made(save("a", 1, attention={"n_heads": 4, "disentangled": distances}, position={"kind": "none"}), layers=layers)
    for name in ("table.weight", "table_norm.weight"):
        assert torch.equal(new[f"blocks.0.attention.{name}"], old[f"blocks.0.attention.{name}"])
    assert torch.equal(new["blocks.0.attention.q.weight"], old[f"blocks.{layers[0]}.attention.q.weight"]) and not found.drawn


@pytest.mark.parametrize(
    "ffn", [{"gated": False, "bias": True}, {"kind": "moe", "n_experts": 4, "top_k": 2, "expert": {"hidden": 16, "bias": True}}]
)
def test_silent_copies_add_nothing(save: Save, ffn: dict[str, Any]) -> None:
    """Their biases are 0, too; a layer's first copy is not silent, wherever it stands."""
    folder = save("a", 1, ffn=ffn, attention=GROUPED)
    found, new, _ = made(folder, layers=[0, 0, 1, 2, 1], silent=True)
    assert found.apart == 0.0
    assert (
        not new["blocks.4.attention.o.weight"].any()
        and new["blocks.2.attention.o.weight"].any()
        and new["blocks.4.attention.q.weight"].any()
    )
    assert found.kept + found.made == found.n_parameters
    assert made(folder, layers=[0, 0, 1, 2, 1])[0].apart > 0.01


@pytest.mark.parametrize("residual", ["x0", "dense", "loop"])
def test_between_layers(save: Save, residual: str) -> None:
    options = ["model.residual.times=2"] if residual == "loop" else []
    found, new, old = made(save("a", 1), f"model/residual={residual}", *options)
    assert found.agrees == (residual != "loop")
    assert all(torch.equal(new[name], weight) for name, weight in old.items())


def test_norms_stay_before_another_mixer_and_within_streams(save: Save) -> None:
    folder = save("a", 1)
    found, new, old = made(folder, "model/recurrent=rg_lru", "model.pattern=[recurrent,attention]")
    assert torch.equal(new["blocks.0.recurrent_residual.norm.weight"], old["blocks.0.attention_residual.norm.weight"])
    assert "blocks.*.attention.q.weight" in found.left
    assert not any(new[name].any() for name in new if name.startswith("blocks.0.recurrent.") and name.endswith(("o.weight", "out.weight")))
    found, new, old = made(folder, "model/residual=hyper")
    assert torch.equal(new["blocks.0.ffn_residual.sublayer.norm.weight"], old["blocks.0.ffn_residual.norm.weight"])


def test_mixers_side_by_side_and_alone(save: Save) -> None:
    """What a new recurrence adds is 0 at first."""
    folder = save("a", 1)
    found, new, old = made(folder, "model/recurrent=mamba2", "model.pattern=[both]")
    assert found.agrees and torch.equal(new["blocks.1.both.attention.q.weight"], old["blocks.1.attention.q.weight"])
    assert not found.left
    back = remodel(found.folder, folder.with_name("back"), model_config(read_config(folder)["model"]))
    assert back.agrees and not back.drawn


@pytest.mark.parametrize(("layers", "pattern"), [([0, 1, 1, 2], ["recurrent", "attention", "attention"]), ([1], ["attention"])])
def test_layers_keep_their_mixers(save: Save, layers: list[int], pattern: list[str]) -> None:
    """Seen to fail: the pattern went on over the new layers, which lost the mixers of those that they began as, and drew others."""
    folder = save("a", 1, recurrent=CONV, pattern=["recurrent", "attention"])
    found, *_ = made(folder, layers=layers, silent=len({*layers}) < len(layers))
    assert not found.drawn and found.agrees == (len(layers) > 1)
    assert model_config(read_config(found.folder)["model"]).pattern == pattern
    other, *_ = made(folder, "model.pattern=[attention,recurrent]", layers=[0, 1])
    assert other.drawn and model_config(read_config(other.folder)["model"]).pattern == ["attention", "recurrent"]


@pytest.mark.parametrize("kind", ["gla", "mamba2"])
def test_a_recurrent_mixer_of_another_kind_begins_anew(save: Save, kind: str) -> None:
    """Seen to fail: of gla the weights that make the decay were taken from gated_delta, where they mean something else; mamba2, one of
    whose kernels has another shape, was refused."""
    delta = {"kind": "gated_delta", "n_heads": 4, "n_k_heads": 4, "k_dim": 8, "v_dim": 8}
    folder = save("a", 1, recurrent=delta, pattern=["recurrent", "attention"])
    found, new, old = made(folder, f"model/recurrent={kind}")
    assert not any(name in old and torch.equal(new[name], old[name]) for name in new if ".recurrent." in name and new[name].any())
    outputs = [name for name in new if name.startswith("blocks.0.recurrent.") and name.endswith(("o.weight", "out.weight"))]
    assert outputs and not any(new[name].any() for name in outputs)
    assert torch.equal(new["blocks.1.attention.q.weight"], old["blocks.1.attention.q.weight"]) and not found.agrees


def test_norms_of_sublayers_side_by_side(save: Save) -> None:
    found, new, old = made(save("a", 1), "model/block=parallel", "model.block.shared_norm=false")
    assert not found.drawn and not found.left and torch.equal(new["blocks.0.ffn_norm.weight"], old["blocks.0.ffn_residual.norm.weight"])


def test_another_router(save: Save) -> None:
    """Seen to fail: the old router's options were taken for those of the new one."""
    found, new, old = made(save("a", 1, ffn=MIXTURE), "model/ffn=deepseek_moe", "model.ffn.n_experts=4", "model.ffn.first_dense=0")
    assert torch.equal(new["blocks.0.ffn.experts.up"], old["blocks.0.ffn.experts.up"])
    assert "blocks.*.ffn.router.correction_bias" in found.drawn


def test_a_head_of_its_own(save: Save) -> None:
    found, new, _ = made(save("a", 1, head={"tied": True}), "model.head.tied=false")
    assert found.agrees and torch.equal(new["head.weight"], new["embed.weight"])
    found, new, _ = made(save("b", 1, head={"tied": False}), "model.head.tied=true")
    assert not found.agrees and list(found.left) == ["head.weight"] and "head.weight" not in new


@pytest.mark.parametrize("width", [12, 32])
def test_a_head_of_its_own_behind_a_narrow_embedding(save: Save, width: int) -> None:
    """Seen to be refused for the shape of the embedding, and where that is as wide as the model to compute something else."""
    found, new, old = made(save("a", 1, embed={"factorized": {"width": width}}), "model.head.tied=false")
    assert found.agrees and not found.drawn and not found.left and found.made == new["head.weight"].numel()
    torch.testing.assert_close(new["head.weight"], old["embed.weight"] @ old["head.narrow.weight"])


def test_what_is_saved_can_be_read_and_is_of_the_dtype(save: Save, tokenizer: Tokenizer) -> None:
    model, folder = redrawn(config(vocab_size=320), 1).bfloat16(), save("a", 1)
    save_model(folder, model.cfg.tree(), dict(model.named_parameters()), tokenizer.save, {"sampling": {"top_p": 0.9}, "family": "llama"})
    found, new, _ = made(folder, *MOE, seed=3)
    assert {weight.dtype for weight in new.values()} == {torch.bfloat16} and found.agrees
    told = json.loads((found.folder / "config.json").read_text())
    assert told["sampling"] == {"top_p": 0.9} and "family" not in told
    assert told["remodeled"] == {"parent": str(folder), "layers": None, "silent": False, "seed": 3}
    again, _ = load(found.folder, "cpu")
    assert again(torch.arange(8)[None]).isfinite().all()
    assert not torch.equal(made(folder, *MOE, seed=4)[1]["blocks.0.ffn.router.weight"], new["blocks.0.ffn.router.weight"])


def test_both_stacks_of_an_encoder_decoder(tmp_path: Path, tokenizer: Tokenizer) -> None:
    cfg = from_tree(EncoderDecoderConfig, with_kinds(BASE | {"kind": "encoder_decoder", "vocab_size": 320}))
    model = random_model(cfg, 0)
    save_model(tmp_path / "a", cfg.tree(), dict(model.named_parameters()), tokenizer.save, {})
    found, new, old = made(tmp_path / "a", *MOE)
    assert found.agrees and torch.equal(new["encoder.blocks.0.ffn.experts.up"][3], old["encoder.blocks.0.ffn.up.weight"])
    with pytest.raises(ConfigError, match="has layers of an encoder and of a decoder"):
        remodel(tmp_path / "a", tmp_path / "b", layers=[0])


def test_a_feed_forward_of_the_same_kind_keeps_its_width(save: Save) -> None:
    """An option sets its own values; all else of the section stays, but for what another kind has not."""
    folder = save("a", 1, ffn={"hidden": 24, "bias": True})
    cfg = changed(folder, ["model/ffn=geglu"]).tree()
    assert cfg["ffn"]["hidden"] == 24 and cfg["ffn"]["bias"] is True and cfg["ffn"]["activation"] == "gelu"
    experts = changed(folder, [*MOE, "model.ffn.expert.activation=relu"]).tree()["ffn"]["expert"]
    assert experts["hidden"] == 24 and experts["activation"] == "relu"


def test_what_cannot_be_is_refused(save: Save, tmp_path: Path) -> None:
    folder = save("a", 1)
    refused: list[tuple[list[str], dict[str, Any], str]] = [
        (["model.d_model=64"], {}, r"a: \S+ is \S+, and the new model's would be \S+\. lm remodel --help says what can change"),
        (["model.dropout=0.0"], {}, "nothing about the model changes"),
        ([], {"layers": [0, 3]}, "layers: .*/a has 3 layers, from 0, and 3 is none. Write layers=0-2, say"),
        ([], {"layers": []}, "and none is named"),
        (["model.dropout=0.1"], {"silent": True}, "silent: it is for copies"),
        ([], {"layers": [0, 1], "silent": True}, "silent: it is for copies"),
        (["model.n_layers=2"], {}, "model.n_layers=2: which layers there are is said by layers"),
        (["model.kind=encoder"], {}, "model.kind=encoder: it reads as it did"),
        (["model=nano"], {}, "model=nano: a preset is a whole other model"),
        (["optim.lr=1"], {}, "optim.lr=1: a model is rebuilt here"),
        (["model.head.labels=[a,b]"], {}, "model.head.labels=.* what the head tells stays"),
        (["model.head={tied: false, labels: [a,b]}"], {}, "model.head.labels stay as they are"),
        (["model/ffn=moo"], {}, "model/ffn: 'moo' is not an option. Did you mean 'moe'"),
        (["model.ffn.hiden=1"], {}, "Did you mean 'hidden'"),
    ]
    for overrides, options, said in refused:
        with pytest.raises(ConfigError, match=said):
            made(folder, *overrides, **options)
        assert not (tmp_path / "new").exists()
    encoder = model_config(with_kinds(BASE | {"kind": "encoder", "vocab_size": 320}))
    save_model(tmp_path / "e", encoder.tree(), dict(random_model(encoder, 0).named_parameters()), load(folder, "cpu")[1].save, {})
    with pytest.raises(ConfigError, match=r"model\.kind=decoder reads otherwise"):
        remodel(tmp_path / "e", tmp_path / "new", config(vocab_size=320))


def test_the_command(save: Save, lm: Lm, tmp_path: Path) -> None:
    folder = save("a", 1)
    code, out, err = lm("remodel", f"from={folder}", "out=moe", *MOE)
    lines = out.splitlines()
    assert code == 0 and "made of others" in lines[0] and lines[1].startswith(f"It computes what {folder} does"), err
    assert lines[2] == "Train it: lm train init_from=moe ..." and "drawn: blocks.*.ffn.router.weight" in err
    code, out, err = lm("remodel", f"from={folder}", "out=deep", "layers=0-1,1-2")
    assert code == 0 and "until it is trained" in out and len(load(tmp_path / "deep", "cpu")[0].blocks) == 4, err
    for args, said in ((["layer=0,1"], "layer: there is no such key. Did you mean 'layers'?"), (["optim.lr=1"], "optim.lr: there is no")):
        code, _, err = lm("remodel", f"from={folder}", "out=x", *args)
        assert code == 2 and err.splitlines()[-1].startswith(said)
    wrong = {"2-0": "2-0 names no layers", "a": "'a' is neither", "1,": "'' is neither", "0-99999": "'0-99999' is neither"}
    for layers, said in wrong.items():
        code, _, err = lm("remodel", f"from={folder}", "out=x", f"layers={layers}")
        assert code == 2 and err.splitlines()[-1].startswith(f"layers={layers}: {said}")
    code, _, err = lm("train", f"init_from={folder}", *MOE)
    assert code == 2 and "or rebuild the model first, by lm remodel" in err
