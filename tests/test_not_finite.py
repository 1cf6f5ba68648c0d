"""Weights and losses that are not finite end with exit code 4, wherever they are read or written, and write nothing."""

import json
import shutil
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from lm.cli.main import main
from lm.data.kinds import BytesConfig
from lm.storage.checkpoint import Piece
from lm.storage.manifest import MANIFEST
from lm.storage.model_folder import save_model
from tests.nn.models import config, redrawn
from tests.runs import save_checkpoint
from tests.training.conftest import TINY, settled, write_text

Call = Callable[..., tuple[int, str, str]]
DATA = ("data=text", "data.files=text.txt", "data.seq_len=16", "data.cache_dir=cache")


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in each form that is read."""
    folder = tmp_path_factory.mktemp("sound")
    write_text(folder / "text.txt")
    model, tokenizer = redrawn(config(vocab_size=320, max_seq_len=64)), BytesConfig().build()
    weights = {name: p.detach() for name, p in model.named_parameters()}
    save_model(folder / "model", model.cfg.tree(), weights, tokenizer.save, {})
    pieces = [Piece.whole(name, "weight", weight) for name, weight in weights.items()]
    save_checkpoint(folder / "checkpoint", pieces, {"model": model.cfg.tree(), "step": 1}, tokenizer.save)
    assert main(["export", "format=hf", "check=false", f"from={folder / 'model'}", f"out={folder / 'hf'}"]) == 0
    return folder


def poison(folder: Path, value: float) -> None:
    """One number of one weight is another, and the manifest agrees."""
    (file,) = [*folder.glob("model.safetensors"), *folder.glob("*.weights.safetensors")]
    weights = load_file(file)
    next(iter(weights.values())).view(-1)[3] = value
    save_file(weights, file, metadata={"format": "pt"})
    listed = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps({name: sha256((folder / name).read_bytes()).hexdigest() for name in listed}))


READERS = {
    "generate": ("generate", "prompt=a", "max_tokens=2"),
    "eval": ("eval", *DATA),
    "export": ("export", "format=hf", "check=false", "out=new"),
    "export in half precision": ("export", "format=hf", "check=false", "dtype=bf16", "out=new"),
    "import": ("import", "out=new"),
    "init_from": ("train", *DATA, "trainer=cpu", "schedule.warmup_steps=0", "trainer.max_steps=1", "run.dir=new"),
}


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
@pytest.mark.parametrize("verb", READERS)
def test_a_weight_that_is_not_finite_is_refused_by_whoever_reads_it(verb: str, value: float, sound: Path, tmp_path: Path, lm: Call) -> None:
    """Seen to fail: `lm eval` printed nan with exit code 0, and `lm export check=false` wrote it."""
    shutil.copytree(sound, tmp_path, dirs_exist_ok=True)
    for folder in ("hf",) if verb == "import" else ("model", "checkpoint"):
        poison(tmp_path / folder, value)
        name, *rest = READERS[verb]
        code, out, err = lm(name, f"init_from={folder}" if name == "train" else f"from={folder}", *rest)
        assert code == 4 and (verb == "init_from" or not out), err
        last = err.splitlines()[-1]
        assert last.startswith(str(folder)) and "holds NaN or infinity" in last
        assert not [*(tmp_path / "new").rglob("*.safetensors")]


def test_an_export_whose_type_is_too_small_says_so_and_writes_nothing(sound: Path, tmp_path: Path, lm: Call) -> None:
    shutil.copytree(sound, tmp_path, dirs_exist_ok=True)
    poison(tmp_path / "model", 1e5)
    for check in ("true", "false"):
        code, _, err = lm("export", "format=hf", f"check={check}", "dtype=fp16", "from=model", "out=new")
        assert code == 4
        assert err.splitlines()[-1].startswith("export in float16: the weight ") and "dtype=bf16 or fp32" in err
        assert not (tmp_path / "new").exists()
    assert lm("export", "format=hf", "check=false", "dtype=bf16", "from=model", "out=new")[0] == 0


@pytest.mark.parametrize("verb", ["eval", "generate"])
def test_finite_weights_whose_logits_are_not_are_told(verb: str, sound: Path, tmp_path: Path, lm: Call) -> None:
    shutil.copytree(sound, tmp_path, dirs_exist_ok=True)
    weights = load_file(tmp_path / "model/model.safetensors")
    model = redrawn(config(vocab_size=320, max_seq_len=64))
    huge = {name: weight.sign() * 1e15 for name, weight in weights.items()}
    save_model(tmp_path / "model", model.cfg.tree(), huge, BytesConfig().build().save, {})
    code, out, err = lm(*READERS[verb], "from=model")
    assert (code, out.strip("a\n")) == (4, ""), err
    assert err.splitlines()[-1].startswith(f"{verb}: ")


@pytest.mark.parametrize("steps", [1, 3])
def test_a_diverged_run_names_the_loss_and_the_step_and_not_the_sampler(steps: int, tmp_path: Path, lm: Call) -> None:
    """The first step takes all weights to infinity. Seen to fail with samples before the validation."""
    text = write_text(tmp_path / "text.txt")
    args = settled(
        *(
            "train",
            *TINY,
            f"data.files={text}",
            "run.dir=runs",
            "data.cache_dir=cache",
            "optim=sgd",
            "optim.lr=1e38",
            "optim.weight_decay=1e38",
        ),
        *("schedule.warmup_steps=0", f"trainer.max_steps={steps}", "trainer.val_every=1", "trainer.sample_prompts=[a]"),
    )
    code, _, err = lm(*args)
    assert code == 4
    assert err.splitlines()[-1].startswith("train: val_loss is nan after step 1, and the weights are not saved")
    lines = (tmp_path / "runs/run/metrics.jsonl").read_text()
    assert "NaN" not in lines and json.loads(lines.splitlines()[-1]) == {"step": 1, "event": "not finite", "of": "val_loss"}
    assert f"diverged at step 1 of {steps}" in lm("runs", "runs")[1]
