import csv
import errno
import json
import logging
import math
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import lm.training.callbacks.wandb_
from lm.cli.main import main
from lm.errors import ConfigError
from lm.schema import Tree
from lm.storage.run_folder import Metrics, RunFolder
from lm.training.callbacks.csv_file import Csv
from lm.training.callbacks.loggers import JsonlLoggerConfig, TensorBoardLoggerConfig, WandbLoggerConfig
from lm.training.callbacks.tags import grouped
from lm.training.callbacks.wandb_ import Wandb
from tests.training.conftest import read, settled

ROOT = Path(__file__).parents[3]


def test_only_metrics_need_no_logger(tmp_path: Path) -> None:
    assert JsonlLoggerConfig().build(tmp_path, {}, 0) == []


@pytest.mark.parametrize("package", ["tensorboard", "wandb"])
def test_a_missing_package_names_the_pip_command(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # what Python itself sees of a package that is not installed
    cfg = TensorBoardLoggerConfig() if package == "tensorboard" else WandbLoggerConfig()
    with pytest.raises(ConfigError, match=rf"kind={package} needs the package {package}. Run: pip install 'slotlm\[{package}\]'"):
        cfg.build(tmp_path, {}, 0)


def events(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder / "tensorboard"))
    found.Reload()
    return found


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    found = events(folder)
    return {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def test_tensorboard_files_read_back_and_a_resume_purges_repeated_steps(tmp_path: Path) -> None:
    (logger,) = TensorBoardLoggerConfig().build(tmp_path, {"seed": 1}, 0)
    for step in (1, 2, 3):
        logger.log({"step": step, "loss": step / 2, "unit": "text is left out"})
    logger.close(None)
    (resumed,) = TensorBoardLoggerConfig().build(tmp_path, {"seed": 1}, 2)
    resumed.log({"step": 3, "loss": 9.0})
    assert scalars(tmp_path) == {"train/loss": [(1, 0.5), (2, 1.0), (3, 9.0)]}
    resumed.go_back(1)  # a rollback
    resumed.log({"step": 2, "loss": 8.0})
    resumed.close(None)
    assert scalars(tmp_path) == {"train/loss": [(1, 0.5), (2, 8.0)]}


def test_a_rollback_to_the_weights_before_the_first_step_leaves_their_validation(tmp_path: Path) -> None:
    """As with checkpoint.keep_steps=[0] and init_from. Seen to fail: tensorboard had lost it, and the config."""
    (logger,) = TensorBoardLoggerConfig().build(tmp_path, {}, 0)
    for step in (0, 1):
        logger.log({"step": step, "val_loss": 0.5})
    logger.go_back(0)
    logger.close(None)
    assert scalars(tmp_path) == {"val/loss": [(0, 0.5)]} and events(tmp_path).Tags()["tensors"] == ["config/text_summary"]


def test_a_run_that_was_killed_before_its_first_checkpoint_stands_in_tensorboard_once(tmp_path: Path) -> None:
    """Seen: 420 losses of 300 steps."""
    for loss in (0.5, 0.25):
        (logger,) = TensorBoardLoggerConfig().build(tmp_path, {}, 0)
        for step in (0, 1):  # a fine-tuning validates at step 0
            logger.log({"step": step, "val_loss": loss})
        logger.close(None)
    assert scalars(tmp_path) == {"val/loss": [(0, 0.25), (1, 0.25)]}


def half_of_them(writer: Any, lines: list[Tree]) -> None:
    """As on a disk that is full."""
    writer.writerow(lines[0])
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_table_is_appended_to_and_agrees_with_the_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen to fail: each validation read all lines of metrics.jsonl and wrote them anew, in the training loop."""
    run = RunFolder(tmp_path)
    own, reads = Metrics.each, list[int]()
    monkeypatch.setattr(Metrics, "each", lambda self: (reads.append(1), own(self))[1])
    table = Csv(run)

    def log(*steps: int, **more: float) -> None:
        for step in steps:
            told: list[Tree] = [{"step": step, "loss": 1 / step} | more, *([{"step": step, "val_loss": math.nan}] if step % 2 == 0 else [])]
            for record in (*told, {"step": step, "event": "e", "of": 1}):
                run.metrics.append(record)
                table.log(record)

    def written() -> list[dict[str, str]]:
        return [*csv.DictReader((tmp_path / "metrics.csv").read_text().splitlines())]

    def expected() -> list[dict[str, str]]:
        lines = [line for line in own(run.metrics) if "event" not in line]
        keys = dict.fromkeys(key for line in lines for key in line)
        return [{key: "" if line.get(key) is None else str(line[key]) for key in keys} for line in lines]

    log(*range(1, 101))
    assert written() == expected() and len(written()) == 150 and len(reads) == 2  # for its columns, and for its lines
    log(101, 102, added=0.5)  # a new column
    run.metrics.truncate(51)  # a rollback
    table.go_back(51)
    log(*range(52, 61))
    table.close(None)
    assert written() == expected() and len(written()) == 90
    (tmp_path / "metrics.csv").unlink()
    log(61, 62)
    assert written() == expected()
    assert len(reads) == 8 and not table._new
    with monkeypatch.context() as patch:
        patch.setattr(csv.DictWriter, "writerows", half_of_them)
        log(63, 64)
    log(65, 66)
    assert written() == expected()


def test_tags_are_grouped_so_that_they_fold() -> None:
    record = {"step": 1, "loss": 1.0, "lr": 0.1, "step_s": 2.0, "mfu_pct": 3.0, "tokens": 4, "tokens/web": 5, "epochs/web": 0.5,
              "expert_load/blocks.1": 1.5, "idle_experts": 2, "val_loss": 6.0, "val_loss/web": 7.0,
              "mine": 8.0, "unit": "text"}  # fmt: skip
    assert grouped(record) == {
        "train/loss": 1.0, "train/lr": 0.1, "train/mine": 8.0, "perf/step_s": 2.0, "perf/mfu_pct": 3.0, "data/tokens": 4,
        "data/tokens/web": 5, "data/epochs/web": 0.5, "experts/blocks.1": 1.5, "experts/idle_experts": 2,
        "val/loss": 6.0, "val/loss/web": 7.0,
    }  # fmt: skip


def test_an_event_is_no_figure() -> None:
    """Seen: the loss of a spike twice, and a figure train/from_step."""
    assert grouped({"step": 7, "event": "loss spike", "loss": 9.0, "rows": [1]}) == {}


@pytest.mark.slow
@pytest.mark.usefixtures("wandb_env")
def test_several_loggers_have_metrics_validations_samples_and_config(
    tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of one run. wandb is offline; its file is a log of protocol buffers, in which texts stand as they are."""
    more = ("logger=[wandb,tensorboard,csv]", "logger.each.wandb.project=ours", "trainer.sample_prompts=['def ']")
    assert main(settled("train", *tiny, *more)) == 0, capsys.readouterr().err
    run = tmp_path / "run"
    found, lines = scalars(run), read(run / "metrics.jsonl")
    assert {"train/loss", "train/lr", "val/loss", "val/bits_per_byte", "perf/step_s", "data/tokens"} <= found.keys()
    assert found["val/loss"] == [(line["step"], pytest.approx(line["val_loss"])) for line in lines if "val_loss" in line]
    texts = events(run).Tensors("samples/text_summary")
    assert [event.step for event in texts] == [4, 8, 12] and b"    def " in texts[-1].tensor_proto.string_val[0]
    table = csv.DictReader((run / "metrics.csv").read_text().splitlines())
    assert [float(row["loss"]) for row in table if row["loss"]] == [line["loss"] for line in lines if "loss" in line]
    (log,) = (run / "wandb").glob("offline-run-*/run-*.wandb")
    assert all(text in log.read_bytes() for text in (b"train/loss", b"val/bits_per_byte", b"samples", b"commit", b"global_batch", b"ours"))
    assert len(list((run / "wandb").glob("offline-run-*/files/media/table/samples_*.json"))) == 3


@pytest.mark.parametrize(
    "given, said",
    [
        ("[wandb,wandbb]", "'wandbb' is not an option. Did you mean 'wandb'?"),
        ("[csv,csv]", "csv is named twice"),
        ("[]", "'' is not an option"),
    ],
)
def test_a_list_of_loggers_is_checked(given: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", f"logger={given}"]) == 2 and said in capsys.readouterr().err.splitlines()[-1]


def test_a_missing_package_is_told_before_data_are_read(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert main(settled("train", *tiny, "logger=[csv,wandb]")) == 2
    assert "pip install 'slotlm[wandb]'" in capsys.readouterr().err.splitlines()[-1] and not (tmp_path / "cache").exists()


def test_a_tensorboard_that_cannot_write_warns_once_and_never_raises(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "tensorboard").write_text("in the way")
    with caplog.at_level(logging.WARNING):
        (logger,) = TensorBoardLoggerConfig().build(tmp_path, {}, 0)
        logger.log({"step": 1, "loss": 1.0})
        logger.close(None)
    assert len(caplog.records) == 1


@pytest.fixture
def wandb_env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for key in [key for key in os.environ if key.startswith("WANDB")]:
        monkeypatch.delenv(key)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NETRC", str(tmp_path / "home" / ".netrc"))
    return monkeypatch


@pytest.mark.slow
@pytest.mark.usefixtures("wandb_env")
def test_wandb_without_a_key_leaves_an_offline_run_in_the_run_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):  # a resumed run keeps its id
        (logger,) = WandbLoggerConfig().build(tmp_path / "run", {"seed": 7}, 0)
        for step in range(5):
            logger.log({"step": step, "loss": 1.0, "event_text": "x"})
        logger.close(None)
    run_id = (tmp_path / "run" / "wandb" / "run-id").read_text()
    files = list((tmp_path / "run" / "wandb").glob(f"offline-run-*-{run_id}/run-{run_id}.wandb"))
    assert len(files) == 2
    assert all(b"loss" in file.read_bytes() for file in files)
    assert "stopped" not in caplog.text


def kept(folder: Path) -> list[Any]:
    """The records of a run's offline files, oldest first: in LevelDB's log format, of protocol buffers."""
    from wandb.proto.wandb_internal_pb2 import Record

    found: list[Any] = []
    for file in sorted((folder / "wandb").glob("offline-run-*/*.wandb")):
        data, at, record = file.read_bytes(), 7, b""
        while at + 7 <= len(data):
            if (rest := 2**15 - at % 2**15) < 7:  # of a block, too short for a header
                at += rest
                continue
            n, part = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
            record += data[at + 7 : at + 7 + n]
            at += 7 + n
            if part in (1, 4):  # whole, or its last part
                found.append(Record.FromString(record))
                record = b""
    return found


def rows(records: list[Any]) -> list[Tree]:
    found = [{item.key or item.nested_key[0]: json.loads(item.value_json) for item in one.history.item} for one in records]
    return [{key: value for key, value in row.items() if key[0] != "_"} for row in found if row]


@pytest.mark.slow
def test_a_wandb_run_has_each_figure_by_step_and_says_whether_it_reached_its_end(tmp_path: Path, wandb_env: pytest.MonkeyPatch) -> None:
    """Seen: a kill during the validation of a step whose loss was logged, and its figures never came; a killed run `finished`."""
    wandb_env.setenv("WANDB_MODE", "offline")
    (logger,) = WandbLoggerConfig().build(tmp_path, {"seed": 7}, 0)
    logger.log({"step": 2, "loss": 1.5})
    logger.close(None)
    (logger,) = WandbLoggerConfig().build(tmp_path, {"seed": 7}, 1)
    for record in ({"loss": 1.5}, {"val_loss": 1.25}):
        logger.log({"step": 2, **record})
    logger.go_back(1)
    logger.log({"step": 2, "loss": 1.75})
    logger.close({"parameters": 1234, "val_loss": 1.25})
    records = kept(tmp_path)
    loss = {"step": 2, "train/loss": 1.5}
    assert rows(records) == [loss, loss, {"step": 2, "val/loss": 1.25}, {"step": 2, "train/loss": 1.75}]
    assert [one.metric.step_metric for one in records if one.metric.glob_name == "*"] == ["step", "step"]
    assert [one.exit.exit_code for one in records if one.HasField("exit")] == [1, 0]
    assert ("parameters", "1234") in [(item.key, item.value_json) for one in records for item in one.summary.update]


@pytest.mark.slow
def test_a_run_that_is_killed_in_the_middle_of_a_line_has_the_lines_before_it(tmp_path: Path, wandb_env: pytest.MonkeyPatch) -> None:
    """Seen to fail: wandb's process ended with an error before it had finished the run."""
    wandb_env.setenv("WANDB_MODE", "offline")
    first = {"options": WandbLoggerConfig().tree(), "folder": str(tmp_path), "name": "run", "config": {}, "pid": os.getpid()}
    del first["options"]["kind"]
    sent = "\n".join([json.dumps(first), json.dumps({"step": 1, "numbers": {"train/loss": 1.5}}), '{"step": 2, "numb'])
    call = [sys.executable, "-c", "from lm.training.callbacks.wandb_ import wandb_process; wandb_process()"]
    subprocess.run(call, input=sent, text=True, check=True, capture_output=True)
    assert rows(kept(tmp_path)) == [{"step": 1, "train/loss": 1.5}]
    assert [one.exit.exit_code for one in kept(tmp_path) if one.HasField("exit")] == [1]


@pytest.mark.slow
def test_a_run_that_is_killed_before_wandb_has_begun_has_its_figures(tmp_path: Path, wandb_env: pytest.MonkeyPatch) -> None:
    """Seen to fail: they waited in the run's memory for wandb's first answer, which a server may take half a minute for."""
    wandb_env.setenv("WANDB_MODE", "offline")
    run = """if True:
        import os, pathlib, signal, sys, time
        from lm.training.callbacks.wandb_ import Wandb
        logger = Wandb(pathlib.Path(sys.argv[1]), {}, dict.fromkeys(("project", "run_group")))
        logger.log({"step": 1, "loss": 1.5})
        while not logger._records.empty():
            time.sleep(0.01)
        time.sleep(0.1)
        print(logger._process.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    killed = subprocess.run([sys.executable, "-c", run, str(tmp_path)], stdout=subprocess.PIPE, text=True, check=False)
    assert killed.returncode == -signal.SIGKILL and not rows(kept(tmp_path))
    deadline = time.monotonic() + 60
    while any(pid == killed.stdout.strip() for pid, _, _ in processes()) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert rows(kept(tmp_path)) == [{"step": 1, "train/loss": 1.5}]
    assert [one.exit.exit_code for one in kept(tmp_path) if one.HasField("exit")] == [1]


@pytest.mark.slow
def test_wandb_is_given_what_the_config_says_and_else_what_its_variables_say(tmp_path: Path, wandb_env: pytest.MonkeyPatch) -> None:
    """Seen: WANDB_PROJECT, WANDB_NAME and WANDB_RUN_ID without effect, and so a run that `wandb agent` began resumed as another."""
    for name, value in {
        "MODE": "offline",
        "PROJECT": "p",
        "NAME": "n",
        "RUN_ID": "abc",
        "RUN_GROUP": "g",
        "TAGS": "t",
        "NOTES": "o",
    }.items():
        wandb_env.setenv(f"WANDB_{name}", value)
    stated = WandbLoggerConfig(mode="offline", project="mine", run_group="seeds", tags=["x", "y"], notes="a remark")
    for cfg in (WandbLoggerConfig(), stated):
        (logger,) = cfg.build(tmp_path / "run", {}, 0)
        logger.close(None)
        wandb_env.delenv("WANDB_RUN_ID", raising=False)
        wandb_env.delenv("WANDB_NAME", raising=False)
        wandb_env.setenv("WANDB_MODE", "disabled")
    by_variables, by_config = [one.run for one in kept(tmp_path / "run") if one.HasField("run")]
    told = [(run.project, run.run_group, [*run.tags], run.notes) for run in (by_variables, by_config)]
    assert told == [("p", "g", ["t"], "o"), ("mine", "seeds", ["x", "y"], "a remark")]
    assert [run.display_name for run in (by_variables, by_config)] == ["n", "run"]
    assert by_variables.run_id == by_config.run_id == (tmp_path / "run" / "wandb" / "run-id").read_text() == "abc"


@pytest.mark.slow
def test_wandb_measures_the_process_that_trains(tmp_path: Path, wandb_env: pytest.MonkeyPatch) -> None:
    """Seen: 83 MB, of the logger's own process."""
    wandb_env.setenv("WANDB_MODE", "offline")
    (logger,) = WandbLoggerConfig().build(tmp_path, {}, 0)
    logger.close(None)
    (seen,) = {float(item.value_json) for one in kept(tmp_path) for item in one.stats.item if item.key == "proc.memory.rssMB"}
    (rss,) = re.findall(r"VmRSS:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert seen == pytest.approx(int(rss) / 1024, rel=0.2)


@pytest.mark.slow
def test_a_wandb_that_is_off_says_so(tmp_path: Path, wandb_env: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    wandb_env.setenv("WANDB_MODE", "disabled")
    (logger,) = WandbLoggerConfig().build(tmp_path, {}, 0)
    logger.log({"step": 1, "loss": 1.0})
    logger.samples(1, ["a text"])
    logger.close({"parameters": 1})
    assert [record.getMessage() for record in caplog.records] == ["wandb: off, by WANDB_MODE"] and not kept(tmp_path)


@pytest.mark.slow
def test_what_wandb_does_not_take_is_told_with_its_reason(
    tmp_path: Path, wandb_env: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Seen: code 1, and no word on why. An id that is refused is not kept for the next start."""
    wandb_env.setenv("WANDB_MODE", "offline")
    wandb_env.setenv("WANDB_RUN_ID", "a/b")
    (logger,) = WandbLoggerConfig().build(tmp_path, {}, 0)
    logger.close(None)
    refused, stopped = (record.getMessage() for record in caplog.records)
    assert refused.startswith("wandb: it does not begin: Run ID")
    assert stopped.startswith("wandb stopped: its process ended with code 1.") and not (tmp_path / "wandb" / "run-id").exists()


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


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(None, id="stalls", marks=pytest.mark.slow),
        pytest.param(b"HTTP/1.1 500 Oops\r\nContent-Length: 0\r\nConnection: close\r\n\r\n", id="fails", marks=pytest.mark.slow),
    ],
)
def test_a_bad_wandb_server_never_holds_up_the_run_and_leaves_no_process(
    answer: bytes | None, tmp_path: Path, wandb_env: pytest.MonkeyPatch, stop: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    assert lm.training.callbacks.wandb_.CLOSE_S < 9.5  # ten seconds in all are the limit
    wandb_env.setattr(lm.training.callbacks.wandb_, "CLOSE_S", 1.0)
    asked = threading.Event()
    wandb_env.setenv("WANDB_API_KEY", "a" * 40)
    wandb_env.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{serve(answer, stop, asked)}")
    started = time.monotonic()
    (logger,) = WandbLoggerConfig().build(tmp_path / "run", {}, 0)
    for step in range(5000):
        logger.log({"step": step, "loss": 1.0})
    assert time.monotonic() - started < 0.5
    assert asked.wait(20)
    (child,) = [pid for pid, parent, args in processes() if int(parent) == os.getpid() and "wandb_process" in args]
    assert [args for _, _, args in processes() if f"--pid {child}" in args]
    started = time.monotonic()
    logger.close(None)
    assert time.monotonic() - started < 1.5
    assert caplog.text.count("wandb stopped: not finished within") == 1
    time.sleep(0.5)
    assert not [args for pid, _, args in processes() if pid == child or f"--pid {child}" in args]


@pytest.mark.slow
def test_where_a_wandb_server_refuses_the_run_is_kept_offline(
    tmp_path: Path, wandb_env: pytest.MonkeyPatch, stop: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    """Seen: `run ID ... is in use`, by the start that had failed, and nothing kept."""
    refusal = b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    wandb_env.setenv("WANDB_API_KEY", "a" * 40)
    wandb_env.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{serve(refusal, stop, threading.Event())}")
    (logger,) = WandbLoggerConfig().build(tmp_path, {}, 0)
    logger.log({"step": 1, "loss": 1.5})
    patient_until = time.monotonic() + 60
    while "wandb: offline (" not in caplog.text and "does not begin" not in caplog.text and time.monotonic() < patient_until:
        time.sleep(0.1)
    logger.close({})
    assert "wandb: offline (" in caplog.text and "stopped" not in caplog.text, caplog.text
    assert rows(kept(tmp_path)) == [{"step": 1, "train/loss": 1.5}]


def test_of_a_wandb_whose_process_is_gone_the_run_says_so_at_once_and_keeps_nothing(
    tmp_path: Path, wandb_env: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Seen: every record of the weeks to come in memory, and the warning behind the last step."""
    wandb_env.setattr(sys, "executable", "false")
    logger = Wandb(tmp_path, {}, {})
    deadline = time.monotonic() + 10
    while "its process ended with code 1" not in caplog.text and time.monotonic() < deadline:
        time.sleep(0.01)
        logger.log({"step": 1, "loss": 1.0})
    kept = logger._records.qsize()
    for step in range(100):
        logger.log({"step": step, "loss": 1.0})
        logger.samples(step, ["text"])
    assert logger._records.qsize() == kept
    logger.close({})
    assert caplog.text.count("wandb stopped") == 1


def processes() -> list[list[str]]:
    """[pid, parent, command line] of each."""
    shown = subprocess.run(["ps", "-ewwo", "pid=,ppid=,args="], capture_output=True, text=True, check=True).stdout
    return [line.split(maxsplit=2) for line in shown.splitlines()]


@pytest.mark.slow
def test_a_wandb_that_cannot_start_never_raises(tmp_path: Path, wandb_env: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "run").write_text("in the way of the folder")
    (logger,) = WandbLoggerConfig().build(tmp_path / "run", {}, 0)
    logger.log({"step": 1, "loss": float("nan")})
    logger.close(None)
    assert caplog.text.count("wandb stopped") == 1
    wandb_env.setattr(sys, "executable", "/nonexistent/python")
    (logger,) = WandbLoggerConfig().build(tmp_path / "run", {}, 0)
    logger.log({"step": 1})
    logger.close(None)
    assert caplog.text.count("wandb stopped") == 2
