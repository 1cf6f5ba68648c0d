"""Validation in shares: what the processes find together is what one finds alone."""

import re
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

import lm as library
from lm.data.kinds import BytesConfig, CausalConfig, TextConfig
from lm.data.rows.build import build_rows
from lm.data.store.prepare import prepare
from lm.errors import ConfigError
from lm.generation.config import EvalConfig
from lm.generation.evaluate import Evaluator
from lm.storage.run_folder import RunFolder
from lm.training.run import train_rank
from tests.nn.models import config, redrawn
from tests.training.conftest import Configure, read, write_text


def longer(folder: Path) -> list[str]:
    """The data of a run, in one row of twice the length."""
    shared = ["data=text", f"data.files={folder / 'text.txt'}", f"data.cache_dir={folder / 'cache'}", "data.mask_documents=false"]
    return [*shared, "data.test_frac=0.5", "data.seq_len=64", "data.val_rows=1"]


@dataclass(frozen=True)
class Share:
    """One process of several; what it hands in is kept, and what comes back is its own."""

    rank: int
    world: int
    sums: list[float] = field(default_factory=list)

    def total(self, *values: float) -> list[float]:
        self.sums[:] = values
        return list(values)


@pytest.mark.parametrize(("n", "world"), [(16, 2), (7, 2), (5, 2), (5, 3), (2, 3), (1, 2)])
def test_shares_add_up_and_take_equally_many_forwards(n: int, world: int, tmp_path: Path) -> None:
    cfg = TextConfig(files=str(write_text(tmp_path / "a.txt")), seq_len=32, cache_dir=str(tmp_path / "cache"))
    data = prepare(cfg, BytesConfig(), log=lambda line: None)
    model = redrawn(config(vocab_size=320))
    rows, ids = build_rows(CausalConfig(), cfg, data.train, data.tokenizer, model.cfg), np.arange(n) * 3
    alone = Evaluator(model, data.tokenizer, 2).totals(rows, ids).figures()
    forwards: list[int] = []
    model.register_forward_pre_hook(lambda module, args: forwards.append(1))
    shares = [Share(rank, world) for rank in range(world)]
    for share in shares:
        forwards.append(0)
        try:
            Evaluator(model, data.tokenizer, 2, ranks=share).totals(rows, ids).figures()
        except ZeroDivisionError:  # of what all have, which `Share` does not add up
            assert share.rank >= n  # it had no row of its own
    nats, tokens, n_bytes = (sum(values) for values in zip(*(share.sums for share in shares), strict=True))
    assert (tokens, n_bytes) == (alone["tokens"], alone["bytes"])
    assert nats / tokens == pytest.approx(alone["val_loss"], rel=1e-6)
    each = "".join(map(str, forwards)).split("0")[1:]
    assert len(each) == world and set(each) == {"1" * -(-len(range(0, n, world)) // 2)}


@pytest.mark.slow
def test_a_run_is_tested_once_behind_its_last_step_and_a_later_end_is_another(configure: Configure, tmp_path: Path) -> None:
    """Seen to fail with the test at every validation, and with the held-out rows for it."""
    summaries = [
        train_rank(configure("schedule=constant", "data.test_frac=0.5", *more))
        for more in ([], ["trainer.max_steps=16"], ["run.name=once", "trainer.max_steps=16"])
    ]
    tested = [line["step"] for line in read(tmp_path / "run" / "metrics.jsonl") if "test_loss" in line]
    assert tested == [12, 16]
    documents = RunFolder(tmp_path / "run").test_documents()
    assert documents is not None
    nats, n, n_bytes = np.sum([*documents[1]["sums"].values()], axis=0).tolist()
    assert (nats / n, nats / n_bytes / np.log(2)) == pytest.approx(
        [summaries[1][f"test_{name}"] for name in ("loss", "bits_per_byte")], rel=1e-6
    )
    found = library.evaluate(tmp_path / "run", split="test")
    for name in ("loss", "bits_per_byte"):
        assert summaries[1][f"test_{name}"] == summaries[2][f"test_{name}"] == pytest.approx(found[f"val_{name}"], rel=1e-6)
        assert summaries[1][f"test_{name}"] != summaries[0][f"test_{name}"] != summaries[0][f"val_{name}"]


def test_what_a_test_is_asked_is_what_eval_tells_of_its_model(configure: Configure, tmp_path: Path) -> None:
    """In trained rows and beyond, on as much text. Seen to fail with as many rows at every length."""
    asked = ("data.test_frac=0.5", "model/position=alibi", "eval.seq_len=[16,64]", "eval.own_tokens=8", "data.mask_documents=false")
    summary = train_rank(configure(*asked, "data.val_rows=2"))
    found = dict(library.evaluate(tmp_path / "run", split="test", wanted=EvalConfig(seq_len=[16, 64], own_tokens=8)))
    told = {name: value for name, value in summary.items() if name.startswith("test_")}
    names = {f"test_{name}" for name in EvalConfig(seq_len=[16, 64], own_tokens=8).figures()}
    assert told.keys() == names | {"test_loss", "test_bits_per_byte", "test_ece"}
    assert told == {name: pytest.approx(found[name.replace("test_", "val_", 1)], rel=1e-5) for name in told}
    plain = library.evaluate(tmp_path / "run", library.config(overrides=longer(tmp_path)).data, split="test")
    assert (plain["val_loss"], plain["tokens"]) == (pytest.approx(told["test_loss/64"], rel=1e-5), 64)


def test_what_is_drawn_of_rows_of_another_length_is_of_the_same_seed(configure: Configure, tmp_path: Path) -> None:
    """Seen to be of seed 0, whatever the run's was, so that rows as long as the run's had another loss."""
    summary = train_rank(configure("data.test_frac=0.5", "objective=fim", "eval.seq_len=[32]", "seed=5"))
    found = dict(library.evaluate(tmp_path / "run", split="test", wanted=EvalConfig(seq_len=[32])))
    assert summary["test_loss"] == pytest.approx(summary["test_loss/32"], rel=1e-6)
    assert found["val_loss"] == pytest.approx(found["val_loss/32"], rel=1e-6)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["eval.own_tokens=8"], "data.test_frac=0 sets no text aside"),
        (["data.test_frac=0.5", "eval.own_tokens=32"], "eval.own_tokens=32 leaves nothing of data.seq_len=32"),
        (["data.test_frac=0.5", "eval.seq_len=[64]", "model/position=learned"], "position=learned has no more places"),
        (["data.test_frac=0.5", "eval.seq_len=[4096]"], "and one row needs 4097. Lower eval.seq_len or"),
        (
            ["data.test_frac=0.5", "eval.own_tokens=8", "objective=fim"],
            "objective=fim of model.kind=decoder does not",
        ),
    ],
)
def test_what_a_test_cannot_be_asked_is_refused_before_step_1(configure: Configure, tmp_path: Path, asked: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        train_rank(configure(*asked))
    assert not (tmp_path / "run").exists()
