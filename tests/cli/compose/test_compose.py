"""How files and overrides become one config."""

from pathlib import Path

import pytest
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from omegaconf import OmegaConf

from lm.cli.compose import catalog
from lm.cli.compose.choices import _hydra_choices, choices_of
from lm.cli.compose.compose import compose, compose_config
from lm.errors import ConfigError
from lm.nn.ffn.moe import MoEConfig
from lm.nn.ffn.router import SigmoidRouterConfig
from lm.nn.position.rope import RopeConfig
from lm.nn.position.scaling import YarnScaling
from lm.schema import flatten
from lm.training.run_config import CheckpointConfig

CHOICES = [*map("recipes={}".format, catalog.groups()["recipes"]), *map("model={}".format, catalog.groups()["model"])]


@pytest.mark.parametrize("choice", [pytest.param([each], marks=[pytest.mark.slow] * bool(n % 8)) for n, each in enumerate(CHOICES)])
def test_without_a_switched_option_the_values_are_those_that_hydra_composes(default_run: Path, tmp_path: Path, choice: list[str]) -> None:
    (tmp_path / "conf").symlink_to(catalog.root() / "conf")  # under another name, it is Hydra that reads the files
    overrides = [f"hydra.searchpath=['file://{catalog.root()}']", *choice]
    with initialize_config_dir(config_dir=str(tmp_path / "conf"), version_base="1.3"):
        theirs = OmegaConf.to_container(hydra_compose("train", overrides))
    ours = flatten(compose(choice).tree)
    assert isinstance(theirs, dict)
    added, beside = {"run.name"}, {"study"}
    if theirs.get("init_from") is not None:
        beside |= {"model", "tokenizer", "optim", "schedule"}  # the checkpoint's, and gentler ones
        added |= {path for path in ours if path.split(".")[0] in beside}
    theirs = {key: value for key, value in theirs.items() if key not in beside}
    assert {path: value for path, value in ours.items() if path not in added} == flatten({str(key): value for key, value in theirs.items()})


def test_command_line_wins_over_recipe_over_preset_over_option() -> None:
    composition = compose(["recipes=pretrain/tiny", "optim.lr=3", "data.seq_len=64", "model.attention.n_kv_heads=1"])
    config = composition.config()
    assert (config.optim.lr, config.data.seq_len, config.model.attention.n_kv_heads) == (3, 64, 1)
    assert [layer.label for layer, _ in composition.stated("data.seq_len")] == ["recipe", "command line"]
    assert [layer.label for layer, _ in composition.stated("model.attention.n_kv_heads")] == ["preset", "command line"]


def test_a_plus_sets_a_key_like_none_and_a_tilde_gives_the_class_default() -> None:
    assert compose(["+trainer.ema_decay=0.9"]).config() == compose(["++trainer.ema_decay=0.9"]).config()
    assert compose(["trainer.ema_decay=0.9"]).config().trainer.ema_decay == 0.9
    assert compose(["~schedule.warmup_steps"]).config().schedule.warmup_steps == 0


def test_switched_slot_drops_what_its_kind_lacks_and_says_so() -> None:
    composition = compose(["model=llama_tiny", "model/position=learned"])
    assert composition.config().model.position.tree() == {"kind": "learned"}
    assert len(composition.notes) == 1
    assert "model/position=learned" in composition.notes[0]
    assert "model.position.theta=500000.0" in composition.notes[0]


def test_switched_option_wins_over_what_a_recipe_said_for_another_and_keeps_the_rest() -> None:
    composition = compose(["recipes=pretrain/gpt2_124m", "optim=muon", "schedule=constant"])
    config = composition.config()
    assert config.optim.lr == catalog.values("optim", "muon")["optim.lr"]  # not the recipe's learning rate for AdamW
    assert config.schedule.warmup_steps == catalog.values("recipes", "pretrain/gpt2_124m")["schedule.warmup_steps"]
    assert any("optim.lr" in note for note in composition.notes)
    assert any("schedule.final_frac" in note for note in composition.notes)


def test_null_chooses_none_where_a_section_may_be_without() -> None:
    """Seen to fail: it was no option of adapter, so that no study could compare one with training all weights, and as debug=null no file
    composed. Without the last lines a section stayed whose kind a preset says by value."""
    found = compose(["recipes=finetune/lora_tiny", "init_from=null", "data.files=x.txt", "adapter=null"])
    assert "adapter" not in found.tree and found.config().adapter is None
    assert compose(["debug=null"]).choices == compose([]).choices
    given = ["model=mamba2_130m", "model/recurrent=null"]
    with pytest.raises(ConfigError, match="names recurrent layers, and recurrent is null"):
        compose(given).config()
    assert compose([*given, "model.pattern=[attention]"]).config().model.tree()["recurrent"] is None
    with pytest.raises(ConfigError, match=r"adapter: 'none' is not an option\. .*null"):
        compose(["adapter=none"])


def test_option_that_the_recipe_chose_itself_changes_nothing() -> None:
    assert compose(["recipes=pretrain/gpt2_124m", "optim=adamw"]).config().optim == compose(["recipes=pretrain/gpt2_124m"]).config().optim


def test_switched_attention_keeps_the_preset_sizes_and_its_own_definition() -> None:
    attention = compose(["model/attention=mqa"]).config().model.attention
    assert (attention.n_heads, attention.n_kv_heads, attention.qk_norm) == (4, 1, "head")
    assert compose(["model/attention=mha"]).config().model.attention.n_kv_heads is None


def test_debug_wins_over_the_recipe_and_loses_to_the_command_line() -> None:
    assert compose(["debug=fast"]).config().trainer.max_steps == catalog.values("debug", "fast")["trainer.max_steps"]
    assert compose(["debug=fast", "trainer.max_steps=6"]).config().trainer.max_steps == 6


def test_text_fields_take_numbers_as_typed() -> None:
    config = compose(["run.name=001", "run.dir=12"]).config()
    assert (config.run.name, config.run.dir) == ("001", "12")


def test_a_section_may_be_given_as_a_dict() -> None:
    assert compose(["checkpoint={every: 7, keep_last: 3}"]).config().checkpoint == CheckpointConfig(every=7, keep_last=3)


@pytest.fixture
def own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of conf/ and recipes/ that a test may spoil."""
    for file in [*(catalog.root() / "conf").rglob("*.yaml"), *(catalog.root() / "recipes").rglob("*.yaml")]:
        copy = tmp_path / file.relative_to(catalog.root())
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(file.read_bytes())
    monkeypatch.setattr(catalog, "root", lambda: tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("file", "line", "expected"),
    [
        ("recipes/pretrain/tiny.yaml", "optimm: {lr: 1}", ["optimm: there is no such key", "Did you mean 'optim'?"]),
        ("conf/optim/muon.yaml", "momentun: 0.9", ["optim.momentun: there is no such key", "Did you mean 'momentum'?"]),
        ("conf/model/tiny.yaml", "n_layer: 2", ["model.n_layer: there is no such key", "Did you mean 'model.n_layers'?"]),
        ("conf/optim/muon.yaml", "eps: small", ["optim.eps: 'small' does not fit", "number"]),
        ("conf/optim/muon.yaml", "eps: .nan", ["optim.eps: NaN does not fit", "finite"]),
        ("conf/optim/muon.yaml", "eps: [", ["not readable yaml"]),
        ("conf/optim/muon.yaml", "eps: !!python/object/apply:os.system [id]", ["not readable yaml"]),
    ],
)
def test_mistake_in_a_file_is_told_with_the_file(own_files: Path, file: str, line: str, expected: list[str]) -> None:
    with (own_files / file).open("a") as out:
        out.write(f"{line}\n")
    with pytest.raises(ConfigError) as error:
        compose([]).config()
    for part in [file, *expected]:
        assert part in str(error.value)
    assert "\n" not in str(error.value)


def test_files_are_found_from_a_folder_with_an_awkward_name(own_files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    awkward = own_files.with_name("it's, a = [folder]")
    own_files.rename(awkward)
    monkeypatch.setattr(catalog, "root", lambda: awkward)
    assert compose(["recipes=ablation/ffn"]).config().run.name == "ablation-ffn"
    awkward.rename(own_files)


def test_a_file_cannot_name_code_to_run(own_files: Path) -> None:
    with (own_files / "conf/optim/muon.yaml").open("a") as out:
        out.write("_target_: os.system\n")
    with pytest.raises(ConfigError, match=r"optim\._target_: there is no such key"):
        compose([]).config()


@pytest.mark.parametrize(
    "given",
    [
        ["model.position.scaling.factor=8", "model.position.scaling.original_len=64", "model.position.scaling.kind=yarn"],
        ["model.position.scaling={kind: yarn, factor: 8, original_len: 64}"],
        ["model/position=rope_llama3", "model.position.scaling.kind=yarn", "+model.position.scaling={factor: 8, original_len: 64}"],
        ["model/position=rope_yarn", "model.position.scaling.factor=8", "model.position.scaling.original_len=64"],
    ],
)
def test_a_section_whose_kind_no_group_chooses_is_set_by_keys(given: list[str]) -> None:
    position = compose(given).config().model.position
    assert isinstance(position, RopeConfig)
    assert isinstance(position.scaling, YarnScaling)
    assert (position.scaling.factor, position.scaling.original_len) == (8.0, 64)


def test_another_kind_of_a_nested_section_starts_afresh() -> None:
    ffn = compose(["model=gpt_oss_20b", "model.ffn.router.kind=sigmoid", "model.ffn.expert.hidden=64"]).config().model.ffn
    assert isinstance(ffn, MoEConfig)
    assert ffn.router == SigmoidRouterConfig()  # router.bias, which the preset sets, is another kind's
    assert ffn.expert.hidden == 64


def test_choices_are_those_of_hydra_told_all_of_them() -> None:
    for group, options in list(catalog.groups().items())[::4]:
        asked = {"recipes": "pretrain/moe_tiny", "model": "t5_tiny", "optim": "sgd"} | {group: options[-1]}
        told = tuple((each, f"{option}") for each, option in asked.items())
        assert list(choices_of(asked).items()) == list(_hydra_choices(catalog.root(), catalog.own(), told).items())


def test_a_packing_that_is_said_is_that_which_is_not_where_it_is_the_objectives_own() -> None:
    """Seen to fail: two runs of the same rows had two fingerprints, and `lm compare` said that they read different data."""
    assert compose_config(["data.packing=split"]).data == compose_config([]).data
    assert compose_config(["data.packing=fit"]).data.packing == "fit"
    plain = compose_config([])
    assert plain.replace(data=plain.data.replace(packing="split")) == plain
