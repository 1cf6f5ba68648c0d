"""What one optimizer step does, seen through whole small runs: scale, dropout, precision, clipping, learning rate, averaging."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import Callback, Trainer
from safetensors.torch import load_file
from torch import Tensor

from lm.data.order import spread
from lm.data.rows.causal import CausalRows
from lm.data.store.prepare import prepare
from lm.generation.evaluate import Evaluator
from lm.generation.load import load
from lm.losses.cross_entropy import token_losses
from lm.losses.tokens import causal_reader
from lm.nn.context import Context
from lm.nn.head import Head, HeadConfig
from lm.nn.norm import RMSNormConfig
from lm.nn.position.base import Position
from lm.nn.transformer import DecoderConfig, DecoderLM, build_model
from lm.ops.attention.mask import Mask, arange_positions
from lm.schema import from_tree
from lm.storage.checkpoint import CheckpointReader
from lm.storage.model_folder import read_model
from lm.training.module import draw_from, step_seed
from lm.training.run import train_rank
from tests.training.conftest import Configure, read

PLAIN = ("model.dropout=0", "trainer.max_steps=3", "trainer.val_every=3", "checkpoint.every=3", "schedule.warmup_steps=1")


def weights(tmp_path: Path, name: str) -> dict[str, Tensor]:
    return load_file(tmp_path / name / "model" / "model.safetensors")


def losses(tmp_path: Path, name: str) -> list[float]:
    return [line["loss"] for line in read(tmp_path / name / "metrics.jsonl") if "loss" in line]


def initial(tmp_path: Path, name: str, seed: int = 0) -> dict[str, Tensor]:
    """The weights before the first step."""
    tree = json.loads((tmp_path / name / "model" / "config.json").read_text())["model"]
    return {n: p.detach() for n, p in build_model(from_tree(DecoderConfig, tree), seed=seed).named_parameters()}


@pytest.fixture
def ragged(tmp_path: Path) -> str:
    """Many short documents, so that rows differ in their number of labels."""
    path = tmp_path / "ragged.jsonl"
    path.write_text("\n".join(json.dumps({"text": "word " * (1 + i % 7)}) for i in range(400)))
    return f"data.files={path}"


def test_the_split_into_micro_batches_changes_nothing_under_sgd(configure: Configure, tmp_path: Path, ragged: str) -> None:
    for rows in (8, 2, 1):
        train_rank(configure(*PLAIN, ragged, "optim=sgd", "optim.lr=0.5", f"trainer.micro_batch={rows}", f"run.name=rows{rows}"))
    whole = weights(tmp_path, "rows8")
    moved = sum(float((whole[n] - before).norm()) for n, before in initial(tmp_path, "rows8").items())
    assert moved > 0.1
    for rows in (2, 1):
        torch.testing.assert_close(weights(tmp_path, f"rows{rows}"), whole, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(losses(tmp_path, f"rows{rows}"), losses(tmp_path, "rows8"), atol=1e-5, rtol=1e-5)


def test_dropout_acts_in_training(configure: Configure, tmp_path: Path) -> None:
    train_rank(configure(*PLAIN, "run.name=none"))
    train_rank(configure(*PLAIN, "model.dropout=0.5", "model.init.out_scale=1", "run.name=half"))
    train_rank(configure(*PLAIN, "model.init.out_scale=1", "run.name=same"))
    assert abs(losses(tmp_path, "half")[0] - losses(tmp_path, "same")[0]) > 1e-3


def test_every_step_micro_batch_and_rank_has_a_dropout_seed_of_its_own() -> None:
    seeds = {step_seed(seed, step, micro, rank) for seed in range(3) for step in range(5) for micro in range(4) for rank in range(2)}
    assert len(seeds) == 3 * 5 * 4 * 2


def test_draws_are_those_of_torchs_own_seeding() -> None:
    found = []
    for seed in (torch.manual_seed, lambda seed: draw_from(seed, torch.device("cpu"))):
        seed(step_seed(0, 1, 2, 3))
        found.append(torch.rand(5))
    assert torch.equal(*found)


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "tolerance"), [("bf16-mixed", 0.02), ("bf16-true", 0.02), ("fp16-mixed", 0.002)])
def test_half_precision_stays_close_to_fp32_and_is_not_fp32(
    configure: Configure, tmp_path: Path, ragged: str, precision: str, tolerance: float
) -> None:
    train_rank(configure(*PLAIN, ragged, "run.name=full", "model.init.out_scale=1"))
    train_rank(configure(*PLAIN, ragged, "run.name=half", "model.init.out_scale=1", f"trainer.precision={precision}"))
    full, half = losses(tmp_path, "full"), losses(tmp_path, "half")
    assert full[0] != half[0]
    assert half == pytest.approx(full, rel=tolerance)
    norms = [[line["grad_norm"] for line in read(tmp_path / name / "metrics.jsonl") if "loss" in line] for name in ("full", "half")]
    assert norms[1] == pytest.approx(norms[0], rel=10 * tolerance), "clipped and logged without the scale"
    assert weights(tmp_path, "half")["embed.weight"].dtype == (torch.bfloat16 if precision == "bf16-true" else torch.float32)


def test_the_count_of_label_tokens_is_exact_under_bf16_true(configure: Configure, ragged: str) -> None:
    seen: list[tuple[torch.dtype, torch.dtype]] = []

    class Watch(Callback):
        def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *args: Any) -> None:
            if pl_module.stepped:
                seen.append((pl_module.nll.dtype, pl_module.tokens_in_step.dtype))

    train_rank(configure(*PLAIN, ragged, "trainer.precision=bf16-true"), callbacks=[Watch()])
    assert seen == [(torch.float32, torch.float32)] * 3


def test_the_logged_rate_is_the_schedules(configure: Configure, tmp_path: Path) -> None:
    cfg = configure("optim=adamw", "optim.lr=0.01", "schedule=cosine", "schedule.warmup_steps=3")
    train_rank(cfg)
    rates = [line["lr"] for line in read(tmp_path / "run" / "metrics.jsonl") if "lr" in line]
    assert rates == pytest.approx([0.01 * cfg.schedule.factor(step, 12) for step in range(12)])


def test_clipping_bounds_the_update(configure: Configure, tmp_path: Path) -> None:
    sgd = ("optim=sgd", "optim.lr=1.0", "trainer.max_steps=2", "trainer.val_every=2", "schedule=constant", "schedule.warmup_steps=0")
    once = ("checkpoint.every=1", "checkpoint.keep_last=9", "model.dropout=0")
    train_rank(configure(*sgd, *once, "optim.clip=0.01"))
    before = initial(tmp_path, "run")
    reader = CheckpointReader(tmp_path / "run" / "checkpoints" / "step-00000001")
    change = torch.cat([(reader.read(name) - before[name]).flatten() for name in before])
    line = read(tmp_path / "run" / "metrics.jsonl")[0]
    assert line["grad_norm"] > 0.02, "nothing to clip"
    assert float(change.norm()) == pytest.approx(0.01, rel=1e-3)


def test_averaged_weights_are_the_formula_over_every_step_and_are_what_is_validated_and_handed_on(
    configure: Configure, tmp_path: Path
) -> None:
    cfg = configure("trainer.ema_decay=0.6", "trainer.max_steps=5", "checkpoint.every=1", "checkpoint.keep_last=9", "optim.lr=0.05")
    summary = train_rank(cfg)
    average = initial(tmp_path, "run")
    for step in range(1, 6):
        reader = CheckpointReader(tmp_path / "run" / "checkpoints" / f"step-{step:08d}")
        average = {name: 0.6 * a + 0.4 * reader.read(name).view(a.shape) for name, a in average.items()}
    torch.testing.assert_close(weights(tmp_path, "run"), average, atol=1e-6, rtol=1e-5)
    model, tokenizer = load(tmp_path / "run", device="cpu")
    data = prepare(cfg.data, tokenizer, log=lambda text: None)
    rows = CausalRows(data.val, tokenizer, cfg.data.seq_len, cfg.data.mask_documents)
    found = Evaluator(model, tokenizer, 8).totals(rows, spread(len(rows), cfg.data.val_rows)).figures()
    assert summary["val_loss"] == pytest.approx(found["val_loss"], rel=1e-6)
    stored = read_model(tmp_path / "run" / "checkpoints" / "step-00000005")[1]  # a checkpoint's model is the one that was validated
    torch.testing.assert_close({name: stored[name] for name in average}, average, atol=1e-6, rtol=1e-5)


def test_the_options_of_the_objective_reach_the_loss() -> None:
    torch.manual_seed(0)
    head, hidden, labels = Head(HeadConfig(), RMSNormConfig(), 8, 50), torch.randn(2, 6, 8), torch.randint(0, 50, (2, 6))
    found = causal_reader(labels, 0.2, 0.1, 5)(hidden, head, _NO_CONTEXT)
    expected = token_losses(head(hidden).flatten(0, 1), labels.flatten(), 0.2, 0.1)
    torch.testing.assert_close(found.total, expected.total)
    assert found.total > found.nll


_PLACES = arange_positions(6, torch.device("cpu"))
_NO_CONTEXT = Context(Position(), Mask(_PLACES, _PLACES))


def test_compile_is_asked_of_the_model(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[DecoderLM] = []
    monkeypatch.setattr(DecoderLM, "compile", lambda model: compiled.append(model))
    train_rank(configure(*PLAIN))
    assert not compiled
    train_rank(configure(*PLAIN, "run.name=compiled", "trainer.compile=true"))
    assert len(compiled) == 1


def test_a_frozen_head_trains_the_rest() -> None:
    tree = {"vocab_size": 50, "max_seq_len": 8, "d_model": 8, "n_layers": 1, "norm": {"kind": "rms"}, "position": {"kind": "rope"}}
    cfg = from_tree(
        DecoderConfig, tree | {"attention": {"kind": "gqa", "n_heads": 2}, "ffn": {"kind": "mlp", "hidden": 8}, "head": {"tied": False}}
    )
    model = build_model(cfg, seed=0)
    model.head.weight.requires_grad_(False)
    from lm.nn.batch import Batch

    ids = torch.randint(0, 50, (2, 8))
    model(Batch(ids), read=causal_reader(ids)).total.backward()
    assert model.head.weight.grad is None and model.embed.weight.grad is not None
