"""Studies by submitit's executor of this machine, and by programs that are called as those of SLURM."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lm.ablation.running import cluster, jobs, work
from lm.ablation.running.work import Submitted, Work
from lm.errors import ConfigError, NumericsError
from lm.schema import Tree
from lm.storage.reading import read_json
from tests.ablation.conftest import Ablate, NewStudy
from tests.conftest import started

pytest.importorskip("submitit", reason="pip install 'slotlm[cluster]'")  # a job without it would wait for ever

FFN = "model/ffn=swiglu,gelu"


@pytest.fixture
def quick(stub: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The runs inside the jobs are started by the server; the jobs themselves are processes of submitit's."""
    monkeypatch.setattr(cluster, "command", lambda study, job: [stub, *jobs.command(study, job)[1:]])


def verdict(folder: Path) -> Tree:
    return dict(json.loads((folder / "verdict.json").read_text()))


def submissions(folder: Path) -> int:
    return len([*(folder / "jobs/cluster").glob("*_submitted.pkl")])


@pytest.mark.slow
def test_a_study_on_a_cluster_has_the_verdict_of_one_that_ran_here(quick: None, ablate: Ablate, stub: str, tmp_path: Path) -> None:
    code, _, err = ablate(FFN, "seeds=2", "cluster=local", "jobs=2", "name=far")
    assert code == 0 and submissions(tmp_path / "far") == 4, err
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", stub)
        assert ablate(FFN, "seeds=2", "jobs=2", "name=near")[0] == 0
    assert verdict(tmp_path / "far") | {"study": ""} == verdict(tmp_path / "near") | {"study": ""}
    code, _, err = ablate(FFN, "seeds=2", "cluster=local", "name=far")
    assert code == 0 and "runs to go" not in err and submissions(tmp_path / "far") == 4


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_command_that_comes_back_finds_the_jobs_of_the_one_that_was_killed(
    number: signal.Signals, ablate: Ablate, corpus: list[str], tmp_path: Path
) -> None:
    """Real processes throughout. Seen to fail, with eight jobs of four runs, where what was submitted is not looked for."""
    call = (FFN, "seeds=2", "jobs=4", "cluster=local")
    whole = [sys.executable, "-m", "lm", "ablate", *call, "threads=1", "name=ffn", f"dir={tmp_path}", *corpus]
    with started(whole, cwd=Path(__file__).parents[2]) as process:
        while len([*tmp_path.glob("ffn/jobs/*.submitted.json")]) < 4:
            time.sleep(0.1)
            assert process.poll() is None
        process.send_signal(number)
        assert process.wait() in (-9, 143)
    code, _, err = ablate(*call)
    assert code == 0 and "4 runs of an earlier command in the cluster" in err, err
    assert submissions(tmp_path / "ffn") == 4 and len(verdict(tmp_path / "ffn")["variants"]["gelu"]["runs"]) == 2


@pytest.fixture
def in_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the job 7 of this machine."""
    for name, value in {"SUBMITIT_EXECUTOR": "local", "SUBMITIT_LOCAL_JOB_ID": "7"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(work, "_PATIENCE_S", 0.2)
    monkeypatch.setattr(work, "_LOOK_S", 0.02)


def test_a_job_runs_once_and_only_as_long_as_it_is_asked_for(in_job: None, tmp_path: Path) -> None:
    """Seen to fail, with a log of two lines, without the look at what is asked for."""
    job = Work(tmp_path / "a.json", ["sh", "-c", "echo ran $OMP_NUM_THREADS; exit 4"], tmp_path / "a.log", threads=3)
    job()
    Submitted(job="8").write(job.file)
    job()
    assert not job.log.exists(), "nobody asked for it, or another job is to do it"
    Submitted(job="7").write(job.file)
    for _ in range(2):
        job()
    assert job.log.read_text() == "ran 3\n" and Submitted.read(job.file) == Submitted(job="7", code=4)
    Submitted(job="7").write(job.file)
    Work(job.file, ["sh", "-c", f"echo '{Submitted(job='8').model_dump_json()}' > {job.file}"], job.log, threads=3)()
    assert Submitted.read(job.file) == Submitted(job="8"), "it was replaced as it ran, and has nothing to say"


def test_a_job_whose_time_is_up_saves_and_comes_back(in_job: None, tmp_path: Path) -> None:
    log = tmp_path / "log"
    job = Work(tmp_path / "a.json", ["true"], log, threads=1)
    script = f"trap 'echo saved > {log}; exit 143' TERM; touch {log}; while :; do sleep 0.02; done"
    with subprocess.Popen(["sh", "-c", script]) as process:
        while not log.exists():
            time.sleep(0.02)
        job.child = process
        again = job.checkpoint()
        assert process.poll() == 143 and log.read_text() == "saved\n"
    assert again.function == Work(job.file, job.command, log, threads=1) and again.function.child is None


def test_a_job_that_slurm_takes_the_machine_from_waits_for_its_end_and_comes_back(in_job: None, tmp_path: Path) -> None:
    """Seen: recorded as failed with 143 as soon as the run had saved; the job, queued again by SLURM, then did nothing."""
    file, log = tmp_path / "a.json", tmp_path / "log"
    Submitted(job="7").write(file)
    script = "trap 'echo saved; exit 143' TERM; echo $$ began; while :; do sleep 0.02; done"
    work = f"Work(Path({str(file)!r}), ['sh', '-c', {script!r}], Path({str(log)!r}), threads=1)()"
    bypass = "import signal; signal.signal(signal.SIGTERM, lambda *_: None)"  # as submitit does
    call = f"from pathlib import Path; from lm.ablation.running.work import Work; {bypass}; {work}"
    slurm = {"SUBMITIT_EXECUTOR": "slurm", "SLURM_JOB_ID": "7"}
    with subprocess.Popen([sys.executable, "-c", call], env=os.environ | slurm, start_new_session=True) as job:
        try:
            until(lambda: log.exists() and "began" in log.read_text())
            for process in (job.pid, int(log.read_text().split()[0])):
                os.kill(process, signal.SIGTERM)
            until(lambda: "saved" in log.read_text())
            with pytest.raises(subprocess.TimeoutExpired):
                job.wait(1)
        finally:
            job.kill()
    Work(file, ["true"], log, threads=1)()
    assert Submitted.read(file) == Submitted(job="7", code=0)


def until(is_so: Callable[[], bool]) -> None:
    patient_until = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < patient_until
        time.sleep(0.02)


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Programs by SLURM's names that take jobs, and say that the first has failed and the others wait. Returns the script of the last."""
    bin, script = tmp_path / "bin", tmp_path / "script"
    bin.mkdir()
    said = {
        "srun": "",
        "sbatch": f"cp $1 {script}; echo Submitted batch job 12",
        "sacct": "echo 'JobID|State|NodeList'; for i in 0 1 2 3; do echo \"12_$i|FAILED|None assigned\"; done",
    }
    for name, text in said.items():
        (bin / name).write_text(f"#!/bin/sh\n{text}\n")
        (bin / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(bin), prepend=":")
    return script


@pytest.mark.slow
def test_slurm_gets_one_array_with_what_was_asked_and_a_job_that_it_loses_is_told(slurm: Path, ablate: Ablate, tmp_path: Path) -> None:
    asked = ("cluster=slurm", "partition=gpu", "gpus=1", "minutes=30", "jobs=3", "sbatch=account=abc", "sbatch=--qos=high")
    for _ in range(2):  # what has failed is submitted again
        code, _, err = ablate(FFN, "seeds=2", *asked)
        assert code == 5 and "4 of 4 runs failed" in err.splitlines()[-1], err
        assert "its job ended in the cluster before the run did" in err.splitlines()[-1], "seen: the last line of losses, as if a reason"
        for log in tmp_path.glob("ffn/jobs/*.log"):
            log.write_text("       4    1%   2.8780\n")
    lines = slurm.read_text().splitlines()
    for option in ("array=0-3%3", "partition=gpu", "gpus-per-node=1", "time=30", "account=abc", "qos=high", "cpus-per-task=1"):
        assert f"#SBATCH --{option}" in lines, option
    assert [read_json(file)["job"] for file in sorted(tmp_path.glob("ffn/jobs/*.submitted.json"))] == ["12_2", "12_3", "12_0", "12_1"]


def test_a_job_of_another_cluster_is_not_waited_for(study: NewStudy, slurm: Path, tmp_path: Path) -> None:
    """Seen: a study waited for ever for a process of `cluster=local` as if it were a job of SLURM, whose sacct knows nothing of it."""
    begun = study(seeds=2)
    job = begun.missing()[0]
    kinds: tuple[cluster.Kind, cluster.Kind] = ("slurm", "local")
    for kind, other in (kinds, kinds[::-1]):
        where = cluster.Cluster(kind, 1, 1, 0, {})
        Submitted(job=str(os.getpid()), cluster=other).write(begun.file(job, "submitted.json"))
        assert where._found(tmp_path, begun, job) is None
    Submitted(job="99", cluster="slurm").write(begun.file(job, "submitted.json"))
    assert cluster.Cluster("slurm", 1, 1, 0, {})._found(tmp_path, begun, job) is not None


def test_a_run_that_diverged_while_nobody_waited_is_an_outcome_and_not_submitted_again(ablate: Ablate, tmp_path: Path) -> None:
    for name in ("swiglu-seed-0", "swiglu-seed-1", "gelu-seed-0", "gelu-seed-1"):
        Submitted(job="1", code=NumericsError.exit_code).write(tmp_path / f"ffn/jobs/{name}.submitted.json")
    code, _, err = ablate(FFN, "seeds=2", "cluster=local")
    assert (code, submissions(tmp_path / "ffn")) == (0, 0), err
    assert {row["diverged"] for row in verdict(tmp_path / "ffn")["variants"].values()} == {2}


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["partition=gpu"], "partition: there is no cluster"),
        (["cluster=slurm", "sbatch=exclusive"], "sbatch=exclusive: this is not of the form name=value"),
        (["cluster=pbs"], "cluster"),
        (["cluster=slurm", "match=time"], "match=time: it would measure this machine"),
    ],
)
def test_what_no_cluster_can_do_is_refused_before_anything_runs(args: list[str], said: str, ablate: Ablate, tmp_path: Path) -> None:
    code, _, err = ablate(FFN, *args)
    assert code == 2 and said in err.splitlines()[-1] and not (tmp_path / "ffn").exists(), err


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="this system does not tell what a process runs")
def test_a_job_whose_id_another_program_has_by_now_is_done() -> None:
    """Seen to fail: after a reboot a study waited for whatever had got its job's id."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", "submitit"]) as job:
        assert not cluster._Local(job.pid).done() and cluster._Local(os.getpid()).done()
        job.kill()
    assert cluster._Local(job.pid).done()


def test_without_submitit_the_remedy_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(ConfigError, match=r"pip install 'slotlm\[cluster\]'"):
        cluster.Cluster("slurm", 1, 1, 0, {})
