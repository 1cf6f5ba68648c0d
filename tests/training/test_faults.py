"""What goes wrong in the middle of a run: every checkpoint that was valid before still is, and the next start goes on from it."""

import csv
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor import config as inductor
from torch._inductor.cpu_vec_isa import pick_vec_isa

from lm.cli.main import main
from lm.data.order import rows_at
from lm.errors import Interrupted, LmError, NumericsError, ResourceError
from lm.report.run import read_run
from lm.storage.checkpoint import META, CheckpointReader, checkpoints
from lm.storage.manifest import verify
from lm.training.callbacks.checkpoints import Checkpoints
from lm.training.callbacks.validation import Validation
from lm.training.module import TrainModule
from lm.training.run import train_rank
from tests.server import ROOT
from tests.training.conftest import Before, Configure, Stop, edit, read, results, settled

Watch = Callable[[Callable[[TrainModule], None]], list[TrainModule]]


@pytest.fixture
def at_each_step(monkeypatch: pytest.MonkeyPatch) -> Watch:
    """Do something at the beginning of each micro-batch; the list holds the run's module."""

    def arrange(act: Callable[[TrainModule], None]) -> list[TrainModule]:
        seen: list[TrainModule] = []
        own = TrainModule.training_step

        def step(module: TrainModule, *args: Any) -> torch.Tensor:
            seen[:] = [module]
            act(module)
            return own(module, *args)

        monkeypatch.setattr(TrainModule, "training_step", step)
        return seen

    return arrange


@pytest.fixture
def stopped_at_five(configure: Configure, tmp_path: Path) -> Path:
    """A run folder with valid checkpoints of steps 4 and 5, as after a SIGTERM."""
    with pytest.raises(LmError, match="SIGTERM"):
        train_rank(configure(), callbacks=[Before(5, lambda module: os.kill(os.getpid(), signal.SIGTERM))])
    return tmp_path / "run"


def require_unharmed(run: Path, steps: list[int]) -> None:
    """These are the checkpoints, they are valid, nothing is half there, and the metrics are readable."""
    found = checkpoints(run / "checkpoints")
    assert [int(path.name.removeprefix("step-")) for path in found] == steps
    for path in found:
        verify(path)
    assert list(run.rglob(".tmp-*")) == []
    read(run / "metrics.jsonl")


@pytest.mark.parametrize(
    "optim", ["muon", *(pytest.param(name, marks=pytest.mark.slow) for name in ("adamw", "sgd", "soap", "adafactor", "lion"))]
)
def test_an_infinite_gradient_takes_no_step_and_names_the_rows(
    configure: Configure, at_each_step: Watch, tmp_path: Path, optim: str
) -> None:
    def poison(module: TrainModule) -> None:
        if module.step == 5:
            module.model.embed.weight.register_hook(lambda grad: grad.index_fill(0, torch.tensor([65]), torch.inf))

    seen = at_each_step(poison)
    cfg = configure(f"optim={optim}", "checkpoint.every=1", "trainer.ema_decay=0.9")
    with pytest.raises(
        NumericsError, match=r"step 6 has loss \d.* gradient norm (inf|nan).*step-00000005 is the last checkpoint"
    ) as caught:
        train_rank(cfg)
    assert caught.value.exit_code == 4
    require_unharmed(tmp_path / "run", [5, 4])
    reader = CheckpointReader(tmp_path / "run" / "checkpoints" / "step-00000005")
    module = seen[0]
    strategy, model = module.strategy, module.model
    pieces = [*strategy.weights(model), *strategy.optimizer(model, module.trainer.optimizers[0])]
    assert len(pieces) > 10
    assert all(torch.equal(reader.read(piece.name, piece.kind), piece.tensor.view(piece.shape)) for piece in pieces)
    rows = rows_at(cfg.seed, cfg.data.sizes.places(5), 59).tolist()
    assert read(tmp_path / "run" / "metrics.jsonl")[-1] == {"step": 6, "event": "not finite", "rows": rows}


@pytest.mark.parametrize(
    "optim", ["muon", *(pytest.param(name, marks=pytest.mark.slow) for name in ("adamw", "sgd", "soap", "adafactor", "lion"))]
)
def test_skipped_steps_change_nothing_name_their_rows_and_are_counted(
    configure: Configure, at_each_step: Watch, tmp_path: Path, optim: str
) -> None:
    def poison(module: TrainModule) -> None:
        if module.step in (4, 5, 8):
            module.model.embed.weight.register_hook(lambda grad: grad * torch.nan if module.step in (4, 5, 8) else grad)

    at_each_step(poison)
    cfg = configure(f"optim={optim}", "checkpoint.every=1", "checkpoint.keep_last=99", "numerics.skip_in_a_row=2")
    assert train_rank(cfg)["steps"] == 12
    events = [line for line in read(tmp_path / "run" / "metrics.jsonl") if "event" in line]
    rows = [rows_at(cfg.seed, cfg.data.sizes.places(step), 59).tolist() for step in (4, 5, 8)]
    assert events == [{"step": step, "event": "skipped", "rows": ids} for step, ids in zip((5, 6, 9), rows, strict=True)]
    before, first, second, after = (CheckpointReader(tmp_path / "run" / "checkpoints" / f"step-{step:08d}") for step in (4, 5, 6, 7))
    for name in before.names():
        for kind in before.kinds(name):
            assert torch.equal(before.read(name, kind), first.read(name, kind))
            assert torch.equal(before.read(name, kind), second.read(name, kind))
    assert not torch.equal(before.read("embed.weight"), after.read("embed.weight"))
    assert CheckpointReader(tmp_path / "run" / "checkpoints" / "step-00000012").meta["counters"]["skipped"] == 3


def test_one_more_bad_step_in_a_row_than_allowed_ends_the_run(configure: Configure, at_each_step: Watch, tmp_path: Path) -> None:
    def poison(module: TrainModule) -> None:
        if module.step == 4:
            module.model.embed.weight.register_hook(lambda grad: grad * torch.inf)

    at_each_step(poison)
    with pytest.raises(NumericsError, match=r"step 7 has loss \d.*only finite steps are taken"):
        train_rank(configure("numerics.skip_in_a_row=2", "optim=adamw"))
    events = [(line["step"], line["event"]) for line in read(tmp_path / "run" / "metrics.jsonl") if "event" in line]
    assert events == [(5, "skipped"), (6, "skipped"), (7, "not finite")]
    require_unharmed(tmp_path / "run", [4])


@pytest.mark.parametrize("allowed", [2, 1])
def test_a_stopped_run_does_not_begin_to_count_bad_steps_anew(
    configure: Configure, at_each_step: Watch, stop: Stop, tmp_path: Path, allowed: int
) -> None:
    """Seen to fail: a run stopped among bad steps in a row, or started again where they had ended it, went on behind them. One that allows
    fewer than there were when it is resumed ends at the next."""

    def poison(module: TrainModule) -> None:
        if module.step == 4:
            module.model.embed.weight.register_hook(lambda grad: grad * torch.inf if module.step in (4, 5, 6) else grad)
        elif module.step == 6:  # resumed, at another weight
            module.model.embed.weight.register_hook(lambda grad: grad * torch.inf if module.step == 6 else grad)

    at_each_step(poison)
    stop(configure("numerics.skip_in_a_row=2", "optim=adamw"), 6)
    for _ in range(2):
        with pytest.raises(NumericsError, match=r"step 7 has loss \d.*only finite steps are taken"):
            train_rank(configure(f"numerics.skip_in_a_row={allowed}", "optim=adamw"))
    events = [(line["step"], line["event"]) for line in read(tmp_path / "run" / "metrics.jsonl") if "event" in line]
    assert events == [(5, "skipped"), (6, "skipped"), (7, "not finite")]


@pytest.mark.parametrize("rollbacks", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_leap_of_the_loss_is_told_and_takes_the_run_back_where_that_is_wanted(
    configure: Configure, at_each_step: Watch, tmp_path: Path, rollbacks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten times the loss at step 11: from the checkpoint of step 8 the run goes on without the rows of steps 9 to 11. Seen to fail where
    the journal told no logger."""
    leapt: list[int] = []
    own = TrainModule.loss

    def loss(module: TrainModule) -> torch.Tensor:
        if module.step == 11 and len(leapt) < 1:
            leapt.append(11)
            return own(module) * 10
        return own(module)

    seen: list[list[int]] = []
    at_each_step(lambda module: None)
    own_step = TrainModule.training_step

    def step(module: TrainModule, batch: Any, *args: Any) -> torch.Tensor:
        seen.append(batch.tokens[:, 0].tolist())
        return own_step(module, batch, *args)

    monkeypatch.setattr(TrainModule, "loss", loss)
    monkeypatch.setattr(TrainModule, "training_step", step)
    monkeypatch.setattr(
        TrainModule, "judge", lambda module, norm: module.verdicts.judge(module.nll, _noted(module, norm), module.tokens_in_step)
    )
    cfg = configure("optim=adamw", f"numerics.rollbacks={rollbacks}", "logger=csv")
    assert train_rank(cfg)["steps"] == 12
    told = csv.DictReader((tmp_path / "run" / "metrics.csv").read_text().splitlines())
    assert [int(row["step"]) for row in told if row["loss"]] == list(range(1, 13)), "loggers hear of a rollback"
    lines = read(tmp_path / "run" / "metrics.jsonl")
    events = [(line["step"], line["event"]) for line in lines if "event" in line]
    assert events == ([(8, "rolled back")] if rollbacks else [(11, "loss spike")])
    assert [line["step"] for line in lines if "loss" in line and "event" not in line] == list(range(1, 13))
    assert len(seen) == (15 if rollbacks else 12)
    counters = CheckpointReader(tmp_path / "run" / "checkpoints" / "step-00000012").meta["counters"]
    assert (counters["rolled_back"], counters["rows_from"]) == ((1, 3) if rollbacks else (0, 0))


def test_a_run_whose_folder_is_moved_under_it_ends_whole(configure: Configure, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What was saved lies where it was moved to, the rest where the run writes. Seen to fail: that had no config.yaml, and no report."""
    train_rank(configure(), callbacks=[Before(6, lambda module: (tmp_path / "run").rename(tmp_path / "moved"))])
    assert read_run(tmp_path / "run").config == read_run(tmp_path / "moved").config
    said = f"{tmp_path / 'run'}: it was moved while its run goes on, which writes to a new folder of this name"
    assert capsys.readouterr().out.count(said) == 1
    assert main(["generate", f"from={tmp_path / 'run'}", "prompt=a", "max_tokens=2"]) == 0


def test_a_gradient_that_stays_exactly_0_is_told_once(configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it was stopped between the two steps. Seen to fail: nothing was said, and the run ended as a success; a resumed run began
    to count anew."""
    monkeypatch.setattr(
        TrainModule,
        "judge",
        lambda module, norm: module.verdicts.judge(module.nll, _noted(module, norm * (module.step < 6)), module.tokens_in_step),
    )
    with pytest.raises(LmError, match="SIGTERM"):
        train_rank(configure(), callbacks=[Before(7, lambda module: os.kill(os.getpid(), signal.SIGTERM))])
    assert train_rank(configure())["steps"] == 12
    events = [line for line in read(tmp_path / "run" / "metrics.jsonl") if "event" in line]
    assert [(line["step"], line["since_step"]) for line in events] == [(8, 7)] and "gradient exactly 0" in events[0]["event"]


def test_a_leap_before_the_first_checkpoint_is_told_to_have_none_to_go_back_to(
    configure: Configure, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = TrainModule.loss
    monkeypatch.setattr(TrainModule, "loss", lambda module: own(module) * (10 if module.step == 11 else 1))
    assert train_rank(configure("optim=adamw", "numerics.rollbacks=1", "checkpoint.every=50"))["steps"] == 12
    assert "numerics.rollbacks: there is no checkpoint yet to go back to. A lower checkpoint.every" in capsys.readouterr().out


def _noted(module: TrainModule, norm: torch.Tensor) -> torch.Tensor:
    module.grad_norm = norm
    return norm


def test_a_run_that_diverges_ends_with_exit_code_4_and_can_be_resumed_to_the_same_end(
    tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = settled("train", *tiny, "optim=sgd", "optim.lr=1e30", "checkpoint.every=1")
    for _ in range(2):
        assert main(args) == 4
        last = capsys.readouterr().err.splitlines()[-1]
        assert "only finite steps are taken" in last and "Lower optim.lr=1e+30" in last
        require_unharmed(tmp_path / "run", [int(path.name[5:]) for path in checkpoints(tmp_path / "run" / "checkpoints")])
        assert not (tmp_path / "run" / "model").exists()


def test_broken_weights_are_not_saved(configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = Checkpoints.save

    def save(callback: Checkpoints, module: TrainModule) -> None:
        if module.step == 8:
            module.model.embed.weight.data[3, 3] = torch.nan
        own(callback, module)

    monkeypatch.setattr(Checkpoints, "save", save)
    with pytest.raises(NumericsError, match=r"save: the weight embed.weight holds NaN or infinity"):
        train_rank(configure())
    require_unharmed(tmp_path / "run", [4])


@pytest.mark.parametrize("part, judged, at, kept", [("val", "validate", 8, [4]), ("test", "_test", 12, [8, 4])])
def test_a_loss_on_held_out_text_that_is_not_finite_is_not_saved(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str, judged: str, at: int, kept: list[int]
) -> None:
    own = Validation.__dict__[judged]

    def spoilt(callback: Validation, module: TrainModule) -> None:
        if module.step == at:
            module.model.norm.weight.data.fill_(torch.finfo(torch.float32).max)
        own(callback, module)

    monkeypatch.setattr(Validation, judged, spoilt)
    with pytest.raises(NumericsError, match=rf"{part}_loss is (nan|inf) after step {at}.*step-{kept[0]:08} is the last checkpoint"):
        train_rank(configure("data.test_frac=0.5"))
    require_unharmed(tmp_path / "run", kept)


@pytest.mark.slow
@pytest.mark.parametrize("point", ["made", "weights", "optimizer", "manifest", "rename"])
def test_a_full_disk_within_a_save_keeps_the_checkpoints_before(
    configure: Configure, stopped_at_five: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    """Seen to fail with the temporary folder left where it is."""
    monkeypatch.setenv("LM_FAILPOINT", f"{point}:enospc")
    with pytest.raises(ResourceError, match=r"step-00000008: no space left: [\d,]{6,} bytes are needed and [\d,]+ are free") as caught:
        train_rank(configure())
    assert caught.value.exit_code == 5
    require_unharmed(stopped_at_five, [5, 4])


@pytest.mark.parametrize("point", ["renamed", pytest.param("prune", marks=pytest.mark.slow)])
def test_a_full_disk_behind_a_save_keeps_that_save(
    configure: Configure, stopped_at_five: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    with monkeypatch.context() as patch, pytest.raises(ResourceError, match="no space left"):
        patch.setenv("LM_FAILPOINT", f"{point}:enospc")
        train_rank(configure())
    verify(stopped_at_five / "checkpoints" / "step-00000008")
    train_rank(configure("run.name=whole"))
    train_rank(configure())
    require_unharmed(stopped_at_five, [12, 8])
    assert results(stopped_at_five) == results(stopped_at_five.parent / "whole")


def limit(what: int, value: int) -> None:
    resource.setrlimit(what, (value, resource.getrlimit(what)[1]))


@contextmanager
def limits_restored(what: int) -> Iterator[None]:
    before = resource.getrlimit(what)
    try:
        yield
    finally:
        resource.setrlimit(what, before)


def test_a_write_that_the_system_refuses_keeps_the_checkpoints_before(
    configure: Configure, stopped_at_five: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real limit on the size of a file, met in the middle of the weights. Seen to fail with the temporary folder left where it is."""
    own = Checkpoints.save

    def save(callback: Checkpoints, module: TrainModule) -> None:
        limit(resource.RLIMIT_FSIZE, 50_000)
        own(callback, module)

    with (
        limits_restored(resource.RLIMIT_FSIZE),
        monkeypatch.context() as patch,
        pytest.raises(ResourceError, match=r"step-00000008: a file of .* bytes is larger than one may be"),
    ):
        patch.setattr(Checkpoints, "save", save)
        train_rank(configure())
    require_unharmed(stopped_at_five, [5, 4])
    assert train_rank(configure())["steps"] == 12


def test_a_disk_too_small_for_the_checkpoints_is_told_before_the_first_step(configure: Configure, tmp_path: Path) -> None:
    """Seen to train on for ever with the look at the free space removed."""
    many = ["checkpoint.every=1", "checkpoint.keep_last=1000000000", "trainer.max_steps=1000000000"]
    with pytest.raises(ResourceError, match=r"checkpoints: no space left: [\d,]{15,} bytes are needed and [\d,]+ are free"):
        train_rank(configure(*many))
    assert read(tmp_path / "run" / "metrics.jsonl") == []


def test_keeping_every_checkpoint_asks_only_for_those_that_will_be(configure: Configure) -> None:
    assert train_rank(configure("checkpoint.keep_last=1000000000"))["steps"] == 12


def test_a_run_folder_that_cannot_be_made_is_exit_code_5(tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Seen to fail with the system's errors left as they are."""
    (tmp_path / "file").write_text("")
    assert main(settled("train", *tiny, f"run.dir={tmp_path / 'file'}")) == 5
    last = capsys.readouterr().err.splitlines()[-1]
    assert f"{tmp_path / 'file'}/run/run.lock: cannot be written (Not a directory)" in last


def test_a_folder_that_becomes_unwritable_keeps_the_checkpoints_before(
    configure: Configure, at_each_step: Watch, stopped_at_five: Path
) -> None:
    """Seen to fail with the system's errors left as they are."""

    def block(module: TrainModule) -> None:
        if module.step == 6:
            (stopped_at_five / "checkpoints").rename(stopped_at_five / "aside")
            (stopped_at_five / "checkpoints").write_text("not a folder")

    at_each_step(block)
    with pytest.raises(ResourceError, match=r"step-00000008: cannot be written \((Not a directory|File exists)\)"):
        train_rank(configure())
    (stopped_at_five / "checkpoints").unlink()
    (stopped_at_five / "aside").rename(stopped_at_five / "checkpoints")
    require_unharmed(stopped_at_five, [5, 4])


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_a_batch_that_does_not_fit_in_memory_is_exit_code_5_with_its_size(configure: Configure, tmp_path: Path) -> None:
    """A limit on the address space, little above what the process has; 65,536 rows of 32 tokens need 268 MB for one activation."""

    def little_more(module: TrainModule) -> None:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit(resource.RLIMIT_AS, pages * resource.getpagesize() + (64 << 20))

    with limits_restored(resource.RLIMIT_AS), pytest.raises(ResourceError) as caught:
        train_rank(configure("data.global_batch=65536", "trainer.micro_batch=65536"), callbacks=[Before(1, little_more)])
    assert "out of memory with trainer.micro_batch=65536 and data.seq_len=32" in str(caught.value)
    require_unharmed(tmp_path / "run", [])


@pytest.mark.slow
def test_a_killed_loader_worker_is_named_and_the_next_start_goes_on(
    configure: Configure, at_each_step: Watch, stopped_at_five: Path
) -> None:
    killed: list[int] = []

    def kill(module: TrainModule) -> None:
        if module.step == 6 and not killed:
            killed.append(multiprocessing.active_children()[0].pid or 0)
            os.kill(killed[0], signal.SIGKILL)

    at_each_step(kill)
    with pytest.raises(ResourceError, match=r"data.workers: (a )?DataLoader worker .* Start again, or set data.workers=0"):
        train_rank(configure("data.workers=1", "trainer.max_steps=4000"))
    require_unharmed(stopped_at_five, [int(path.name[5:]) for path in checkpoints(stopped_at_five / "checkpoints")])
    assert train_rank(configure("data.workers=1", "trainer.max_steps=30"))["steps"] == 30
    assert multiprocessing.active_children() == []


@pytest.mark.slow
def test_a_signal_that_ends_the_compiler_too_is_no_error(configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster sends SIGTERM to all processes of a job, so the C++ compiler dies of it as well."""
    killed = tmp_path / "killed"
    killed.write_text("#!/bin/sh\nif [ $1 = --version ]; then exec g++ --version; fi\nkill -TERM $$\n", encoding="utf-8")
    killed.chmod(0o755)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    torch._dynamo.reset()
    pick_vec_isa()  # asks the compiler, once in a process
    told = r"run: SIGTERM also ended the compiler, which step 1 needed. There is no checkpoint to go on from"
    with inductor.patch({"cpp.cxx": (None, str(killed))}):  # monkeypatch would leave the tests behind without a compiler
        with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=r"SIGTERM|-15|compile error"):
            train_rank(configure("trainer.compile=true"))
        with pytest.raises(Interrupted, match=told) as stopped:
            train_rank(configure("trainer.compile=true"), callbacks=[Before(1, lambda module: os.kill(os.getpid(), signal.SIGTERM))])
    assert stopped.value.exit_code == 128 + signal.SIGTERM


@pytest.mark.slow
def test_a_secret_of_the_environment_is_nowhere_in_the_run_folder(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loggers and hubs read their keys from there; nothing copies it."""
    secret = "b7f3c1d9e5a24680b7f3c1d9e5a24680b7f3c1d9"
    for name in ("WANDB_API_KEY", "HF_TOKEN"):
        monkeypatch.setenv(name, secret)
    monkeypatch.setenv("WANDB_MODE", "offline")
    train_rank(configure("logger=wandb"))
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert (tmp_path / "run" / "wandb").is_dir() and len(files) > 10
    assert [path for path in files if secret.encode() in path.read_bytes()] == []


@pytest.mark.parametrize("where", ["", "model", "model.norm", "model.attention"])
def test_a_config_that_names_code_is_refused_and_runs_nothing(
    stopped_at_five: Path, tmp_path: Path, where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the model folder and, with a manifest that agrees, in a checkpoint. Seen to fail with unknown keys ignored."""
    code = {"_target_": "os.system", "command": f"touch {tmp_path / 'canary'}"}
    folder = checkpoints(stopped_at_five / "checkpoints")[0]

    def plant(meta: dict[str, Any]) -> dict[str, Any]:
        place = meta
        for key in where.split(".") if where else []:
            place = place[key]
        place |= code
        return meta

    edit(folder, META, plant)
    code_of = main(["generate", f"from={folder}", "prompt=def", "max_tokens=1"])
    assert code_of == (3 if where else 0)  # what is beside the model in the meta data is never looked at
    assert not where or "there is no such key" in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "canary").exists()


@pytest.mark.slow
def test_a_process_that_is_cut_off_from_every_network_trains(tiny: list[str]) -> None:
    """In a network namespace of its own, which has not even a loopback that is up."""
    cut_off = ["unshare", "--map-root-user", "--net"]
    if subprocess.run([*cut_off, "true"], capture_output=True, check=False).returncode:
        pytest.skip("the system gives no network namespace here")
    command = [*cut_off, sys.executable, "-m", "lm", "train", *(given for given in tiny if not given.startswith("data.cache_dir="))]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"HOME": "/dev/null"}, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_run_needs_neither_a_network_nor_a_home(tiny: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen to fail with one connection to a server added."""

    def refuse(*args: Any) -> None:
        raise OSError("no network here")

    monkeypatch.setattr("socket.socket.connect", refuse)
    monkeypatch.setenv("HOME", "/dev/null")
    assert main(["train", *(given for given in tiny if not given.startswith("data.cache_dir="))]) == 0
