"""Kinds that a file of the user's own brings: chosen, explained, misspelt, frozen, asked for and refused as its neighbours are."""

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

import lm as library
from lm import plugins
from lm.cli.compose import catalog
from lm.cli.compose.keys import at
from lm.errors import ConfigError, internal
from lm.nn.norm import NormConfig
from lm.plugins import _bare
from lm.schema import Slot
from lm.storage.run_folder import RunFolder
from tests.conftest import Lm
from tests.training.conftest import TINY, settled, write_text

NORM = '''
from typing import Literal

import torch
from torch import Tensor, nn

from lm.kinds import NormConfig


class {name}(NormConfig):
    """x / mean(|x|) * weight."""

    kind: Literal["{kind}"] = "{kind}"
    floor: float = 1e-6
    """Smallest mean."""

    def build(self, d: int) -> nn.Module:
        return _Norm(d, self.floor)


class _Norm(nn.Module):
    def __init__(self, d: int, floor: float) -> None:
        super().__init__()
        self.weight, self.floor = nn.Parameter(torch.ones(d)), floor

    def forward(self, x: Tensor) -> Tensor:
        return x / x.abs().mean(-1, keepdim=True).clamp_min(self.floor) * self.weight
'''
DATA = """
from typing import Literal

from lm.{module} import {slot}


class Mine({slot}):
    kind: Literal["{kind}"] = "{kind}"
"""


@pytest.fixture
def own(tmp_path: Path) -> Callable[[str, str], str]:
    """A file of this content; its name is that of a plugin, which one process knows once."""

    def write(name: str, content: str) -> str:
        (tmp_path / name).write_text(content)
        return name

    return write


def norm(kind: str) -> str:
    return NORM.format(name=kind.title().replace("_", ""), kind=kind)


def lm_process(folder: Path, *args: str, **env: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "lm", *args], cwd=folder, env={**os.environ, **env}, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.mark.usefixtures("forgotten")
def test_a_kind_of_a_file_is_chosen_explained_listed_and_misspelt_like_ours(lm: Lm, own: Callable[[str, str], str]) -> None:
    given = f"plugins={own('asked.py', norm('asked'))}"
    code, out, err = lm("train", given, "model/norm=asked", "model.norm.floor=0.5", "--cfg", "job")
    tree = yaml.safe_load(out)
    assert code == 0, err
    assert tree["model"]["norm"] == {"place": "pre", "kind": "asked", "floor": 0.5} and list(tree["plugins"]) == ["asked"]
    assert "options: layer, rms, asked" in lm("explain", "model.norm", given, "model/norm=asked")[1]
    assert "Smallest mean." in lm("explain", "model.norm.floor", given, "model/norm=asked")[1]
    assert "layer, rms, asked" in lm("train", "--help", given)[1]
    assert yaml.safe_load(lm("train", "--cfg", "job")[1])["plugins"] == {}  # it is used by no kind
    for wrong, words in (
        ("model/norm=askd", "Did you mean 'asked'?"),
        ("model.norm.flor=1", "model.norm.flor: there is no such key in kind 'asked'. Did you mean 'floor'?"),
        ("model.norm.floor=x", "model.norm.floor: 'x' does not fit"),
        ("model.norm.eps=1", "only in others. Write model/norm=layer or model/norm=rms model.norm.eps=..."),
    ):
        code, _, err = lm("train", given, *(["model/norm=asked"] if "/" not in wrong else []), wrong)
        assert code == 2 and words in err.splitlines()[-1], err
    assert "layer, rms, asked, later" in lm("train", "--help", f"plugins={own('later.py', norm('later'))}")[1]  # beside what was loaded


WRONG = {
    "missing": (None, "gone.py is no file"),
    "raises": ("import lm\n\nx = 1 / 0\n", "raises.py:3: ZeroDivisionError: division by zero"),
    "no python": ("def f(:\n", "no_python.py:1: SyntaxError"),
    "exits": ("raise SystemExit(0)\n", "exits.py:1: SystemExit"),
    "defines nothing": ("x = 1\n", "defines_nothing.py: it defines no kind"),
    "redefines ours": (norm("rms"), "already. Give yours another name"),
    "defines one twice": (NORM.format(name="A", kind="one") + NORM.format(name="B", kind="one"), "twice.py already. Give yours another"),
    "has no default": (
        norm("bare").replace(' = "bare"', ""),
        "Bare: its kind must have its one text as its default. Write kind: L",
    ),
    "has another default": (norm("other").replace('= "other"', '= "others"'), "Other: its kind must have its one text as its default"),
    "has an older name": (
        norm("older")
        .replace("nn.Module):\n", "Declares, nn.Module):\n    drawn = {}\n")
        .replace("import NormConfig", "import Declares, NormConfig"),
        "has_an_older_name.py: _Norm: drawn is called initializers now, and would not be asked for. Rename it.",
    ),
    "answers by an older name": (
        DATA.format(module="nn.position.base", slot="PositionConfig", kind="aged") + "    def keeps(self, n_heads, seq_len): return None\n",
        "Mine: keeps is called saved_activations now",
    ),
    "named like an option": (
        DATA.format(module="nn.ffn.base", slot="FFNConfig", kind="geglu"),
        "'geglu' is named like lm's option",
    ),
    "is no module": (norm("dashed"), "is-no-module.py must be named like a Python module"),
}


@pytest.mark.usefixtures("forgotten")
def test_a_kind_that_lacks_a_method_of_its_slot_is_refused_by_its_name(lm: Lm, own: Callable[[str, str], str]) -> None:
    program = (
        "from typing import Literal\nfrom lm.kinds import NormConfig\n\n\nclass Half(NormConfig):\n    kind: Literal['half'] = 'half'\n"
    )
    code, _, err = lm("train", f"plugins={own('half.py', program)}", "model/norm=half", "--cfg", "job")
    assert code == 2 and "model.norm: kind=half does not define build" in err.splitlines()[-1], err


@pytest.mark.parametrize("wrong", WRONG)
def test_a_file_that_brings_no_kind_ends_with_one_sentence(lm: Lm, tmp_path: Path, wrong: str) -> None:
    content, words = WRONG[wrong]
    name = "gone.py" if content is None else f"{wrong.replace(' ', '-' if wrong == 'is no module' else '_')}.py"
    if content is not None:
        (tmp_path / name).write_text(content)
    args = ["train", f"plugins={name}", "--cfg", "job"]
    if wrong == "named like an option":  # its class is defined, which this process would not forget
        done = lm_process(tmp_path, *args)
        code, err = done.returncode, done.stderr
    else:
        code, _, err = lm(*args)
    assert code == 2 and words in err.splitlines()[-1], err
    assert "Traceback" not in err and len([line for line in err.splitlines() if not line.startswith("lm train: ")]) == 1


@pytest.mark.usefixtures("forgotten")
def test_a_file_that_was_edited_has_its_kinds_of_today_alone(lm: Lm, own: Callable[[str, str], str]) -> None:
    kinds = []
    for program in (norm("edited"), norm("edited").replace("class Edited", "class Renamed"), norm("since"), norm("since") + "x = 1 / 0\n"):
        lm("train", f"plugins={own('edited.py', program)}", "--cfg", "job")
        kinds.append({kind: found.__name__ for kind, found in NormConfig.kinds().items() if found.__module__ == "lm_plugins.edited"})
    assert kinds == [{"edited": "Edited"}, {"edited": "Renamed"}, {"since": "Since"}, {}]


def test_code_is_never_named_by_a_config(lm: Lm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(catalog.OWN, "")
    (tmp_path / "own" / "recipes").mkdir(parents=True)
    (tmp_path / "own" / "recipes" / "sly.yaml").write_text("# @package _global_\nplugins:\n  sly: abc\n")
    code, _, err = lm("train", "--config-dir", "own", "recipes=sly", "--cfg", "job")
    assert code == 2 and "sly.yaml: plugins.sly: code is named by a person" in err
    monkeypatch.setenv(catalog.OWN, "")
    code, _, err = lm("train", "plugins.sly=abc", "--cfg", "job")
    assert code == 2 and "code is named by a person, never by a config" in err


@pytest.mark.slow
def test_a_run_with_a_plugin_is_swept_resumed_read_and_asks_for_its_file(tmp_path: Path) -> None:
    write_text(tmp_path / "text.txt")
    (tmp_path / "swept.py").write_text(norm("swept"))
    base = [*[arg for arg in TINY if arg != "run.name=run"], "data.files=text.txt", "data.cache_dir=cache", "trainer.max_steps=4"]
    done = lm_process(tmp_path, *settled("train", *base, "plugins=swept.py", "model/norm=rms,swept", "-m"))
    assert done.returncode == 0, done.stderr
    ours, theirs = sorted(tmp_path.glob("runs/*"), key=lambda path: "swept" in path.name)
    sha256 = hashlib.sha256(_bare((tmp_path / "swept.py").read_bytes())).hexdigest()
    assert json.loads((theirs / "model" / "config.json").read_text())["plugins"] == {"swept": sha256}
    assert json.loads((ours / "model" / "config.json").read_text())["plugins"] == {}
    assert yaml.safe_load((theirs / "config.yaml").read_text())["plugins"] == {"swept": sha256}
    checkpoint = next((theirs / "checkpoints").iterdir())
    for verb, folder in (("eval", theirs), ("generate", checkpoint), ("export", theirs / "model"), ("show", theirs)):
        rest = {"generate": ["prompt=a"], "export": ["format=hf", "out=exported"]}.get(verb, [])
        done = lm_process(tmp_path, verb, f"from={folder}", *rest)
        assert done.returncode == 2 and f"it needs the plugin 'swept' (SHA-256 {sha256})" in done.stderr.splitlines()[-1], done.stderr
    assert lm_process(tmp_path, "eval", f"from={theirs}", LM_PLUGINS="swept.py").returncode == 0
    longer = ["train", *base, "model/norm=swept", "trainer.max_steps=6", f"run.name={theirs.name}"]
    assert lm_process(tmp_path, *settled(*longer, "plugins=swept.py", "strategy=ddp", "launch.devices=2")).returncode == 0
    (tmp_path / "swept.py").write_text(norm("swept") + "CHANGED = True\n")
    copy = f"plugins={theirs.relative_to(tmp_path) / 'plugins' / 'swept.py'}"
    assert lm_process(tmp_path, "eval", f"from={theirs}", copy).returncode == 0 and not (ours / "plugins").exists()
    for args in (["generate", f"from={theirs}", "prompt=a"], [*longer, "trainer.max_steps=8"]):
        done = lm_process(tmp_path, *settled(*args, "plugins=swept.py"))
        assert done.returncode == 2 and f"the plugin 'swept' of SHA-256 {sha256}, and " in done.stderr.splitlines()[-1], done.stderr


@pytest.mark.slow
def test_every_slot_with_a_group_takes_a_kind_of_its_own_without_a_yaml(tmp_path: Path, own: Callable[[str, str], str]) -> None:
    slots = [slot for slot in Slot.__subclasses__() if slot.__module__.startswith("lm.") and slot.group is not None]
    groups = {slot.group: slot for slot in slots}
    assert {"model/norm", "model/position", "model/attention", "model/ffn", "objective", "optim", "data", "strategy"} <= groups.keys()
    program = "\n".join(
        DATA.format(module=slot.__module__.removeprefix("lm."), slot=slot.__name__, kind=f"own{number}").replace("Mine", f"Mine{number}")
        for number, slot in enumerate(groups.values())
    )
    given, chosen = f"plugins={own('all_slots.py', program)}", [f"{group}=own{number}" for number, group in enumerate(groups)]
    program = "import json, sys; from lm import plugins; from lm.cli.compose.compose import compose;"
    program += "print(json.dumps(compose(plugins.take(sys.argv[1:])).tree))"
    command = [sys.executable, "-c", program, given, *chosen]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [at(json.loads(done.stdout), [*str(group).split("/"), "kind"]) for group in groups] == [f"own{n}" for n in range(len(groups))]


LOOKS = '''
from typing import Literal

from lm.training.config import CallbackConfig, MetricConfig


class Looks(CallbackConfig):
    """Looks on."""

    kind: Literal["looks"] = "looks"
    every: int = 3
    """Steps between looks."""

    def build(self):
        raise AssertionError("composed, not run")


class Counted(MetricConfig):
    """Counts."""

    kind: Literal["counted"] = "counted"

    def build(self):
        raise AssertionError("composed, not run")
'''


@pytest.mark.usefixtures("forgotten")
def test_callbacks_and_metrics_go_by_names_which_may_be_kinds(lm: Lm, own: Callable[[str, str], str]) -> None:
    given = f"plugins={own('looks.py', LOOKS)}"
    code, out, err = lm(
        "train", given, "callbacks.looks.every=10", "callbacks.b={kind: looks, every: 4}", "metrics.counted={}", "--cfg", "job"
    )
    assert code == 0, err
    tree = yaml.safe_load(out)
    assert tree["callbacks"] == {"looks": {"kind": "looks", "every": 10}, "b": {"kind": "looks", "every": 4}}
    assert tree["metrics"] == {"counted": {"kind": "counted"}} and list(tree["plugins"]) == ["looks"]
    assert "Steps between looks." in lm("explain", given, "callbacks.looks", "callbacks.looks.every=4")[1]
    for wrong, words in {
        "callbacks.looks.evry=1": "callbacks.looks.evry: there is no such key in kind 'looks'. Did you mean 'every'?",
        "callbacks.loks.every=1": "callbacks.loks.kind: 'loks' is not an option. Did you mean 'looks'?",
        "callbacks.x.kind=loks": "callbacks.x.kind: 'loks' is not an option. Did you mean 'looks'?",
        "callbacks.looks=5": "callbacks.looks: 5 was given for a section",
        "metrics.count={}": "metrics.count.kind: 'count' is not an option. Did you mean 'counted'?",
    }.items():
        code, _, err = lm("train", given, wrong, "--cfg", "job")
        assert code == 2 and words in err.splitlines()[-1], err


TRACKER = '''
from pathlib import Path
from typing import Literal

from lm.kinds import Logger, LoggerConfig


class TrackerConfig(LoggerConfig):
    """Keeps what it is told."""

    kind: Literal["tracker"] = "tracker"

    def build(self, folder, config, step):
        return [Tracker(folder / "told.txt")]


class Tracker(Logger):
    def __init__(self, file: Path) -> None:
        self.file = file.open("w")

    def log(self, record):
        print(record["step"], *record, file=self.file)

    def samples(self, step, texts):
        pass

    def go_back(self, step):
        pass

    def close(self, summary):
        print("steps", summary["steps"], file=self.file)
        self.file.close()
'''


@pytest.mark.usefixtures("forgotten")
def test_a_logger_of_ones_own_stands_beside_ours(lm: Lm, own: Callable[[str, str], str], tmp_path: Path) -> None:
    text = [f"data.files={write_text(tmp_path / 'a.txt')}", f"data.cache_dir={tmp_path}", f"run.dir={tmp_path}"]
    few = ["trainer.max_steps=2", "schedule.warmup_steps=0", "logger=[tracker,csv]", f"plugins={own('tracker.py', TRACKER)}"]
    code, _, err = lm(*settled("train", *TINY, *text, *few))
    assert code == 0, err
    told = (tmp_path / "run" / "told.txt").read_text().splitlines()
    assert [line[:13] for line in told] == ["1 step tokens", "2 step tokens", "2 step tokens", "steps 2"]
    assert "val_loss" in told[2] and (tmp_path / "run" / "metrics.csv").exists()


BROKEN = """
import torch
from typing import Literal
from lm.nn.norm import NormConfig


class BrokenConfig(NormConfig):
    kind: Literal["broken"] = "broken"

    def build(self, width):
        raise ValueError("no such norm")
"""


@pytest.mark.slow
def test_what_a_plugin_raises_is_told_with_its_file_and_line(own: Callable[[str, str], str], tmp_path: Path) -> None:
    found = lm_process(tmp_path, "show", f"plugins={own('broken.py', BROKEN)}", "model/norm=broken")
    assert found.returncode == 1
    assert found.stderr.splitlines()[-1].startswith(f"{tmp_path / 'broken.py'}:11: ValueError: no such norm. The plugin raises it;")


def test_an_error_that_a_plugin_may_have_caused_outside_of_its_lines_names_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    error = TypeError("Mine.build() takes 2 positional arguments but 3 were given")
    monkeypatch.setenv("LM_PLUGINS", "/a/mine.py")
    assert "given. If it is about what mine.py defines, mend it there" in internal(error).sentence
    monkeypatch.setenv("LM_PLUGINS", "")
    assert internal(error).sentence.endswith("given. Run again with traceback=true to see where, and report it.")


def test_comments_and_blank_lines_are_not_the_code() -> None:
    code = b'''"""Doc

# of the doc
"""
# why
import os  # how


def f(x):

    # what
    return f"{x!r:>{3}}#"   # so
'''
    same = b'"""Doc\n\n# of the doc\n"""\nimport os\ndef f(x):\n    return f"{x!r:>{3}}#"'
    assert _bare(code) == _bare(same) == _bare(code.replace(b"\n", b"\r\n")) == same
    assert _bare(code.replace(b"# of the doc", b"# of it")) != same, "what a string holds is code"
    assert _bare(code.replace(b"    return", b"     return")) != same
    assert all(_bare(not_python) == not_python for not_python in (b"def f(:\n  # no", b"x = 1\ny = 2\n# \xff\n", b""))
    assert _bare(b"# why\rx = 1\ry = 2\r") == _bare(b"\xef\xbb\xbfx = 1# why\ny = 2") == b"x = 1\ny = 2"


def test_what_a_model_needs_is_told_with_the_copy_that_its_run_keeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen to fail: a second norm in the file, and all models of the first were lost but for a file that nobody had kept."""
    monkeypatch.setattr(plugins, "_loaded", {})
    monkeypatch.setenv("LM_PLUGINS", "")
    (tmp_path / "kept.py").write_text(norm("kept"))
    plugins.load([str(tmp_path / "kept.py")])
    cfg = library.config(["model/norm=kept", f"run.dir={tmp_path}", "run.name=run"])
    folder = RunFolder(cfg.run.folder)
    folder.write_config(cfg.tree())
    folder.write_plugins(plugins.files(cfg))
    assert (folder.path / "plugins" / "kept.py").read_text() == norm("kept")
    (tmp_path / "kept.py").write_text(norm("kept") + norm("more"))
    plugins.load([str(tmp_path / "kept.py")])
    where = folder.checkpoints / "step-00000004" / "meta.json"
    with pytest.raises(ConfigError, match=re.escape(f"Give its copy, plugins={folder.path / 'plugins' / 'kept.py'}, or train")):
        plugins.require(cfg.tree(), where)
    monkeypatch.setattr(plugins, "_loaded", {})
    monkeypatch.setenv("LM_PLUGINS", "")
    with pytest.raises(ConfigError, match=re.escape(f"as in plugins={folder.path / 'plugins' / 'kept.py'} or, in Python")):
        plugins.require(cfg.tree(), folder.model / "config.json")
