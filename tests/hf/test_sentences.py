"""Exports that sentence-transformers reads, and the way back."""

import json
import random
from contextlib import suppress
from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers")

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

import lm  # noqa: E402
from lm.data.tokenizer.config import BytesConfig  # noqa: E402
from lm.errors import CheckpointError, ConfigError  # noqa: E402
from lm.nn.model_config import ModelConfig  # noqa: E402
from lm.nn.transformer import build_model  # noqa: E402
from lm.storage.model_folder import read_config, save_model  # noqa: E402
from lm.storage.run_folder import RunFolder  # noqa: E402
from tests.hf.draws import held  # noqa: E402
from tests.nn.models import random_model  # noqa: E402

TEXTS = ["the sea", "a", "x" * 100, "the sea is wet"]  # of which one is cut
CASES = [("llama", "token"), ("bert", "token"), ("bert", "mean"), ("gpt2", "token"), ("gpt2", "mean"), ("modernbert", "mean")]


def drawn(name: str, pooling: str = "token") -> ModelConfig:
    """A random model that this family holds."""
    source = random.Random(name)
    while True:
        with suppress(ConfigError):
            cfg = held(source, name)
            return cfg.replace(vocab_size=320, max_seq_len=48, head=cfg.head.replace(pooling=pooling))


def saved(folder: Path, name: str, pooling: str = "token") -> Tensor:
    """Writes a model folder; returns the vectors of TEXTS."""
    model, tokenizer = random_model(drawn(name, pooling)), BytesConfig().build()
    lm.save(model, tokenizer, folder)
    return lm.embed(model, tokenizer, TEXTS)


def read_by_hand(folder: Path) -> Tensor:
    """The vectors by AutoModel, as the files say that they are read."""
    tokenizer, model = transformers.AutoTokenizer.from_pretrained(folder), transformers.AutoModel.from_pretrained(folder).eval()
    batch = tokenizer(TEXTS, padding=True, truncation=True, return_tensors="pt")
    with torch.no_grad():
        hidden = model(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1)
    told = json.loads((folder / "1_Pooling" / "config.json").read_text())
    [mode] = [key for key, value in told.items() if key.startswith("pooling_mode") and value]
    last = hidden[torch.arange(len(TEXTS)), batch["attention_mask"].sum(1) - 1]
    ways = {"cls_token": hidden[:, 0], "lasttoken": last, "mean_tokens": (hidden * mask).sum(1) / mask.sum(1)}
    return torch.nn.functional.normalize(ways[mode.removeprefix("pooling_mode_")], dim=-1)


@pytest.mark.slow
def test_transformers_gives_the_same_vectors_as_the_files_say(tmp_path: Path) -> None:
    for name, pooling in CASES:
        there = tmp_path / f"{name}-{pooling}"
        expected = saved(there, name, pooling)
        lm.export(there, out := tmp_path / f"{there.name}-hf", family=name, embeds=True, check=name == "gpt2")
        torch.testing.assert_close(read_by_hand(out), expected, atol=2e-5, rtol=1e-4)
        lm.import_model(out, back := tmp_path / f"{there.name}-back")
        torch.testing.assert_close(lm.embed(*lm.load(back), TEXTS), expected, atol=2e-5, rtol=1e-4)


def test_sentence_transformers_gives_the_same_vectors(tmp_path: Path) -> None:
    sentences = pytest.importorskip("sentence_transformers")
    for name, pooling in CASES:
        there = tmp_path / f"{name}-{pooling}"
        expected = saved(there, name, pooling)
        lm.export(there, out := tmp_path / f"{there.name}-hf", family=name, embeds=True, check=False)
        found = sentences.SentenceTransformer(str(out), device="cpu").encode(TEXTS, convert_to_tensor=True)
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.slow
def test_a_run_tells_whether_its_model_is_for_vectors(tmp_path: Path) -> None:
    """And so does a mean, of which nothing is predicted; asked otherwise the files are left out."""
    saved(tmp_path / "runs" / "x" / "model", "llama")
    run = RunFolder(tmp_path / "runs" / "x")
    for kind, written in (("contrastive", True), ("causal", False)):
        run.write_config({"objective": {"kind": kind}})
        found = lm.export(run.path, out := tmp_path / kind, check=False)
        assert (out / "modules.json").exists() == written == ([use.program for use in found.uses] == ["sentence-transformers"])
        assert ("library_name: sentence-transformers" in (out / "README.md").read_text()) == written
        assert json.loads((out / "tokenizer_config.json").read_text())["padding_side"] == ("right" if written else "left")
    run.write_config({"objective": {"kind": "contrastive"}})
    lm.export(run.path, out := tmp_path / "asked", check=False, embeds=False)
    assert not (out / "modules.json").exists()
    saved(tmp_path / "mean", "llama", "mean")
    lm.export(tmp_path / "mean", out := tmp_path / "of_mean", check=False)
    assert json.loads((out / "1_Pooling" / "config.json").read_text())["pooling_mode_mean_tokens"]
    with pytest.raises(ConfigError, match="the model reads the mean of a text"):
        lm.generate(*lm.load(tmp_path / "mean"), "a")


def test_what_has_no_vectors_is_not_exported_so(tmp_path: Path) -> None:
    saved(tmp_path / "made", "llama")
    with pytest.raises(ConfigError, match="embeds=true: format=gguf has no place"):
        lm.export(tmp_path / "made", tmp_path / "out", format="gguf", embeds=True)
    model = build_model(drawn("t5"), seed=0)
    lm.save(model, BytesConfig().build(), tmp_path / "t5")
    with pytest.raises(ConfigError, match="embed: the model is an encoder-decoder"):
        lm.export(tmp_path / "t5", tmp_path / "out", embeds=True)
    assert not (tmp_path / "out").exists()


def test_what_an_import_does_not_keep_is_told(tmp_path: Path) -> None:
    saved(tmp_path / "made", "bert")
    lm.export(tmp_path / "made", out := tmp_path / "hf", check=False, embeds=True)
    modules = json.loads((out / "modules.json").read_text())
    modules[2] = {"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"}
    (out / "modules.json").write_text(json.dumps(modules))
    (out / "1_Pooling" / "config.json").write_text('{"pooling_mode": "max"}')
    (out / "sentence_bert_config.json").write_text('{"max_seq_length": 20, "do_lower_case": true}')
    (out / "config_sentence_transformers.json").write_text(
        '{"prompts": {"query": "query: ", "document": ""}, "default_prompt_name": "query"}'
    )
    told: list[str] = []
    lm.import_model(out, tmp_path / "back", say=told.append)
    for says in (
        "modules.json: left out: Dense",
        "it names no Normalize",
        "1_Pooling: max has no form here, and vectors are those of cls_token",
        "a text gets the prompt query where none is asked for, and here none: give prompt=query",
        "do_lower_case is not kept",
        "for that import with max_seq_len=20",
    ):
        assert sum(says in line for line in told) == 1, (says, told)
    assert read_config(tmp_path / "back")["prompts"] == {"query": "query: "}


@pytest.mark.parametrize(
    ("file", "holds", "prompts", "says"),
    [
        ("config_sentence_transformers.json", '{"prompts": null, "default_prompt_name": ["query"]}', None, ""),
        ("config_sentence_transformers.json", '{"prompts": ["query: "]}', None, "left out, as it is no text by a name: prompts"),
        ("config_sentence_transformers.json", '{"prompts": {"a": {"b": "c"}, "d": "e", "f": 1}}', {"d": "e"}, "by a name: a, f"),
        ("config_sentence_transformers.json", '{"prompts": {"a": "b\\ud800"}}', None, "by a name: a"),
        ("config_sentence_transformers.json", "[1]", None, "it holds no object in JSON"),
        ("sentence_bert_config.json", "null", None, "it holds no object in JSON"),
        ("1_Pooling/config.json", "[]", None, "it holds no object in JSON"),
        ("1_Pooling/config.json", '{"pooling_mode": 3}', None, "1_Pooling: 3 has no form here"),
        ("modules.json", "{}", None, "it holds no list in JSON"),
    ],
)
def test_a_file_that_is_not_as_sentence_transformers_writes_it_is_told(
    tmp_path: Path, file: str, holds: str, prompts: dict[str, str] | None, says: str
) -> None:
    """Seen to fail: by internal errors; prompts that were no texts were taken for some."""
    saved(tmp_path / "made", "bert")
    lm.export(tmp_path / "made", out := tmp_path / "hf", check=False, embeds=True)
    (out / file).write_text(holds)
    told: list[str] = []
    if says.startswith("it holds"):
        with pytest.raises(CheckpointError, match=says):
            lm.import_model(out, tmp_path / "back", say=told.append)
        return
    lm.import_model(out, tmp_path / "back", say=told.append)
    assert read_config(tmp_path / "back").get("prompts") == prompts and any(says in line for line in ["", *told])


def test_means_that_leave_prompts_out_are_told(tmp_path: Path) -> None:
    saved(tmp_path / "made", "bert")
    lm.export(tmp_path / "made", out := tmp_path / "hf", check=False, embeds=True)
    (out / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true, "include_prompt": false}')
    for prompts in ("{}", '{"query": "ask: "}'):
        (out / "config_sentence_transformers.json").write_text(f'{{"prompts": {prompts}}}')
        told: list[str] = []
        lm.import_model(out, tmp_path / f"back{len(prompts)}", say=told.append)
        assert any("its means leave prompts out" in line for line in told) == (len(prompts) > 2)


@pytest.mark.slow
def test_prompts_and_lengths_of_vectors_go_out_and_come_back(tmp_path: Path) -> None:
    """By a run that was trained with them; transformers and sentence-transformers read the file that has them."""
    run = RunFolder(tmp_path / "runs" / "x")
    model, prompts = random_model(drawn("llama")), {"query": "query: ", "document": "text: "}
    save_model(run.model, model.cfg.tree(), dict(model.named_parameters()), BytesConfig().build().save, {"prompts": prompts})
    for first, written in (([8, 4], [4, 8, model.cfg.d_model]), ([], None)):
        run.write_config({"objective": {"kind": "contrastive", "first_dims": first}})
        [use] = lm.export(run.path, out := tmp_path / f"{len(first)}", check=True).uses
        assert "encode(['a text'], prompt_name='query')" in str(use.command)
        assert json.loads((out / "config_sentence_transformers.json").read_text())["prompts"] == prompts
        assert json.loads((out / "config.json").read_text()).get("matryoshka_dimensions") == written
        lm.import_model(out, back := tmp_path / f"back{len(first)}")
        assert read_config(back)["prompts"] == prompts
        torch.testing.assert_close(lm.embed(*lm.load(back), TEXTS), lm.embed(*lm.load(run.path), TEXTS), atol=2e-5, rtol=1e-4)
