"""Validation in shares: what the processes find together is what one finds alone."""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

import lm as library
from lm.data.kinds import BytesConfig, CausalConfig, TextConfig
from lm.data.rows.build import build_rows
from lm.data.store.prepare import prepare
from lm.generation.evaluate import totals
from lm.storage.run_folder import RunFolder
from lm.training.run import train
from tests.nn.models import config, redrawn
from tests.training.conftest import Configure, read, write_text


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
    alone = totals(model, rows, ids, data.tokenizer, 2).figures()
    forwards: list[int] = []
    model.register_forward_pre_hook(lambda module, args: forwards.append(1))
    shares = [Share(rank, world) for rank in range(world)]
    for share in shares:
        forwards.append(0)
        try:
            totals(model, rows, ids, data.tokenizer, 2, share).figures()
        except ZeroDivisionError:  # of what all have, which `Share` does not add up
            assert share.rank >= n  # it had no row of its own
    nats, tokens, n_bytes = (sum(values) for values in zip(*(share.sums for share in shares), strict=True))
    assert (tokens, n_bytes) == (alone["tokens"], alone["bytes"])
    assert nats / tokens == pytest.approx(alone["val_loss"], rel=1e-6)
    each = "".join(map(str, forwards)).split("0")[1:]
    assert len(each) == world and set(each) == {"1" * -(-len(range(0, n, world)) // 2)}


def test_a_run_is_tested_once_behind_its_last_step_and_a_later_end_is_another(configure: Configure, tmp_path: Path) -> None:
    """Seen to fail with the test at every validation, and with the held-out rows for it."""
    summaries = [
        train(configure("schedule=constant", "data.test_frac=0.5", *more))
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
