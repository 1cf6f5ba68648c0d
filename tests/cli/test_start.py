"""Starts: what was mistyped, and what has ended, is told before the code that trains is imported, in the same words."""

import gc
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import lm as library
from lm.cli.compose.compose import compose
from lm.cli.listing import known
from lm.cli.main import VERBS
from lm.cli.verbs.train import _ended, _outset
from lm.schema import Config
from lm.storage.atomic import atomic_folder
from lm.storage.checkpoint import step_folder, write_meta
from lm.storage.model_folder import save_model
from lm.storage.reading import read_json, read_yaml
from lm.storage.run_folder import RunFolder
from lm.training.config import TrainConfig
from tests.conftest import Lm
from tools.keys import listed

LIST: dict[str, Any] = json.loads(known.FILE.read_bytes())
LISTED = known.made(LIST["classes"])
TYPOS = {
    **dict.fromkeys(["trian", "train optm.lr=1", "train modl=nano", "train optim.lrr=1", "train ~optim.lrr", "train model.ffn.hiden=3"], 2),
    **dict.fromkeys(["train data.file=a.txt", "train model.attention.q_rank=3", "train trainer.max_steps.x=1"], 2),
    **dict.fromkeys(["train seed=x", "train optim.lr=-1", "train trainer.precision=fp23", "train optim={lrr: 1}", "train optim=[1]"], 2),
    **dict.fromkeys(["train recipes=nope", "train model/ffn=nope", "train model/fn=mlp", "train optim.kind=muon", "train --multi"], 2),
    **dict.fromkeys(["show modl=nano", "explain optm.lr", "ablate optm.lr=1,2", "ablate match=parms", "data shw", "data show dta=x"], 2),
    **dict.fromkeys(
        ["prepare dta=x", "tokenizer out=t data.sq_len=3", "eval fom=x", "generate form=x", "import frm=x", "completion bsh"], 2
    ),
    **dict.fromkeys(["export from=x format=hff out=x", "compare nowhere"], 2),
    **dict.fromkeys(["eval from=nowhere", "generate from=nowhere", "export from=nowhere format=hf out=x"], 3),
}
RUN = ["debug=fast", "model=nano", "tokenizer=bytes", "data=text", "data.files=a.txt", "data.cache_dir=cache", "run.name=a"]
MACHINES = ["strategy=ddp", "launch.nodes=2", "launch.rendezvous=a:1"]
SOURCE = '''"""Norms."""

MOST = 4


class NormConfig(Slot):
    """What a norm is."""

    eps: float = 1e-6
    """Added."""

    def build(
        self,
    ) -> int:
        """Builds."""
        return 1


class Norm(nn.Module):
    def forward(self, x):
        return x + 1
'''


def parted(command: str) -> list[str]:
    return command.split(" ", 1 if "{" in command else -1)


def without_torch(folder: Path, program: str, *args: str) -> list[str]:
    """What a process prints on stdout that must not import what takes long."""
    check = "found = {'torch', 'lightning', 'transformers'} & set(sys.modules)\nassert not found, found"
    program = f"import sys, time\nfrom lm.cli.main import main\n{program}\n{check}"
    done = subprocess.run([sys.executable, "-c", program, *args], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_list_of_keys_is_that_of_the_sources() -> None:
    assert {"declared": known.declared(), "classes": listed(TrainConfig)} == LIST, "run `make keys`"
    assert len(LIST["classes"]) >= 90


def test_whatever_declares_an_option_is_among_the_sources_of_the_list() -> None:
    """And is seen when it changes."""

    def below(kind: type[Config]) -> set[type[Config]]:
        return {kind}.union(*map(below, kind.__subclasses__()))

    declaring = {Path(sys.modules[kind.__module__].__file__ or "") for kind in below(Config) if kind.__module__.startswith("lm.")}
    of_runs = {file for file in declaring if file.relative_to(known.FILE.parents[2]).parts[0] in ("nn", "adapters", "data", "training")}
    assert len(of_runs) >= 40 and of_runs <= set(known.sources())


def test_classes_made_of_the_list_have_the_fields_of_the_real_ones() -> None:
    assert listed(LISTED) == listed(TrainConfig)


@pytest.mark.parametrize(
    ("edit", "is_told"),
    [
        (("    eps: float = 1e-6", "    eps: float = 1e-5"), True),
        (("    eps: float = 1e-6", "    eps: float = 1e-6\n    scale: bool = True"), True),
        (('"""Added."""', '"""Added to the square."""'), True),
        (("MOST = 4", "MOST = 5"), True),
        (("class NormConfig(Slot)", "class NormConfig(Slot, group='model/norm')"), True),
        (("return 1", "return 2"), False),
        (("x + 1", "x + 2"), False),
    ],
)
def test_a_declaration_that_changes_puts_the_list_aside_and_a_body_does_not(tmp_path: Path, edit: tuple[str, str], is_told: bool) -> None:
    file = tmp_path / "nn" / "norm.py"
    file.parent.mkdir()
    file.write_text(SOURCE)
    before = known.declared(tmp_path)
    file.write_text(SOURCE.replace(*edit))
    assert file.read_text() != SOURCE
    assert (known.declared(tmp_path) != before) == is_told


@pytest.mark.parametrize("content", [json.dumps(LIST | {"declared": "of other sources"}), "<<<<<<< HEAD", None])
def test_a_list_of_other_sources_judges_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None) -> None:
    assert known._listed.__wrapped__() is not None
    monkeypatch.setattr(known, "FILE", tmp_path / "keys.json")
    if content is not None:
        known.FILE.write_text(content)
    assert known._listed.__wrapped__() is None


@pytest.mark.parametrize("command", TYPOS)
def test_what_is_mistyped_is_told_by_the_list_as_by_the_schema(lm: Lm, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    by_schema = lm(*parted(command))
    monkeypatch.setattr(known, "root", lambda: LISTED)
    assert lm(*parted(command)) == by_schema
    assert by_schema[0] == TYPOS[command] and by_schema[2].strip()


@pytest.mark.slow
def test_the_help_of_every_verb_needs_no_torch(tmp_path: Path) -> None:
    *_, codes = without_torch(tmp_path, f"print([main([verb, '--help']) for verb in {[*VERBS]}])")
    assert codes == str([0] * len(VERBS)) and len(VERBS) >= 16


@pytest.mark.slow
def test_asking_for_the_real_classes_leaves_what_is_young_young() -> None:
    known.real()
    gc.collect()  # so that none is due within the next lines
    young = [object()]
    assert known.real() is TrainConfig
    assert any(each is young for each in gc.get_objects(generation=0))


FIRST = """
class First:
    encoding = "utf-8"

    def write(self, text):
        os.write(1, text.encode())
        found = {"torch", "numpy", "lightning", "transformers", "matplotlib", "scipy"} & set(sys.modules)
        os._exit(len(found))

import os
sys.stdout = First()
main(sys.argv[1:])
"""
"""Ends at the first line on stdout, with the number of heavy modules as exit code."""


def test_a_training_tells_what_it_is_before_torch_is_imported(tmp_path: Path) -> None:
    assert without_torch(tmp_path, FIRST, "train", *RUN) == [
        "runs/a: recipes=pretrain/tiny model=nano data=text objective=causal optim=muon"
    ]


def test_a_fine_tuning_tells_its_parent_for_the_model(ended: RunFolder) -> None:
    composition = compose(["data=text", "data.files=a.txt", f"init_from={ended.path}", "run.name=b"])
    told = _outset(composition)
    assert told is not None and told.startswith("runs/b: recipes=pretrain/tiny data=text ") and told.endswith(f" init_from={ended.path}")


@pytest.mark.parametrize("option", [["check=true"], ["plan=true"], MACHINES])
def test_what_trains_elsewhere_is_told_there(option: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen to fail with a line in any case."""
    monkeypatch.setenv("SLURM_NODEID", "1")
    assert _outset(compose([*RUN, *option])) is None and _outset(compose(RUN)) is not None
    monkeypatch.setenv("SLURM_NODEID", "0")
    assert (_outset(compose([*RUN, *option])) is not None) == (option == MACHINES)


def test_what_is_mistyped_is_told_without_torch(tmp_path: Path) -> None:
    commands = [parted(command) for command in TYPOS]
    assert without_torch(tmp_path, f"print([main(command) for command in {commands!r}])") == [str(list(TYPOS.values()))]


@pytest.fixture
def ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """A run as the end of `lm train RUN` leaves it, as far as a start looks at it, which knows the list alone."""
    monkeypatch.setattr(known, "root", lambda: LISTED)
    monkeypatch.chdir(tmp_path)
    config = compose(RUN).full()
    folder = RunFolder.of(config["run"])
    folder.write_config(config)
    with atomic_folder(step_folder(folder.checkpoints, 4)) as checkpoint:
        write_meta(checkpoint, {"step": 4})
    save_model(folder.model, config["model"], {"weight": torch.ones(2)}, lambda temporary: None, {})
    folder.write_summary({"steps": 4, "version": library.__version__})
    folder.write_report("<html>")
    return folder


@pytest.mark.slow
def test_a_run_that_has_ended_is_told_so_without_torch(ended: RunFolder, tmp_path: Path) -> None:
    told = [f"{ended.path}: finished already at step 4; nothing to do.", f"report: {ended.path / 'report.html'}"]
    assert without_torch(tmp_path, "assert main(sys.argv[1:]) == 0", "train", *RUN)[:2] == told


def with_summary(**changes: object) -> Callable[[RunFolder], None]:
    return lambda folder: folder.write_summary(read_json(folder.path / "summary.json") | changes)


def with_config(**changes: object) -> Callable[[RunFolder], None]:
    return lambda folder: folder.write_config(read_yaml(folder.config_file) | changes)


def over_machines(folder: RunFolder) -> None:
    folder.write_config(compose([*RUN, *MACHINES]).full())


CHANGES: dict[str, tuple[list[str], Callable[[RunFolder], object]]] = {
    "a value": (["seed=1"], str),
    "more steps": (["trainer.max_steps=5"], str),
    "fewer steps": (["trainer.max_steps=3"], str),
    "a trial": (["check=true"], str),
    "several machines": (MACHINES, over_machines),
    "another name": (["run.name=b"], str),
    "another part of a name": (["run.name=../runs/a"], str),
    "a damaged model": ([], lambda folder: (folder.model / "model.safetensors").write_bytes(b"")),
    "a file beside the model": ([], lambda folder: (folder.model / "x").touch()),
    "no model": ([], lambda folder: shutil.rmtree(folder.model)),
    "no checkpoints": ([], lambda folder: shutil.rmtree(folder.checkpoints)),
    "a damaged checkpoint": ([], lambda folder: (step_folder(folder.checkpoints, 4) / "meta.json").write_text("{}")),
    "a damaged later checkpoint": ([], lambda folder: step_folder(folder.checkpoints, 5).mkdir()),
    "no summary": ([], lambda folder: folder.remove_summary()),
    "a summary of fewer steps": ([], with_summary(steps=3)),
    "a summary of another version": ([], with_summary(version="0.0.1")),
    "a config of another seed": ([], with_config(seed=1)),
    "a config with plugins": ([], with_config(plugins={"mine": "0" * 64})),
    "a config of another name": ([], with_config(run={"name": "b", "dir": "runs"})),
}


ALIKE = ("fewer steps", "a file beside the model", "another part of a name", "a config of another seed", "a config of another name")


@pytest.mark.parametrize("change", [pytest.param(each, marks=[pytest.mark.slow] * (each in ALIKE)) for each in CHANGES])
def test_only_the_very_same_run_counts_as_ended(ended: RunFolder, change: str) -> None:
    further, apply = CHANGES[change]
    assert _ended(compose(RUN)) == ended.path
    apply(ended)
    assert _ended(compose([item for item in RUN if item != "run.name=a" or "run.name" not in str(further)] + further)) is None


COLLECTIONS = """
import gc
gc.callbacks.append(lambda phase, info: found.update(name for name in ("torch", "lightning") if busy(sys.modules.get(name))))
found, busy = set(), lambda module: module is not None and module.__spec__._initializing
assert main(sys.argv[1:]) == 0
print(sorted(found), [name for name in ("lightning", "scipy.signal", "transformers") if name in sys.modules])
"""


@pytest.mark.slow
def test_nothing_is_collected_while_torch_and_lightning_are_imported(tmp_path: Path) -> None:
    """And nothing is imported that metrics alone need."""
    (tmp_path / "a.txt").write_text("the cat sat on the mat. " * 400)
    program = f"import sys\nfrom lm.cli.main import main\n{COLLECTIONS}"
    done = subprocess.run([sys.executable, "-c", program, "train", *RUN], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == "[] ['lightning']", done.stderr


@pytest.mark.slow
def test_the_same_command_again_ends_within_a_second(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("the cat sat on the mat. " * 400)
    subprocess.run([sys.executable, "-m", "lm", "train", *RUN], cwd=tmp_path, stdout=subprocess.DEVNULL, check=True)
    told, report, *_, seconds = without_torch(tmp_path, "assert main(sys.argv[1:]) == 0; print(time.process_time())", "train", *RUN)
    assert told.endswith("finished already at step 4; nothing to do.") and report.startswith("report: ")
    assert float(seconds) < 1.5  # of the processor, which is shared with other tests
