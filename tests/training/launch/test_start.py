"""Before the first step: where machines meet, what the environment says, whose child a process is, and what a failed start leaves."""

import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from lm.errors import ConfigError, Interrupted, LmError, ResourceError
from lm.storage.run_folder import RunFolder
from lm.training import run
from lm.training.launch import parent, rendezvous
from lm.training.launch.ranks import Ranks
from lm.training.launch.signals import Signals
from tests.conftest import Lm
from tests.server import ROOT, Process
from tests.training.conftest import Configure, settled, write_text
from tests.training.launch.test_cluster import free_port


@pytest.mark.slow
@pytest.mark.parametrize("talks", [False, True], ids=["says nothing", "says something else"])
def test_a_rendezvous_port_in_use_is_named_at_once(monkeypatch: pytest.MonkeyPatch, talks: bool) -> None:
    """Seen to take 105 s, and to name neither."""
    monkeypatch.setattr(rendezvous, "_ANSWER_S", 0.6)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        if talks:
            threading.Thread(target=answer_all, args=(taken,), daemon=True).start()
        place = f"127.0.0.1:{taken.getsockname()[1]}"
        began = time.monotonic()
        with pytest.raises(ResourceError, match=f"^launch.rendezvous={place}: another program listens on this port"):
            rendezvous.require_place(place)
        assert time.monotonic() - began < 5


def answer_all(taken: socket.socket) -> None:
    while True:
        try:
            with taken.accept()[0] as connection:
                connection.sendall(b"HTTP/1.0 400 Bad Request\r\n\r\n")
        except OSError:
            return


def test_a_port_where_a_run_meets_already_and_a_free_one_are_fine() -> None:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    rendezvous.require_place(f"127.0.0.1:{store.port}")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    rendezvous.require_place(f"127.0.0.1:{port}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "option", "said"),
    [
        (0, "optim.lr=0.0123", r"optim\.lr=0\.\d+ on rank 1, but 0\.\d+ on rank 0"),
        pytest.param(1, "data.cache_dir=its_own", r"data=\w+ on rank 1, but \w+ on rank 0", marks=pytest.mark.slow),
    ],
    ids=["another command", "another file"],
)
def test_machines_that_would_train_different_runs_are_refused_on_each(
    text: int, option: str, said: str, tiny: list[str], server: Path, tmp_path: Path
) -> None:
    """Seen to train to the end, each machine with its own rate or its own text."""
    machines = two_machines(server, tmp_path, (0, text), [*tiny, "data.files=local.txt"], [option])
    assert [machine.wait() for machine in machines] == [2, 2]
    for machine in machines:
        assert re.search(rf"^rank \d: launch: {said}\. Start the same command, with ", machine.stderr.splitlines()[-1]), machine.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_machines_without_a_common_run_folder_are_refused_on_each(tiny: list[str], server: Path, tmp_path: Path) -> None:
    """Seen to train until the first save, and then to say that a folder cannot be written."""
    machines = two_machines(server, tmp_path, (0, 0), [*tiny, "run.dir=of_a_machine"], [])
    assert [machine.wait() for machine in machines] == [5, 5]
    for machine in machines:
        said = r"^rank \d: of_a_machine/run/checkpoints: rank 1 on host \S+ cannot write there \(No such file or directory\), and"
        assert re.search(said, machine.stderr.splitlines()[-1]), machine.stderr
    assert not [*tmp_path.glob("*/of_a_machine/run")]


def two_machines(server: Path, folder: Path, texts: tuple[int, int], args: list[str], more: list[str]) -> list[Process]:
    """Two commands that meet, each in its own folder with its own local.txt.  texts: their seeds.  more: arguments of the second alone."""
    there = ["strategy=ddp", "launch.nodes=2", f"launch.rendezvous=localhost:{free_port()}"]
    machines = []
    for name, seed, own in (("first", texts[0], []), ("second", texts[1], more)):
        (folder / name).mkdir()
        write_text(folder / name / "local.txt", seed=seed)
        machines.append(Process(server, folder / name, ["-m", "lm", "train", *settled(*args, *there, *own)]))
    return machines


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a" * 80, "bad..name"])
def test_a_host_without_an_address_is_named(host: str) -> None:
    with pytest.raises(ResourceError, match=f"^launch.rendezvous={host}:29400: no address is known"):
        rendezvous.require_place(f"{host}:29400")


def test_a_host_that_takes_long_to_look_up_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_RESOLVE_S", 0.1)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **options: time.sleep(2) or [])
    began = time.monotonic()
    with pytest.raises(ResourceError, match="no address is known of the host 'slow'"):
        rendezvous.require_place("slow:1")
    assert time.monotonic() - began < 1.5


SCHEDULERS = {"SLURM_NTASKS": "3", "SLURM_PROCID": "x", "RANK": "abc", "WORLD_SIZE": "-2", "LOCAL_RANK": "", "NODE_RANK": "z"}


def test_what_schedulers_say_of_ranks_counts_under_torchrun_only(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SCHEDULERS.items():
        monkeypatch.setenv(name, value)
    with monkeypatch.context() as torchrun:
        torchrun.setenv("TORCHELASTIC_RUN_ID", "1")
        with pytest.raises(ConfigError, match=r"^environment: RANK='abc' WORLD_SIZE='-2' LOCAL_RANK='', where torchrun"):
            Ranks.from_environment()
    assert Ranks.from_environment() == Ranks()
    assert not SCHEDULERS.keys() & os.environ.keys()


CHILD = """
import os, time
from lm.training.launch.parent import end_with_parent
open('child', 'w').write(str(os.getpid()))
while {late} and os.getppid() == int(os.environ['LM_PARENT']):
    time.sleep(0.01)
end_with_parent()
time.sleep(30)
"""
PARENT = """
import os, subprocess, sys, time
from lm.training.launch.parent import named
subprocess.Popen([sys.executable, '-c', sys.argv[1]], env=os.environ | named())
while not os.path.exists('child') or not open('child').read():
    time.sleep(0.01)
os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("late", [False, True], ids=["while it lives", "before it looks"])
def test_a_process_ends_with_the_one_that_it_was_started_for(tmp_path: Path, late: bool) -> None:
    """Seen to fail, for a launcher that is killed while its ranks still import, with a signal that the system sends at its death."""
    command = [sys.executable, "-c", PARENT, CHILD.format(late=late)]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == -signal.SIGKILL
    child, deadline = Path("/proc") / (tmp_path / "child").read_text(), time.monotonic() + 5
    while child.exists() and " Z " not in (child / "stat").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(
    "overrides",
    [
        ["data.files=gone.txt"],
        ["data.seq_len=100000"],
        ["trainer.device=cuda"],
        ["trainer.sample_prompts=['x']", "trainer.sample_tokens=0"],
    ],
)
def test_a_start_that_fails_leaves_no_folder(lm: Lm, tiny: list[str], tmp_path: Path, overrides: list[str]) -> None:
    code, _, err = lm("train", *tiny, *overrides)
    assert code == 2, err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("error", [MemoryError("none"), ResourceError("no port"), KeyboardInterrupt()])
def test_nor_does_one_that_runs_out_of_something(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fit(*args: object) -> None:
        assert (tmp_path / "run" / "config.yaml").exists()
        raise error

    monkeypatch.setattr(run, "_fit", fit)
    with pytest.raises((LmError, KeyboardInterrupt)):
        run.train_rank(configure())
    assert not (tmp_path / "run").exists()


def test_a_failed_start_takes_nothing_along_that_was_there(lm: Lm, tiny: list[str], tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    write_text(tmp_path / "run" / "notes.txt")
    assert lm("train", *tiny, "trainer.device=cuda")[0] == 2
    assert (tmp_path / "run" / "notes.txt").exists()
    (tmp_path / "other").write_text("a file")
    assert lm("train", *tiny, "run.name=other")[0] in (2, 5)
    assert (tmp_path / "other").read_text() == "a file"


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_a_signal_within_an_import_is_raised_behind_it_where_the_process_goes_on(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen to fail: Ctrl-C while Lightning loads, and every later lm.train of a notebook with "partially initialized module"."""
    reached = []
    refused = pytest.raises(Interrupted, match="SIGINT came before the first step")
    with Signals(RunFolder(tmp_path / "run"), 0) as signals, refused, signals.held():
        interrupt()
        interrupt()
        reached.append("the end of the import")
    assert reached

    def begun(signals: Signals) -> None:
        raise MemoryError("the import")

    monkeypatch.setattr(Signals, "held", begun)
    with pytest.raises(MemoryError, match="the import"):
        run.train_rank(configure())


def test_a_second_signal_in_a_session_raises_instead_of_ending_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen to fail: a second Ctrl-C ended a notebook's kernel with all of its variables."""
    monkeypatch.setattr(sys, "ps1", "In : ", raising=False)
    monkeypatch.setattr("lm.training.launch.parent._ONCE_S", 0.0)
    with Signals(RunFolder(tmp_path / "run"), 0) as signals:
        signals.defer()
        interrupt()
        with pytest.raises(Interrupted, match="came as a second signal, so the run ended at once"):
            interrupt()


def test_a_signal_that_all_processes_get_and_another_program_hands_on_counts_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of systemd at a shutdown. Seen to fail: the one that the launcher handed on ended its ranks at once, without a save."""
    monkeypatch.setattr(sys, "ps1", "In : ", raising=False)
    with Signals(RunFolder(tmp_path / "run"), 0) as signals:
        signals.defer()
        interrupt()
        interrupt()
        assert signals.received == signal.SIGINT


def test_a_child_ends_at_once_where_its_parent_says_so_and_by_the_first_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM behind SIGUSR1, as SLURM sends them, would otherwise keep the job out of its queue."""
    monkeypatch.setattr(sys, "ps1", "In : ", raising=False)
    monkeypatch.setattr(parent, "_is_child", True)
    monkeypatch.setattr(parent, "_ONCE_S", 0.0)
    with Signals(RunFolder(tmp_path / "run"), 0) as signals, pytest.raises(Interrupted, match="SIGUSR1 came as a second signal") as ended:
        signals.defer()
        for number in (signal.SIGUSR1, signal.SIGUSR1, signal.SIGTERM):
            os.kill(os.getpid(), number)
            assert signals.received == signal.SIGUSR1
        monkeypatch.setattr(parent, "_IMPATIENT_S", 0.0)
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.received == signal.SIGUSR1
        os.kill(os.getpid(), parent.AT_ONCE)
    assert ended.value.exit_code == 128 + signal.SIGUSR1


def test_a_fork_of_a_run_ends_by_sigterm_and_not_by_what_is_meant_for_the_run(tmp_path: Path) -> None:
    """As a reward's Pool and Process.terminate end theirs. Seen to fail: the fork noted the signal, as the run would, and the run
    waited for its end for good."""
    with Signals(RunFolder(tmp_path / "run"), 0) as signals:
        signals.defer()
        fork = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        fork.start()
        assert fork.pid is not None
        os.kill(fork.pid, signal.SIGINT)
        fork.join(0.3)
        assert fork.is_alive()
        fork.terminate()
        fork.join(20)
        ended = fork.exitcode
        fork.kill()
        assert signals.received is None
        interrupt()
        assert signals.received == signal.SIGINT
    assert ended == -signal.SIGTERM


def test_a_fork_that_is_ended_at_once_ends(tmp_path: Path) -> None:
    """As the idle ones of a reward's Pool. Seen to fail: of 100 forks 86 noted the signal before they had their own, and went on."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    ends = list[int | None]()
    with Signals(RunFolder(tmp_path / "run"), 0) as signals:
        signals.defer()
        for _ in range(8):
            fork = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
            fork.start()
            fork.terminate()
            fork.join(5)
            ends.append(fork.exitcode)
            fork.kill()
        assert signals.received is None
    assert ends == [-signal.SIGTERM] * 8 and signal.pthread_sigmask(signal.SIG_BLOCK, []) == mask
