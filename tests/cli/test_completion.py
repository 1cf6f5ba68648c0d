"""`lm completion`: what the shells are handed, and what they make of it."""

import shutil
import subprocess
from pathlib import Path

import pytest

from lm.cli.main import VERBS
from tests.conftest import Lm

TRY = r"""
source "$1"
COMP_WORDBREAKS=$' \t\n"\'><=;|&(:'
COMP_LINE="$2"; COMP_POINT=${#2}; COMP_WORDS=($2); [[ "$2" == *" " ]] && COMP_WORDS+=("")
COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
_lm
printf '%s\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scripts")


def script(lm: Lm, folder: Path, shell: str) -> Path:
    """The script, once for all tests."""
    file = folder / shell
    if not file.exists():
        code, out, err = lm("completion", shell)
        assert (code, err) == (0, "")
        file.write_text(out)
    return file


def completed(file: Path, line: str) -> set[str]:
    done = subprocess.run(["bash", "-c", TRY, "bash", str(file), line], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("lm ", set(VERBS)),
        ("lm tr", {"train"}),
        ("lm train optim.l", {"optim.lr=", "optim.layer_decay="}),
        ("lm train data.file", {"data.files="}),
        ("lm train model=nan", {"nano", "nano_deep", "nanochat_d20"}),
        ("lm train seed=1 model/ffn=gegl", {"geglu", "geglu_tanh"}),
        ("lm train recipes=finetune/ch", {"finetune/chat", "finetune/chat_tiny"}),
        ("lm eval spl", {"split=val", "split=train", "split=test", "split=all"}),
        ("lm eval split=v", {"val"}),
        ("lm eval optim.l", set()),
        ("lm generate temp", {"temperature="}),
        ("lm generate chat=t", {"true"}),
        ("lm export fo", {"format=hf", "format=gguf", "format=peft"}),
        ("lm data sh", {"show"}),
        ("lm completion z", {"zsh"}),
        ("lm train data.files=/no", set()),
    ],
)
def test_bash_completes_verbs_keys_options_and_recipes(lm: Lm, scripts: Path, line: str, expected: set[str]) -> None:
    assert completed(script(lm, scripts, "bash"), line) == expected


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_the_scripts_of_other_shells_have_the_same_words_and_parse(lm: Lm, scripts: Path, shell: str) -> None:
    """Their syntax is checked where they are installed."""
    file = script(lm, scripts, shell)
    text = file.read_text().replace("'", " ").replace("(", " ").replace(")", " ")
    assert {"train", "completion", "optim.lr=", "model=nano", "recipes=finetune/chat", "split=val"} <= set(text.split())
    if shutil.which(shell):
        subprocess.run([shell, "-n", str(file)], check=True)


@pytest.mark.parametrize("args", [[], ["tcsh"], ["bash", "zsh"]])
def test_another_shell_is_refused(lm: Lm, args: list[str]) -> None:
    code, out, err = lm("completion", *args)
    assert (code, out) == (2, "") and err.startswith("completion: ") and "Options: " in err


@pytest.mark.parametrize("verb", ["", *VERBS])
def test_help_has_80_columns_and_every_key(lm: Lm, verb: str) -> None:
    code, out, _ = lm(*filter(None, [verb, "--help"]))
    assert code == 0 and max(map(len, out.splitlines())) <= 80
    if verb == "train":
        assert out.index("\noptim:\n") < out.index("\n  optim.lr  float > 0") < out.index("\nschedule:\n")
        assert "\n      Peak learning rate" in out
