"""lm-eval by three doors: its tasks on a model here, on the exported folder under `--model hf`, and on the server."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from lm.data.kinds import BytesConfig
from lm.data.tokenizer.tokenizer import Tokenizer
from lm.errors import ConfigError
from lm.generation.text import chat_template
from lm.hf.io.export import export
from lm.nn.transformer import LM
from lm.storage.model_folder import save_model
from tests.conftest import Lm
from tests.generation.test_answers import encoder_decoder
from tests.generation.test_chat_prompts import chat_tokenizer
from tests.nn.models import config, redrawn
from tests.serving.conftest import Serve

pytestmark = pytest.mark.slow
QUESTIONS = [("The sky is", ["blue", "a long red thing", "7"], 0), ("größer: ", ["ja", "nein 😀"], 1), ("x" * 60, ["y", "z" * 20], 0)]
TASKS = {
    "chosen": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{label}}",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "rolled": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{question}} {{choices | join(' ')}} {{question}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
    },
    "written": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{written}}",
        "generation_kwargs": {"until": ["\n", "zz"], "max_gen_toks": 12},
        "metric_list": [{"metric": "exact_match"}],
    },
}


@pytest.fixture
def tasks(tmp_path: Path) -> list[str]:
    """Of files here."""
    rows = [{"question": q, "choices": c, "label": label, "written": "?"} for q, c, label in QUESTIONS]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.jsonl")}}, "test_split": "test"}
    for name, task in TASKS.items():
        (tmp_path / f"{name}.yaml").write_text(json.dumps({"task": name, **data, **task}))
    return [str(tmp_path / f"{name}.yaml") for name in TASKS]


@pytest.fixture(scope="session")
def plain() -> Tokenizer:
    return BytesConfig().build()


def saved(folder: Path, model: LM, tokenizer: Tokenizer) -> Path:
    save_model(folder, model.cfg.tree(), dict(model.named_parameters()), tokenizer.save, {})
    return folder


def answered(model: str | Any, args: dict[str, Any] | None, tasks: list[str], **options: Any) -> tuple[list[Any], dict[str, Any]]:
    """What a model answered, request by request, and the metrics."""
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_defaults=False)
    found = simple_evaluate(model, args, tasks=tasks, task_manager=manager, bootstrap_iters=0, batch_size=4, **options)
    each = [sample["resps"] for name in sorted(found["samples"]) for sample in found["samples"][name]]
    return each, found["results"]


def flat(values: Any) -> list[Any]:
    return [leaf for value in values for leaf in flat(value)] if isinstance(values, list | tuple) else [values]


def same(one: list[Any], other: list[Any]) -> None:
    for mine, theirs in zip(flat(one), flat(other), strict=True):
        if isinstance(mine, float):
            assert abs(mine - theirs) < 1e-4 * max(1, abs(theirs))
        else:
            assert mine == theirs


@pytest.mark.parametrize("kind", ["decoder", "encoder_decoder"])
def test_a_model_here_answers_as_its_export_under_transformers(kind: str, tmp_path: Path, tasks: list[str], plain: Tokenizer) -> None:
    from lm.generation.harness import Harness

    t5 = {
        "position": {"kind": "t5_relative"},
        "attention": {"n_heads": 4, "scale": 1.0, "head_dim": 8},
        "vocab_size": 320,
        "start_token": 258,
    }
    model = redrawn(config(vocab_size=259)) if kind == "decoder" else encoder_decoder(**t5)
    folder = saved(tmp_path / "m", model, plain)
    export(folder, tmp_path / "hf", check=False)
    args = {"pretrained": str(tmp_path / "hf"), "dtype": "float32", "device": "cpu"}
    if kind == "decoder":
        own, _ = answered(Harness(model, plain, 4), None, tasks)
        same(
            own,
            answered("hf", args, tasks[:1] + tasks[2:])[0][:3] + answered("hf", args | {"add_bos_token": False}, tasks[1:2])[0] + own[6:],
        )
        same(own[6:], answered("hf", args, tasks[2:])[0])
    else:
        own, _ = answered(Harness(model, plain, 4), None, tasks[:1])
        same(own, answered("hf", args, tasks[:1])[0])


def test_the_server_answers_as_the_model_here(serve: Serve, tasks: list[str], tmp_path: Path, plain: Tokenizer) -> None:
    from lm.generation.harness import Harness

    model = redrawn(config(vocab_size=320, max_seq_len=256))
    export(saved(tmp_path / "m", model, plain), tmp_path / "hf", check=False)
    with serve(model) as client:
        url = f"{client.base_url}/v1/completions"
        args = {
            "model": "tiny",
            "base_url": url,
            "tokenizer": str(tmp_path / "hf"),
            "tokenizer_backend": "huggingface",
            "max_length": 256,
        }
        theirs = [answered("local-completions", args | {"add_bos_token": i != 1}, [task])[0] for i, task in enumerate(tasks)]
    same([answered(Harness(model, plain, 4), None, [task])[0] for task in tasks], theirs)


@pytest.mark.parametrize("n_shots", [0, 1])
def test_a_chat_is_asked_as_of_its_export_under_transformers(n_shots: int, tmp_path: Path, tasks: list[str]) -> None:
    """The template writes bos itself, which is not written twice, and special tokens of its own."""
    from lm.generation.harness import Harness

    tokenizer = chat_tokenizer("chatml")
    model = redrawn(config(vocab_size=tokenizer.vocab_size, max_seq_len=512))
    export(saved(tmp_path / "m", model, tokenizer), tmp_path / "hf", check=False)
    asked, args = [tasks[0], tasks[2]], {"pretrained": str(tmp_path / "hf"), "dtype": "float32", "device": "cpu"}
    options = {"apply_chat_template": True, "num_fewshot": n_shots}
    own, _ = answered(Harness(model, tokenizer, 4, chat_template(tokenizer)), None, asked, **options)
    same(own, answered("hf", args, asked, **options)[0])
    plain, _ = answered(Harness(model, tokenizer, 4), None, asked, num_fewshot=n_shots)
    assert own != plain


def test_a_text_ends_at_each_of_the_tokenizers_ends() -> None:
    """Seen to fail: at eos alone, while transformers ends texts at all that generation_config.json names."""
    from lm_eval.api.instance import Instance

    from lm.generation.harness import Harness

    tokenizer = BytesConfig().build()
    tokenizer.further_ends = [ord("a")]
    model = redrawn(config(vocab_size=tokenizer.vocab_size, head={"tied": False, "bias": True}))
    assert model.head.bias is not None
    model.head.bias.data[ord("a")] = 1000.0
    asked = Instance("generate_until", {}, ("?", {"max_gen_toks": 5}), 0)
    assert Harness(model, tokenizer, 1).generate_until([asked]) == [""]


def test_an_answer_without_tokens_is_refused(plain: Tokenizer) -> None:
    """Nothing would be likelier; seen to end with an error of torch."""
    from lm.generation.harness import Harness

    with pytest.raises(ConfigError, match=r"tasks: an answer has no tokens, .* Give it text in the task\."):
        Harness(redrawn(config(vocab_size=320)), plain, rows=2)._loglikelihood_tokens([(None, [5], [6]), (None, [5], [])])


def test_the_verb_prints_metrics_and_says_what_is_fetched(lm: Lm, tmp_path: Path, tasks: list[str], plain: Tokenizer) -> None:
    folder = saved(tmp_path / "m", redrawn(config(vocab_size=320)), plain)
    code, out, err = lm("eval", f"from={folder}", f"tasks={','.join(tasks)}", "format=json", "device=cpu")
    assert code == 0, err
    assert sorted(json.loads(out)["results"]) == sorted(TASKS)
    code, out, err = lm("eval", f"from={folder}", f"tasks={tasks[0]}", "limit=2", "device=cpu")
    assert code == 0 and out.split()[:5] == ["task", "metric", "value", "error", "samples"] and out.split()[-1] == "2", err
    (tmp_path / "far.yaml").write_text(
        json.dumps({"task": "far", "dataset_path": "nobody/nothing", "test_split": "test", **TASKS["chosen"]})
    )
    code, out, err = lm("eval", f"from={folder}", f"tasks={tmp_path / 'far.yaml'}", "device=cpu")
    assert code == 2 and "far reads nobody/nothing of the Hugging Face hub" in err and "cannot be had" in err.splitlines()[-1]
    code, out, err = lm("eval", f"from={folder}", "tasks=nowhere.yaml")
    assert (code, out) == (2, "") and "nowhere.yaml does not exist" in err
    for task, remedy in (("arc_esy", "Did you mean 'arc_easy'?"), ("3e16", "Take a name that `lm-eval ls tasks` lists.")):
        code, out, err = lm("eval", f"from={folder}", f"tasks={task}")
        assert (code, out, err.splitlines()[-1]) == (2, "", f"tasks: lm-eval has no {task!r}. {remedy}")
    for option in ("limit=3", "chat=true", "samples=a.jsonl"):
        code, out, err = lm("eval", f"from={folder}", option)
        assert code == 2 and f"{option.partition('=')[0]}: only tasks have that" in err
    code, out, err = lm("eval", f"from={folder}", f"tasks={tasks[0]}", "chat=true")
    assert code == 2 and "no chat template" in err.splitlines()[-1]


def test_samples_are_written_as_lm_eval_logs_them_and_a_system_speaks_first(lm: Lm, tmp_path: Path, tasks: list[str]) -> None:
    from lm.generation.harness import Harness

    tokenizer = chat_tokenizer("chatml")
    model = redrawn(config(vocab_size=tokenizer.vocab_size, max_seq_len=512))
    ask = ["eval", f"from={saved(tmp_path / 'm', model, tokenizer)}", f"tasks={','.join(tasks[::2])}", "chat=true", "device=cpu"]
    ask += ["system=Be brief.", "samples=new/all.jsonl"]
    code, _, err = lm(*ask)
    assert code == 0, err
    lines = [json.loads(line) for line in Path("new/all.jsonl").read_text().splitlines()]
    assert [line["task"] for line in lines] == ["chosen"] * 3 + ["written"] * 3
    assert all("system\nBe brief." in json.dumps(line["arguments"]).replace("\\n", "\n") for line in lines)
    harness = Harness(model, tokenizer, 4, chat_template(tokenizer))
    theirs, _ = answered(harness, None, tasks[::2], apply_chat_template=True, system_instruction="Be brief.")
    same([line["resps"] for line in lines], theirs)
    assert [line["acc"] for line in lines[:3]] == [float(line["doc"]["label"] == best(line["resps"])) for line in lines[:3]]
    code, _, err = lm(*ask)
    assert code == 2 and "samples=new/all.jsonl: it exists already. Add overwrite=true to replace it" in err
    assert lm(*ask, "overwrite=true", "limit=1")[0] == 0 and len(Path("new/all.jsonl").read_text().splitlines()) == 2


def best(resps: list[list[list[Any]]]) -> int:
    logs = [float(each[0][0]) for each in resps]
    return logs.index(max(logs))


def test_a_missing_extra_is_named(lm: Lm, tmp_path: Path, plain: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval.api.instance", None)
    monkeypatch.delitem(sys.modules, "lm.generation.harness", raising=False)
    folder = saved(tmp_path / "m", redrawn(config(vocab_size=320)), plain)
    code, _, err = lm("eval", f"from={folder}", "tasks=arc_easy")
    assert code == 2 and "pip install 'slotlm[eval]'" in err
