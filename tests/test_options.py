"""The arguments of the programs in tools/: a mistake is one sentence and exit code 2, before anything is measured."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools.options import asked, folders, options

ROOT = Path(__file__).parents[1]
DEFAULTS = {"rounds": 5, "modes": ["fp32", "bf16"], "lengths": [64], "clock": "wall", "fast": False, "seed": 1}
PROGRAMS = {
    "abuse.py case=3": "case: there is no such option. Did you mean 'cases'?",
    "alarms.py none": "none: there is no such folder",
    "baselines.py": "0 folders were given. Give 1 or more.",
    "bench.py models rouns=1": "rouns: there is no such option. Did you mean 'rounds'?",
    "bench.py sft clock=cpu": "clock: there is no such option",
    "bench_adapter.py models=tinny": "models: 'tinny' is not an option. Did you mean 'tiny'?",
    "bench_cache.py": "from: none was given",
    "bench_data.py memory tokenizer=bp": "tokenizer: 'bp' is not an option. Did you mean 'bpe'?",
    "bench_generate.py rows=0": "rows: '0' is no whole number of 1 or more",
    "bench_length.py only=atention": "only: 'atention' is not an option. Did you mean 'attention'?",
    "bench_ranks.py overhead d_model=8": "d_model: there is no such option",
    "bench_step.py modl=gpt2": "modl: there is no such key. Did you mean 'model'?",
    "findings.py wrte": "'wrte' is nothing to do. Did you mean 'write'?",
    "gpu_dry_run.py only=model=nan": "only: 'model=nan' is not an option. Did you mean 'model=nano'?",
    "keys.py x": "x: no option is taken",
    "kill_test.py --kills 3": "--kills 3: at least 4 are needed",
    "mutate.py job=2": "job: there is no such option. Did you mean 'jobs'?",
    "power.py": "0 folders were given. Give 1 or 2.",
    "same_bits.py before=HEAD": "before, after: both are needed",
    "torch_matrix.py": "versions: none was given",
    "weak_scaling.py her": "'her' is nothing to do. Did you mean 'here'?",
}


def test_options_have_the_types_of_their_defaults() -> None:
    found = options(["modes=bf16", "rounds=7", "lengths=1,2", "fast=true", "seed=0"], None, DEFAULTS, {"clock": ["wall", "cpu"]}, ["seed"])
    assert found == {"rounds": 7, "modes": ["bf16"], "lengths": [1, 2], "clock": "wall", "fast": True, "seed": 0}


@pytest.mark.parametrize(
    ("arg", "said"),
    [
        ("round=1", "round: there is no such option. Did you mean 'rounds'?"),
        ("rounds", "rounds: this is not of the form key=value."),
        ("rounds=x", "rounds: 'x' is no whole number of 1 or more."),
        ("rounds=-1", "rounds: '-1' is no whole number of 1 or more."),
        ("lengths=8,,9", "lengths: '' is no whole number of 1 or more."),
        ("fast=yes", "fast: 'yes' is neither true nor false."),
        ("clock=", "clock: nothing stands behind '='."),
        ("clock=sun", "clock: 'sun' is not an option."),
        ("seed=2 seed=3", "seed: it was given twice."),
    ],
)
def test_a_mistake_is_one_sentence(arg: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        options(arg.split(" "), None, DEFAULTS, {"clock": ["wall", "cpu"]})
    err = capsys.readouterr().err
    assert ended.value.code == 2 and said in err and err.count("\n") == 1


def test_what_is_asked_for_is_known(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert asked(["a", "x=1"], None, ["a", "b"]) == "a" and folders([str(tmp_path)], None) == [tmp_path]
    for call in (lambda: asked([], None, ["a"]), lambda: folders(["/none"], None), lambda: folders(["/", "/", "/"], None, most=2)):
        with pytest.raises(SystemExit, match=r"^2$"):
            call()
    with pytest.raises(SystemExit, match=r"^None$|^$"):
        options(["--help"], "the page", DEFAULTS)
    assert capsys.readouterr().out == "the page\n"


@pytest.mark.slow
@pytest.mark.parametrize("call", PROGRAMS)
def test_a_program_refuses_a_mistake_before_it_begins(call: str) -> None:
    """Seen to fail: most measured for minutes as if nothing had been said, or ended with a traceback."""
    name, *args = call.split(" ")
    run = [sys.executable, "-m", f"tools.{name[:-3]}", *args]
    ended = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, timeout=120)
    last = ended.stderr.splitlines()[-1]
    assert ended.returncode == 2 and PROGRAMS[call] in last and "Traceback" not in ended.stderr
    assert re.match(r"\w+\.py: ", last)
