"""Adapters whose head is not the parent's, in peft."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from lm.adapters.adapter import LoRAConfig  # noqa: E402
from lm.data.rows.labelled import with_labels  # noqa: E402
from lm.data.tokenizer.config import BytesConfig  # noqa: E402
from lm.errors import ConfigError  # noqa: E402
from lm.generation.load import load  # noqa: E402
from lm.hf.io.export import export  # noqa: E402
from lm.hf.io.export_adapter import export_adapter  # noqa: E402
from lm.hf.io.import_ import import_adapter, import_model  # noqa: E402
from lm.nn.batch import Batch  # noqa: E402
from lm.nn.model_config import model_config  # noqa: E402
from lm.nn.transformer import build_model  # noqa: E402
from lm.storage.model_folder import folder_hash, read_model, save_model  # noqa: E402
from lm.testing.models import redraw  # noqa: E402
from tests.hf.test_peft import adapted  # noqa: E402


@pytest.mark.parametrize("preset", ["bert_base", "llama3_8b"])
def test_the_adapter_of_a_new_head_goes_to_peft(preset: str, tmp_path: Path) -> None:
    """Its parent predicts tokens, and peft adds it to a classifier made of that. Seen to fail: with the KeyError 'head.weight', with a
    RuntimeError of transformers where the parent has a matrix of that name, and refused without base= as of other options."""
    peft = pytest.importorskip("peft")
    cfg = LoRAConfig(rank=2, whole=["head"])
    adapted(preset, cfg, tmp_path)
    parent, labels = tmp_path / "parent", ["calm", "wild", "neither"]
    model = build_model(with_labels(model_config(read_model(parent)[0]["model"], "parent"), labels), seed=0)
    cfg.apply(model)
    redraw(model, seed=1)
    about = {"adapter": cfg.tree(), "parent": str(parent), "parent_hash": folder_hash(parent)}
    own = {name: 0.15 * p for name, p in cfg.own(model).items()}
    save_model(tmp_path / "new", model.cfg.tree(), own, BytesConfig().build().save, about)
    told: list[str] = []
    found = export_adapter(tmp_path / "new", tmp_path / "out", say=told.append)
    assert found.check is not None and found.check.difference <= 2e-5 * max(1.0, found.check.spread)
    names = dict(enumerate(labels))
    assert any(f"AutoModelForSequenceClassification.from_pretrained({str(parent)!r}, id2label={names})" in line for line in told)
    export(parent, tmp_path / "base")
    base = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "base", id2label=names)
    ids, at = torch.tensor([[3, 7, 9, 2, 7, 11, 3]]), 0 if preset == "bert_base" else -1
    ours = load(tmp_path / "new", "cpu")[0](Batch(ids), read=lambda hidden, head, ctx: head(hidden[:, at]))
    there = peft.PeftModel.from_pretrained(base, tmp_path / "out").eval()(ids).logits
    torch.testing.assert_close(ours, there.detach(), rtol=0.0, atol=2e-5)


@pytest.mark.parametrize("name", ["Llama", "Bert", "DebertaV2"])
def test_an_adapter_of_a_classifier_whose_head_stays_goes_to_peft(name: str, tmp_path: Path) -> None:
    """Seen to fail: with a KeyError of peft, which wants the head of a classifier in the file."""
    peft = pytest.importorskip("peft")
    sizes = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
    more: dict[str, Any] = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]} if name == "DebertaV2" else {}
    config = getattr(transformers, f"{name}Config")(**sizes, **more, max_position_embeddings=64, pad_token_id=258, num_labels=3)
    theirs = getattr(transformers, f"{name}ForSequenceClassification")(config)
    theirs.save_pretrained(tmp_path / "theirs")
    BytesConfig().build().save(tmp_path / "theirs")
    import_model(tmp_path / "theirs", tmp_path / "parent")
    known = read_model(tmp_path / "parent")[0]
    cfg, model = LoRAConfig(rank=2), build_model(model_config(known["model"], "parent"), seed=0)
    cfg.apply(model)
    redraw(model, seed=1)
    about = {"adapter": cfg.tree(), "parent": str(tmp_path / "parent"), "parent_hash": folder_hash(tmp_path / "parent")}
    own = {key: 0.15 * p for key, p in cfg.own(model).items()}
    save_model(tmp_path / "new", model.cfg.tree(), own, BytesConfig().build().save, about)
    found = export_adapter(tmp_path / "new", tmp_path / "out")
    assert found.check is not None and found.check.difference <= 2e-5 * max(1.0, found.check.spread)
    ids, at = torch.tensor([[3, 7, 9, 2, 7, 11, 3]]), -1 if name == "Llama" else 0
    ours = load(tmp_path / "new", "cpu")[0](Batch(ids), read=lambda hidden, head, ctx: head(hidden[:, at]))
    there = peft.PeftModel.from_pretrained(theirs, tmp_path / "out").eval()(ids).logits
    torch.testing.assert_close(ours, there.detach(), rtol=0.0, atol=2e-5)
    import_adapter(tmp_path / "out", tmp_path / "back", base=tmp_path / "parent")
    back = load(tmp_path / "back", "cpu")[0](Batch(ids), read=lambda hidden, head, ctx: head(hidden[:, at]))
    torch.testing.assert_close(back, ours, rtol=0.0, atol=1e-5)


def test_an_adapter_of_a_classifier_is_refused_on_a_base_that_predicts_tokens(tmp_path: Path) -> None:
    """The message says how to make the base that it wants. Seen to fail: 'Give the base that it is of', which was given."""
    peft = pytest.importorskip("peft")
    sizes: dict[str, Any] = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 1}
    language = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_attention_heads=4))
    language.save_pretrained(tmp_path / "theirs")
    BytesConfig().build().save(tmp_path / "theirs")
    import_model(tmp_path / "theirs", tmp_path / "parent")
    base = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "theirs", num_labels=3)
    peft.get_peft_model(base, peft.LoraConfig(task_type="SEQ_CLS")).save_pretrained(tmp_path / "peft")
    with pytest.raises(ConfigError, match=r"trained score\.weight.*predicts tokens: make a base by AutoModelForSequenceClassification"):
        import_adapter(tmp_path / "peft", tmp_path / "back", base=tmp_path / "parent")


def test_a_base_that_is_another_model_is_refused(tmp_path: Path) -> None:
    """Seen to be written: peft loads the adapter on any model of these shapes, and computes something else."""
    folder = adapted("llama3_8b", LoRAConfig(rank=2), tmp_path)
    export(tmp_path / "parent", tmp_path / "base", dtype="bf16")
    told: list[str] = []
    export_adapter(folder, tmp_path / "out", check=False, base=str(tmp_path / "base"), say=told.append)
    assert not any("base=" in line for line in told)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    with torch.no_grad():
        theirs.model.layers[0].mlp.up_proj.weight[0, 0] += 1
    theirs.save_pretrained(tmp_path / "other")
    said = r"base=.*other: it has other weights than .*parent, beside which the adapter was trained, the first of them blocks\.0\.ffn\.up"
    with pytest.raises(ConfigError, match=said):
        export_adapter(folder, tmp_path / "out2", check=False, base=str(tmp_path / "other"))
    config = json.loads((tmp_path / "other/config.json").read_text())
    (tmp_path / "other/config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "bitsandbytes"}}))
    export_adapter(folder, tmp_path / "out2", check=False, base=str(tmp_path / "other"), say=told.append)
    assert "other: its weights were not compared with those of" in told[-1]


def test_a_base_that_lm_does_not_read_is_named_and_not_compared(tmp_path: Path) -> None:
    """Seen to fail: no adapter was written beside a base of pickles, which peft reads."""
    folder = adapted("llama3_8b", LoRAConfig(rank=2), tmp_path)
    export(tmp_path / "parent", tmp_path / "base")
    (tmp_path / "base" / "model.safetensors").rename(tmp_path / "base" / "pytorch_model.bin")
    told: list[str] = []
    export_adapter(folder, tmp_path / "out", check=False, base=str(tmp_path / "base"), say=told.append)
    assert f"base={tmp_path / 'base'}: its weights were not compared with those of {tmp_path / 'parent'}" in told
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["base_model_name_or_path"] == str(tmp_path / "base")


def test_the_base_of_an_adapter_that_was_trained_beside_rounded_matrices_is_the_unrounded_one(tmp_path: Path) -> None:
    folder = adapted("llama3_8b", LoRAConfig(rank=2, base="bf16"), tmp_path)
    export(tmp_path / "parent", tmp_path / "base")
    told: list[str] = []
    export_adapter(folder, tmp_path / "out", check=False, base=str(tmp_path / "base"), say=told.append)
    assert not any("were not compared" in line for line in told)
