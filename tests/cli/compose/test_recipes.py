"""What every shipped preset and recipe keeps to."""

import json
import re
import shlex
from pathlib import Path

import pytest

from lm.cli.compose import catalog
from lm.cli.compose.arguments import parse_call
from lm.cli.compose.compose import compose
from lm.cli.compose.overrides import expand
from lm.cli.listing import known
from lm.cost.count import count
from lm.schema import from_tree
from lm.training.config import TrainConfig

RECIPES = catalog.groups()["recipes"]
PRESETS = catalog.groups()["model"]
LISTED = known.made(json.loads(known.FILE.read_bytes())["classes"])
SLOTS = {"model/attention", "model/block", "model/ffn", "model/norm", "model/position"}
NEEDED = {
    "text": ["data.files=a.txt"],
    "pairs": ["data.files=a.jsonl"],
    "mix": ["data.sources=[{name:a,data:{kind:stdlib}}]"],
    "chat": ["data.files=a.jsonl"],
    "preferences": ["data.files=a.jsonl"],
    "prompts": ["data.files=a.jsonl"],
    "rated": ["data.files=a.jsonl"],
    "labels": ["data.files=a.jsonl"],
    "alike": ["data.files=a.jsonl"],
    "hub": ["data.name=a/b"],
    "file": ["tokenizer.path=tokenizer.json"],
}  # what an option leaves to the user
BESIDE = {
    "data=pairs": ["objective=seq2seq"],
    "data=stdlib_docstrings": ["objective=seq2seq"],
    "data=chat": ["objective=sft"],
    "data=labels": ["objective=classify", "objective.labels=[no,yes]"],
    "data=stdlib_labels": ["objective=classify", "objective.labels=[nothing,value]"],
    "data=alike": ["objective=contrastive"],
    "data=stdlib_alike": ["objective=contrastive"],
    "data=stdlib_chat": ["objective=sft"],
    "data=stdlib_code": ["objective=sft"],
    "data=arithmetic": ["objective=sft"],
    "data=stdlib_preferences": ["objective=dpo", "init_from=runs/pretrain-tiny"],
    "data=preferences": ["objective=dpo", "init_from=runs/pretrain-tiny"],
    "data=rated": ["objective=kto", "init_from=runs/pretrain-tiny"],
    "data=prompts": ["objective=grpo", "objective.rewards={ended:{}}", "init_from=runs/pretrain-tiny"],
    **{f"strategy={name}": ["optim=adamw"] for name in catalog.groups()["strategy"] if name not in ("single", "ddp")},
    "data=wmt14_de_en": ["objective=seq2seq"],
    "data=cnn_dailymail": ["objective=seq2seq"],
    "data=alpaca": ["objective=sft"],
    "data=mqar": ["objective=sft"],
    "data=ultrafeedback": ["objective=dpo", "init_from=runs/pretrain-tiny"],
    **{f"model/recurrent={name}": ["model.pattern=[recurrent,attention]"] for name in catalog.groups()["model/recurrent"]},
    "model/block=single": ["model.pattern=[attention,ffn]"],
    "model/parametrization=mup": ["model.parametrization.base_width=64"],
    "model/parametrization=completep": ["model.parametrization.base_width=64", "model.parametrization.base_depth=2"],
    "adapter=lora": ["init_from=runs/pretrain-tiny"],
    "objective=mlm": ["model=bert_base"],
    "objective=diffusion": ["model=llada_8b"],
    "objective=seq2seq": ["data=stdlib_docstrings"],
    "objective=sft": ["data=stdlib_chat"],
    "objective=kto": ["data=rated", "data.files=a.jsonl", "init_from=runs/pretrain-tiny"],
    "objective=classify": ["data=stdlib_labels", "objective.labels=[nothing,value]"],
    "objective=multi_label": ["data=stdlib_labels", "objective.labels=[nothing,value]"],
    "objective=regression": ["data=stdlib_labels"],
    "objective=contrastive": ["data=stdlib_alike"],
    **{f"objective={name}": ["data=arithmetic", "init_from=runs/pretrain-tiny"] for name in ("grpo", "rloo")},
    "objective=gkd": ["data=arithmetic", "init_from=runs/pretrain-tiny", "objective.teacher=runs/pretrain-tiny"],
    **{
        f"objective={name}": ["data=preferences", "data.files=a.jsonl", "init_from=runs/pretrain-tiny"]
        for name in ("dpo", "ipo", "apo", "simpo", "orpo", "reward")
    },
}  # what an option does not go without
OBJECTIVES = {"decoder": "causal", "encoder": "mlm", "encoder_decoder": "spans"}  # for texts


def kind_of(preset: str) -> str:
    """The kind of a preset's model: its own, or that of what it derives from."""
    told = [catalog.values("model", each) for each in catalog.lineage("model", preset)]
    return str([values["model.kind"] for values in told if "model.kind" in values][-1])


def beside(group: str, option: str) -> list[str]:
    """The overrides that an option needs to compose."""
    if group == "model":
        return [f"objective={OBJECTIVES[kind_of(option)]}"]
    if group == "strategy" and option.startswith(("zero3", "zero2_offload")):
        return ["optim=adamw"]  # muon needs whole matrices
    return BESIDE.get(f"{group}={option}", [])


def header(recipe: str) -> dict[str, str]:
    lines = catalog.file_of("recipes", recipe).read_text(encoding="utf-8").splitlines()
    return dict(re.findall(r"^# (\w+): +(.*)$", "\n".join(lines), re.MULTILINE))


def run_line(recipe: str, extra: str = "") -> list[TrainConfig]:
    """The configs of the header's command, with what the Shrink line adds."""
    verb, *args = shlex.split(f"{header(recipe)['Run']} {extra}")[1:]
    if verb == "train":
        return [compose(job).config() for job in expand(parse_call(args).overrides)]
    study, (asked, *_) = catalog.study(recipe), args
    assert verb == "ablate" and asked == f"study={recipe}" and study is not None
    return [
        compose([f"recipes={recipe}", *study.get("overrides", []), *own, *extra.split()]).config() for own in study["variants"].values()
    ]


def test_the_catalog_is_complete() -> None:
    assert len(RECIPES) >= 20
    assert len(PRESETS) >= 35
    assert catalog.groups().keys() >= SLOTS
    files = [*(catalog.root() / "conf").glob("*/**/*.yaml"), *(catalog.root() / "recipes").rglob("*.yaml")]
    assert sum(map(len, catalog.groups().values())) == len(files)


@pytest.mark.parametrize(("group", "option"), [(group, option) for group in catalog.groups() for option in catalog.groups()[group]])
def test_every_option_composes(default_run: Path, group: str, option: str) -> None:
    chosen = str(compose([f"{group}={option}"]).choices["data"])
    needed = NEEDED.get(chosen, []) + (NEEDED.get(option, []) if group == "tokenizer" else [])
    composition = compose([f"{group}={option}", *needed, *beside(group, option)])
    assert from_tree(LISTED, composition.tree).tree() == composition.config().tree()


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_chooses_an_option_for_every_slot(preset: str) -> None:
    assert catalog.preset_slots(preset).keys() == SLOTS


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_is_short_with_its_header_in_order_and_leaves_the_model_to_presets(recipe: str) -> None:
    lines = catalog.file_of("recipes", recipe).read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 40
    assert lines[0] == "# @package _global_"
    assert [line.split(":")[0] for line in lines[2:6]] == ["# Run", "# Expect", "# Tokens", "# Shrink"]
    assert not [path for path in catalog.values("recipes", recipe) if path.startswith("model.")]


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_run_line_and_shrink_line_compose(default_run: Path, recipe: str) -> None:
    assert run_line(recipe)
    shrunk = run_line(recipe, header(recipe)["Shrink"])
    assert all(config.trainer.max_steps <= 10 for config in shrunk)


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_token_arithmetic_is_that_of_its_config(default_run: Path, recipe: str) -> None:
    numbers = [int(number.replace(",", "")) for number in re.findall(r"[\d,]*\d", header(recipe)["Tokens"])]
    *factors, per_step, steps, total = numbers
    config = run_line(recipe)[0]
    product = 1
    for factor in factors:
        product *= factor
    assert product == per_step == config.step_tokens
    assert steps == config.trainer.max_steps
    assert total == per_step * steps


def test_a_step_and_its_memory_count_every_text_of_a_row(default_run: Path) -> None:
    """Seen to fail: of a preference one of its two texts."""
    for objective, texts in {"dpo": 2, "orpo": 2, "reward": 2, "kto": 1, "grpo": 8, "contrastive": 32, "sft": 1}.items():
        data = {"contrastive": "alike", "grpo": "prompts", "sft": "chat", "kto": "rated"}.get(objective, "preferences")
        given = ["data.files=a.jsonl", f"data={data}", "objective.rewards={ended:{}}"][: 3 if objective == "grpo" else 2]
        config = compose(
            [f"objective={objective}", *given, "init_from=runs/pretrain-tiny", "data.global_batch=6", "data.seq_len=64"]
        ).config()
        assert config.step_tokens == 6 * texts * 64 and config.setting().micro_batch == 6 * texts


@pytest.mark.slow
def test_jobs_of_an_ablation_have_folders_of_their_own() -> None:
    for recipe in [name for name in RECIPES if name.startswith("ablation/")]:
        names = [config.run.name for config in run_line(recipe)]
        assert len(set(names)) == len(names)


@pytest.mark.parametrize("recipe", ["pretrain/shakespeare_cpu", "pretrain/shakespeare_deep"])
def test_a_shakespeare_recipe_keeps_the_limits_of_the_comparison(recipe: str) -> None:
    [config] = run_line(recipe)
    model = config.model.replace(vocab_size=320, max_seq_len=config.data.seq_len)
    assert count(model, config.data.seq_len).parameters <= 810_000
    assert config.data.seq_len == 64
    assert config.data.global_batch * config.data.seq_len * config.trainer.max_steps <= 1_536_000


@pytest.mark.slow
def test_what_a_finetune_recipe_starts_from_is_the_run_of_another_recipe(default_run: Path) -> None:
    runs = {f"runs/{recipe.replace('/', '-')}": recipe for recipe in RECIPES}
    found = {recipe: runs[str(run_line(recipe)[0].init_from)] for recipe in RECIPES if recipe.startswith("finetune/")}
    assert found["finetune/tiny_on_text"] == "pretrain/tiny" and len(found) >= 3


@pytest.mark.slow
def test_every_objective_has_a_recipe(default_run: Path) -> None:
    trained = {config.objective.kind for recipe in RECIPES for config in run_line(recipe)}
    assert trained == set(catalog.groups()["objective"])
