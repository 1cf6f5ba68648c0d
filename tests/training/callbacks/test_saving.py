"""Saving behind the step loop: the same checkpoints, later; and the loop is not told too late that one has failed."""

import errno
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback

from lm.errors import NumericsError, ResourceError
from lm.storage import manifest
from lm.storage.checkpoint import CheckpointReader, Piece, checkpoints, step_folder
from lm.storage.manifest import verify
from lm.training.callbacks import saving
from lm.training.callbacks.saving import Saver
from lm.training.launch.ranks import PeerLost, Ranks
from lm.training.run import train_rank
from lm.training.run_config import CheckpointConfig
from tests.server import Process
from tests.training.conftest import Configure, Launch, ranks, results


def saver(folder: Path) -> Saver:
    return Saver(folder, CheckpointConfig(background=True), Ranks(), lambda temporary: None)


def test_the_loop_goes_on_while_a_checkpoint_is_written_and_the_next_save_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the loop does to the weights meanwhile is not in the checkpoint."""
    may_write, own = threading.Event(), saving.write_pieces

    def write(*args: object) -> None:
        assert may_write.wait(30)
        own(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(saving, "write_pieces", write)
    weight, behind = torch.ones(8), saver(tmp_path)
    behind.save(1, [Piece.whole("w", "weight", weight)], {"step": 1})
    weight.fill_(2)
    assert checkpoints(tmp_path) == []
    timer = threading.Timer(0.2, may_write.set)
    timer.start()
    behind.save(2, [Piece.whole("w", "weight", weight)], {"step": 2})
    assert checkpoints(tmp_path)[-1] == step_folder(tmp_path, 1)
    behind.wait()
    assert [CheckpointReader(step_folder(tmp_path, step)).read("w").tolist() for step in (1, 2)] == [[1.0] * 8, [2.0] * 8]


def test_a_save_that_fails_behind_the_loop_is_told_by_the_next_and_keeps_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    behind = saver(tmp_path)
    behind.save(1, [Piece.whole("w", "weight", torch.ones(8))], {"step": 1})
    behind.wait()
    with monkeypatch.context() as patch:
        patch.setenv("LM_FAILPOINT", "weights:enospc")
        behind.save(2, [Piece.whole("w", "weight", torch.ones(8))], {"step": 2})
        with pytest.raises(ResourceError, match="step-00000002: no space left"):
            behind.wait()
    assert list(tmp_path.iterdir()) == [step_folder(tmp_path, 1)]
    verify(step_folder(tmp_path, 1))


def test_broken_weights_are_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(NumericsError, match="the weight w holds NaN"):
        saver(tmp_path).save(1, [Piece.whole("w", "weight", torch.tensor([torch.nan]))], {"step": 1})


def test_what_is_saved_is_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen to fail: before older checkpoints were removed, the one just written was read and hashed again, while the loop waited."""
    own, hashed = manifest.sha256_of, list[Path]()
    monkeypatch.setattr(manifest, "sha256_of", lambda path: (hashed.append(path), own(path))[1])
    saving = Saver(tmp_path, CheckpointConfig(keep_last=1), Ranks(), lambda folder: None)
    for step in (1, 2):
        saving.save(step, [Piece.whole("w", "weight", torch.ones(8))], {"step": step})
    assert checkpoints(tmp_path) == [step_folder(tmp_path, 2)]
    assert len(hashed) == 2 * len(manifest.listed_files(step_folder(tmp_path, 2)))


@pytest.mark.slow
def test_a_run_that_saves_in_the_background_is_bitwise_the_same(configure: Configure, tmp_path: Path) -> None:
    train_rank(configure("run.name=whole", "checkpoint.every=2"))
    train_rank(configure("checkpoint.every=2", "checkpoint.background=true"))
    assert results(tmp_path / "run") == results(tmp_path / "whole")
    ours, theirs = (checkpoints(tmp_path / name / "checkpoints")[0] for name in ("run", "whole"))
    for file in ("rank-00000.weights.safetensors", "rank-00000.optimizer.safetensors"):
        assert (ours / file).read_bytes() == (theirs / file).read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("point", ["optimizer", "rename"])
def test_a_kill_while_writing_in_the_background_leaves_the_checkpoint_before(
    tiny: list[str], configure: Configure, lm_process: Callable[..., Process], tmp_path: Path, point: str
) -> None:
    train_rank(configure("run.name=whole"))
    assert lm_process("train", *tiny, "checkpoint.background=true", env=os.environ | {"LM_FAILPOINT": f"{point}:kill"}).wait() == -9
    assert checkpoints(tmp_path / "run" / "checkpoints") == []
    train_rank(configure("checkpoint.background=true"))
    assert results(tmp_path / "run") == results(tmp_path / "whole")


def test_an_error_of_the_run_does_not_lose_the_save_under_way(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen to fail: the folder was no longer locked while the checkpoint was written, and ranks ended without it."""
    write = saving.write_pieces
    monkeypatch.setattr(saving, "write_pieces", lambda *args: (time.sleep(0.3), write(*args)))
    failing = LambdaCallback(on_train_batch_end=lambda trainer, module, *rest: 1 / (module.step < 3))
    with pytest.raises(ZeroDivisionError):
        train_rank(configure("checkpoint.every=2", "checkpoint.background=true"), callbacks=[failing])
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000002"]


@pytest.mark.slow
def test_ranks_save_in_the_background_together(configure: Configure, launch: Launch, tmp_path: Path) -> None:
    launch(configure("optim=adamw", *ranks("fsdp"), "run.name=whole"))
    launch(configure("optim=adamw", *ranks("fsdp"), "checkpoint.background=true", "checkpoint.every=1"))
    assert (tmp_path / "run/model/model.safetensors").read_bytes() == (tmp_path / "whole/model/model.safetensors").read_bytes()
    for path in checkpoints(tmp_path / "run" / "checkpoints"):
        verify(path)


@dataclass(frozen=True)
class Threads(Ranks):
    """Two ranks in threads of one process."""

    world: int = 2
    meeting: Any = None
    board: dict[Any, Any] = field(default_factory=dict)

    def total(self, *values: float) -> list[float]:
        self.board[self.rank] = values
        self.meeting.wait()
        found = [sum(each) for each in zip(self.board[0], self.board[1], strict=True)]
        self.meeting.wait()
        return found

    def from_first(self, find: Callable[[], Any]) -> Any:
        if self.first:
            self.board["first"] = find()
        self.meeting.wait()
        return self.board["first"]


@pytest.mark.parametrize("full", [0, 1])
def test_a_rank_whose_disk_is_full_tells_so_and_the_other_only_that_it_is_lost(
    full: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen, where rank 0 had failed: rank 1 said that there is no such folder, which rank 0 had removed, and either was told."""
    own, meeting, board = saving.write_pieces, threading.Barrier(2, timeout=20), dict[Any, Any]()

    def write(folder: Path, pieces: list[Piece], rank: int = 0) -> None:
        if rank == full:
            raise OSError(errno.ENOSPC, "no space")
        time.sleep(0.2)
        own(folder, pieces, rank)

    def save(rank: int) -> BaseException | None:
        weights = [Piece("w", "weight", (8,), (4 * rank,), torch.ones(4))]
        try:
            ranks = Threads(rank=rank, meeting=meeting, board=board)
            Saver(tmp_path, CheckpointConfig(), ranks, lambda folder: None).save(1, weights, {"step": 1})
        except Exception as error:
            return error
        return None

    monkeypatch.setattr(saving, "write_pieces", write)
    with ThreadPoolExecutor(2) as pool:
        errors = list(pool.map(save, range(2)))
    assert isinstance(errors[full], ResourceError) and "no space left" in str(errors[full])
    assert isinstance(errors[1 - full], PeerLost)
    assert list(tmp_path.iterdir()) == []
