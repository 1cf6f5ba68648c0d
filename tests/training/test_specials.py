"""Special tokens that a fine-tuning adds: the rows that they get, who learns them, and where they are kept."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lm.cli.compose import catalog
from lm.cli.compose.compose import compose_config
from lm.data.tokenizer.tokenizer import load_tokenizer
from lm.errors import ConfigError
from lm.generation.load import load
from lm.generation.merging import merge
from lm.hf.io.export import export
from lm.hf.io.export_adapter import export_adapter
from lm.hf.io.import_ import import_adapter
from lm.nn.mixers.token_values import TABLE
from lm.nn.per_layer import LAYERS_TABLE
from lm.storage.reading import read_json
from lm.training.config import TrainConfig
from lm.training.plan import plan
from lm.training.run import train_rank
from tests.training.conftest import TINY, Before, Configure, read, results, settled, write_text

CHATML = "tokenizer.specials=[<|im_start|>,<|im_end|>]"
LORA = ("adapter=lora", "adapter.rank=4")
TABLES = ["model.vocab_size=259", "model.attention.value_embedding.every=1", "model.embed.per_layer.channels=4"]


@pytest.fixture(scope="module")
def parents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with chats, preferences and runs of a tokenizer of 259 tokens: `exact` has as many rows, `padded` 320, and a head."""
    folder = tmp_path_factory.mktemp("parents")
    given = [*TINY, f"run.dir={folder}", f"data.files={write_text(folder / 'text.txt')}", f"data.cache_dir={folder / 'cache'}"]
    padded = ["model.head.tied=false"]
    for name, more in {
        "exact": ["model.vocab_size=259"],
        "padded": padded,
        "biased": [*padded, "model.head.bias=true"],
        "tables": TABLES,
    }.items():
        train_rank(compose_config(settled(*given, *more, "trainer.max_steps=3", f"run.name={name}")))
    chats = [[("user", f"{n}?"), ("assistant", f"{n}!")] for n in range(80)]
    rows = [{"messages": [{"role": role, "content": text} for role, text in chat]} for chat in chats]
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pairs = [{"prompt": f"{n}?", "chosen": f"{n}!", "rejected": "no"} for n in range(80)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return folder


@pytest.fixture
def child(parents: Path, tmp_path: Path) -> Configure:
    def run(parent: str, *more: str) -> TrainConfig:
        given = [item for item in TINY if not item.startswith(("model", "tokenizer"))]
        own = ["data=chat", "objective=sft", f"data.files={parents / 'chats.jsonl'}", "data.record.template=chatml", "data.val_frac=0.2"]
        own += [f"init_from={parents / parent}", f"run.dir={tmp_path}", f"data.cache_dir={tmp_path / 'cache'}", "trainer.max_steps=4"]
        return compose_config(settled(*given, *own, CHATML, *more))

    return run


@pytest.mark.slow
@pytest.mark.parametrize(("parent", "n_rows"), [("exact", 261), ("padded", 320), ("biased", 320), ("tables", 261)])
def test_new_tokens_start_as_the_mean_of_those_that_there_are(
    parent: str, n_rows: int, child: Configure, parents: Path, tmp_path: Path
) -> None:
    """In rows that no token has had, or else in new ones. Seen to fail with padded rows left as they were, and with these in the mean."""
    cfg = child(parent, "optim.lr=1e-12", "trainer.max_steps=1", "schedule.warmup_steps=0")
    plan(cfg.replace(plan=True), lambda line: None)
    train_rank(cfg)
    tokenizer = load_tokenizer(tmp_path / "run" / "model")
    assert (tokenizer.special(["<|im_start|>"]), tokenizer.special(["<|im_end|>"]), tokenizer.vocab_size) == (259, 260, 261)
    assert read_json(tmp_path / "run" / "model" / "config.json")["model"]["vocab_size"] == cfg.model.vocab_size == n_rows
    before, after = (load_file(folder / "model" / "model.safetensors") for folder in (parents / parent, tmp_path / "run"))
    assert before.keys() == after.keys()
    for name, old in before.items():
        expected = old
        if name in ("embed.weight", "head.weight", "head.bias", f"blocks.0.attention.{TABLE}", LAYERS_TABLE):
            expected = torch.cat([old[:259], old[:259].mean(0).expand(2, *old.shape[1:]), old[261:]])
        torch.testing.assert_close(after[name], expected, atol=1e-7, rtol=0)


@pytest.mark.slow
def test_an_adapter_trains_their_rows_in_tables_of_layers_too(child: Configure, parents: Path, tmp_path: Path) -> None:
    cfg = child("tables", *LORA)
    assert cfg.adapter is not None and {TABLE, LAYERS_TABLE} <= {*cfg.adapter.tree()["whole"]}
    train_rank(cfg)
    model, name = load(tmp_path / "run", "cpu")[0], f"blocks.0.attention.{TABLE}"
    before = load_file(parents / "tables" / "model" / "model.safetensors")[name]
    assert (model.get_parameter(name)[259:] - before.mean(0)).abs().max() > 1e-4 and model.vocab_size == 261


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parent", "more"), [("exact", ()), *(pytest.param(name, LORA, marks=pytest.mark.slow) for name in ("exact", "padded"))]
)
def test_they_are_learned_and_kept_by_all_that_is_made_of_the_run(
    parent: str, more: tuple[str, ...], child: Configure, parents: Path, tmp_path: Path
) -> None:
    """By a resumed run too, the merged model, its export, and that of the adapter, which comes back with the same logits."""
    cfg = child(parent, *more, "checkpoint.every=2", "run.name=whole")
    train_rank(cfg)
    with pytest.raises(ZeroDivisionError):
        train_rank(child(parent, *more, "checkpoint.every=2"), callbacks=[Before(4, lambda module: 1 // 0)])
    train_rank(child(parent, *more, "checkpoint.every=2"))
    assert results(tmp_path / "run") == results(tmp_path / "whole")
    model, tokenizer = load(tmp_path / "run", "cpu")
    assert tokenizer.hash == load_tokenizer(tmp_path / "run" / "checkpoints" / "step-00000004").hash
    first, second = model.embed.weight[259:261]
    assert (first - second).abs().max() > 1e-5
    written = export(tmp_path / "run", tmp_path / "hf", check=False).folder
    assert read_json(written / "config.json")["vocab_size"] == model.vocab_size
    named = {token["id"]: token["content"] for token in read_json(written / "tokenizer.json")["added_tokens"]}
    assert (named[259], named[260]) == ("<|im_start|>", "<|im_end|>")
    assert read_json(written / "generation_config.json")["eos_token_id"] == [257, 260]
    if not more:
        return
    assert cfg.adapter is not None and cfg.adapter.tree()["whole"] == ["embed.weight", "head.weight"][: 1 + (parent == "padded")]
    told: list[str] = []
    export_adapter(tmp_path / "run", tmp_path / "peft", check=False, say=told.append)
    assert any(line.endswith(f"call model.resize_token_embeddings({model.vocab_size})") for line in told)
    import_adapter(tmp_path / "peft", tmp_path / "back", base=parents / parent)
    ids = torch.tensor([[256, 259, 70, 260, 71, 257]])
    for other in (merge([tmp_path / "run"], tmp_path / "merged"), tmp_path / "back"):
        found, own = load(other, "cpu")
        assert own.hash == tokenizer.hash and own.chat_template == tokenizer.chat_template
        torch.testing.assert_close(found(ids), model(ids), atol=1e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("parent", ["exact", "padded"])
def test_what_was_trained_with_them_is_merged_by_its_changes_to_a_parent_without(
    parent: str, child: Configure, parents: Path, tmp_path: Path
) -> None:
    """Seen to fail: the parent's vocabulary and tokenizer are others. With all changes of one model that model comes back."""
    train_rank(child(parent, *LORA))
    found = load(merge([tmp_path / "run"], tmp_path / "same", method="ties", base=parents / parent, density=1), "cpu")[0].state_dict()
    for name, weight in load(tmp_path / "run", "cpu")[0].state_dict().items():
        torch.testing.assert_close(found[name], weight, atol=1e-6, rtol=0)


@pytest.mark.slow
def test_the_model_that_a_preference_is_compared_with_has_rows_for_them_too(child: Configure, parents: Path, tmp_path: Path) -> None:
    """Seen to fail: an index beyond its embedding."""
    more = ("data=preferences", "objective=dpo", f"data.files={parents / 'pairs.jsonl'}", "model.dropout=0", "trainer.max_steps=1")
    train_rank(child("exact", *more, "schedule.warmup_steps=0"))
    [first] = [line for line in read(tmp_path / "run" / "metrics.jsonl") if "loss" in line]
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-5)


def test_where_they_could_not_be_told_apart_the_run_is_refused(child: Configure, parents: Path) -> None:
    for more, remedy in (
        ((*LORA, "adapter.whole=[norm]"), r"embed\.weight, and this run freezes it\. Name it in adapter\.whole"),
        (("trainer.freeze=[embed]",), r"embed\.weight, and this run freezes it\. Leave it out of trainer\.freeze"),
    ):
        with pytest.raises(ConfigError, match=f"tokenizer.specials: new tokens start as one and the same row of {remedy}"):
            train_rank(child("exact", *more))
    with pytest.raises(ConfigError, match=r"brings its own tokenizer, .* or add special tokens to it by tokenizer\.specials"):
        child("exact", "tokenizer.eos=x")
    cfg = child("exact", "tokenizer.specials=[<|eos|>]", *LORA)  # it has that one
    assert cfg.model.vocab_size == 259 and cfg.adapter is not None and cfg.adapter.tree()["whole"] == []


@pytest.mark.slow
def test_one_that_reads_as_another_value_is_the_text_that_was_typed(child: Configure) -> None:
    """Seen to fail: rows were made for 'True', which the tokenizer then had not, beside 'true'."""
    cfg = child("exact", "tokenizer.specials=[true,1.50]")
    grown_tokenizer = cfg.tokenizer.build()
    assert cfg.model.vocab_size == grown_tokenizer.vocab_size == 261 and grown_tokenizer.special(["true"]) == 259
    cfg = child("exact", "tokenizer.specials=[]")
    assert cfg.model.vocab_size == 259


def test_a_recipe_that_names_its_parent_adds_them_as_well(parents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen to fail: what a file says of the tokenizer was left aside without a word."""
    (tmp_path / "recipes").mkdir()
    said = {"init_from": str(parents / "exact"), "tokenizer": {"specials": ["<|im_end|>"]}, "trainer": {"max_steps": 20}}
    lines = ["# @package _global_", "# Mine", *(f"{key}: {json.dumps(value)}" for key, value in said.items())]
    (tmp_path / "recipes" / "mine.yaml").write_text("\n".join(lines))
    monkeypatch.setenv(catalog.OWN, str(tmp_path))
    found = compose_config(["recipes=mine", "data.seq_len=32"])
    assert (found.tokenizer.tree()["specials"], found.model.vocab_size) == (["<|im_end|>"], 260)
