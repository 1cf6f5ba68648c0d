"""Folders that a verb writes where a person says: never half of one, never over what is not its own."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from lm.cli.main import main
from lm.data.kinds import BytesConfig
from lm.storage.manifest import MANIFEST, verify
from lm.storage.model_folder import save_model
from lm.storage.out import require_free
from tests.nn.models import config, redrawn

Call = Callable[..., tuple[int, str, str]]
EXPORT = ("export", "format=hf", "check=false")
WRITERS = {
    "export": (*EXPORT, "from=base"),
    "import": ("import", "from=theirs"),
    "tokenizer": ("tokenizer", "kind=bytes", "data=text", "data.files=text.txt", "data.val_frac=0.5", "data.cache_dir=cache"),
    "compare": ("compare", "run"),
}


def model_folder(folder: Path, d_model: int = 16) -> Path:
    model = redrawn(config(vocab_size=320, d_model=d_model))
    save_model(folder, model.cfg.tree(), dict(model.named_parameters()), BytesConfig().build().save, {})
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the verbs read."""
    folder = tmp_path_factory.mktemp("made")
    model_folder(folder / "base")
    assert main([*EXPORT, f"from={folder / 'base'}", f"out={folder / 'theirs'}"]) == 0
    (folder / "text.txt").write_text("some text to train on, and some more of it to validate with\n" * 20)
    (folder / "run").mkdir()
    (folder / "run/config.yaml").write_text("seed: 0\n")
    (folder / "run/metrics.jsonl").write_text('{"step": 1, "tokens": 8, "val_loss": 2.0, "val_bits_per_byte": 3.0}\n')
    return folder


@pytest.fixture
def place(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    return tmp_path


@pytest.mark.parametrize("verb", WRITERS)
def test_a_verb_writes_a_folder_that_verifies_and_replaces_it_on_demand_alone(verb: str, place: Path, lm: Call) -> None:
    args = (*WRITERS[verb], "out=out")
    assert lm(*args)[0] == 0
    verify(place / "out")
    before = os.stat(place / "out").st_ino
    code, _, err = lm(*args)
    assert code == 2
    assert err.splitlines()[-1] == "out=out: it exists already. Add overwrite=true to replace it, or choose another folder."
    assert os.stat(place / "out").st_ino == before
    assert lm(*args, "overwrite=true")[0] == 0
    verify(place / "out")
    assert os.stat(place / "out").st_ino != before
    assert not [path.name for path in place.iterdir() if path.name.startswith(".")]


FOREIGN = {
    "a folder of the user's": "config.json is in it",
    "a model folder with a file of the user's": "notes.txt is in it",
    "a file": "it is no folder",
    "a link": "it is no folder",
    "the model of a run": "it belongs to the run",
    "a manifest that lies": "its manifest.json cannot be read",
    "a manifest that is a pipe": "its manifest.json cannot be read",
}


@pytest.mark.parametrize("what", FOREIGN)
def test_what_no_verb_has_written_is_never_removed(what: str, place: Path, lm: Call) -> None:
    """Seen to fail with the look for unlisted files off, and with that for runs off."""
    out = place / ("run/model" if what == "the model of a run" else "out")
    if what == "a file":
        out.write_text("mine")
    elif what == "a link":
        out.symlink_to(place / "base")
    else:
        shutil.copytree(place / "base", out)
    if "user" in what:
        (out / "notes.txt").write_text("mine")
    if what == "a folder of the user's":
        (out / MANIFEST).unlink()
    if what == "a manifest that lies":
        (out / MANIFEST).write_text('{"../base/config.json": "0"}')
    if what == "a manifest that is a pipe":
        (out / MANIFEST).unlink()
        os.mkfifo(out / MANIFEST)
    before = os.stat(out).st_ino
    code, _, err = lm(*WRITERS["tokenizer"], f"out={out}", "overwrite=true")
    assert code == 2
    assert FOREIGN[what] in err.splitlines()[-1] and "it is not overwritten" in err
    assert os.stat(out).st_ino == before
    assert "user" not in what or (out / "notes.txt").read_text() == "mine"


@pytest.mark.slow
def test_a_kill_of_an_export_that_replaces_leaves_the_old_one_or_the_new_one(
    place: Path, lm: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_folder(place / "wide", 32)
    for point in ("made", "manifest", "rename", "renamed"):
        shutil.rmtree(place / "out", ignore_errors=True)
        assert lm(*EXPORT, "from=base", "out=out")[0] == 0
        pid = os.fork()
        if pid == 0:
            os.environ["LM_FAILPOINT"] = f"{point}:kill"
            main([*EXPORT, "from=wide", "out=out", "overwrite=true"])
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 9
        verify(place / "out")
        assert lm("import", "from=out", "out=back", "overwrite=true")[0] == 0


@pytest.mark.slow
def test_of_two_exports_into_one_folder_the_one_that_returns_0_is_there(place: Path) -> None:
    """Twelve races of two processes. Seen to fail with one temporary name for both."""
    sizes = {name: model_folder(place / name, width) for name, width in (("narrow", 16), ("wide", 32))}
    for race in range(12):
        start, go = os.pipe()
        pids = {}
        for name in sizes:
            if (pid := os.fork()) == 0:
                os.close(go)
                os.read(start, 1)  # until the other one is there too
                os._exit(main([*EXPORT, f"from={place / name}", f"out={place}/race-{race}"]))
            pids[name] = pid
        os.close(start)
        os.close(go)
        codes = {name: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for name, pid in pids.items()}
        assert sorted(codes.values()) == [0, 2], codes
        verify(place / f"race-{race}")
        (winner,) = (name for name, code in codes.items() if code == 0)
        width = {"narrow": 16, "wide": 32}[winner]
        assert f'"hidden_size": {width},' in (place / f"race-{race}" / "config.json").read_text()
    assert not [path.name for path in place.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize(
    ("args", "source"),
    [
        ((*EXPORT, "from=base"), "base"),
        (("export", "from=base", "format=gguf"), "base"),
        (("import", "from=theirs"), "theirs"),
        (("merge", "base", "base"), "base"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_is_read_is_never_replaced(args: tuple[str, ...], source: str, place: Path, lm: Call) -> None:
    """Seen to fail: a model in float32 was replaced by itself in bf16."""
    before = {path.name: path.read_bytes() for path in (place / source).iterdir()}
    for out in (source, f"./{source}/", f"{source}/../{source}"):
        code, _, err = lm(*args, f"out={out}", "overwrite=true")
        assert code == 2 and "is read from there, and would be replaced. Choose another folder." in err.splitlines()[-1]
    assert {path.name: path.read_bytes() for path in (place / source).iterdir()} == before


@pytest.mark.parametrize("verb", WRITERS)
def test_nothing_is_written_into_a_folder_whose_manifest_would_not_list_it(verb: str, place: Path, lm: Call) -> None:
    """Seen to fail: an export into the model's own folder ended well, and nothing could read the model from then on."""
    (place / "link").symlink_to("base")
    for out in ("base/new", "base/deep/new", "link/new"):
        code, _, err = lm(*WRITERS[verb], f"out={out}")
        assert code == 2 and err.splitlines()[-1].startswith(f"out={out}: it lies in {place}/base, where only what its {MANIFEST} lists"), (
            err
        )
    verify(place / "base")
    (place / "run" / MANIFEST).write_text('{"name": "an app of the web", "icons": []}')
    assert lm(*WRITERS[verb], "out=base/../run/new")[0] == 0, "that of another program lists nothing"


def test_a_name_on_the_hub_may_be_that_of_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert require_free("owner/name", False, "owner/name") == Path("owner/name")
