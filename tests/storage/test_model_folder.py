import json
import pickle
from pathlib import Path

import pytest
import torch

from lm.errors import CheckpointError, NumericsError, ResourceError
from lm.storage.checkpoint import Piece, step_folder
from lm.storage.formats import FORMAT
from lm.storage.manifest import verify
from lm.storage.model_folder import read_config, read_model, require_same_shapes, resolve_model, save_model
from lm.storage.run_folder import RunFolder
from tests.conftest import unprivileged
from tests.runs import save_checkpoint

WEIGHTS = {"embed": torch.arange(6.0).view(3, 2), "head": torch.tensor([1.5, -2.0]).bfloat16()}


def save_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")


def save(folder: Path, scale: float = 1.0) -> None:
    save_model(folder, {"d_model": 2}, {name: w * scale for name, w in WEIGHTS.items()}, save_tokenizer, {"parent": "runs/x"})


def test_a_model_folder_round_trips(tmp_path: Path) -> None:
    save(tmp_path / "model")
    config, weights = read_model(tmp_path / "model")
    assert config == {"format": FORMAT, "model": {"d_model": 2}, "parent": "runs/x"}
    assert weights.keys() == WEIGHTS.keys()
    for name, weight in weights.items():
        assert weight.dtype == WEIGHTS[name].dtype
        assert torch.equal(weight, WEIGHTS[name])
    assert {p.name for p in (tmp_path / "model").iterdir()} == {"model.safetensors", "config.json", "tokenizer.json", "manifest.json"}


def test_a_save_that_fails_keeps_the_model_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "model")
    monkeypatch.setenv("LM_FAILPOINT", "manifest:enospc")
    with pytest.raises(ResourceError):
        save(tmp_path / "model", 2.0)
    monkeypatch.delenv("LM_FAILPOINT")
    with pytest.raises(NumericsError, match="embed"):
        save(tmp_path / "model", float("nan"))
    assert torch.equal(read_model(tmp_path / "model")[1]["embed"], WEIGHTS["embed"])
    save(tmp_path / "model", 2.0)
    assert torch.equal(read_model(tmp_path / "model")[1]["embed"], 2 * WEIGHTS["embed"])


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "manifest.json"])
def test_a_damaged_model_folder_is_refused_and_named(name: str, tmp_path: Path) -> None:
    save(tmp_path / "model")
    path = tmp_path / "model" / name
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=name):
        read_model(tmp_path / "model")
    path.unlink()
    with pytest.raises(CheckpointError, match=name):
        read_model(tmp_path / "model")


def test_a_model_format_from_the_future_is_refused_by_number(tmp_path: Path) -> None:
    save_model(tmp_path / "model", {}, WEIGHTS, save_tokenizer, {"format": FORMAT + 1})
    with pytest.raises(CheckpointError, match=f"format is {FORMAT + 1}, but this version reads format {FORMAT}"):
        read_model(tmp_path / "model")


class Canary:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "epoch.ckpt", "x.pth", "x.pkl"])
def test_a_pickle_is_refused_by_name_and_never_run(name: str, tmp_path: Path) -> None:
    """Seen to fail with the refusal removed."""
    canary, folder = tmp_path / "canary", tmp_path / "model"
    folder.mkdir()
    (folder / name).write_bytes(pickle.dumps(Canary(canary)))
    (folder / "config.json").write_text(json.dumps({"format": 1, "model": {}}))
    with pytest.raises(CheckpointError, match=rf"{name}: a pickle"):
        read_model(resolve_model(str(folder)))
    with pytest.raises(CheckpointError, match=rf"{name}: a pickle"):
        resolve_model(str(folder / name))
    assert not canary.exists()


def test_a_path_resolves_to_a_model_a_run_or_a_checkpoint(tmp_path: Path) -> None:
    run = tmp_path / "run"
    save(run / "model")
    save_checkpoint(run / "checkpoints" / "step-00000001", [Piece.whole("embed", "weight", WEIGHTS["embed"])], {"step": 1})
    assert resolve_model(str(run)) == run / "model"
    assert resolve_model(str(run / "model")) == run / "model"
    (run / "config.yaml").write_text("{}")
    assert resolve_model(str(run / "checkpoints")) == run / "model"
    checkpoint = resolve_model(str(run / "checkpoints" / "step-00000001"))
    verify(checkpoint)
    meta, weights = read_model(checkpoint)
    assert meta["step"] == 1
    assert torch.equal(weights["embed"], WEIGHTS["embed"])


def test_other_paths_are_refused_with_what_was_found(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("{}")
    (tmp_path / "file").write_text("")
    for path, message in {"run": "no model/ yet", "file": "is a file", "nothing": "does not exist", ".": "no run or model folder"}.items():
        with pytest.raises(CheckpointError, match=message):
            resolve_model(str(tmp_path / path))


def test_a_folder_that_cannot_be_read_is_refused_as_such(public: Path) -> None:
    """Seen to fail: `runs/x/config.json: Permission denied. Free space, or write elsewhere.`"""
    save(public / "runs" / "x" / "model")
    for closed in (public / "runs" / "x", public / "runs"):
        closed.chmod(0)
        with (
            unprivileged(),
            pytest.raises(CheckpointError, match=rf"^{public}/runs/x: cannot be read \(Permission denied\)\. Check the path"),
        ):
            resolve_model(str(public / "runs" / "x"))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("runs/bsae", r"^runs/bsae: does not exist in {here}, but .* Did you mean runs/base\?$"),
        ("base", r"^base: does not exist in {here}, but .* Did you mean runs/base\?$"),
        ("elsewhere", r"^elsewhere: does not exist in {here}, but .* Give a folder that lm train or lm import wrote\.$"),
        ("Qwen/Qwen3-0.6B", r"needed\. Check the path, or import .* hub first: lm import from=Qwen/Qwen3-0\.6B out=models/Qwen3-0\.6B\.$"),
        ("models/elsewhere", r"^models/elsewhere: does not exist in {here}, but .* Give a folder that lm train or lm import wrote\.$"),
        ("run/base", r"^run/base: does not exist in {here}, but .* Did you mean runs/base\?$"),
        ("{here}/elsewhere", r"^{here}/elsewhere: does not exist, but"),
        ("runs", r"^runs: .* is no run or model folder\. Give one of the runs in it, such as runs/base\.$"),
        ("runs/base", r"^runs/base: the run has no model/ yet; .* newest checkpoint, runs/base/checkpoints/step-00000002\.$"),
        ("runs/base/checkpoints", r"^runs/base/checkpoints: the run has no model/ yet; .* runs/base/checkpoints/step-00000002\.$"),
        ("runs/base/checkpoints/step-00000002/meta.json", r"is a file, .* Give its folder, runs/base/checkpoints/step-00000002\.$"),
        ("runs/base/config.yaml", r"is a file, .* Give its folder, runs/base\.$"),
    ],
)
def test_a_path_beside_a_model_is_answered_with_the_way_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    run = RunFolder(Path("runs/base"))
    run.write_config({"seed": 0})
    for step in (1, 2):
        save_checkpoint(step_folder(run.checkpoints, step), [Piece.whole("embed", "weight", WEIGHTS["embed"])], {"step": step})
    with pytest.raises(CheckpointError, match=message.format(here=tmp_path)):
        resolve_model(path.format(here=tmp_path))


@pytest.mark.parametrize("name", ["config.json", "meta.json"])
def test_a_config_that_was_changed_is_refused_by_whoever_reads_it_alone(tmp_path: Path, name: str) -> None:
    """As `lm show` does, which reads no weights."""
    folder = tmp_path / "step-00000001"
    save(folder) if name == "config.json" else save_checkpoint(folder, [Piece.whole("embed", "weight", WEIGHTS["embed"])], {"step": 1})
    tree = json.loads((folder / name).read_text())
    assert read_config(folder) == tree
    (folder / name).write_text(json.dumps({**tree, "model": {"d_model": 8}}))
    with pytest.raises(CheckpointError, match=rf"{name}: the file is damaged: its SHA-256 is not the one in manifest.json"):
        read_config(folder)


def test_another_width_names_the_first_mismatches() -> None:
    saved, model = {"embed": (10, 8), "inner": (8, 8)}, {"embed": (10, 4), "inner": (4, 4)}
    with pytest.raises(CheckpointError, match=r"x: .* embed is 10x8 there and 10x4 in the model; inner is 8x8 there and 4x4"):
        require_same_shapes(model, saved, "x")


def test_at_most_five_of_many_mismatches_are_shown() -> None:
    shapes: dict[str, tuple[int, ...]] = {f"w{i}": (2,) for i in range(9)}
    with pytest.raises(CheckpointError, match=r"w2 is missing there and 2 in the model;.*w6 .*model \(5 of 7\)"):
        require_same_shapes(shapes, {"w0": (2,), "w1": (2,)}, "x")
    with pytest.raises(CheckpointError, match=r"w1 is 2 there and missing in the model"):
        require_same_shapes({"w0": (2,)}, {"w0": (2,), "w1": (2,)}, "x")
