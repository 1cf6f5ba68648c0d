"""Losses beyond cross-entropy, and a few real steps of every objective."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from lm.cli.compose import compose
from lm.config import from_tree
from lm.data.objective import CausalConfig, PreferenceConfig, Seq2SeqConfig
from lm.nn.batch import IGNORED, Batch
from lm.nn.transformer import LM, build_model
from lm.training.config import TrainConfig
from lm.training.objective import Likelihood
from lm.training.preference import Preference
from lm.training.run import train
from lm.training.sampled import with_own_tokens
from tests.nn.models import VOCAB, config, redrawn, tokens


def labelled(b: int = 4, s: int = 12) -> Batch:
    ids = tokens(b, s)
    return Batch(ids, ids.roll(-1, 1).masked_fill(torch.arange(s) < 5, IGNORED))


def log_likelihoods(model: LM, batch: Batch) -> torch.Tensor:
    assert batch.labels is not None
    found = model(batch).log_softmax(-1).gather(-1, batch.labels.clamp_min(0)[..., None])[..., 0]
    return found.masked_fill(batch.labels == IGNORED, 0.0).sum(-1)


def test_the_preference_loss_is_that_of_the_paper() -> None:
    model, reference, batch = redrawn(config(), 0), redrawn(config(), 1), labelled()
    sums = Preference(PreferenceConfig(beta=0.3), lambda: reference)(model, batch, 0)
    gain = log_likelihoods(model, batch) - log_likelihoods(reference, batch)
    expected = -F.logsigmoid(0.3 * (gain[0::2] - gain[1::2])).sum()
    assert sums.total.item() == pytest.approx(expected.item(), rel=1e-5)
    sums.total.backward()
    assert all(p.grad is not None for p in model.parameters()) and all(p.grad is None for p in reference.parameters())


def test_the_preference_loss_starts_at_the_logarithm_of_two_and_raises_the_better_answers() -> None:
    model, batch = redrawn(config()), labelled()
    objective = Preference(PreferenceConfig(), lambda: redrawn(config()))
    first = objective(model, batch, 0)
    assert first.total.item() == pytest.approx(2 * 0.693147, rel=1e-4)
    before = log_likelihoods(model, batch)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    first.total.backward()
    optimizer.step()
    moved = log_likelihoods(model, batch) - before
    assert (moved[0::2] > moved[1::2]).all()


@pytest.mark.parametrize("frac", [0.0, 0.3, 1.0])
def test_own_tokens_replace_that_part_of_what_was_predicted_and_nothing_else(frac: float) -> None:
    model, batch = redrawn(config()), labelled(64, 40)
    torch.manual_seed(0)
    mixed = with_own_tokens(model, batch, frac, chunk=100)
    assert batch.labels is not None and mixed.labels is batch.labels
    open_to_change = torch.zeros_like(batch.tokens, dtype=torch.bool)
    open_to_change[:, 1:] = batch.labels[:, :-1] != IGNORED
    changed = mixed.tokens != batch.tokens
    assert not (changed & ~open_to_change).any()
    assert changed[open_to_change].float().mean().item() == pytest.approx(frac, abs=0.08)


def test_own_tokens_are_drawn_from_the_place_before() -> None:
    model = redrawn(config())
    with torch.no_grad():
        model.head.weight.mul_(100.0)  # so sure that a draw is the best token
    batch = labelled(8, 20)
    best = model(batch).argmax(-1)
    mixed = with_own_tokens(model, batch, 1.0, chunk=7)
    assert torch.equal(mixed.tokens[:, 6:], best[:, 5:-1]) and torch.equal(mixed.tokens[:, :6], batch.tokens[:, :6])


def test_sampling_grows_with_the_steps() -> None:
    model, batch = redrawn(config()), labelled()
    plain = Likelihood(CausalConfig(), 10)(model, batch, 0)
    scheduled = Likelihood(CausalConfig(own_tokens=1.0), 10)
    assert scheduled(model, batch, 0).nll == plain.nll
    assert scheduled(model, batch, 10).nll != plain.nll
    assert Seq2SeqConfig(own_tokens=0.5).own_tokens == 0.5 and build_model(config()).vocab_size == VOCAB


Configure = Callable[..., TrainConfig]
OBJECTIVES = {
    "prefix": ("decoder", "stdlib"), "fim": ("decoder", "stdlib"), "spans": ("encoder_decoder", "stdlib"), "ul2": ("decoder", "stdlib"),
    "mlm": ("encoder", "stdlib"), "seq2seq": ("encoder_decoder", "pairs"), "sft": ("decoder", "chat"), "causal": ("decoder", "stdlib"),
}  # fmt: skip


@pytest.fixture
def small(tiny: list[str], tmp_path: Path) -> Callable[..., TrainConfig]:
    """A run of a few steps of any objective, kind of model and kind of record."""
    texts = [f"{word} and {word} again {n} " * 3 for n in range(40) for word in ("one", "two", "three")]
    pairs = [{"source": text, "target": text[:9]} for text in texts]
    chat = [{"messages": [{"role": "user", "content": text[:20]}, {"role": "assistant", "content": text[:9]}]} for text in texts]
    preferences = [{"prompt": text[:20], "chosen": text[:9], "rejected": text[9:20]} for text in texts]
    for name, records in (("pairs", pairs), ("chat", chat), ("preferences", preferences), ("stdlib", [{"text": text} for text in texts])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))

    def run(objective: dict[str, Any], kind: str, data: str, *overrides: str, parent: str | None = None) -> TrainConfig:
        composition = compose([*tiny, f"data.files={tmp_path / data}.jsonl", "data.seq_len=96", *overrides])
        tree = composition.tree
        tree["model"]["kind"] = kind
        tree["objective"] = objective
        record = {"pairs": {"kind": "pair"}, "chat": {"kind": "chat"}, "preferences": {"kind": "preference"}}.get(data)
        tree["data"]["record"] = record
        tree["init_from"] = parent
        return from_tree(TrainConfig, tree)

    return run


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_every_objective_learns_in_a_few_steps(small: Callable[..., TrainConfig], objective: str) -> None:
    kind, data = OBJECTIVES[objective]
    cfg = small({"kind": objective}, kind, data, "trainer.max_steps=24", "trainer.val_every=24", "optim.lr=1e-2")
    first = train(cfg.replace(trainer=cfg.trainer.replace(max_steps=3), run=cfg.run.replace(name="first")))
    assert train(cfg)["val_loss"] < first["val_loss"] - 0.2


def test_preferences_learn_from_a_parent(small: Callable[..., TrainConfig], tmp_path: Path) -> None:
    chat = small({"kind": "sft"}, "decoder", "chat", "run.name=parent")
    train(chat)
    parent = str(tmp_path / "parent")
    train(small({"kind": "preference"}, "decoder", "preferences", "optim.lr=1e-3", parent=parent))
    losses = [json.loads(line).get("loss") for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    found = [loss for loss in losses if loss is not None]
    assert found[0] == pytest.approx(0.6931, abs=0.01) and found[-1] < 0.65
