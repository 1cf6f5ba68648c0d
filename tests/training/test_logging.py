import errno
import logging
import os
import pty
import socket
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from fcntl import ioctl
from pathlib import Path

import pytest

import lm.training.logging
from lm.config import Tree
from lm.errors import ConfigError
from lm.training.config import JsonlLoggerConfig, TensorBoardLoggerConfig, WandbLoggerConfig
from lm.training.logging import Console, build_loggers, duration

ROOT = Path(__file__).parents[2]


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
    assert duration(seconds) == text


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
    assert etas == [duration(990 * 9), duration(980 * 2), duration(970 * 2)]


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
import sys
from tests_record import record, validation
from lm.training.logging import Console
out = Console(100)
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


def test_only_metrics_need_no_logger(tmp_path: Path) -> None:
    assert build_loggers(JsonlLoggerConfig(), tmp_path, {}) == []


@pytest.mark.parametrize("package", ["tensorboard", "wandb"])
def test_a_missing_package_names_the_pip_command(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # what Python itself sees of a package that is not installed
    cfg = TensorBoardLoggerConfig() if package == "tensorboard" else WandbLoggerConfig()
    with pytest.raises(ConfigError, match=f"kind={package} .* not installed. Run: pip install {package}"):
        build_loggers(cfg, tmp_path, {})


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_files_read_back_and_a_resume_purges_repeated_steps(tmp_path: Path) -> None:
    (logger,) = build_loggers(TensorBoardLoggerConfig(), tmp_path, {"seed": 1})
    for step in (1, 2, 3):
        logger.log({"step": step, "loss": step / 2, "event": "text is left out"})
    logger.close()
    (resumed,) = build_loggers(TensorBoardLoggerConfig(), tmp_path, {"seed": 1}, step=2)
    resumed.log({"step": 3, "loss": 9.0})
    resumed.close()
    assert scalars(tmp_path) == {"loss": [(1, 0.5), (2, 1.0), (3, 9.0)]}


def test_a_tensorboard_that_cannot_write_warns_once_and_never_raises(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "tensorboard").write_text("in the way")
    with caplog.at_level(logging.WARNING):
        (logger,) = build_loggers(TensorBoardLoggerConfig(), tmp_path, {})
        logger.log({"step": 1, "loss": 1.0})
        logger.close()
    assert len(caplog.records) == 1


@pytest.fixture
def wandb_env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for key in [key for key in os.environ if key.startswith("WANDB")]:
        monkeypatch.delenv(key)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NETRC", str(tmp_path / "home" / ".netrc"))
    return monkeypatch


@pytest.mark.usefixtures("wandb_env")
def test_wandb_without_a_key_leaves_an_offline_run_in_the_run_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):  # a resumed run keeps its id
        (logger,) = build_loggers(WandbLoggerConfig(), tmp_path / "run", {"seed": 7})
        for step in range(5):
            logger.log({"step": step, "loss": 1.0, "event_text": "x"})
        logger.close()
    run_id = (tmp_path / "run" / "wandb" / "run-id").read_text()
    files = list((tmp_path / "run" / "wandb").glob(f"offline-run-*-{run_id}/run-{run_id}.wandb"))
    assert len(files) == 2
    assert all(b"loss" in file.read_bytes() for file in files)
    assert "stopped" not in caplog.text


def serve(answer: bytes | None, stop: threading.Event, asked: threading.Event) -> int:
    """A loopback server that takes every connection, sets `asked`, and gives `answer` or nothing."""
    server = socket.create_server(("127.0.0.1", 0))
    server.settimeout(0.2)

    def loop() -> None:
        kept = []
        while not stop.is_set():
            try:
                kept.append(server.accept()[0])
                asked.set()
            except TimeoutError:
                continue
            if answer is not None:
                kept[-1].recv(65536)
                kept[-1].sendall(answer)
                kept.pop().close()
        server.close()

    threading.Thread(target=loop, daemon=True).start()
    return int(server.getsockname()[1])


@pytest.fixture
def stop() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


@pytest.mark.parametrize("answer", [None, b"HTTP/1.1 500 Oops\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"], ids=["stalls", "fails"])
def test_a_bad_wandb_server_never_holds_up_the_run_and_leaves_no_process(
    answer: bytes | None, tmp_path: Path, wandb_env: pytest.MonkeyPatch, stop: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    assert lm.training.logging.CLOSE_S < 9.5  # ten seconds in all are the limit
    wandb_env.setattr(lm.training.logging, "CLOSE_S", 1.0)
    asked = threading.Event()
    wandb_env.setenv("WANDB_API_KEY", "a" * 40)
    wandb_env.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{serve(answer, stop, asked)}")
    started = time.monotonic()
    (logger,) = build_loggers(WandbLoggerConfig(), tmp_path / "run", {})
    for step in range(5000):
        logger.log({"step": step, "loss": 1.0})
    assert time.monotonic() - started < 0.5
    assert asked.wait(20)
    (child,) = [pid for pid, parent, args in processes() if int(parent) == os.getpid() and "wandb_process" in args]
    assert [args for _, _, args in processes() if f"--pid {child}" in args]
    started = time.monotonic()
    logger.close()
    assert time.monotonic() - started < 1.5
    assert caplog.text.count("wandb stopped: not finished within") == 1
    time.sleep(0.5)
    assert not [args for pid, _, args in processes() if pid == child or f"--pid {child}" in args]


def processes() -> list[list[str]]:
    """[pid, parent, command line] of each."""
    shown = subprocess.run(["ps", "-ewwo", "pid=,ppid=,args="], capture_output=True, text=True, check=True).stdout
    return [line.split(maxsplit=2) for line in shown.splitlines()]


def test_a_wandb_that_cannot_start_never_raises(tmp_path: Path, wandb_env: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "run").write_text("in the way of the folder")
    (logger,) = build_loggers(WandbLoggerConfig(), tmp_path / "run", {})
    logger.log({"step": 1, "loss": float("nan")})
    logger.close()
    assert caplog.text.count("wandb stopped") == 1
    wandb_env.setattr(sys, "executable", "/nonexistent/python")
    (logger,) = build_loggers(WandbLoggerConfig(), tmp_path / "run", {})
    logger.log({"step": 1})
    logger.close()
    assert caplog.text.count("wandb stopped") == 2
