from dataclasses import fields
from itertools import islice
from pathlib import Path

import pytest
from torch import Tensor

import lm
from lm.data.batches import Batches
from lm.data.kinds import BytesConfig, CausalConfig, MLMConfig, TextConfig
from lm.data.loader import train_loader
from lm.data.sizes import Sizes
from lm.nn.batch import Batch
from lm.testing.runs import small_run


def batches(tmp_path: Path, seed: int = 3, train_rows: int | None = None) -> Batches:
    (tmp_path / "a.txt").write_text("".join(f"line {n} of a text\n" for n in range(400)))
    data = TextConfig(files=str(tmp_path / "a.txt"), cache_dir=str(tmp_path / "cache"), seq_len=32, global_batch=6, val_rows=5)
    data = data.replace(train_rows=train_rows)
    return Batches(data, MLMConfig(), BytesConfig(), seed=seed, log=lambda line: None)


def equal(one: Batch, other: Batch) -> bool:
    pairs = [(getattr(one, field.name), getattr(other, field.name)) for field in fields(Batch)]
    return all(a.equal(b) if isinstance(a, Tensor) else a == b for a, b in pairs)


@pytest.mark.parametrize("train_rows", [None, 12])
def test_a_loop_of_ones_own_reads_the_batches_of_a_training(tmp_path: Path, train_rows: int | None) -> None:
    """Seen to fail with the step left out of the draw."""
    found = batches(tmp_path, train_rows=train_rows)
    loader = train_loader(
        found.train, seed=3, sizes=Sizes(6), micro_batch=4, rank=0, world=1, start_step=2, max_steps=40, workers=0,
        train_rows=train_rows,
    )  # fmt: skip
    own = [batch for _, step in islice(found.steps(start=2, micro_batch=4), 38) for batch in step]
    assert len(own) == len(loader) == 2 * 38  # two of three rows a step
    assert all(equal(a, b) for a, b in zip(own, loader, strict=True))


def test_the_run_of_check_kind_reads_rows_within_one_document_and_others(tmp_path: Path) -> None:
    """Seen to fail: each text was shorter than a row, so that `documents` and `positions` were never None."""
    cfg = small_run(CausalConfig(), {}, tmp_path)
    steps = islice(lm.batches(cfg).steps(micro_batch=cfg.trainer.micro_batch), cfg.trainer.max_steps)
    whole = [batch.documents is None and batch.positions is None for _, step in steps for batch in step]
    assert 1 < sum(whole) < len(whole) - 1


def test_a_loop_that_starts_later_goes_on_with_the_same_steps(tmp_path: Path) -> None:
    found = batches(tmp_path)
    whole, rest = list(islice(found.steps(), 9)), list(islice(found.steps(start=5), 4))
    assert [step for step, _ in rest] == [5, 6, 7, 8]
    assert all(equal(a, b) for (_, one), (_, other) in zip(whole[5:], rest, strict=True) for a, b in zip(one, other, strict=True))
    assert sum(len(batch.tokens) for batch in whole[0][1]) == 6
    assert sum(len(batch.tokens) for batch in found.validation(micro_batch=2)) == 5


def test_the_tokenizer_has_what_the_objective_needs(tmp_path: Path) -> None:
    assert batches(tmp_path).tokenizer.mask is not None
    data = TextConfig(files=str(tmp_path / "a.txt"), cache_dir=str(tmp_path / "cache"), seq_len=32)
    assert Batches(data, CausalConfig(), BytesConfig(), log=lambda line: None).tokenizer.mask is None
