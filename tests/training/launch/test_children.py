"""Processes that a command starts: a signal reaches each of them once, whenever it comes."""

import os
import signal
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lm.ablation.running import jobs
from lm.errors import Interrupted, ResourceError
from lm.training.launch import parent
from lm.training.launch.children import Children

CHILD = ["sh", "-c", "trap 'echo got' TERM; echo ready; for i in $(seq 10); do sleep 0.05; done; exit 7"]


def ready(log: Path) -> None:
    for _ in range(500):
        if log.exists() and "ready" in log.read_text():
            return
        threading.Event().wait(0.01)
    pytest.fail("the child did not start")


@pytest.mark.slow
@pytest.mark.parametrize("threads", [0, 2], ids=["in the main thread", "in threads"])
def test_a_signal_right_behind_the_start_of_a_process_reaches_it_once(
    threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen to fail, both ways, with a handler that hands on to the processes that are known by then."""
    logs = [tmp_path / str(n) for n in range(max(1, threads))]

    class Signalled(subprocess.Popen[bytes]):
        """The last one is followed by a signal, before anyone can know of it."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            log = Path(kwargs["stdout"].name)
            ready(log)
            if log == logs[-1]:
                os.kill(os.getpid(), signal.SIGTERM)
                while children.caught is None:
                    pass

    monkeypatch.setattr(subprocess, "Popen", Signalled)

    def run(log: Path) -> int:
        with log.open("wb") as output:
            return children.run(CHILD, output=output)

    with ThreadPoolExecutor(2) as pool, Children() as children:
        codes = list(pool.map(run, logs)) if threads else [run(logs[0])]
        assert children.caught == signal.SIGTERM and run(tmp_path / "late") == -signal.SIGTERM
    assert codes == [7] * len(logs)
    assert [log.read_text().count("got") for log in logs] == [1] * len(logs)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_an_error_ends_the_processes_that_run(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("wb") as output, ThreadPoolExecutor(1) as pool:
        with pytest.raises(ResourceError, match="nothing/here: no process can be started"), Children() as children:
            future = pool.submit(children.run, CHILD, None, output)
            ready(log)
            children.run(["nothing/here"])
        assert future.result() == 7 and log.read_text().count("got") == 1


def test_a_study_that_a_second_signal_ends_does_not_say_that_its_runs_are_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen to fail."""

    def twice(study: Any, job: Any, children: Children) -> int:
        for n in (1, 2):
            os.kill(os.getpid(), signal.SIGINT)
            while len(children.numbers) < n:
                threading.Event().wait(0.01)
        return 130

    monkeypatch.setattr(jobs, "_run", twice)
    monkeypatch.setattr(parent, "_ONCE_S", 0.0)
    study: Any = SimpleNamespace(folder=tmp_path)
    with pytest.raises(Interrupted, match="SIGINT ended the study at once, without a save of the runs under way") as ended:
        [*jobs.Here(1).run(study, [cast(Any, "a job")])]
    assert ended.value.exit_code == 130
