"""Files that are read may be anything: a pipe, a device, a link to itself, nested without end, or lacking what they must say."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from lm.cli.compose import catalog
from lm.cli.main import main
from lm.storage.manifest import MANIFEST
from tests.training.conftest import TINY, settled, write_text

Call = Callable[..., tuple[int, str, str]]
STEP = "run/checkpoints/step-00000012"
DATA = ("data=text", "data.files=text.txt", "data.cache_dir=cache")


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, its export, and options of one's own."""
    folder = tmp_path_factory.mktemp("sound")
    write_text(folder / "text.txt")
    assert main(["train", *TINY, f"run.dir={folder}", f"data.files={folder / 'text.txt'}", f"data.cache_dir={folder / 'cache'}"]) == 0
    assert main(["export", "format=hf", "check=false", f"from={folder / 'run'}", f"out={folder / 'hf'}"]) == 0
    (folder / "own/model").mkdir(parents=True)
    (folder / "own/model/mine.yaml").write_text("defaults: [nano, _self_]\n")
    (folder / "plug.py").write_text("x = 1\n")
    return folder


@pytest.fixture
def place(sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.delenv(catalog.OWN, raising=False)
    shutil.copytree(sound, tmp_path, dirs_exist_ok=True)
    yield tmp_path
    os.environ.pop(catalog.OWN, None)


def again(sound: Path) -> list[str]:
    """One step more of the run in the current folder, which has the data of that one."""
    place = ("run.dir=.", f"data.files={sound / 'text.txt'}", f"data.cache_dir={sound / 'cache'}")
    return settled("train", *TINY, *place, "trainer.max_steps=13")


GENERATE = ("generate", "from=run", "prompt=a", "max_tokens=1")
READERS: dict[str, tuple[str, ...]] = {
    "run/run.lock": (),
    "run/metrics.jsonl": (),
    "run/samples.md": (),
    "run/config.yaml": ("eval", "from=run"),
    "run/summary.json": ("compare", "run"),
    "run/model/config.json": GENERATE,
    "run/model/manifest.json": GENERATE,
    "run/model/tokenizer.json": ("prepare", *DATA, "tokenizer=file", "tokenizer.path=run/model/tokenizer.json"),
    "run/model/tokenizer_config.json": ("generate", "from=run", "prompt=a"),
    "run/model/model.safetensors": GENERATE,
    "hf/config.json": ("import", "from=hf", "out=new"),
    "hf/tokenizer_config.json": ("import", "from=hf", "out=new"),
    "hf/model.safetensors": ("import", "from=hf", "out=new"),
    "text.txt": ("prepare", *DATA, "tokenizer=bytes"),
    "own/model/mine.yaml": ("train", "--config-dir", "own", "model=mine", "--cfg", "job"),
    "plug.py": ("show", "plugins=plug.py"),
}
"""() stands for another step of the run."""


def fails(found: tuple[int, str, str], *parts: str) -> None:
    code, _, err = found
    assert code in (2, 3, 5), err
    assert "Traceback" not in err and "internal error" not in err
    assert all(part in err.splitlines()[-1] for part in parts), err


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pipe", "device", "link to itself", "folder"])
@pytest.mark.parametrize("name", READERS)
def test_what_is_no_regular_file_is_refused_at_once(name: str, kind: str, sound: Path, place: Path, lm: Call) -> None:
    """Seen to fail by never ending: pipes and devices in the place of data, samples, an own preset and tokenizers."""
    path = place / name
    path.unlink(missing_ok=True)
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "device":
            path.symlink_to("/dev/zero")
        case "link to itself":
            path.symlink_to(path.name)
        case "folder":
            path.mkdir()
    if name == "text.txt" and kind == "folder":
        return  # a folder of texts, though an empty one
    fails(lm(*(READERS[name] or again(sound))))


DEEP = "[" * 100_000 + "]" * 100_000
BOMB = "a: &a [x, x]\nb: &b [*a, *a]\nmodel: [*b, *b]\n"


TEXTS = [DEEP, '{"step": 1e999}', f'{{"step": {"9" * 5000}}}', "NaN", BOMB, "\x00\x01", "\ufeff{", '{"a": ' * 9999]
TREES = [name for name in READERS if name.endswith((".json", ".yaml", ".safetensors"))]
BOUNDLESS = TEXTS[1:3]  # another program may write so into tokenizer_config.json that there is no limit
CASES = [(name, text) for name in TREES for text in TEXTS if text not in BOUNDLESS or not name.endswith("tokenizer_config.json")]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "text"), CASES)
def test_what_is_nested_without_end_or_no_number_is_refused(name: str, text: str, place: Path, lm: Call) -> None:
    """Seen to fail in tokenizer_config.json and own presets."""
    (place / name).write_text(text)
    if not name.endswith(MANIFEST):
        reseal((place / name).parent)
    fails(lm(*READERS[name]))


def reseal(folder: Path) -> None:
    """The manifest agrees with what the folder holds."""
    if (folder / MANIFEST).is_file():
        listed = {path.name: sha256(path.read_bytes()).hexdigest() for path in folder.iterdir() if path.name != MANIFEST}
        (folder / MANIFEST).write_text(json.dumps(listed))


@pytest.mark.slow
def test_a_broken_line_of_metrics_is_named(place: Path, lm: Call) -> None:
    for line in (DEEP, '{"step": NaN}', "[]", '{"step": 1.5}'):
        (place / "run/metrics.jsonl").write_text(f'{{"step": 1}}\n{line}\n')
        fails(lm("compare", "run", "overwrite=true"), "metrics.jsonl:2")


def changed(tree: Any, path: tuple[Any, ...], value: Any) -> Any:
    """The tree with another value there; Ellipsis: without it."""
    key, *rest = path
    copied = dict(tree) if isinstance(tree, dict) else list(tree)
    if rest:
        copied[key] = changed(tree[key], tuple(rest), value)
    elif value is ...:
        del copied[key]
    else:
        copied[key] = value
    return copied


INDEX = ("norm.weight", "weight")
CASES = [
    *(("meta.json", (key,), ...) for key in ("format", "model", "config", "step", "counters", "fingerprint", "files", "tokenizer_hash")),
    *(("meta.json", ("step",), value) for value in ("4", -1, 7, None)),
    *(("meta.json", ("model",), value) for value in ([], "x", {}, None)),
    ("meta.json", ("model", "n_layers"), 10**9),
    ("meta.json", ("config", "trainer"), ...),
    ("meta.json", ("config", "trainer", "max_steps"), "many"),
    ("meta.json", ("counters", "train_s"), "long"),
    *(("rank-00000.json", (*INDEX, key), ...) for key in ("shape", "dtype", "pieces")),
    *(("rank-00000.json", (*INDEX, "shape"), value) for value in ([10**12], [-1], [], "x", [16])),
    ("rank-00000.json", (*INDEX, "dtype"), "int64"),
    ("rank-00000.json", (*INDEX, "dtype"), "__class__"),
    *(
        ("rank-00000.json", (*INDEX, "pieces", 0, 0), value)
        for value in ("../../model/model.safetensors", "rank-00001.weights.safetensors", 1)
    ),
    ("rank-00000.json", (*INDEX, "pieces", 0, 1), "x"),
    *(("rank-00000.json", (*INDEX, "pieces", 0, 2), value) for value in ([9], [0, 0], [-1])),
    ("rank-00000.json", (*INDEX, "pieces", 0, 3), [10**12]),
    ("rank-00000.json", INDEX[:1], ...),
    ("rank-00000.json", INDEX, []),
]


@pytest.mark.parametrize(("name", "path", "value"), CASES)
def test_a_checkpoint_that_does_not_say_what_it_must_is_refused(
    name: str, path: tuple[Any, ...], value: Any, sound: Path, place: Path, lm: Call
) -> None:
    """With a manifest that agrees. Seen to fail: a key that was missing was an internal error."""
    for step in (place / "run/checkpoints").iterdir():
        file = step / name
        file.write_text(json.dumps(changed(json.loads(file.read_text()), path, value)))
        reseal(step)
    fails(lm(*again(sound)))
    if name != "meta.json" or path[0] in ("format", "model"):
        fails(lm("generate", f"from={STEP}", "prompt=a", "max_tokens=1"), STEP)


@pytest.mark.parametrize("key", ["num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size", "max_position_embeddings"])
@pytest.mark.parametrize("value", [10**12, -1, 0, 1.5, "x", None, []])
def test_sizes_of_a_hugging_face_config_are_bounded(key: str, value: Any, place: Path, lm: Call) -> None:
    config = json.loads((place / "hf/config.json").read_text())
    (place / "hf/config.json").write_text(json.dumps(config | {key: value}))
    found = lm("import", "from=hf", "out=new")
    if found[0] == 0:  # what null stands for
        assert value is None
    else:
        fails(found)


SIZES = {
    "model.d_model=1000000000000": "16777216",
    "model.n_layers=1000000000": "4096",
    "data.seq_len=1000000000000": "16777216",
    "trainer.micro_batch=1000000000": "16777216",
    "model.d_model=16777216": "GiB of memory here",
    "model.vocab_size=16777216 model.d_model=65536": "GiB of memory here",
}


@pytest.mark.parametrize("sizes", SIZES)
def test_sizes_that_nothing_can_hold_are_refused_before_they_are_built(sizes: str, sound: Path, place: Path, lm: Call) -> None:
    """Seen to fail by an allocation, or by never ending."""
    fails(lm(*settled(*again(sound), "run.name=big", *sizes.split())), SIZES[sizes])


@pytest.mark.parametrize("defaults", ["[mine, _self_]", "[other, _self_]", "3", "{a: 1}", "[1]"])
def test_an_own_preset_that_leads_back_to_itself_is_refused(defaults: str, place: Path, lm: Call) -> None:
    """Seen to fail with a recursion without end."""
    (place / "own/model/mine.yaml").write_text(f"defaults: {defaults}\n")
    (place / "own/model/other.yaml").write_text("defaults: [mine, _self_]\n")
    fails(lm("train", "--config-dir", "own", "model=mine", "--cfg", "job"), "own")
