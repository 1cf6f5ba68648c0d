import errno
import os
import pty
import struct
import subprocess
import sys
import termios
from fcntl import ioctl
from pathlib import Path

import pytest

from lm.data.sizes import Sizes
from lm.schema import Tree
from lm.training.callbacks.console import Console, clock

ROOT = Path(__file__).parents[3]


def record(step: int, **more: float) -> Tree:
    numbers = {"loss": 3.14159, "lr": 1e-3, "grad_norm": 0.5, "tokens_per_second": 8312.4, "step_s": 0.25, "memory_gib": 1.234}
    return {"step": step, "tokens": step * 2048, **numbers, **more}


def validation(step: int) -> Tree:
    return {"step": step, "tokens": 1, "val_loss": 2.71828, "val_bits_per_byte": 1.5}


def console(max_steps: int = 1000, pace_s: float = 0.25) -> Console:
    times = (pace_s * 10 * i for i in range(10**6))
    return Console(max_steps, clock=lambda: next(times))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (45.4, "45s"), (59.6, "1m00s"), (83, "1m23s"), (3599.4, "59m59s"), (7500, "2h05m"), (273600, "3d04h")],
)
def test_durations_read_at_a_glance(seconds: float, text: str) -> None:
    assert clock(seconds) == text


def test_a_record_of_a_callback_of_ones_own_is_no_row_of_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    """Seen to fail: it took a line with nothing but its step, and a header of its own."""
    out = console()
    for line in (record(10), {"step": 10, "grad_norm/0": 0.5}, record(20)):
        out.log(line)
    assert [row.split()[0] for row in capsys.readouterr().out.splitlines()] == ["step", "10", "20"]


def test_lines_align_under_their_header(capsys: pytest.CaptureFixture[str]) -> None:
    out = console()
    for line in (record(10), record(20, loss=12.5, lr=3.2e-7, grad_norm=123.4), validation(20), record(1000)):
        out.log(line)
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split() == ["step", "loss", "lr", "grad", "norm", "tokens/s", "memory", "ETA"]
    assert rows[0].split() == ["10", "1%", "3.1416", "1.00e-03", "0.500", "8,312", "1.23", "GiB", "4m08s"]
    assert rows[2].split() == ["20", "2%", "2.7183", "validation", "1.5000", "bits/byte"]
    for title, texts in {"loss": ["3.1416", "12.5000", "2.7183", "3.1416"], "step": ["10", "20", "20", "1,000"]}.items():
        ends = [row.index(text) + len(text) for row, text in zip(rows, texts, strict=True)]
        assert set(ends) == {header.index(title) + len(title)}
    assert len({len(row) for row in (header, rows[0], rows[1], rows[3])}) == 1


def test_a_run_with_rewards_shows_them(capsys: pytest.CaptureFixture[str]) -> None:
    """Seen to fail: only metrics.jsonl had them."""
    out = console()
    for line in (record(10, reward=0.25), validation(20) | {"val_reward": 0.5}):
        out.log(line)
    header, row, held_out = capsys.readouterr().out.splitlines()
    assert row.index("0.250") + 5 == header.index("reward") + 6
    assert held_out.endswith("1.5000 bits/byte  0.5000 reward")


def test_the_header_comes_again_and_utilisation_only_where_it_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    out = console()
    for step in range(1, 42):
        out.log(record(step))
    lines = capsys.readouterr().out.splitlines()
    assert [i for i, line in enumerate(lines) if "loss" in line] == [0, 21, 42]
    assert "MFU" not in lines[0]
    out.log(record(50, mfu_pct=41.27))
    header, row = capsys.readouterr().out.splitlines()
    assert row.index("41.3%") + 5 == header.index("MFU") + 3


def test_the_remaining_time_follows_the_pace_since_the_first_line(capsys: pytest.CaptureFixture[str]) -> None:
    out = console(max_steps=1000, pace_s=2.0)
    for step in (10, 20, 30):
        out.log(record(step, step_s=9.0))
    etas = [line.split()[-1] for line in capsys.readouterr().out.splitlines()[1:]]
    assert etas == [clock(990 * 9), clock(980 * 2), clock(970 * 2)]


def test_the_remaining_time_goes_by_what_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    """Of steps of 2 rows up to step 500, and of 8 behind it."""
    times = (20.0 * i for i in range(10))
    out = Console(1000, clock=lambda: next(times), read=Sizes(8, ((500, 2),)).before)
    for step in (10, 20, 510):
        out.log(record(step, step_s=2.0))
    etas = [line.split()[-1] for line in capsys.readouterr().out.splitlines()[1:]]
    assert etas == [clock(980 + 4000), clock(960 + 4000), clock(40 / (980 + 80) * 490 * 8)]


def test_a_number_that_is_not_there_or_not_finite_still_prints(capsys: pytest.CaptureFixture[str]) -> None:
    out = console()
    out.log(record(10, loss=float("nan"), grad_norm=float("inf"), step_s=float("nan")))
    out.log({"step": 10, "event": "spike", "loss": 30.5})
    out.log({"step": 10, "val_loss": 2.0})
    out.log({"step": 20, "loss": 1.0})
    shown = capsys.readouterr().out
    assert "nan" in shown
    assert "spike  loss=30.5" in shown


PRINT = """
import itertools, sys
from tests_record import record, validation
from lm.training.callbacks.console import Console
out = Console(100, clock=itertools.count().__next__)
for step in range(1, 60):
    out.log(record(step))
out.log(validation(60))
out.say("saved")
print("others print too")
print("reached the end", file=sys.stderr)
"""


@pytest.fixture
def script(tmp_path: Path) -> list[str]:
    source = PRINT.replace("from tests_record import record, validation\n", "")
    records = f"record = lambda step: {{**{record(0)!r}, 'step': step}}\nvalidation = lambda step: {{**{validation(0)!r}, 'step': step}}\n"
    return [sys.executable, "-c", records + source]


def run_in_terminal(command: list[str], columns: int) -> tuple[bytes, int]:
    ours, theirs = pty.openpty()
    ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    env = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "NO_COLOR")} | {"TERM": "xterm-256color"}
    process = subprocess.Popen(command, cwd=ROOT, stdout=theirs, env=env)
    os.close(theirs)
    shown = b""
    try:
        while chunk := os.read(ours, 65536):
            shown += chunk
    except OSError as error:
        assert error.errno == errno.EIO  # how Linux says that the other side is closed
    os.close(ours)
    return shown, process.wait()


def test_a_terminal_gets_colour_and_whole_lines_at_any_width(script: list[str]) -> None:
    wide, code = run_in_terminal(script, 120)
    narrow, narrow_code = run_in_terminal(script, 1)
    assert (code, narrow_code) == (0, 0)
    assert b"\x1b[" in wide
    assert narrow == wide  # the terminal wraps by itself; we never break a line
    assert wide.count(b"\r\n") == 59 + 3 + 3


def test_no_escape_codes_off_a_terminal_even_if_colour_is_forced(script: list[str]) -> None:
    forced = {**os.environ, "FORCE_COLOR": "1", "TTY_COMPATIBLE": "1"}
    done = subprocess.run(script, cwd=ROOT, env=forced, capture_output=True, check=True)
    assert b"\x1b" not in done.stdout
    assert done.stdout.count(b"\n") == 59 + 3 + 3


@pytest.mark.parametrize("redirect", [">&-", "| true", ">/dev/full"])
def test_a_stdout_that_takes_nothing_stops_only_the_printing(redirect: str, script: list[str]) -> None:
    command = ["bash", "-c", f'"$@" {redirect}; exit ${{PIPESTATUS[0]}}', "bash", *script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "reached the end\n")
