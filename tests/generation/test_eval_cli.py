"""`lm eval` prints what `evaluate` finds."""

import json
from pathlib import Path

import numpy as np
import pytest
import yaml

import lm as library
from lm.data.kinds import TextConfig
from lm.data.rows.causal import CausalRows
from lm.data.store.prepare import prepare
from lm.generation.evaluate import Evaluation, Evaluator
from lm.storage.checkpoint import write_meta
from tests.conftest import Lm


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "notes.txt"
    path.write_text("".join(f"line {i}: {i * i} and {i % 7}\n" for i in range(120)))
    return path


@pytest.fixture
def where(model_folder: Path, text: Path, tmp_path: Path) -> list[str]:
    return [f"from={model_folder}", "data=text", f"data.files={text}", f"data.cache_dir={tmp_path / 'cache'}"]


def by_hand(folder: Path, text: Path, tmp_path: Path, seq_len: int, split: str = "val") -> Evaluation:
    model, tokenizer = library.load(folder, device="cpu")
    data = prepare(TextConfig(files=str(text), cache_dir=str(tmp_path / "cache")), tokenizer, log=lambda line: None)
    rows = CausalRows(data.val if split == "val" else data.train, tokenizer, seq_len, True)
    return Evaluator(model, tokenizer, 8).totals(rows, np.arange(len(rows))).figures()


def test_figures_are_those_of_evaluate_on_rows_of_the_whole_context(
    lm: Lm, where: list[str], model_folder: Path, text: Path, tmp_path: Path
) -> None:
    code, out, err = lm("eval", *where, "format=json", "micro_batch=3")
    found = json.loads(out)
    assert code == 0, err
    assert (
        found.pop("zlib_bits_per_byte") > 0.5 and found.pop("reliability") and found.pop("loss_by_place") and 0 < found.pop("val_ece") < 1
    )
    assert found == pytest.approx(by_hand(model_folder, text, tmp_path, 48), rel=1e-5)


def test_table_shows_every_figure(lm: Lm, where: list[str]) -> None:
    found = json.loads(lm("eval", *where, "format=json")[1])
    out = lm("eval", *where)[1]
    del found["reliability"]
    places = {str(each["from"]): each["loss"] for each in found.pop("loss_by_place")}
    for name, value in (found | places).items():
        line = next(line for line in out.splitlines() if line.startswith((f"{name} ", f"{name}-")))
        assert float(line.split()[1].replace(",", "")) == pytest.approx(value, abs=5e-5)


def test_all_is_training_and_validation_part_together(lm: Lm, where: list[str], model_folder: Path, text: Path, tmp_path: Path) -> None:
    found = json.loads(lm("eval", *where, "split=all", "format=json", "data.seq_len=20")[1])
    parts = [by_hand(model_folder, text, tmp_path, 20, split) for split in ("train", "val")]
    tokens = sum(part["tokens"] for part in parts)
    assert (found["tokens"], found["bytes"]) == (tokens, sum(part["bytes"] for part in parts))
    assert found["val_loss"] == pytest.approx(sum(part["val_loss"] * part["tokens"] for part in parts) / tokens, rel=1e-5)


def test_run_is_evaluated_on_its_own_data_unless_told_otherwise(lm: Lm, model_folder: Path, text: Path, tmp_path: Path) -> None:
    data = TextConfig(files=str(text), cache_dir=str(tmp_path / "cache"), seq_len=16)
    (model_folder.parent / "config.yaml").write_text(yaml.safe_dump({"data": data.tree()}))
    expected = by_hand(model_folder, text, tmp_path, 16)
    for folder in (model_folder, model_folder.parent):
        found = json.loads(lm("eval", f"from={folder}", "format=json")[1])
        assert found["tokens"] == expected["tokens"]
        assert found["val_loss"] == pytest.approx(expected["val_loss"], rel=1e-5)
    where = (f"from={model_folder}", "data=text", f"data.files={text}", f"data.cache_dir={tmp_path / 'cache'}", "format=json")
    assert json.loads(lm("eval", *where)[1])["val_loss"] == pytest.approx(expected["val_loss"], rel=1e-5)  # in rows of the run, too
    assert json.loads(lm("eval", *where, "data.seq_len=48")[1])["val_loss"] != pytest.approx(expected["val_loss"], rel=1e-3)


def test_a_stranger_s_run_puts_no_file_of_ours_at_its_url(lm: Lm, model_folder: Path, text: Path, tmp_path: Path) -> None:
    """Its config names both, and its tokenizer reads the tokens. Seen to fail: they were there."""
    url = f"file://{tmp_path}/theirs"
    data = TextConfig(files=str(text), cache_dir=str(tmp_path / "cache"), seq_len=16, remote=url)
    (model_folder.parent / "config.yaml").write_text(yaml.safe_dump({"data": data.tree()}))
    code, _, err = lm("eval", f"from={model_folder}")
    said: list[str] = []
    library.evaluate(model_folder, log=said.append)
    assert code == 0 and not (tmp_path / "theirs").exists()
    assert all(f"data.remote={url} of the run is left aside" in each for each in (err, said[0]))
    code, _, err = lm("eval", f"from={model_folder}", f"data.remote={url}")
    assert code == 0 and "left aside" not in err
    assert [*(tmp_path / "theirs").rglob("val-00000.bin")]


def test_files_that_have_changed_since_the_run_read_them_are_named(lm: Lm, model_folder: Path, text: Path, tmp_path: Path) -> None:
    data = TextConfig(files=str(text), cache_dir=str(tmp_path / "cache"), seq_len=16)
    run = model_folder.parent
    (run / "config.yaml").write_text(yaml.safe_dump({"data": data.tree()}))
    checkpoint = run / "checkpoints" / "step-00000001"
    checkpoint.mkdir(parents=True)
    write_meta(checkpoint, {"files": prepare(data, library.load(model_folder)[1], log=lambda line: None).files})
    assert "changed" not in lm("eval", f"from={run}")[2]
    text.write_text(text.read_text() + "one more line\n")
    said = "notes.txt has changed since the run read it, so these figures are not of what it validated on."
    assert said in lm("eval", f"from={run}")[2] and said in lm("eval", f"from={run}", "data.seq_len=32")[2]
    assert "changed" not in lm("eval", f"from={run}", "data=text", f"data.files={text}")[2]
    (checkpoint / "meta.json").write_text("{")
    assert lm("eval", f"from={run}")[0] == 0


MISTAKES = {
    "no data": (["from={m}"], 2, ["data", "data=text"]),
    "unknown kind": (["from={m}", "data=txt"], 2, ["'txt' is not an option", "Did you mean 'text'?"]),
    "misspelt data key": (["from={m}", "data=text", "data.file=a.txt"], 2, ["data.file", "Did you mean 'data.files'?"]),
    "files missing": (["from={m}", "data=text"], 2, ["data.files", "missing"]),
    "no such file": (["from={m}", "data=text", "data.files=nowhere.txt"], 2, ["nowhere.txt"]),
    "key of training": (["from={m}", "data=stdlib", "optim.lr=1"], 2, ["optim.lr", "no such key"]),
    "rows longer than the context": (["from={m}", "data=stdlib", "data.seq_len=49"], 2, ["data.seq_len=49", "model.max_seq_len=48"]),
    "unknown part": (["from={m}", "data=stdlib", "split=tst"], 2, ["split: 'tst' is not an option"]),
    "no such part": (["from={m}", "data=stdlib", "split=test"], 2, ["split=test: nothing is set aside", "data.test_frac"]),
    "no model": (["data=stdlib"], 2, ["from", "lm eval from=runs/NAME"]),
    "no such model": (["from=nowhere", "data=stdlib"], 3, ["nowhere: does not exist"]),
}


@pytest.mark.parametrize("args, exit_code, parts", MISTAKES.values(), ids=MISTAKES.keys())
def test_mistake_is_answered_with_one_sentence(lm: Lm, model_folder: Path, args: list[str], exit_code: int, parts: list[str]) -> None:
    code, out, err = lm("eval", *(arg.format(m=model_folder) for arg in args))
    assert (code, out) == (exit_code, "")
    assert "Traceback" not in err
    assert all(part in err.splitlines()[-1] for part in parts), err


def test_a_run_whose_config_names_another_seed_alone_has_that_of_data_at_0(lm: Lm, model_folder: Path, text: Path) -> None:
    """Seen to end with a KeyError."""
    data = f"data: {{kind: text, files: {text}, seq_len: 24, val_frac: 0.5, cache_dir: {model_folder.parent / 'cache'}}}\n"
    told = []
    for seed in ("{init: 3}", "0"):
        (model_folder.parent / "config.yaml").write_text(f"{data}seed: {seed}\n")
        code, out, err = lm("eval", f"from={model_folder.parent}", "format=json")
        assert code == 0, err
        told.append(out)
    assert told[0] == told[1]


def test_damaged_config_of_a_run_is_named(lm: Lm, model_folder: Path) -> None:
    (model_folder.parent / "config.yaml").write_text("data: {kind: text}")
    code, _, err = lm("eval", f"from={model_folder.parent}")
    assert code == 3
    assert "config.yaml" in err
    assert "data.files" in err


@pytest.mark.parametrize("split", ["val", "all"])
def test_a_mixture_is_told_by_source_as_each_is_alone(split: str, lm: Lm, where: list[str], text: Path, tmp_path: Path) -> None:
    """Seen to fail: a training's validation alone told val_loss/NAME."""
    (tmp_path / "codes.txt").write_text("".join(f"{i * 7919 % 1000} " for i in range(300)))
    files = {"notes": text, "codes": tmp_path / "codes.txt"}
    sources = ",".join(f"{{name:{name},data:{{kind:text,files:{file},val_files:{file}}}}}" for name, file in files.items())
    common = [
        *(arg for arg in where if "files" not in arg and arg != "data=text"),
        f"split={split}",
        "format=json",
        "data.max_contamination=1",
    ]
    code, out, err = lm("eval", *common, "data=mix", f"data.sources=[{sources}]")
    assert code == 0, err
    found = json.loads(out)
    for name in ("notes", "codes"):
        code, out, err = lm("eval", *common, "data=text", f"data.files={files[name]}", f"data.val_files={files[name]}")
        assert code == 0, err
        assert found[f"val_loss/{name}"] == pytest.approx(json.loads(out)["val_loss"], rel=1e-6)
