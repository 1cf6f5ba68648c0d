"""`python -m lm.testing`: what the author of a kind is told of it, in one line."""

from pathlib import Path

import pytest

from lm.testing.__main__ import main

SIGMOID = Path(__file__).parents[1] / "examples/plugins/sigmoid.py"
MISTAKES = {
    "nothing is hidden": (" * seen", "", "SigmoidConfig, kind=nothing_is_hidden: causality does not hold: a token sees a later one."),
    "no cache": ("k, v = ctx.cache.append(self.layer, k, v)", "pass", "decoding with a cache breaks where the full forward does not"),
    "no position": ("q, k = (ctx.position.rotate", "_ = (ctx.position.rotate", "position=rope changes nothing. Rotate queries and keys"),
    "no such function": ("torch.sigmoid", "torch.sigmid", "no attribute 'sigmid'. The plugin raises it"),
    "a slip": ("import torch\n", "import torch.nothing\n", "No module named 'torch.nothing'"),
}

pytestmark = pytest.mark.usefixtures("forgotten")


@pytest.mark.slow
def test_a_kind_that_holds_is_told_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"plugins={SIGMOID}", "model/attention=sigmoid"]) == 0
    assert capsys.readouterr().out == "SigmoidConfig, kind=sigmoid: keeps what holds for every kind\n"


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told_in_one_sentence(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    right, wrong, said = MISTAKES[name]
    text = SIGMOID.read_text()
    assert right in text
    kind = name.replace(" ", "_")  # a process knows a kind once
    (tmp_path / f"{kind}.py").write_text(text.replace(right, wrong).replace('"sigmoid"', f'"{kind}"'))
    assert main([f"plugins={tmp_path / kind}.py", f"model/attention={kind}"]) != 0
    shown = capsys.readouterr().err.splitlines()
    assert said in shown[-1] and ".." not in shown[-1] and not any("Traceback" in line for line in shown)


def test_what_is_not_of_a_plugin_is_not_looked_at(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"plugins={SIGMOID}"]) == 2
    assert "no kind of a plugin is chosen" in capsys.readouterr().err.splitlines()[-1]
