"""Each mistake of a user, from the command line to the last line on stderr: the exit code, where, what was given, and no traceback."""

import gzip
import hashlib
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lm.cli.compose import catalog
from lm.cli.main import main
from lm.data.kinds import BPEConfig
from lm.storage.manifest import MANIFEST
from tests.training.conftest import TINY, settled, write_text

Prepare = Callable[[Path], list[str]]  # puts what is needed into an empty folder; the arguments of lm


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the finished run `run` and its cache."""
    folder = tmp_path_factory.mktemp("trained")
    write_text(folder / "text.txt")
    assert main(["train", *TINY, f"run.dir={folder}", f"data.files={folder / 'text.txt'}", f"data.cache_dir={folder / 'cache'}"]) == 0
    return folder


def train_on(name: str, content: bytes, *overrides: str) -> Prepare:
    def prepare(folder: Path) -> list[str]:
        (folder / name).write_bytes(content)
        return settled("train", *TINY, "run.dir=runs", "data.cache_dir=cache", f"data.files={name}", *overrides)

    return prepare


def call(*args: str) -> Prepare:
    return lambda folder: list(args)


def own_recipe(line: str) -> Prepare:
    """A line added to the default recipe, in a copy of all config files."""

    def prepare(folder: Path) -> list[str]:
        for part in ("conf", "recipes"):
            shutil.copytree(catalog.root() / part, folder / part)
        with (folder / "recipes/pretrain/tiny.yaml").open("a") as file:
            file.write(f"{line}\n")
        return ["train", "--cfg", "job"]

    return prepare


def empty_folder(folder: Path) -> list[str]:
    (folder / "nothing").mkdir()
    return ["train", *TINY, "run.dir=runs", "data.cache_dir=cache", "data.files=nothing"]


def foreign_token(folder: Path) -> list[str]:
    (shard,) = folder.glob("cache/tokens/*/train-00000.bin")
    tokens = np.fromfile(shard, "<u2")
    tokens[700] = 300
    tokens.tofile(shard)
    place = [f"run.dir={folder}", "run.name=other", f"data.files={folder / 'text.txt'}", f"data.cache_dir={folder / 'cache'}"]
    return settled("train", *TINY, *place)


def larger_tokenizer(folder: Path) -> list[str]:
    """With a manifest that agrees, so that only the size tells."""
    model = folder / "run" / "model"
    text = " ".join(map(str, range(900)))
    BPEConfig(vocab_size=400).build([text]).save(model)
    digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in model.iterdir() if path.name != MANIFEST}
    (model / MANIFEST).write_text(json.dumps(digests))
    return ["generate", f"from={folder / 'run'}", "prompt=def"]


def other_tokenizer(folder: Path) -> list[str]:
    """Of the same size, dropped in without a word."""
    path = folder / "run" / "model" / "tokenizer.json"
    path.write_text(path.read_text().replace('"a"', '"\x00"', 1))
    return ["generate", f"from={folder / 'run'}", "prompt=def"]


def flipped_bit(folder: Path) -> list[str]:
    path = folder / "run" / "model" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    return ["eval", f"from={folder / 'run'}"]


def pickled(folder: Path) -> list[str]:
    (folder / "model.pt").write_bytes(b"\x80\x04cos\nsystem\n")
    return ["generate", f"from={folder / 'model.pt'}", "prompt=def"]


def finetune_with_another_tokenizer(folder: Path) -> list[str]:
    return ["train", f"init_from={folder / 'run'}", "tokenizer=bytes", "data=text", f"data.files={folder / 'text.txt'}"]


ROW = b'{"text": "a first line that is long enough"}\n'
FILES: dict[str, tuple[Prepare, int, list[str]]] = {
    "empty file": (train_on("a.txt", b""), 2, ["0 documents", "a.txt"]),
    "blank lines": (train_on("a.txt", b"\n \n\n"), 2, ["0 documents", "a.txt"]),
    "empty folder": (empty_folder, 2, ["data.files", "nothing", "no file"]),
    "missing file": (call("train", *TINY, "data.files=gone.txt"), 2, ["data.files: gone.txt does not exist"]),
    "shorter than a row": (train_on("a.txt", b"only a few words here"), 2, ["data.seq_len=32", "one row needs 33"]),
    "invalid UTF-8": (train_on("a.txt", b"x" * 700 + b"\xff" + b"y" * 99), 2, ["a.txt", "byte 700", "not UTF-8"]),
    "broken jsonl": (train_on("a.jsonl", ROW * 6 + b'{"text": "half\n' + ROW), 2, ["a.jsonl:7", "not JSON"]),
    "jsonl without the field": (train_on("a.jsonl", ROW * 3 + b'{"txt": "x"}\n'), 2, ["a.jsonl:4", "'text' is missing", "txt"]),
    "jsonl with a number": (train_on("a.jsonl", ROW + b'{"text": 5}\n'), 2, ["a.jsonl:2", "'text' holds 5"]),
    "truncated gzip": (train_on("a.txt.gz", gzip.compress(b"words " * 5000)[:-9]), 2, ["a.txt.gz", "truncated or damaged"]),
    "no such home": (train_on("~nobody-here.txt", b""), 2, ["0 documents", "~nobody-here.txt"]),
    "no such home of runs": (call("runs", "~nobody-here/a"), 2, ["~nobody-here/a: there is no such folder"]),
    "no such home of a run": (call("average", "~nobody-here/a", "out=x"), 2, ["~nobody-here/a: a run folder is needed"]),
    "no such home of a table": (call("compare", "runs/gone", "out=~nobody-here/a"), 2, ["runs/gone"]),
    "no such home of texts": (call("embed", "from=runs/gone", "texts=~nobody-here/a.txt", "out=b"), 3, ["runs/gone: does not exist"]),
    "unknown ending": (train_on("a.doc", b"x"), 2, ["a.doc", ".jsonl"]),
    "vocabulary below the tokenizer's": (train_on("a.txt", b"words " * 500, "model.vocab_size=100"), 2, ["model.vocab_size=100", "259"]),
    "no such tokenizer": (train_on("a.txt", b"x", "tokenizer=file", "tokenizer.path=t.json"), 2, ["t.json"]),
    "no such parent": (call("train", "init_from=runs/gone"), 3, ["runs/gone: does not exist"]),
    "no such model": (call("generate", "from=runs/gone", "prompt=x"), 3, ["runs/gone: does not exist"]),
    "no model given": (call("eval"), 2, ["lm eval from="]),
    "no such run": (call("compare", "runs/gone", "runs/gone2"), 2, ["runs/gone"]),
    "nothing to compare": (call("compare", ""), 2, ["compare: '' was given for a folder"]),
    "nothing to average": (call("average", "", "out=x"), 2, ["average: '' was given for a folder"]),
    "nothing to merge": (call("merge", "runs/a", " ", "out=x"), 2, ["merge: '' was given for a folder"]),
    "nothing as parent": (call("train", "init_from=''"), 3, ["model folder: '' names none"]),
    "no UTF-8 as model": (call("generate", "from=\udcff", "prompt=x"), 2, ["from: '\\udcff' does not fit", "set PYTHONUTF8=1"]),
}


def mix(source: str) -> Prepare:
    return call("train", "data=mix", f"data.sources=[{source}]")


VALUES: dict[str, tuple[Prepare, int, list[str]]] = {
    "misspelt key": (call("train", "optim.lrr=1"), 2, ["optim.lrr: there is no such key", "Did you mean 'lr'?"]),
    "misspelt key of generate": (call("generate", "from=x", "temprature=1"), 2, ["temprature", "Did you mean 'temperature'?"]),
    "misspelt key of a source": (
        mix("{name:a,data:{kind:text,files:x,fils:x}}"),
        2,
        ["data.fils: there is no such key", "Did you mean 'files'?"],
    ),
    "misspelt kind of a source": (mix("{name:a,data:{kind:txt,files:x}}"), 2, ["'txt' is not an option", "Did you mean 'text'?"]),
    "misspelt name of a source": (
        mix("{name:a,nam:a,data:{kind:text,files:x}}"),
        2,
        ["sources.0.nam: there is no such key", "'name'?"],
    ),
    "wrong type": (call("train", "trainer.max_steps=many"), 2, ["trainer.max_steps: 'many'", "Give steps such as 300"]),
    "wrong type of generate": (call("generate", "from=x", "max_tokens=many"), 2, ["max_tokens: 'many'", "integer"]),
    "NaN": (call("train", "optim.lr=nan"), 2, ["optim.lr: NaN", "finite number"]),
    "heads": (call("train", "model.attention.n_heads=4", "model.attention.n_kv_heads=3"), 2, ["n_heads=4", "n_kv_heads=3", "multiple"]),
    "unknown option": (call("train", "optim=adamww"), 2, ["'adamww' is not an option", "Did you mean 'adamw'?"]),
    "unknown verb": (call("trian"), 2, ["'trian'", "Did you mean 'train'?"]),
    "row longer than the context": (
        call("train", "model.max_seq_len=64", "data.seq_len=128"),
        2,
        ["data.seq_len=128", "model.max_seq_len=64"],
    ),
    "name outside of runs": (call("train", "run.name=../../etc/x"), 2, ["run.name: '../../etc/x'"]),
}
MODELS: dict[str, tuple[Prepare, int, list[str]]] = {
    "token id beyond the vocabulary": (foreign_token, 2, ["train-00000.bin", "token id 300", "259"]),
    "larger tokenizer": (larger_tokenizer, 3, ["400 tokens", "320 rows"]),
    "replaced tokenizer": (other_tokenizer, 3, ["model/tokenizer.json: the file is damaged"]),
    "flipped bit": (flipped_bit, 3, ["model/model.safetensors: the file is damaged"]),
    "pickle": (pickled, 3, ["model.pt: a pickle"]),
    "another tokenizer for a fine-tune": (finetune_with_another_tokenizer, 2, ["tokenizer=bytes", "its own tokenizer"]),
}


def require_one_sentence(args: list[str], code: int, parts: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(args) == code
    err = capsys.readouterr().err
    last = err.splitlines()[-1]
    assert "Traceback" not in err
    assert last.endswith((".", "?")) or ". Run: " in last
    for part in parts:
        assert part in last
    assert main([*args, "traceback=true"]) == code
    shown = capsys.readouterr().err
    assert "Traceback (most recent call last)" in shown
    assert shown.splitlines()[-1] == last


@pytest.mark.parametrize(("prepare", "code", "parts"), [*FILES.values(), *VALUES.values()], ids=[*FILES, *VALUES])
def test_a_mistake_ends_with_its_exit_code_and_one_sentence(
    prepare: Prepare, code: int, parts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    require_one_sentence(prepare(tmp_path), code, parts, capsys)


@pytest.mark.parametrize(("prepare", "code", "parts"), MODELS.values(), ids=MODELS)
def test_what_does_not_fit_a_trained_model_ends_with_its_exit_code_and_one_sentence(
    prepare: Prepare, code: int, parts: list[str], trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each spoils a copy of its own; the path of the text decides its place in the cache."""
    spare = tmp_path / "spare"
    shutil.copytree(trained, spare)
    try:
        require_one_sentence(prepare(trained), code, parts, capsys)
    finally:
        shutil.rmtree(trained)
        shutil.move(spare, trained)


def test_a_misspelt_key_in_a_recipe_is_told_with_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    args = own_recipe("optimm: {lr: 1}")(tmp_path)
    monkeypatch.setattr(catalog, "root", lambda: tmp_path)
    require_one_sentence(args, 2, ["recipes/pretrain/tiny.yaml: optimm: there is no such key", "Did you mean 'optim'?"], capsys)


def test_a_missing_extra_is_told_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "tensorboard", None)  # as if it were not installed
    args = train_on("a.txt", b"words and more words " * 100, "logger=tensorboard")(tmp_path)
    require_one_sentence(args, 2, ["pip install", "tensorboard"], capsys)
