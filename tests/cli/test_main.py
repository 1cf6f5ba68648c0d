"""The outermost layer: help in any position, speed, pipes, signals, unexpected errors."""

import errno
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest
import yaml

from lm.cli import main as main_module
from lm.cli.compose.compose import compose
from lm.cli.main import VERBS, main
from lm.cli.verb import find
from lm.cli.views.further import next_commands
from lm.data.tokenizer.config import Pattern
from lm.storage.run_folder import RunFolder
from tests.conftest import Lm

Process = Callable[..., subprocess.CompletedProcess[str]]


def test_top_level_help_names_every_verb_and_imports_nothing_heavy(tmp_path: Path) -> None:
    program = (
        "import sys; from lm.cli.main import main; assert main(['--help']) == 0;"
        "heavy = {'torch', 'pydantic', 'hydra', 'omegaconf', 'yaml', 'numpy', 'rich'} & set(sys.modules); assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert all(f"  {verb} " in done.stdout for verb in VERBS)


def test_top_level_help_answers_in_under_three_tenths_of_a_second(lm_process: Process) -> None:
    def seconds() -> float:
        started = time.perf_counter()
        assert lm_process("--help").returncode == 0
        return time.perf_counter() - started

    assert min(seconds() for _ in range(5)) < 0.3


@pytest.mark.parametrize("args", [["train", "--help"], ["--help", "train"], ["train", "model/ffn=geglu", "-h", "seed=1"]])
def test_train_help_lists_groups_recipes_and_described_options_from_any_position(lm: Lm, args: list[str]) -> None:
    code, out, _ = lm(*args)
    assert code == 0
    for part in ["recipes=pretrain/gpt2_124m", "model/ffn", "swiglu", "optim.lr", "Peak learning rate", "trainer.max_steps", "int > 0"]:
        assert part in out


def test_train_help_works_where_a_value_is_still_missing(lm: Lm) -> None:
    code, out, _ = lm("train", "data=text", "--help")
    assert code == 0
    assert "data.files" in out


@pytest.mark.parametrize(
    ("words", "flags"), [(["help"], ["--help"]), (["help", "merge"], ["merge", "--help"]), (["version"], ["--version"])]
)
def test_help_and_version_are_understood_as_words_too(lm: Lm, words: list[str], flags: list[str]) -> None:
    assert lm(*words) == lm(*flags)
    assert lm(*words)[0] == 0


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help(lm: Lm, verb: str) -> None:
    code, out, err = lm(verb, "--help")
    assert (code, err) == (0, "")
    assert out.startswith(f"usage: lm {verb}")


def test_help_tells_a_type_in_words_and_every_way_to_split_text(lm: Lm) -> None:
    assert "logit_bias  float >= -10000.0 and <= 10000.0, any number of them by name [{}]" in lm("generate", "--help")[1]
    assert f"[pattern={'|'.join(get_args(Pattern))}]" in lm("tokenizer", "--help")[1]


@pytest.mark.parametrize("args", [["--cfg", "job", "seed=5"], ["seed=5", "--cfg", "job"], ["--cfg=job", "seed=5"]])
def test_cfg_job_prints_the_whole_config_and_runs_nothing(lm: Lm, tmp_path: Path, args: list[str]) -> None:
    code, out, _ = lm("train", *args)
    assert code == 0
    assert yaml.safe_load(out) == compose(["seed=5"]).config().tree()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_composition_works_from_any_folder(lm_process: Process) -> None:
    done = lm_process("train", "recipes=ablation/ffn", "--cfg", "job")
    assert done.returncode == 0, done.stderr
    assert yaml.safe_load(done.stdout)["run"]["name"] == "ablation-ffn"


def test_version(lm: Lm) -> None:
    code, out, _ = lm("--version")
    assert code == 0
    assert out.startswith("lm 0.")


ENDING = """
import atexit, sys, threading, time
from concurrent.futures import ThreadPoolExecutor

class Kept:
    def __del__(self):
        print("taken apart")

def late():
    time.sleep(0.2)
    print("thread")

kept, sys.argv = Kept(), ["lm", "nonsense"]
atexit.register(print, "exit handler")
threading.Thread(target=late).start()
idle = ThreadPoolExecutor(1)
idle.submit(int).result()
from lm.cli.main import program
program()
"""


def test_the_program_waits_for_threads_and_handlers_and_takes_nothing_apart() -> None:
    done = subprocess.run([sys.executable, "-c", ENDING], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (2, "thread\nexit handler\n") and done.stderr.startswith("lm: 'nonsense' is not a verb.")


def test_the_program_can_be_profiled(tmp_path: Path) -> None:
    profiled = [sys.executable, "-m", "cProfile", "-o", tmp_path / "profile", "-m", "lm", "version"]
    assert subprocess.run(profiled, capture_output=True, check=False).returncode == 0 and (tmp_path / "profile").exists()


WRITES = """
from typing import Literal

from lm.schema import Slot

class PartConfig(Slot, group="parts"):
    kind: Literal["kept"] = "kept"

file = open("written", "w")
file.write("held back")
"""


@pytest.mark.slow
def test_what_a_plugin_has_open_is_written(tmp_path: Path) -> None:
    (tmp_path / "kept.py").write_text(WRITES)
    args = [sys.executable, "-m", "lm", "explain", "plugins=kept.py", "seed"]
    done = subprocess.run(args, cwd=tmp_path, capture_output=True, check=False)
    assert done.returncode == 0 and (tmp_path / "written").read_text() == "held back", done


@pytest.mark.slow
def test_closed_pipe_is_no_error() -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "lm", "train", "--cfg", "job"], stdout=write, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(write)
    assert done.returncode == 0 and all(re.fullmatch(r"lm train: \d+ s", line) for line in done.stderr.splitlines())


def test_closed_stdout_is_no_error() -> None:
    done = subprocess.run(f"{sys.executable} -m lm --help >&-", shell=True, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_full_output_is_exit_code_5_and_one_sentence() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([sys.executable, "-m", "lm", "--help"], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 5
    assert done.stderr.count("\n") == 1
    assert "No space left" in done.stderr


@pytest.mark.parametrize(
    ("error", "code", "part"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (MemoryError(), 5, "memory"),
        (PermissionError(13, "Permission denied", "runs/x"), 5, "runs/x: Permission denied. Change its permissions"),
        (OSError(errno.ENOSPC, "No space left on device"), 5, "output: No space left on device. Free space"),
        (OSError(errno.EFBIG, "File too large"), 5, "output: File too large. Raise the limit (ulimit -f)"),
        (OSError(errno.EMFILE, "Too many open files", "runs/x"), 5, "runs/x: Too many open files. Raise the limit (ulimit -n)"),
        (ZeroDivisionError("division\nby zero"), 1, "internal error: ZeroDivisionError: division by zero"),
    ],
)
def test_unexpected_errors_end_with_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: BaseException, code: int, part: str
) -> None:
    def dispatch(args: list[str]) -> int:
        raise error

    monkeypatch.setattr(main_module, "_dispatch", dispatch)
    assert main(["train"]) == code
    err = capsys.readouterr().err
    assert part in err
    assert err.count("\n") == 1
    assert main(["train", "traceback=true"]) == code
    assert "Traceback" in capsys.readouterr().err


def threadless(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool of threads, under a limit on these. In Python 3.11 its own clean-up fails then, and that was all that was told."""
    monkeypatch.setattr(threading.Thread, "start", lambda thread: fails(RuntimeError("can't start new thread")))
    try:
        threading.Thread().start()
    except RuntimeError:
        raise AttributeError("'DummyProcess' object has no attribute 'terminate'")  # noqa: B904


def forkless(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "_USE_POSIX_SPAWN", False)
    monkeypatch.setattr(subprocess, "_USE_VFORK", False)
    monkeypatch.setattr(subprocess, "_fork_exec", lambda *args: fails(BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))))
    subprocess.run([sys.executable, "-c", ""], check=True)


def fails(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize("limited", [threadless, forkless])
def test_no_more_threads_or_processes_are_no_bug(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], limited: Callable[[pytest.MonkeyPatch], None]
) -> None:
    """Under ulimit -u or -v: seen to be told as an internal error, to be reported."""
    monkeypatch.setattr(main_module, "_dispatch", lambda args: limited(monkeypatch))
    assert main(["train"]) == 5
    assert re.fullmatch(r"the system starts no more threads or processes .*Raise the limit .*\n", capsys.readouterr().err)


def test_a_current_folder_that_is_deleted_meanwhile_is_no_internal_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Seen to fail: `internal error: FileNotFoundError: [Errno 2] No such file or directory`."""
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    monkeypatch.setattr(main_module, "_dispatch", lambda args: (tmp_path / "gone").rmdir() or Path("x").absolute())
    assert main(["train"]) == 2
    assert capsys.readouterr().err.startswith("current folder: it has been deleted")


def test_the_prompt_that_a_training_names_ends_before_what_is_no_text(tmp_path: Path) -> None:
    """Seen to fail: with tokens of bytes it had the first ones that the model had drawn."""
    run = RunFolder(tmp_path / "x")
    run.write_config({"model": {"kind": "decoder"}})
    (run.path / "samples.md").write_text("## step 2\n\n```\ndef th\ufffd?s\x0e two\n```\n")
    assert next_commands(run)[0].endswith('prompt="def th"')


@pytest.mark.parametrize(("most", "masks"), [({"max_seq_len": None}, 8), ({"max_seq_len": 1024}, 64), ({}, 8)])
def test_the_masks_that_a_training_names_leave_room_for_the_text(tmp_path: Path, most: dict[str, int | None], masks: int) -> None:
    """Seen to fail: with rows of 64 tokens or fewer the command was refused, as text and 64 masks are longer than the context."""
    run = RunFolder(tmp_path / "x")
    run.write_config({"model": {"kind": "encoder", **most}, "objective": {"kind": "diffusion"}, "data": {"seq_len": 32}})
    assert next_commands(run)[0].endswith(f" max_tokens={masks}")


@pytest.mark.parametrize(("mask", "text"), [("<|mask|>", "A<|mask|> text."), ("[MASK]", "A [MASK] text."), ("<mask>", "A <mask> text.")])
def test_the_mask_that_a_training_names_is_written_as_its_words_are(tmp_path: Path, mask: str, text: str) -> None:
    """Seen to fail: tokens that lm trains have the blank before a word in them, and one stood before the mask alone, as in no text."""
    run = RunFolder(tmp_path / "x")
    run.write_config({"model": {"kind": "encoder"}, "objective": {"kind": "mlm"}})
    run.model.mkdir()
    (run.model / "tokenizer_config.json").write_text(json.dumps({"mask_token": mask}))
    assert next_commands(run)[0].endswith(f'text="{text}"')


@pytest.mark.parametrize(
    ("kind", "template", "first", "objective"),
    [
        ("decoder", None, "sample it: lm generate from='my runs/x' prompt=\"def main(\"", "causal"),
        ("encoder_decoder", None, "try it: lm generate from='my runs/x' prompt=\"def main(\"", "causal"),
        ("decoder", "{{ messages }}", "talk to it: lm generate from='my runs/x'", "causal"),
        ("encoder", None, "try it: lm fill from='my runs/x' text=\"A [MASK] text.\"", "mlm"),
        ("encoder", None, "sample it: lm fill from='my runs/x' text=\"def main(\" max_tokens=64", "diffusion"),
        ("encoder", None, "try it: lm classify from='my runs/x' text=TEXT", "classify"),
        ("decoder", "{{ messages }}", "try it: lm classify from='my runs/x' text=TEXT", "classify"),
    ],
)
def test_the_end_of_a_training_names_the_commands_that_fit_it(
    tmp_path: Path, kind: str, template: str | None, first: str, objective: str
) -> None:
    run = RunFolder(tmp_path / "my runs" / "x")
    run.write_config({"model": {"kind": kind}, "trainer": {"sample_prompts": ["def main("]}, "objective": {"kind": objective}})
    run.model.mkdir()
    (run.model / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "a", "mask_token": "[MASK]"} | ({"chat_template": template} if template else {}))
    )
    *lines, last = [line.replace(f"{tmp_path}/", "") for line in next_commands(run)]
    assert lines == [first]
    assert last == "further: lm eval from='my runs/x' | lm compare 'my runs' | lm export from='my runs/x' format=hf out=FOLDER"


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        (["generate", "from=x", "do_sample=false"], "temperature"),
        (["generate", "from=x", "num_beams=2"], "beams"),
        (["generate", "from=x", "max-new-tokens=4"], "max_tokens"),
        (["serve", "from=x", "max_num_seqs=8"], "rows"),
        (["serve", "from=x", "load_in_8bit=true"], "dtype"),
        (["generate", "from=x", "assistant_model=y"], "draft"),
        (["export", "from=x", "out=y", "quantization=q8_0"], "dtype"),
    ],
)
def test_what_other_programs_call_an_option_is_told_its_name_here(line: list[str], meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Seen: do_sample was told to be 'compile', and num_beams 'n'."""
    assert main(line) == 2
    assert f"there is no such key. Did you mean '{meant}'?" in capsys.readouterr().err


def test_every_option_of_a_verb_that_others_name_differently_exists() -> None:
    for verb in map(find, VERBS):
        keys = {name.rstrip("_") for name in verb.model_fields}
        assert {option.partition("=")[0] for option in verb.other_names} <= keys
