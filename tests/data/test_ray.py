"""`lm prepare engine=ray`: parts made by a real cluster of this machine, its workers killed on the way."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.verbs.test_data_verbs import contents
from tests.conftest import Lm

pytestmark = [pytest.mark.slow]
ray = pytest.importorskip("ray")


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """Overrides for four files of 6 MB, enough for a worker to be met at work."""
    for name in range(4):
        with (tmp_path / f"{name}.jsonl").open("w") as stream:
            for n in range(30_000):
                stream.write(json.dumps({"text": f"file {name} line {n} " * (n % 17 + 1)}) + "\n")
    return ["data=text", f"data.files={tmp_path}/*.jsonl", "tokenizer=bytes", "data.seq_len=32"]


def workers() -> list[int]:
    """The processes of this machine that make a part."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if b"ray::_part" in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:  # it has just ended
            continue
    return found


def test_a_cluster_whose_workers_are_killed_makes_what_one_machine_makes(lm: Lm, files: list[str], tmp_path: Path) -> None:
    """Seen to fail with a part that is not begun again."""
    call = [sys.executable, "-m", "lm", "prepare", *files, f"data.cache_dir={tmp_path}/ray", "engine=ray", "parts=4"]
    killed = 0
    with subprocess.Popen(call, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        ends = time.monotonic() + 120
        while process.poll() is None and killed < 2 and time.monotonic() < ends:
            if list((tmp_path / "ray").glob("tokens/*.half/train-*.bin")) and (found := workers()):
                os.kill(found[0], signal.SIGKILL)
                killed += 1
                time.sleep(0.5)
            time.sleep(0.02)
        out, err = process.communicate(timeout=240)
    assert killed == 2 and process.returncode == 0, err
    assert err.count(" of 4 is there; ") == 4
    whole = Path(lm("prepare", *files, f"data.cache_dir={tmp_path}/alone")[1].strip())
    joined = Path(out.strip())
    assert joined.name == whole.name and contents(joined) == contents(whole)
    assert (joined / "index.json").read_bytes() == (whole / "index.json").read_bytes()


def test_a_cluster_keeps_at_a_url_what_it_leaves_in_a_folder(lm: Lm, files: list[str], tmp_path: Path) -> None:
    remote = f"data.remote=file://{tmp_path}/kept"
    code, out, err = lm("prepare", *files, f"data.cache_dir={tmp_path}/ray", remote, "engine=ray", "parts=2")
    assert code == 0, err
    folder = Path(out.strip())
    there = tmp_path / "kept" / "tokens"
    assert sorted(path.name for path in there.iterdir()) == [folder.name, *(f"{folder.name}.part-{n}-of-2" for n in (1, 2))]
    assert contents(there / folder.name) == {name: data for name, data in contents(folder).items() if name != "origin.url"}
    assert lm("prepare", *files, f"data.cache_dir={tmp_path}/other", remote, "engine=ray", "parts=2")[0] == 0
    assert not list((tmp_path / "other").rglob("*.part-*"))


@pytest.mark.parametrize(
    ("address", "cpus", "said"),
    [
        (None, 4096, "cpus=4096: no machine of the cluster has so many cores"),
        ("127.0.0.1:9", 1, "RAY_ADDRESS=127.0.0.1:9: no cluster answers"),
    ],
)
def test_a_cluster_that_cannot_do_it_is_named(
    lm: Lm, files: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str | None, cpus: int, said: str
) -> None:
    if address:
        monkeypatch.setenv("RAY_ADDRESS", address)
    code, out, err = lm("prepare", *files, f"data.cache_dir={tmp_path}/ray", "engine=ray", "parts=2", f"cpus={cpus}")
    assert (code, out) == (5, "") and said in err.splitlines()[-1]


def test_what_is_wrong_with_a_part_is_told_as_if_it_were_made_here(lm: Lm, files: list[str], tmp_path: Path) -> None:
    with (tmp_path / "2.jsonl").open("a") as stream:
        stream.write("{broken\n")
    code, out, err = lm("prepare", *files, f"data.cache_dir={tmp_path}/ray", "engine=ray", "parts=2")
    assert (code, out) == (2, "") and f"{tmp_path}/2.jsonl:30001: the line is not JSON" in err.splitlines()[-1]
