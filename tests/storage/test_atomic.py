import errno
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from lm.errors import CheckpointError, ResourceError
from lm.storage import atomic, manifest
from lm.storage.atomic import atomic_folder, clean, discard, disk_errors, require_space
from lm.storage.lock import RunLock, locked
from lm.storage.manifest import MANIFEST, verify
from tests.conftest import on_linux, unprivileged

ROOT = Path(__file__).parents[2]


def write(path: Path, text: str) -> None:
    with atomic_folder(path) as folder:
        (folder / "sub").mkdir()
        (folder / "a.txt").write_text(text)
        (folder / "sub" / "b.txt").write_text(text)


def test_a_written_folder_verifies_and_lists_every_file(tmp_path: Path) -> None:
    write(tmp_path / "deep" / "x", "one")
    verify(tmp_path / "deep" / "x")
    assert set(json.loads((tmp_path / "deep" / "x" / MANIFEST).read_text())) == {"a.txt", "sub/b.txt"}
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["x"]


def test_all_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is hashed, then the manifest and the names in each folder, then the folder's own name."""
    real, seen = os.fsync, list[int | str]()

    def synced(descriptor: int) -> None:
        real(descriptor)
        seen.append(os.fstat(descriptor).st_ino)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(atomic, "failpoint", seen.append)
    write(path := tmp_path / "x", "one")
    parts = [[path / "a.txt", path / "sub" / "b.txt"], [path / MANIFEST, path / "sub", path], [tmp_path]]
    files, names, own = ({each.stat().st_ino for each in part} for part in parts)
    points = [seen.index(point) for point in ("manifest", "rename", "renamed")]
    assert [{*seen[start + 1 : end]} for start, end in pairwise([0, *points])] == [files, names, own]


def test_what_is_damaged_is_told_without_waiting_for_the_other_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does Ctrl-C wait. Seen to fail: it ended lm generate when all of a model had been hashed, after 35 s of 6 GB."""
    write(tmp_path / "x", "one")
    (tmp_path / "x" / "a.txt").write_text("two")
    own, done = manifest.sha256_of, threading.Event()
    monkeypatch.setattr(manifest, "sha256_of", lambda path: own(path) if path.name == "a.txt" else str(done.wait(60)))
    began = time.monotonic()
    with pytest.raises(CheckpointError, match=r"a\.txt: the file is damaged"):
        verify(tmp_path / "x")
    done.set()
    assert time.monotonic() - began < 30


@pytest.mark.skipif((3, 12) <= sys.version_info < (3, 12, 2), reason="no thread begins there while a program ends (gh-113964)")
def test_a_thread_may_save_while_the_program_ends(tmp_path: Path) -> None:
    """As a checkpoint in the background. Seen to fail: no thread of a ThreadPoolExecutor begins then."""
    program = (
        "import sys, threading\nfrom pathlib import Path\nfrom lm.storage.atomic import atomic_folder\n"
        "def save():\n    with atomic_folder(Path(sys.argv[1])) as folder:\n"
        "        threading.main_thread().join()\n        (folder / 'a').write_text('one')\n"
        "threading.Thread(target=save).start()"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "x")], cwd=ROOT, check=True)
    verify(tmp_path / "x")


def test_whoever_may_read_a_new_file_may_read_the_weights(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        with atomic_folder(tmp_path / "x") as folder:
            save_file({"a": torch.zeros(2)}, folder / "a.safetensors")
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "x").iterdir()} == {0o640}


def test_an_error_inside_keeps_the_old_folder_and_no_temporary(tmp_path: Path) -> None:
    write(tmp_path / "x", "one")
    with pytest.raises(KeyError), atomic_folder(tmp_path / "x") as folder:
        (folder / "a.txt").write_text("two")
        raise KeyError("a bug")
    verify(tmp_path / "x")
    assert (tmp_path / "x" / "a.txt").read_text() == "one"
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


@pytest.mark.parametrize(
    "name",
    [".DS_Store", "._a.txt", ".nfs000000000123abcd00000001", ".fuse_hidden0000001a00000002", "Thumbs.db", "desktop.ini", "sub/.DS_Store"],
)
def test_a_file_that_a_system_leaves_in_folders_is_no_damage(name: str, tmp_path: Path) -> None:
    """Seen to fail: a checkpoint that had been looked at on a Mac was not used."""
    write(tmp_path / "x", "one")
    (tmp_path / "x" / name).parent.mkdir(exist_ok=True)
    (tmp_path / "x" / name).write_text("of the system's")
    verify(tmp_path / "x")
    (tmp_path / "x" / "mine.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"lm did not write it"):
        verify(tmp_path / "x")


def test_a_second_write_replaces_the_first(tmp_path: Path) -> None:
    write(tmp_path / "x", "one")
    write(tmp_path / "x", "two")
    verify(tmp_path / "x")
    assert (tmp_path / "x" / "a.txt").read_text() == "two"
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def killed_at(point: str, path: Path, text: str) -> None:
    """Another process writes and is killed there."""
    pid = os.fork()
    if pid == 0:
        os.environ["LM_FAILPOINT"] = f"{point}:kill"
        write(path, text)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL


@pytest.mark.parametrize(("point", "text"), [("made", "one"), ("manifest", "one"), ("rename", "one"), ("renamed", "two")])
def test_a_kill_leaves_the_old_folder_or_the_new_one_and_the_next_writer_removes_the_rest(point: str, text: str, tmp_path: Path) -> None:
    """Seen to fail with two renames in the place of a swap (`renamed`), and without the look for what was left."""
    write(tmp_path / "x", "one")
    killed_at(point, tmp_path / "x", "two")
    verify(tmp_path / "x")
    assert (tmp_path / "x" / "a.txt").read_text() == text
    assert len(list(tmp_path.iterdir())) == 2
    write(tmp_path / "x", "three")
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_a_writer_leaves_the_files_of_another_at_work_alone(tmp_path: Path) -> None:
    with atomic_folder(tmp_path / "x") as slow:
        (slow / "a.txt").write_text("slow")
        write(tmp_path / "x", "fast")
        assert (slow / "a.txt").read_text() == "slow"
    verify(tmp_path / "x")
    assert (tmp_path / "x" / "a.txt").read_text() == "slow"


def test_where_names_cannot_be_swapped_a_kill_between_two_renames_is_undone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atomic, "_exchange", lambda one, other: False)  # as on NFS
    write(tmp_path / "x", "zero")
    write(tmp_path / "x", "one")
    killed_at("replaced", tmp_path / "x", "two")
    assert not (tmp_path / "x").exists()
    clean(tmp_path)
    verify(tmp_path / "x")
    assert (tmp_path / "x" / "a.txt").read_text() == "one"
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


@pytest.mark.parametrize("point", ["made", "manifest", "rename"])
def test_a_full_disk_keeps_the_old_folder_and_names_both_numbers(point: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "x", "one")
    monkeypatch.setenv("LM_FAILPOINT", f"{point}:enospc")
    message = r"x: no space left: 1,234 bytes are needed and [\d,]+ are free"
    with pytest.raises(ResourceError, match=message), atomic_folder(tmp_path / "x", 1234):
        pass
    verify(tmp_path / "x")
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


@contextmanager
def small_files() -> Iterator[None]:
    """Not a fixture: pytest itself writes between the parts of a test, perhaps to a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_write_that_the_system_cuts_short_is_a_resource_error(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match="a file is larger than one may be here"), small_files():
        write(tmp_path / "x", "y" * 2000)
    assert list(tmp_path.iterdir()) == []


@on_linux
def test_dev_full_is_a_resource_error() -> None:
    with pytest.raises(ResourceError, match="/dev/full: no space left"), disk_errors(Path("/dev/full")):
        Path("/dev/full").write_text("x")


def test_what_cannot_fit_is_refused_before_writing(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match=f"{10**18:,} bytes are needed"):
        require_space(tmp_path / "not" / "yet", 10**18)
    with pytest.raises(ResourceError, match="are free"), atomic_folder(tmp_path / "x", 10**18):
        pytest.fail("must not begin")
    assert list(tmp_path.iterdir()) == []


@on_linux
def test_a_place_that_cannot_be_written_is_a_resource_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(ResourceError, match=r"file/x: cannot be written \((Not a directory|File exists)\)"):
        write(tmp_path / "file" / "x", "one")
    with pytest.raises(ResourceError, match=os.strerror(errno.ENOENT)):
        write(Path("/proc/x"), "one")
    with pytest.raises(ResourceError, match="cannot be written"), RunLock(tmp_path / "file"):
        pytest.fail("must not begin")


@pytest.mark.parametrize("said", ["File too large (os error 27)", 'IoError(Os { code: 27, kind: FileTooLarge, message: "..." })'])
def test_what_safetensors_says_of_a_file_that_may_not_be_larger_is_understood(said: str, tmp_path: Path) -> None:
    """In its words of today and in those before 0.6."""
    with pytest.raises(ResourceError, match="a file of 9 bytes is larger than one may be"), disk_errors(tmp_path / "x", 9):
        raise SafetensorError(f"Error while serializing: {said}")


@pytest.mark.parametrize("name", ["a.txt", "sub/b.txt", MANIFEST])
@pytest.mark.parametrize("damage", ["byte", "empty", "bit", "missing"])
def test_any_damage_to_any_file_is_rejected_and_named(name: str, damage: str, tmp_path: Path) -> None:
    """Seen to fail with the comparison of hashes off, and with the look for missing files off."""
    write(tmp_path / "x", "one")
    path = tmp_path / "x" / name
    data = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        flipped = bytes([data[0] ^ 4]) + data[1:]
        path.write_bytes({"byte": data[:-1], "empty": b"", "bit": flipped}[damage])
    with pytest.raises(CheckpointError, match=rf"x/{name}: the file is (missing|damaged)"):
        verify(tmp_path / "x")


@pytest.mark.parametrize("what", ["a file", "a hidden file", "a link", "an entry less", "a file elsewhere", "no hash", "no list"])
def test_a_manifest_lists_exactly_what_the_folder_holds(what: str, tmp_path: Path) -> None:
    """Seen to fail: a manifest without the weights was accepted, and flipped ones were loaded."""
    write(tmp_path / "x", "one")
    manifest = tmp_path / "x" / MANIFEST
    listed = json.loads(manifest.read_text())
    match what:
        case "a file":
            (tmp_path / "x" / "sub" / "c.txt").write_text("mine")
        case "a hidden file":
            (tmp_path / "x" / ".c").write_text("mine")
        case "a link":
            (tmp_path / "x" / "c.txt").symlink_to("nowhere")
        case "an entry less":
            manifest.write_text(json.dumps({"a.txt": listed["a.txt"]}))
            (tmp_path / "x" / "sub" / "b.txt").write_text("flipped")
        case "a file elsewhere":
            manifest.write_text(json.dumps(listed | {"../y": listed["a.txt"]}))
            (tmp_path / "y").write_text("one")
        case "no hash":
            manifest.write_text(json.dumps(listed | {"a.txt": 1}))
        case "no list":
            manifest.write_text(json.dumps(list(listed)))
    with pytest.raises(CheckpointError, match=r"manifest\.json (does not list the file|.*damaged)|manifest\.json: the file is damaged"):
        verify(tmp_path / "x")


@pytest.mark.slow
def test_flipped_bits_all_over_the_manifest_are_rejected(tmp_path: Path) -> None:
    write(tmp_path / "x", "one")
    path = tmp_path / "x" / MANIFEST
    data = path.read_bytes()
    for bit in range(0, 8 * len(data), 5):
        path.write_bytes(data[: bit // 8] + bytes([data[bit // 8] ^ (1 << bit % 8)]) + data[bit // 8 + 1 :])
        with pytest.raises(CheckpointError):
            verify(tmp_path / "x")


HOLDER = """
import os, sys, time
from pathlib import Path
from lm.storage.lock import RunLock
with RunLock(Path(sys.argv[1])):
    child = os.fork() if sys.argv[2] == "fork" else 1
    if child:
        print(child, flush=True)
    time.sleep(60)
"""


def hold(folder: Path, how: str) -> tuple[subprocess.Popen[str], int]:
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(folder), how], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    return holder, int(holder.stdout.readline())


def test_a_second_process_is_refused_with_pid_and_host_and_a_stale_lock_is_recovered(tmp_path: Path) -> None:
    """Seen to fail without the flock."""
    holder, _ = hold(tmp_path, "alone")
    try:
        with pytest.raises(ResourceError, match=rf"in use by pid {holder.pid} on host {socket.gethostname()}"), RunLock(tmp_path):
            pytest.fail("two holders")
    finally:
        holder.kill()
        holder.wait()
    assert (tmp_path / "run.lock").read_text()
    with RunLock(tmp_path), pytest.raises(ResourceError, match=f"pid {os.getpid()}"), RunLock(tmp_path):
        pytest.fail("two holders")
    with RunLock(tmp_path):
        pass


@pytest.mark.parametrize("fault", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP])
def test_without_locks_a_run_goes_on_warned_and_shared_work_is_refused(
    fault: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on Lustre mounted without flock. Seen to refuse the run as not writable, and to tell the cache's as an internal error."""

    def flock(file: object, how: int) -> None:
        raise OSError(fault, os.strerror(fault))

    monkeypatch.setattr("fcntl.flock", flock)
    with RunLock(tmp_path):
        assert f"{tmp_path}: the file system has no locks ({os.strerror(fault)})" in caplog.text
    with pytest.raises(ResourceError, match=rf"^{tmp_path}: its file system has no locks"), locked(tmp_path / "x.lock", lambda: None):
        pytest.fail("not alone")


def test_a_forked_worker_does_not_keep_the_lock_of_a_killed_run(tmp_path: Path) -> None:
    holder, child = hold(tmp_path, "fork")
    time.sleep(0.1)
    holder.kill()
    holder.wait()
    try:
        os.kill(child, 0)
        with RunLock(tmp_path):
            pass
    finally:
        os.kill(child, signal.SIGKILL)


def test_what_belongs_to_somebody_else_and_stays_is_told(public: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Two users resume each other's run, one with a umask of 022. Seen to fail: gigabytes stayed without a word."""
    public.chmod(0o777)
    (public / "step").mkdir()
    (public / "step" / "weights").touch()
    (public / "step").chmod(0o555)
    with unprivileged():
        discard(public / "step")
    (left,) = public.iterdir()
    assert caplog.messages == [f"{left}: nothing needs this folder any more, but it cannot be removed. Remove it, or let its owner."]
    left.chmod(0o755)
    clean(public)
    assert not list(public.iterdir()) and len(caplog.messages) == 1


def test_a_run_behind_a_link_to_nothing_is_told(tmp_path: Path) -> None:
    (tmp_path / "runs").symlink_to(tmp_path / "gone")
    with pytest.raises(ResourceError, match=r"runs: it is a link to .*gone, which is not there\. Make that folder, or remove the link\."):
        RunLock(tmp_path / "runs" / "a").__enter__()
