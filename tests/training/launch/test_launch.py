"""A run of several ranks as its user meets it: one rank fails or is killed, a signal comes, a config cannot be trained so."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
from torch.distributed.elastic.rendezvous import RendezvousConnectionError

from lm.errors import Interrupted, LmError, ResourceError
from lm.storage.checkpoint import checkpoints
from lm.storage.manifest import verify
from lm.training.config import TrainConfig
from lm.training.launch import launcher, outcome
from lm.training.launch.outcome import Outcome, verdict
from lm.training.strategies.zero_config import ZeroConfig
from tests.conftest import on_linux
from tests.server import ROOT, Process
from tests.training.conftest import Configure, Launch, needs_deepspeed, ranks, read, results

HALVES = ranks("ddp", 2, 2)
ENDLESS = ("trainer.max_steps=100000", "trainer.val_every=100000", "checkpoint.every=100000")
FAILING = """
import os, sys
from lm import errors
from lm.training.module import TrainModule
from lm.training.worker import main
STARTS = {starts!r}
own = TrainModule.training_step
def step(module, *args):
    if module.step == 5 and module.global_rank == 1:
        open(STARTS, 'a').write('.')
        {act}
    return own(module, *args)
TrainModule.training_step = step
code = main(sys.argv[1:])
sys.stdout.flush()
os._exit(code)
"""
ONCE = "open(STARTS).read() == '.'"  # in what a failing worker does: the first time
Failing = Callable[[TrainConfig, str], None]
Start = Callable[..., Process]


@pytest.fixture
def failing(launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Failing:
    """Launch a config with workers that do something at step 6, on rank 1."""

    def run(cfg: TrainConfig, act: str) -> None:
        (tmp_path / "failing_worker.py").write_text(FAILING.format(act=act, starts=str(tmp_path / "starts")))
        monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
        launch(cfg, "failing_worker")

    return run


def require_gone(folder: Path, within_s: float = 30.0) -> None:
    """Whoever works in this folder."""
    deadline = time.monotonic() + within_s
    while left := processes_in(folder):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def processes_in(folder: Path) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile
            if (path / "cwd").readlink() == folder and " Z " not in (path / "stat").read_text():
                found.append(path.name)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("act", "code", "said"),
    [
        pytest.param("raise ValueError('one of mine')", 1, r"^rank 1: internal error: ValueError: one of mine", marks=pytest.mark.slow),
        pytest.param(
            "raise MemoryError('no more')", 5, r"^rank 1: train: out of memory with trainer.micro_batch=8", marks=pytest.mark.slow
        ),
        ("os.kill(os.getpid(), 9)", 5, r"^rank 1: the process was killed by SIGKILL"),
        ("os.environ.update(LM_FAILPOINT='optimizer:enospc')", 5, r"^rank 1: \S+/step-00000008: no space left"),
    ],
    ids=["raises", "runs out of memory", "is killed", "finds no space"],
)
def test_the_end_of_one_rank_ends_all_and_is_told_with_the_rank(
    configure: Configure, failing: Failing, tmp_path: Path, act: str, code: int, said: str
) -> None:
    """The next start goes on from the last checkpoint."""
    cfg = configure("optim=adamw", *ranks("ddp"))
    with pytest.raises(LmError, match=said) as caught:
        failing(cfg, act)
    assert caught.value.exit_code == code
    require_gone(tmp_path)
    (kept,) = checkpoints(tmp_path / "run" / "checkpoints")
    verify(kept)
    assert kept.name == "step-00000004"
    read(tmp_path / "run" / "metrics.jsonl")


@pytest.mark.slow
def test_a_rank_that_died_is_started_again_where_that_is_allowed(
    configure: Configure, launch: Launch, failing: Failing, tmp_path: Path
) -> None:
    launch(configure("optim=adamw", *ranks("ddp"), "run.name=whole"))
    failing(configure("optim=adamw", *ranks("ddp"), "launch.max_restarts=1"), f"{ONCE} and os.kill(os.getpid(), 9)")
    assert results(tmp_path / "run") == results(tmp_path / "whole")
    assert starts(tmp_path) == 2


@pytest.mark.parametrize(
    ("act", "n_starts"),
    [
        pytest.param("raise errors.ConfigError('one of mine')", 1, marks=pytest.mark.slow),
        pytest.param("raise errors.CheckpointError('one of mine')", 1, marks=pytest.mark.slow),
        pytest.param("raise errors.NumericsError('one of mine')", 1, marks=pytest.mark.slow),
        pytest.param("raise errors.ResourceError('one of mine')", 2, marks=pytest.mark.slow),
    ],
    ids=["config", "checkpoint", "numbers", "disk or memory"],
)
def test_only_what_another_start_may_mend_is_started_again(
    configure: Configure, failing: Failing, tmp_path: Path, act: str, n_starts: int
) -> None:
    with pytest.raises(LmError, match=r"^rank 1: one of mine"):
        failing(configure("optim=adamw", *ranks("ddp"), "launch.max_restarts=1"), act)
    assert starts(tmp_path) == n_starts


def starts(folder: Path) -> int:
    """How often rank 1 came to its failing step."""
    return len((folder / "starts").read_text())


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])
def test_a_signal_to_the_launcher_ends_all_ranks_behind_the_same_step_which_is_saved(
    lm_process: Start, tiny: list[str], tmp_path: Path, number: signal.Signals
) -> None:
    """Seen to fail with the launcher keeping signals to itself. Nothing is left where temporary files are."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    process = lm_process("train", *tiny, "optim=adamw", *ENDLESS, *ranks("ddp"), env=os.environ | {"TMPDIR": str(temporary)})
    wait_for_steps(tmp_path / "run", process)
    os.kill(process.pid, number)
    assert process.wait() == 128 + number, process.stderr
    newest = checkpoints(tmp_path / "run" / "checkpoints")[0]
    verify(newest)
    *_, resume, last = process.stderr.splitlines()
    step = int(newest.name.removeprefix("step-"))
    assert f"{number.name} ended the run after step {step}, which is saved" in last and resume.startswith("resume: lm train ")
    assert [line["step"] for line in read(tmp_path / "run" / "metrics.jsonl")] == list(range(1, step + 1))
    require_gone(tmp_path, within_s=1)
    assert not [*temporary.iterdir()]


BEFORE = """
import os, signal, sys, time
from lm.training.launch.ranks import Ranks
from lm.training.worker import main
def meet(ranks, timeout_s):
    os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(20)
Ranks.meet = meet
os._exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_signal_before_the_ranks_have_met_ends_them_and_is_what_ended_the_run(
    configure: Configure, launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen to fail: it was told that a rank had been killed, with exit code 5."""
    (tmp_path / "waiting_worker.py").write_text(BEFORE)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    with pytest.raises(Interrupted, match="launch: SIGTERM came before the ranks ran") as ended:
        launch(configure("optim=adamw", *ranks("ddp")), "waiting_worker")
    assert ended.value.exit_code == 143


STARVED = """import signal, time
        for pid, number in ((os.getppid(), 'SIGSTOP'), (os.getpid(), 'SIGUSR1'), (os.getppid(), 'SIGUSR1')):
            os.kill(pid, getattr(signal, number))
        time.sleep(1.5)
        os.kill(os.getppid(), signal.SIGCONT)
        time.sleep(1.5)"""


@pytest.mark.slow
def test_a_signal_to_all_processes_counts_once_however_late_the_launcher_hands_its_own_on(
    configure: Configure, failing: Failing, tmp_path: Path
) -> None:
    """As a cluster sends it. Seen to fail where a busy machine kept the launcher for more than a second: its rank ended without a save."""
    with pytest.raises(Interrupted, match="SIGUSR1 ended the run after step 6, which is saved"):
        failing(configure("optim=adamw", *ranks("ddp")), STARVED)
    verify(tmp_path / "run" / "checkpoints" / "step-00000006")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [[], pytest.param(ranks("ddp"), marks=pytest.mark.slow)], ids=["one rank", "two ranks"])
def test_a_second_signal_ends_the_run_at_once_and_says_what_is_lost(
    lm_process: Start, tiny: list[str], tmp_path: Path, strategy: list[str]
) -> None:
    """Seen to end without a word."""
    process = lm_process("train", *tiny, "optim=adamw", *ENDLESS, "checkpoint.every=4", *strategy)
    wait_for_steps(tmp_path / "run", process, 6)
    for number in (signal.SIGSTOP, signal.SIGINT, signal.SIGTERM, signal.SIGCONT):  # both wait when it goes on
        os.kill(process.pid, number)
    assert process.wait() in (130, 143), process.stderr
    last = process.stderr.splitlines()[-1]
    assert "came as a second signal, so the run ended at once after step" in last
    assert re.search(r"/run/checkpoints/step-\d+ is the last checkpoint, and training again goes on from there.$", last)
    require_gone(tmp_path)


STOPPED = "os.kill(os.getpid(), 19)"
STOPPED_WITHIN = f"module.model.blocks[0].register_forward_pre_hook(lambda *args: {STOPPED})"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "act"), [("ddp", STOPPED), ("fsdp", STOPPED_WITHIN), pytest.param("zero2", STOPPED_WITHIN, marks=needs_deepspeed)]
)
def test_a_rank_that_does_not_answer_is_told_with_its_state(
    configure: Configure, failing: Failing, tmp_path: Path, strategy: str, act: str
) -> None:
    """Seen to be told as killed, where memory runs out; and under ZeRO after torch's 30 minutes, whatever launch.timeout_s."""
    said = r"^rank 1: it did not answer the others within launch.timeout_s, and its process is stopped, as by SIGSTOP \(state T\)"
    began = time.monotonic()
    with pytest.raises(ResourceError, match=said):
        failing(configure("optim=adamw", "launch.timeout_s=6", *ranks(strategy)), act)
    assert time.monotonic() - began < 60
    require_gone(tmp_path)


def test_a_rank_that_was_killed_is_told_before_one_that_has_not_noticed() -> None:
    """Seen with four ranks on two cores: the last one had not come to what it would wait for."""
    ranks_now = [Outcome(0, 10, 1.0), Outcome(1, 11, 2.0, 1, "lost", peer_lost=True), Outcome(2, 12, 3.0)]
    died, hung = verdict(ranks_now, {0: 9, 2: 15}, {0: "Z", 2: "R"}), verdict(ranks_now, {0: 9, 2: 9}, {0: "S", 2: "R"})
    assert "rank 0: the process was killed by SIGKILL" in str(died) and "rank 0: it did not answer the others" in str(hung)


@pytest.mark.slow
@on_linux
def test_ranks_end_and_save_when_their_launcher_is_killed(lm_process: Start, tiny: list[str], tmp_path: Path) -> None:
    process = lm_process("train", *tiny, "optim=adamw", *ENDLESS, *ranks("ddp"))
    wait_for_steps(tmp_path / "run", process)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    require_gone(tmp_path)
    verify(checkpoints(tmp_path / "run" / "checkpoints")[0])


@pytest.mark.slow
def test_a_config_that_differs_is_refused_before_any_rank_starts(
    configure: Configure, launch: Launch, killed: Callable[..., None], tmp_path: Path
) -> None:
    killed(configure("optim=adamw", *ranks("ddp")))
    kept = (tmp_path / "run" / "config.yaml").read_bytes()
    with pytest.raises(LmError, match=r"optim.lr: \S+ in the run, 0.5 now"):
        launch(configure("optim=adamw", "optim.lr=0.5", *ranks("ddp")))
    assert (tmp_path / "run" / "config.yaml").read_bytes() == kept


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["launch.devices=2"], "strategy=single: this is one process, and launch asks for 2"),
        (["strategy=ddp", "launch.devices=3"], "data.global_batch=8 is not a multiple of the 3 ranks"),
        (["strategy=zero3", "optim=muon"], "optim=muon works on whole matrices.*Use optim=adamw, or strategy=ddp, fsdp, zero1 or zero2"),
        (["strategy=zero2_offload", "optim=muon"], "optim=muon works on whole matrices"),
        (["strategy=fsdp", "optim=soap"], "optim=soap works on whole matrices.*Use optim=adamw, or strategy=ddp"),
        (["strategy=zero1", "optim=adafactor"], "optim=adafactor works on whole matrices.*Use optim=adamw, or strategy=ddp"),
        (["strategy=fsdp", "optim=muon", "optim.row_beta2=0.95"], "optim.row_beta2=0.95 works on whole matrices.*or strategy=ddp"),
        (["strategy=zero1", "optim=adamw", "trainer.ema_decay=0.9"], "trainer.ema_decay needs weights"),
        (["strategy=zero1", "optim=adamw", "schedule=free"], "schedule=free needs weights"),
        (["strategy=zero3", "optim=adamw", "trainer.precision=bf16-true"], "trainer.precision=bf16-mixed"),
        (["strategy=zero3", "optim=adamw", "trainer.compile=true"], "trainer.compile"),
        (
            ["strategy=zero3", "optim=adamw", "trainer.recompute=selective", "strategy.prefetch_bucket_size=9"],
            "prefetch_bucket_size=9: with trainer.recompute=selective each weight is gathered when it is used",
        ),
        (ranks("fsdp", 4, shard=3), "strategy=fsdp: shard=3 ranks hold a copy of the weights, and launch asks for 4, no multiple. Choose"),
        (ranks("ddp", 2, 3), "context=3 ranks hold a row, and devices \\* nodes=2 is not a multiple. Choose a divisor of it"),
        ([*ranks("ddp", 6, 2), "data.global_batch=8"], "data.global_batch=8 is not a multiple of the 3 groups of 2 ranks"),
        ([*HALVES, "data.seq_len=33"], "launch.context=2: data.seq_len=33 is not a multiple of it. Choose one, such as 34."),
        (ranks("ddp", 4, 4), "launch.context=4: model.attention.n_heads=2 is not a multiple of it, .* Choose a divisor."),
        (
            [*HALVES, "model/recurrent=gla", "model.pattern=[recurrent]", "model/position=none"],
            "launch.context=2: recurrent=gla takes a state",
        ),
        ([*HALVES, "model/position=alibi"], "launch.context=2: position=alibi is a bias on all pairs .* Use position=rope."),
        ([*HALVES, "model/position=t5_relative"], "launch.context=2: position=t5_relative is a bias"),
        ([*HALVES, "model.embed.noise=5"], "launch.context=2: model.embed.noise depends on the length .* Set model.embed.noise=0."),
        ([*HALVES, "model.mtp.depth=1"], "launch.context=2: model.mtp reads the next tokens, .* Set model.mtp=null."),
        ([*HALVES, "objective.scheduled_sampling=0.1"], "launch.context=2: objective.scheduled_sampling takes inputs .* Set it to 0."),
        ([*HALVES, "objective=simpo", "data.record.kind=preference"], "launch.context=2: objective=simpo needs whole rows in one rank."),
        (["strategy=ddp", "launch.nodes=2"], "nodes=2 need a place to meet, and rendezvous is None"),
        (
            ["strategy=ddp", "launch.nodes=2", "launch.rendezvous=a:1", "launch.max_restarts=1"],
            "max_restarts=1 is for one machine, and nodes=2",
        ),
    ],
)
def test_what_cannot_be_trained_so_is_refused_by_the_config(configure: Configure, overrides: list[str], said: str) -> None:
    with pytest.raises(LmError, match=said):
        configure(*overrides)


@pytest.mark.parametrize("kind", ["zero3", "zero3_offload"])
def test_only_where_products_are_kept_does_zero3_gather_every_weight_when_it_is_used(configure: Configure, kind: str) -> None:
    """And leave its own linear layers, which add their bias to a product in place. Everywhere else the config's sizes hold."""
    found = {}
    for recompute in ("none", "block", "selective"):
        cfg = configure("optim=adamw", f"trainer.recompute={recompute}", *ranks(kind))
        assert isinstance(cfg.strategy, ZeroConfig)
        found[recompute] = cfg.strategy.zero(cfg)
    assert found["none"] == found["block"] and "memory_efficient_linear" not in found["none"]
    ahead = ("stage3_param_persistence_threshold", "stage3_prefetch_bucket_size", "stage3_max_reuse_distance")
    assert found["selective"] == found["none"] | {"memory_efficient_linear": False} | dict.fromkeys(ahead, 0)


@pytest.mark.slow
def test_every_rank_prints_nothing_but_the_first(lm_process: Start, tiny: list[str]) -> None:
    done = lm_process("train", *tiny, "optim=adamw", *ranks("fsdp"))
    assert done.wait() == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if "left out" not in line] == []
    assert done.stdout.count("/run starts: ") == 1 and done.stdout.count("  validation") == 3


@pytest.mark.slow
def test_a_sweep_of_runs_of_two_ranks_runs_each_once(lm_process: Start, tiny: list[str], tmp_path: Path) -> None:
    args = [*(given for given in tiny if not given.startswith("run.name=")), "optim=adamw", *ranks("ddp"), "seed=0,1", "-m"]
    done = lm_process("train", *args)
    assert done.wait() == 0, done.stderr
    folders = [path.parent for path in tmp_path.glob("*/config.yaml")]
    assert len(folders) == 2
    for folder in folders:
        assert json.loads((folder / "summary.json").read_text())["steps"] == 12
        assert [line["step"] for line in read(folder / "metrics.jsonl") if "loss" in line] == list(range(1, 13))


@pytest.mark.slow
def test_two_machines_train_one_run(configure: Configure, launch: Launch, tiny: list[str], tmp_path: Path) -> None:
    """Both commands on this machine, as fresh interpreters, which find each other at the rendezvous."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    there = ["strategy=ddp", "launch.nodes=2", f"launch.rendezvous=localhost:{port}"]
    args = [sys.executable, "-m", "lm", "train", *tiny, "optim=adamw", *there]
    machines = [subprocess.Popen(args, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    said = [machine.communicate(timeout=120)[1] for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], said
    launch(configure("run.name=whole", "optim=adamw", *ranks("ddp")))
    assert results(tmp_path / "run") == results(tmp_path / "whole")


FAKE = """#!/bin/sh
echo "$@" >> {log}
"""


ASKED = ["requeue 77"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "node", "asked"),
    [pytest.param([], "0", ASKED, marks=pytest.mark.slow), (ranks("ddp"), "0", ASKED), ([], "1", [])],
    ids=["one rank", "two ranks", "another machine than the first"],
)
def test_sigusr1_saves_and_puts_the_job_back_into_the_queue_once(
    lm_process: Start, tiny: list[str], tmp_path: Path, strategy: list[str], node: str, asked: list[str]
) -> None:
    """Seen to fail with SIGUSR1 left to the system."""
    (tmp_path / "scontrol").write_text(FAKE.format(log=tmp_path / "asked"))
    (tmp_path / "scontrol").chmod(0o755)
    slurm = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "SLURM_JOB_ID": "77", "SLURM_NODEID": node}
    process = lm_process("train", *tiny, "optim=adamw", *ENDLESS, *strategy, env=os.environ | slurm)
    wait_for_steps(tmp_path / "run", process)
    os.kill(process.pid, signal.SIGUSR1)
    assert process.wait() == 128 + signal.SIGUSR1, process.stderr
    assert "SIGUSR1 ended the run after step" in process.stderr.splitlines()[-1]
    assert ((tmp_path / "asked").read_text().splitlines() if (tmp_path / "asked").exists() else []) == asked
    verify(checkpoints(tmp_path / "run" / "checkpoints")[0])


def wait_for_steps(run: Path, process: Process, steps: int = 3) -> None:
    metrics = run / "metrics.jsonl"
    while process.alive() and (not metrics.exists() or len(metrics.read_bytes().splitlines()) < steps):
        time.sleep(0.05)


@pytest.mark.slow
def test_a_port_in_use_is_no_matter(configure: Configure, launch: Launch) -> None:
    """Those that torch uses where it is told nothing."""
    with socket.socket() as first, socket.socket() as second:
        for taken, port in ((first, 29400), (second, 29500)):
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            taken.bind(("127.0.0.1", port))
            taken.listen()
        launch(configure("optim=adamw", "trainer.max_steps=4", *ranks("ddp")))


def test_what_torchs_launcher_does_not_take_is_told(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by a torch of another age. Seen to end as if all had been trained."""

    @dataclass
    class Older:
        min_nodes: int

    monkeypatch.setattr("torch.distributed.launcher.api.LaunchConfig", Older)
    with pytest.raises(TypeError, match="unexpected keyword argument 'max_nodes'"):
        launcher.launch(configure("optim=adamw", "trainer.max_steps=4", *ranks("ddp")))


def told(rank: int, code: int | None, pid: int = 1, **more: bool) -> None:
    """What a rank of an agent that is none has written when it ended; or began, with the code None."""
    folder = Path(os.environ["LM_OUTCOMES"])
    (folder / f"rank-{rank}.json").write_text(json.dumps(asdict(Outcome(rank, pid, float(rank), code, "said", (), **more))))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "error", "said"),
    [(1, LmError, "^rank 1: said"), (None, ResourceError, "^rank 1: the process was killed")],
    ids=["that told why it ended", "that was killed"],
)
def test_a_machine_that_does_not_answer_holds_up_no_launcher(
    code: int | None, error: type[LmError], said: str, configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its ranks have ended, and torch's agent waits for the others'. Seen to wait for more than two minutes."""

    def agent(*_: object) -> None:
        with subprocess.Popen(["true"]) as ended:
            ended.wait()
        told(1, code, ended.pid, peer_lost=True)
        time.sleep(10)

    monkeypatch.setattr("torch.distributed.launcher.api.elastic_launch", lambda *_: agent)
    monkeypatch.setattr(launcher, "_ABANDON_S", 0.5)
    began = time.monotonic()
    with pytest.raises(error, match=said):
        launcher.launch(configure("optim=adamw", *ranks("ddp")))
    assert time.monotonic() - began < 8


def test_where_there_is_no_proc_a_rank_that_runs_is_not_gone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As on macOS, where the launcher gave up each run of several ranks after ten seconds, for all of them to have ended."""
    monkeypatch.setattr(outcome, "Path", lambda path: tmp_path / path.strip("/"))
    with subprocess.Popen(["true"]) as ended:
        ended.wait()
    assert [Outcome(0, pid, 0.0).gone() for pid in (os.getpid(), ended.pid)] == [False, True]
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as killed:
        killed.kill()  # and nobody has waited for it yet
        deadline = time.monotonic() + 5
        while not Outcome(0, killed.pid, 0.0).gone():
            assert time.monotonic() < deadline
    monkeypatch.setenv("PATH", "")  # a system without ps
    assert [Outcome(0, pid, 0.0).gone() for pid in (os.getpid(), ended.pid)] == [False, True]


def test_a_rendezvous_that_is_lost_is_told_apart_from_one_that_was_never_held(
    configure: Configure, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Seen to say that the machines did not meet, of a run that had been trained and saved."""
    begun, why = False, "no store"

    def agent(*_: object) -> None:
        if begun:
            told(0, 143, stopped=True)
        raise RendezvousConnectionError(why)

    monkeypatch.setattr("torch.distributed.launcher.api.elastic_launch", lambda *_: agent)
    cfg = configure("optim=adamw", "strategy=ddp", "launch.nodes=2", "launch.rendezvous=localhost:29400")
    with pytest.raises(ResourceError, match=r"launch.rendezvous=localhost:29400: the 2 machines did not meet \(no store\)"):
        launcher.launch(cfg)
    assert "launch: waits up to 1,800 s for 2 machines to meet at localhost:29400" in capsys.readouterr().out
    why = ""
    with pytest.raises(ResourceError, match=r"the 2 machines did not meet \(not within launch.timeout_s=1800\)"):
        launcher.launch(cfg)
    begun, why = True, "no store"
    with pytest.raises(Interrupted, match="said"):
        launcher.launch(cfg)
    assert "the command of the machine that holds it has ended or does not answer (no store)" in capsys.readouterr().err
