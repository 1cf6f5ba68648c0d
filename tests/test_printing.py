"""What a stranger's name can do to a terminal, and what a stream that takes nothing can do to a command: nothing."""

import errno
import io
import os
import pty
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lm import printing
from lm.errors import ConfigError
from lm.printing import one_line, plain
from lm.progress import _due, progress, quiet
from lm.schema import Config, from_tree
from lm.units import fitted
from tests.conftest import Lm

STEERS = [
    "\x00",
    "\x07",
    "\x08",
    "\r",
    "\x1b[2J",
    "\x1b]0;title\x07",
    "\x7f",
    "\x85",
    "\x9b31m",
    "\u2028",
    "\u202e",
    "\u2066",
    "\ufeff",
    "\udcff",
]


class Full(io.RawIOBase):
    """As /dev/full, or with EPIPE a pipe that nobody reads."""

    def __init__(self, number: int) -> None:
        self.number = number

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        if self.number:
            raise OSError(self.number, os.strerror(self.number))
        return len(data)


def stream(encoding: str, raw: io.RawIOBase | None = None) -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO() if raw is None else io.BufferedWriter(raw), encoding=encoding)


def written(into: io.TextIOWrapper) -> bytes:
    into.flush()
    return into.buffer.getvalue()  # type: ignore[attr-defined,no-any-return]


@pytest.mark.parametrize("text", STEERS)
def test_nothing_that_steers_a_terminal_gets_through(text: str) -> None:
    shown = one_line(f"a{text}b")
    assert shown.isprintable() and shown.startswith("a\\") and shown.endswith("b")
    assert plain(f"a{text}b") == shown


def test_text_of_all_scripts_stays_as_it_is() -> None:
    text = "def main(): ñ 中文 العربية हिन्दी 👩‍👩‍👧 ⟨│·⏎ \u00a0ﬁn"
    assert one_line(text) == plain(text) == text
    assert plain("a\n\tb") == "a\n\tb" and one_line("a\n\tb") == "a\\n\\tb"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_what_a_stream_cannot_show_is_escaped(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    out = stream(encoding)
    monkeypatch.setattr(sys, "stdout", out)
    for tell in (printing.say, printing.answer):
        tell("müll 中")
    shown = {"ascii": b"m\\xfcll \\u4e2d", "latin-1": b"m\xfcll \\u4e2d", "utf-8": "müll 中".encode()}[encoding]
    assert written(out) == (shown + b"\n") * 2


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_generated_text_is_raw_in_a_pipe_and_escaped_on_a_terminal(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text, out = "中\x1b[2J\n", stream(encoding)
    monkeypatch.setattr(sys, "stdout", out)
    printing.raw(text)
    assert written(out) == text.encode()
    monkeypatch.setattr(printing, "on_terminal", lambda stream: True)
    printing.raw(text)
    assert written(out).removeprefix(text.encode()).decode(encoding) == plain(text).encode(encoding, "backslashreplace").decode(encoding)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EPIPE, errno.EIO])
def test_a_stream_that_takes_nothing_ends_no_run_but_the_answer(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    full = {name: Full(number) for name in ("stdout", "stderr")}
    for name, raw in full.items():
        monkeypatch.setattr(sys, name, stream("utf-8", raw))
    printing.say("a line")
    printing.note("a note")
    printing.status("how far")
    for tell in (printing.answer, printing.raw):
        with pytest.raises(OSError, match=os.strerror(number)):
            tell("what the command is for")
    for raw in full.values():
        raw.number = 0  # for what is still held when they are closed: from Python 3.13 on that is a warning


def test_a_pipe_whose_reader_was_slow_gets_what_comes_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a log on a disk that was full for a while: such a run told nothing any more, not even why it ended. Lines in between are lost, and
    the last of these may be torn."""
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    with open(reads, "rb") as reader, open(writes, "w", encoding="utf-8") as out:
        monkeypatch.setattr(sys, "stdout", out)
        for _ in range(100):
            printing.say("x" * 10_000)  # more than a pipe holds
        os.set_blocking(reads, False)
        for answering in (printing.answer, printing.raw):  # Seen to fail: nothing came, and the command was said to be well
            with pytest.raises(BlockingIOError):
                answering("y" * 100_000)
            printing.say("lost")
        assert len(reader.read()) < 1_000_000
        print("another's", file=out)
        printing.say("much later")
        printing.shut_door()
        assert reader.read().endswith(b"much later\n")


def test_a_value_forges_no_last_line() -> None:
    class Cfg(Config):
        name: int

    with pytest.raises(ConfigError) as caught:
        from_tree(Cfg, {"name": 1, "b\nfake: error\x1b[2J": 2}, "a\nfile")
    assert len(str(caught.value).splitlines()) == 1 and "\x1b" not in printing.plain(str(caught.value))
    assert "b\\nfake: error" in caught.value.sentence


@pytest.mark.parametrize(
    "args",
    [
        ["expl\nfake: done"],
        ["train", "optim.l\nfake: done=1"],
        ["generate", "from=a\nfake: done", "prompt=x"],
        ["show", "model=a\x1b[2J"],
        ["data", "\x9b"],
    ],
    ids=["verb", "key", "folder", "option", "word"],
)
def test_the_last_line_is_one_whatever_was_typed(lm: Lm, args: list[str]) -> None:
    code, out, err = lm(*args)
    assert code in (2, 3) and not out
    last = err.removesuffix("\n").split("\n")[-1]
    assert last.isprintable() and not last.startswith("fake")


@pytest.mark.parametrize("verb", [["--help"], ["--version"]])
@pytest.mark.parametrize("redirect", [">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-", "2>/dev/full", "| true"])
def test_a_closed_or_full_descriptor_changes_no_exit_code(verb: list[str], redirect: str) -> None:
    command = f'"$@" {redirect}; exit ${{PIPESTATUS[0]}}'
    assert subprocess.run(["bash", "-c", command, "bash", sys.executable, "-m", "lm", *verb], capture_output=True).returncode == 0


def test_an_error_keeps_its_code_where_nobody_reads_it() -> None:
    command = [sys.executable, "-m", "lm", "nothing"]
    for redirect in ("2>&-", "2>/dev/full", ">&- 2>&-"):
        assert subprocess.run(["bash", "-c", f'"$@" {redirect}', "bash", *command]).returncode == 2


def test_no_file_takes_the_place_of_a_closed_stream(tmp_path: Path) -> None:
    """Seen to fail without `open_door`: a checkpoint would have got what is printed."""
    program = (
        "import sys; from lm import printing; printing.open_door(); file = open(sys.argv[1], 'w'); assert file.fileno() > 2;"
        "printing.say('told'); printing.note('told'); sys.stdout.write('told'); print('told', file=sys.stderr)"
    )
    done = subprocess.run(["bash", "-c", '"$@" <&- >&- 2>&-', "bash", sys.executable, "-c", program, str(tmp_path / "file")])
    assert done.returncode == 0 and (tmp_path / "file").read_text() == ""


def test_a_silent_wait_is_told_until_it_ends(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("lm.progress._SILENT_S", 0.02)
    with progress("Waiting"):
        wait_for(lambda: "Waiting: 0 s\n" in capsys.readouterr().err)
        with quiet():
            capsys.readouterr()
            time.sleep(0.1)
            assert capsys.readouterr().err == ""
        with progress("Inside", 2_000_000) as done:
            done(1_000_000)
            wait_for(lambda: "Inside: 1 of 2 MB" in capsys.readouterr().err)
    capsys.readouterr()
    time.sleep(0.1)
    assert capsys.readouterr().err == ""


def test_where_lines_stay_few_are_told_of_a_long_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen to fail with a line every two seconds."""
    monkeypatch.setattr("lm.progress._SILENT_S", 2.0)
    assert [_due(elapsed) for elapsed in (0.0, 10.1, 30.1, 60.0, 61.0, 125.0)] == [10, 30, 60, 120, 120, 180]


def wait_for(seen: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not seen():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_on_a_terminal_a_line_of_progress_makes_way_for_the_next() -> None:
    ours, theirs = pty.openpty()
    program = "from lm import printing as p; p.status('10 %'); p.status('20 %' * 99); p.note('done')"
    subprocess.run([sys.executable, "-c", program], stderr=theirs, check=True)
    os.close(theirs)
    shown = os.read(ours, 4096).decode()
    os.close(ours)
    first, second, last = shown.split("\r\x1b[K")
    assert first == "10 %" and len(second) == 79 and last == "done\r\n"


def test_a_table_that_a_terminal_is_too_narrow_for_is_a_list_of_each_row() -> None:
    rows = [("variant", "loss", "verdict"), ("a", "1.0", "baseline"), ("bcd", "2.0", "cannot tell")]
    lines = fitted(rows, None).split("\n")
    assert fitted(rows, len(lines[-1])).split("\n") == lines and len(lines) == 3
    narrow = "a\n  loss     1.0\n  verdict  baseline\nbcd\n  loss     2.0\n  verdict  cannot tell"
    assert fitted(rows, len(lines[-1]) - 1) == narrow
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 57))
    program = "from lm import printing as p; p.say(str(p.width()))"
    subprocess.run([sys.executable, "-c", program], stdout=theirs, check=True)
    assert os.read(ours, 99) == b"57\r\n" and printing.width() is None
    for end in (ours, theirs):
        os.close(end)


@pytest.mark.parametrize(
    ("env", "shown"),
    [
        ({"TERM": "xterm", "NO_COLOR": ""}, "\x1b[32mgood\x1b[0m\r\n10 %\r\x1b[Kdone\r\n"),
        ({"TERM": "xterm", "NO_COLOR": "1"}, "good\r\n10 %\r\x1b[Kdone\r\n"),
        ({"TERM": "dumb", "NO_COLOR": ""}, "good\r\n10 %\r\ndone\r\n"),
    ],
)
def test_styles_and_lines_that_make_way_are_for_terminals_that_know_them(env: dict[str, str], shown: str) -> None:
    ours, theirs = pty.openpty()
    program = "from lm import printing as p; p.say('good', 'green'); p.status('10 %'); p.note('done')"
    subprocess.run([sys.executable, "-c", program], stdout=theirs, stderr=theirs, check=True, env=os.environ | env)
    os.close(theirs)
    assert os.read(ours, 4096).decode() == shown
    os.close(ours)


def test_a_home_that_cannot_be_written_is_no_matter_of_matplotlibs() -> None:
    """Seen to fail: two lines before each training on where its cache is."""
    program = "from lm.printing import open_door; open_door(); import matplotlib"
    environment = {name: value for name, value in os.environ.items() if name not in ("MPLCONFIGDIR", "XDG_CONFIG_HOME", "XDG_CACHE_HOME")}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment | {"HOME": "/dev/null"}, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
