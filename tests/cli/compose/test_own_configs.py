"""`--config-dir`: options of the user's own beside those of conf/ and recipes/."""

from pathlib import Path

import pytest

from lm.cli.compose import catalog
from tests.conftest import Lm

RECIPE = """\
# @package _global_
# A recipe of mine
defaults:
  - override /model: mine
  - override /tokenizer: bytes
trainer:
  max_steps: 7
"""
PRESET = """\
# A model of mine
defaults:
  - nano
  - override ffn: relu2
n_layers: 3
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a recipe and a model; forgotten after the test."""
    monkeypatch.setenv(catalog.OWN, "")
    monkeypatch.delenv(catalog.OWN)
    for name, text in (("recipes/trial/mine", RECIPE), ("model/mine", PRESET)):
        file = tmp_path / "it's mine" / f"{name}.yaml"
        file.parent.mkdir(parents=True)
        file.write_text(text)
    return tmp_path / "it's mine"


@pytest.mark.parametrize("spelling", [["--config-dir", "it's mine"], ["--config-dir=it's mine"], ["-cd", "it's mine"]])
def test_a_recipe_and_a_model_of_ones_own_are_options_like_others(own: Path, lm: Lm, spelling: list[str]) -> None:
    code, out, err = lm("train", *spelling, "recipes=trial/mine", "--cfg", "job")
    assert code == 0, err
    assert "n_layers: 3" in out and "activation: relu2" in out and "max_steps: 7" in out and "name: trial-mine" in out
    assert "recipes=trial/mine" in lm("train", "--help")[1]
    said = lm("explain", "recipes=trial/mine", "model.n_layers")[1]
    assert "it's mine/model/mine.yaml" in said


def test_a_recipe_whose_name_has_spaces_is_one_too_and_its_study_gets_a_folder(own: Path, lm: Lm) -> None:
    study = "study:\n  variants:\n    one: [model.n_layers=1]\n    three: []\n"
    (own / "recipes/two words.yaml").write_text(RECIPE + study)
    code, out, err = lm("train", "--config-dir", str(own), "recipes=two words", "--cfg", "job")
    assert code == 0 and "max_steps: 7" in out and "name: two-words" in out, err
    code, out, err = lm("ablate", "plan", "--config-dir", str(own), "study=two words")
    assert code == 0 and "2 variants" in out, err
    assert "runs/studies/two-words: there is no study here" in lm("ablate", "report", "--config-dir", str(own), "study=two words")[2]


def test_the_variable_does_what_the_flag_does(own: Path, lm: Lm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(catalog.OWN, str(own))
    assert "n_layers: 3" in lm("train", "model=mine", "--cfg", "job")[1]
    monkeypatch.setenv(catalog.OWN, "nowhere")
    assert lm("train", "--cfg", "job")[2].startswith("LM_CONFIG_DIR=nowhere: it must hold")
    monkeypatch.setenv(catalog.OWN, "")
    assert lm("train", "--cfg", "job")[0] == 0


@pytest.mark.slow
def test_jobs_of_a_sweep_and_the_line_that_resumes_know_the_folder(own: Path, lm: Lm) -> None:
    tiny = ["model.d_model=32", "model.attention.n_heads=2", "data.seq_len=32", "data.val_rows=8", "trainer.sample_prompts=[]"]
    (own.parent / "a.txt").write_text("some words and then some others again\n" * 300)
    sweep = ["recipes=trial/mine", *tiny, "data=text", "data.files=a.txt", "seed=0,1", "schedule.warmup_steps=1", "-m"]
    code, _, err = lm("train", "--config-dir", str(own), *sweep)
    assert code == 0, err
    assert len(list((own.parent / "runs").glob("*/summary.json"))) == 2
    assert catalog.flags() == ["--config-dir", str(own)]


@pytest.mark.parametrize("verb", ["train", "show", "explain"])
def test_a_folder_that_adds_nothing_is_refused(own: Path, lm: Lm, verb: str) -> None:
    for folder in ("nowhere", str(own / "model"), ""):
        code, _, err = lm(verb, "--config-dir", folder)
        assert code == 2 and err.splitlines()[-1].startswith(f"--config-dir={folder}: it must hold yaml files in folders")


@pytest.mark.parametrize(
    "given, remedy",
    [
        ("my/recipes/a/b.yaml", "To use a file of yours, write --config-dir my recipes=a/b."),
        ("recipes=recipes/b.yaml", "To use a file of yours, write --config-dir . recipes=b."),
        ("model/ffn=my/model/ffn/wide.yaml", "To use a file of yours, write --config-dir my model/ffn=wide."),
        ("config=runs/a/config.yaml", "put it into FOLDER/recipes/, named .yaml, and write --config-dir FOLDER recipes=config."),
        ("recipes=mine.yml", "put it into FOLDER/recipes/, named .yaml, and write --config-dir FOLDER recipes=mine."),
        ("recipes=pretrain/tiny.yaml", "Write recipes=pretrain/tiny."),
        ("recipes/pretrain/tiny.yaml", "Write recipes=pretrain/tiny."),
    ],
)
def test_the_path_of_a_yaml_file_is_answered_with_how_to_choose_it(lm: Lm, given: str, remedy: str) -> None:
    code, _, err = lm("train", given)
    assert code == 2 and err.splitlines()[-1].endswith(remedy)


def test_many_options_are_listed_in_order(lm: Lm) -> None:
    names = lm("train", "recipes=zzz")[2].partition("Options: ")[2].rstrip(".\n").split(", ")
    assert names == sorted(catalog.groups()["recipes"])


@pytest.mark.parametrize(
    "line, sentence",
    [
        ("/schedule: cosine", "'/schedule: cosine' does not replace the option of schedule. Write '- override /schedule: cosine'."),
        (
            "override /logger: [wandb, csv]",
            "override /logger needs one option. For two loggers write '- override /logger: several', and below",
        ),
        ("schedule: cosine", "'schedule: cosine' does not replace the option of schedule. Write '- override /schedule: cosine'."),
        ("override schedule: cosine", "Write '- override /schedule: cosine'."),
        ("override /schedule: cosinne", "schedule: 'cosinne' is not an option. Did you mean 'cosine'?"),
        ("override /optim: adamw\n  - override /optim: sgd", "optim is chosen twice. Leave one out."),
        ("/recipes/pretrain/tiny", "'/recipes/pretrain/tiny' is not an option of recipes. Did you mean 'pretrain/tiny'?"),
    ],
)
def test_a_line_of_defaults_that_does_not_compose_is_told_with_its_file(own: Path, lm: Lm, line: str, sentence: str) -> None:
    (own / "recipes" / "bare.yaml").write_text(f"# @package _global_\ndefaults:\n  - {line}\n")
    code, _, err = lm("train", "--config-dir", str(own), "recipes=bare", "--cfg", "job")
    assert code == 2 and err.startswith("it's mine/recipes/bare.yaml: defaults: ") and sentence in err


def test_a_folder_that_is_no_group_does_no_harm(own: Path, lm: Lm) -> None:
    """As experiment/ of a Hydra project. Seen: an internal error, where a line of defaults did not compose."""
    (own / "experiment").mkdir()
    (own / "experiment" / "x.yaml").write_text("seed: 1\n")
    (own / "recipes" / "two.yaml").write_text("defaults:\n  - /model: nano\n")
    assert "Write '- override /model: nano'." in lm("train", "--config-dir", str(own), "recipes=two")[2].splitlines()[-1]


def test_two_loggers_of_a_recipe_of_ones_own(own: Path, lm: Lm) -> None:
    """As the message on a list of them says."""
    chosen = "defaults: [override /model: nano, override /logger: several]\nlogger: {each: {wandb: {}, csv: {}}}\ntrainer: {max_steps: 3}\n"
    (own / "recipes" / "two.yaml").write_text(chosen)
    code, out, err = lm("train", "--config-dir", str(own), "recipes=two", "--cfg", "job")
    assert code == 0 and "    wandb:\n      kind: wandb\n" in out and "    csv:\n      kind: csv\n" in out, err


@pytest.mark.parametrize(
    "line, sentence",
    [
        ("optim: adamw", "optim: adamw was given as a value, and the option of a section is chosen under defaults."),
        ("optim: {kind: adamw, lr: 1}", "optim.kind: adamw was given as a value, and the option of a section is chosen under defaults."),
        ("optim: {kind: muon, lrr: 1}", "optim.lrr: there is no such key in kind 'muon'. Did you mean 'lr'?"),
        ("optim:", "Write '- override /optim: OPTION' there."),
        ("model: {ffn: swiglu}", "Write '- override /model/ffn: swiglu' there."),
        ("trainer: gpu", "Write '- override /trainer: gpu' there."),
        ("run: mine", "run: mine was given for a section. Set one of its keys, as run.x."),
        ("metrics: 3", "metrics: 3 does not fit. The value must be an object."),
        ("recipes: pretrain/tiny", "recipes: this chooses a file, and has no keys. Write recipes=NAME on the command line."),
    ],
)
def test_an_option_that_is_written_as_a_value_is_told_with_its_file(own: Path, lm: Lm, line: str, sentence: str) -> None:
    (own / "recipes" / "bare.yaml").write_text(f"{line}\n")
    code, _, err = lm("train", "--config-dir", str(own), "recipes=bare", "trainer.max_steps=3", "--cfg", "job")
    assert code == 2 and err.startswith("it's mine/recipes/bare.yaml: ") and sentence in err, err


def test_a_name_in_a_file_of_ones_own_is_not_left_out_in_silence(own: Path, lm: Lm) -> None:
    (own / "recipes" / "bare.yaml").write_text("run: {name: yours, dir: there}\ntrainer: {max_steps: 7}\n")
    code, out, err = lm("train", "--config-dir", str(own), "recipes=bare", "--cfg", "job")
    assert code == 0 and "name: bare\n" in out and "dir: there\n" in out
    assert err == "run.name: left out yours (it's mine/recipes/bare.yaml); runs are named after what they do\n"
    assert lm("train", "--config-dir", str(own), "recipes=bare", "run.name=mine", "--cfg", "job")[2] == ""


def test_a_slot_of_a_preset_of_ones_own_that_overrides_nothing_is_told(own: Path, lm: Lm) -> None:
    (own / "model" / "mine.yaml").write_text(PRESET.replace("override ", ""))
    err = lm("train", "--config-dir", str(own), "model=mine", "--cfg", "job")[2]
    assert err.startswith("it's mine/model/mine.yaml: defaults: 'ffn: relu2'") and "Write '- override ffn: relu2'." in err


def test_an_option_that_lm_has_is_not_replaced_in_silence(own: Path, lm: Lm) -> None:
    (own / "model" / "tiny.yaml").write_text(PRESET)
    code, _, err = lm("train", "--config-dir", str(own), "--cfg", "job")
    assert (code, err) == (2, "it's mine/model/tiny.yaml: lm has an option model=tiny of its own. Rename yours.\n")


def test_a_mistake_in_a_file_of_ones_own_is_told_with_the_file(own: Path, lm: Lm) -> None:
    (own / "model" / "mine.yaml").write_text(PRESET.replace("n_layers", "n_layer"))
    code, _, err = lm("train", "--config-dir", str(own), "model=mine", "--cfg", "job")
    assert code == 2 and err.startswith("it's mine/model/mine.yaml: model.n_layer: there is no such key")


@pytest.mark.parametrize("text", ["defaults: [geglu]\nbias: true", "defaults: [geglu, _self_]\nkind: mlp\nbias: true"])
def test_an_option_of_ones_own_inherits_from_another_of_its_group(own: Path, lm: Lm, text: str) -> None:
    (own / "model/ffn").mkdir()
    (own / "model/ffn/biased.yaml").write_text(text)
    code, out, err = lm("train", "--config-dir", str(own), "model=nano", "model/ffn=biased", "--cfg", "job")
    assert code == 0, err
    assert "activation: gelu\n" in out and "gated: true" in out and "bias: true" in out
    said = lm("explain", "--config-dir", str(own), "model=nano", "model/ffn=biased", "model.ffn.activation")[1]
    assert "conf/model/ffn/geglu.yaml" in said


def test_an_empty_section_of_a_recipe_changes_nothing(own: Path, lm: Lm) -> None:
    (own / "recipes/empty.yaml").write_text("# @package _global_\ntokenizer: {}\noptim: {}\ntrainer: {max_steps: 7}\n")
    code, out, err = lm("train", "--config-dir", str(own), "recipes=empty", "tokenizer.vocab_size=999", "optim.lr=0.5", "--cfg", "job")
    assert code == 0, err
    assert "vocab_size: 999" in out and "lr: 0.5" in out
