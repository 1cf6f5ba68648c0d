"""Every shipped recipe and every option of conf/ goes through `lm train check=true`: shrunk, on local files, in this process.

Replaced: the standard library of recipes by a small text (both of its own options are real), datasets of the hub by a local one of the
same configurations, splits and columns, CUDA by the CPU and the compiler by nothing. Engines of several processes have one here.
"""

import importlib.util
import json
import random
import shlex
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from lm.cli.compose import catalog
from lm.cli.compose.compose import compose
from lm.cli.main import main
from lm.data.kinds import BytesConfig
from tests.cli.compose.test_recipes import BESIDE, NEEDED, OBJECTIVES, kind_of
from tests.test_presets import TINY
from tests.training.conftest import settled

LIMIT_S = 5.0
GROUPS = catalog.groups()
OPTIONS = [(group, option) for group, options in GROUPS.items() if group != "recipes" for option in options]
ROWS = ["data.seq_len=128", "data.global_batch=4", "data.val_rows=4", "data.cache_dir=cache", "trainer.micro_batch=2", "trainer.device=cpu"]
WIDTH = ["model.d_model=32", "model.n_layers=2", "model.vocab_size=null", "model.max_seq_len=4096"]
PARENT = ["init_from=runs/pretrain-tiny"]
TEACHER = ["objective.teacher=runs/pretrain-tiny"]
TEXT = ["data=text", "data.files=a.txt", "tokenizer=bytes"]
MIXED = "data.sources=[{name:a,data:{kind:text,files:a.txt}},{name:b,data:{kind:text,files:a.jsonl}}]"
CONFIGS = ("default", "en", "3.0.0", "sample-10BT", "de-en", "wikitext-103-raw-v1")  # of datasets that conf/data names
CORPORA = (  # 11 MB, which are prepared anew here
    "mqar",
    "stdlib",
    "stdlib_docstrings",
    "stdlib_chat",
    "stdlib_code",
    "stdlib_preferences",
    "stdlib_labels",
    "stdlib_alike",
)
OF_DATA = {
    "pair": "seq2seq", "chat": "sft", "preference": "dpo", "recall": "sft", "prompt": "grpo", "label": "classify", "rated": "kto",
    "alike": "contrastive",
}  # fmt: skip  # kind of record -> objective
WORDS = ["".join(random.Random(n).choices("abcdefghij", k=3 + n % 5)) for n in range(200)]  # enough for a small vocabulary


def words(draw: random.Random, n: int) -> str:
    return " ".join(draw.choices(WORDS, k=n))


def record(draw: random.Random) -> dict[str, Any]:
    """With the columns of every dataset that conf/ names."""
    asked, better, worse = words(draw, 4), words(draw, 3), words(draw, 2)
    chat = [{"role": "user", "content": asked}, {"role": "assistant", "content": better}]
    return {
        "text": words(draw, 12), "source": asked, "target": better, "messages": chat, "prompt": asked, "article": asked,
        "highlights": better, "label": draw.choice(("no", "yes")), "good": bool(draw.getrandbits(1)), "number": draw.random(),
        "translation": {"de": asked, "en": better}, "instruction": asked,
        "input": worse, "output": better, "chosen": chat, "rejected": [chat[0], {"role": "assistant", "content": worse}],
        "anchor": asked, "positive": better, "negative": worse,
    }  # fmt: skip


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with what options leave to the user, under the names that tests/cli/compose/test_recipes.py gives; entered."""
    folder, draw = tmp_path_factory.mktemp("shipped"), random.Random(0)
    (folder / "a.txt").write_text("\n".join(words(draw, 8) for _ in range(300)))
    rows = [record(draw) for _ in range(150)]
    kept = ("text", "source", "target", "messages", "prompt", "label", "good", "number", "anchor", "positive", "negative")
    local = [{key: row[key] for key in kept} | {"chosen": row["target"], "rejected": row["input"]} for row in rows]
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in local))
    (folder / "a" / "b").mkdir(parents=True)
    for name, part in (("rows", rows), ("held_out", [record(draw) for _ in range(20)])):
        (folder / "a" / "b" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    splits = [{"split": name, "path": "rows.jsonl"} for name in ("train", "train_prefs")]
    splits += [{"split": name, "path": "held_out.jsonl"} for name in ("validation", "test_prefs")]
    configs = yaml.safe_dump({"configs": [{"config_name": name, "data_files": splits} for name in CONFIGS]})
    (folder / "a" / "b" / "README.md").write_text(f"---\n{configs}---\n")
    BytesConfig().build().save(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("HF_DATASETS_CACHE", str(folder / "datasets"))
        assert main(["train", "debug=fast", *TEXT, *ROWS, *WIDTH, "run.name=pretrain-tiny"]) == 0
        yield folder


def require_check(given: list[str], capfd: pytest.CaptureFixture[str], limit_s: float = LIMIT_S) -> None:
    begun = time.process_time()  # of this process alone: the machine may be busy
    code = main(settled("train", *given, "check=true"))
    took, captured = time.process_time() - begun, capfd.readouterr()
    assert code == 0, captured.err
    assert captured.out.rstrip().endswith("the run can start")
    assert took < limit_s


def for_model(option: str) -> list[str]:
    return [*TEXT, *WIDTH, *shlex.split(TINY[option]), f"objective={OBJECTIVES[kind_of(option)]}"]


def local_hub(values: dict[str, Any]) -> list[str]:
    """The local dataset instead; a part of a thousandth, which is the default, would hold out nothing of it."""
    if values["data.kind"] != "hub":
        return []
    return ["data.name=a/b"] if "data.val_split" in values else ["data.name=a/b", "data.val_frac=0.2"]


def for_data(option: str) -> list[str]:
    """The objective is that of its records; hub datasets become the local one."""
    values = catalog.values("data", option)
    hub = local_hub(values)
    shape = values.get("data.record.kind", {"stdlib_docstrings": "pair", "arithmetic": "chat", "mqar": "recall"}.get(option))
    start = PARENT if shape in ("preference", "prompt", "rated") else [*WIDTH, "tokenizer=bytes"]
    start = [*start, "data.record.prompt=prompt", "objective.rewards={ended:{}}", "objective.max_tokens=4"] if shape == "prompt" else start
    start = [*start, f"objective.labels=[{'nothing,value' if option == 'stdlib_labels' else 'no,yes'}]"] if shape == "label" else start
    start = [*start, "data.record.label=good", "data.record.messages=messages"] if shape == "rated" else start
    start = [*start, "objective.among=2"] if shape == "alike" else start
    long = (
        ["data.seq_len=4096"] if option in ("stdlib_chat", "stdlib_code", "stdlib_preferences") else []
    )  # in bytes, most functions are longer than other rows here
    return [f"objective={OF_DATA[shape]}" if shape else "objective=causal", *start, *NEEDED.get(option, []), *hub, *long]


def beside(group: str, option: str) -> list[str]:
    """What the option does not go without, and what shrinks it."""
    match group, option:
        case "model", _:
            return for_model(option)
        case "adapter", _:
            return [*TEXT[:2], *PARENT]
        case "model/recurrent", _:
            return [*TEXT, *WIDTH, "model.pattern=[recurrent,attention]"]
        case "model/block", "single":
            return [*TEXT, *WIDTH, *BESIDE[f"{group}={option}"]]
        case "model/parametrization", "mup" | "completep":
            return [*TEXT, *WIDTH, *BESIDE[f"{group}={option}"]]
        case "data", "mix":
            return [*WIDTH, "tokenizer=bytes", MIXED]
        case "data", "arithmetic":
            return [*for_data(option), "data.problems=500"]
        case "data", _:
            return for_data(option)
        case "tokenizer", _:
            size = ["tokenizer.vocab_size=420"] if option in ("bpe", "unigram", "wordpiece") else []
            return [*TEXT[:2], *WIDTH, *size, *NEEDED.get(option, [])]
        case "objective", "mlm" | "diffusion":
            return [*TEXT, *for_model("bert_tiny")[len(TEXT) : -1], "model=bert_tiny"]
        case "objective", "seq2seq":
            return [*WIDTH, "data=pairs", "data.files=a.jsonl", "tokenizer=bytes"]
        case "objective", "sft":
            return [*WIDTH, "data=chat", "data.files=a.jsonl", "tokenizer=bytes"]
        case "objective", "classify":
            return [*WIDTH, "data=labels", "data.files=a.jsonl", "objective.labels=[no,yes]", "tokenizer=bytes"]
        case "objective", "multi_label":
            return [*WIDTH, "data=labels", "data.files=a.jsonl", "objective.labels=[no,yes]", "tokenizer=bytes"]
        case "objective", "regression":
            return [*WIDTH, "data=labels", "data.files=a.jsonl", "data.record.label=number", "tokenizer=bytes"]
        case "objective", "contrastive":
            return [*WIDTH, "data=alike", "data.files=a.jsonl", "tokenizer=bytes", "objective.among=2"]
        case "objective", "dpo" | "ipo" | "apo" | "simpo" | "orpo" | "reward":
            return [*PARENT, "data=preferences", "data.files=a.jsonl"]
        case "objective", "kto":
            return [*for_data("rated")[1:], "data=rated"]
        case "objective", "grpo" | "rloo":
            return [*PARENT, "data=arithmetic", "data.problems=50", "data.val_frac=0.3", "objective.max_tokens=4"]
        case "objective", "gkd":
            return [*beside("objective", "grpo"), "objective.on_policy=0.5", *TEACHER]
        case "strategy", _ if option != "single":
            return [*TEXT, *WIDTH, "optim=adamw"]
        case "trainer", "gpu":
            return [*TEXT, *WIDTH, "trainer.compile=false"]
        case _:
            return [*TEXT, *WIDTH]


def for_recipe(recipe: str) -> list[str]:
    """Its data become local ones of the same shape. Seen to fail: those with numbers or several labels, whose columns these had not."""
    own = catalog.values("recipes", recipe)
    parent = [*(PARENT if "init_from" in own else []), *(TEACHER if "objective.teacher" in own else [])]
    chosen = compose([f"recipes={recipe}", *parent]).choices
    data, model, tokenizer, objective = (str(chosen[group]) for group in ("data", "model", "tokenizer", "objective"))
    alike = {
        "stdlib": "text",
        "stdlib_docstrings": "pairs",
        "stdlib_chat": "chat",
        "stdlib_preferences": "preferences",
        "stdlib_alike": "alike",
    }
    local = (alike | ({"stdlib_labels": "labels"} if objective == "classify" else {})).get(data, data)  # others read other columns of it
    labels = ["objective.labels=[no,yes]"] * (local == "labels")
    hub = local_hub(catalog.values("data", data))
    longer = ["eval.seq_len=[160]"] * ("eval.seq_len" in catalog.values("recipes", recipe))  # as long as the local text allows
    fewer = ["data.n_records=400"] * (data == "mqar") + ["objective.among=2"] * (local == "alike")
    needed = [MIXED] if local == "mix" else NEEDED.get(local, [])
    given = [f"data={local}", *labels, *needed, *hub, *fewer, "trainer.compile=false", *longer]
    if parent:
        return [*given, *parent]
    size = ["tokenizer.vocab_size=600"] if tokenizer not in ("bytes", "file") else []
    return [*given, *size, *WIDTH, *shlex.split(TINY[model])]


# each of the first line is the data of an objective, which is tried; of the second line, read from a hub as fineweb_edu and wmt14_de_en are
# (but preferences, from files as chats are); objectives that differ from grpo or dpo in a formula are trained in test_objectives.py
ALIKE = (
    *("stdlib_docstrings", "stdlib_chat", "stdlib_code", "pairs", "chat", "rated"),
    *("c4", "tinystories", "wikitext103", "cnn_dailymail", "alpaca", "preferences", "ultrafeedback", "fineweb_edu", "wmt14_de_en"),
)


def option_case(group: str, option: str) -> Any:
    several = group == "strategy" and option != "single"  # processes of their own, which take seconds to start
    of_model = group.split("/")[0] == "model"  # composed in tests/cli/compose/test_recipes.py, run in tests/nn/test_invariants.py
    alike = option in {"data": ALIKE, "objective": ("rloo", "ipo", "apo", "simpo", "orpo", "prefix", "ul2")}.get(group, ())
    marks = [pytest.mark.slow] if several or option in CORPORA or of_model or alike else []
    if option.startswith("zero") and importlib.util.find_spec("deepspeed") is None:
        marks.append(pytest.mark.skip(reason="pip install 'slotlm[deepspeed]'"))
    return pytest.param(group, option, marks=marks, id=f"{group}={option}")


@pytest.mark.parametrize(("group", "option"), [option_case(*both) for both in OPTIONS])
def test_every_option_passes_a_check(workplace: Path, capfd: pytest.CaptureFixture[str], group: str, option: str) -> None:
    fast = [] if group == "debug" else ["debug=fast"]
    require_check([*fast, f"{group}={option}", *ROWS, *beside(group, option)], capfd, 60.0 if option in CORPORA else LIMIT_S)


@pytest.mark.slow  # each composes in tests/cli/compose/test_recipes.py
@pytest.mark.parametrize("recipe", [name for name in GROUPS["recipes"] if catalog.values("recipes", name)])
def test_every_recipe_passes_a_check(workplace: Path, capfd: pytest.CaptureFixture[str], recipe: str) -> None:
    """With its own objective, optimizer and schedule, and its model shrunk."""
    require_check([f"recipes={recipe}", "debug=fast", *for_recipe(recipe), *ROWS], capfd)
