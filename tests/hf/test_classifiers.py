"""Classifiers as `...ForSequenceClassification` of transformers, both ways."""

import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

import torch  # noqa: E402
from tokenizers import Tokenizer as RawTokenizer  # noqa: E402
from tokenizers import processors  # noqa: E402

import lm  # noqa: E402
from lm.data.rows.reading import Reading  # noqa: E402
from lm.data.tokenizer.config import BytesConfig  # noqa: E402
from lm.errors import CheckpointError, ConfigError  # noqa: E402
from lm.generation.classify import predicted  # noqa: E402
from lm.hf.io.check import compare  # noqa: E402
from lm.hf.io.classifier import HEADS, classifiers  # noqa: E402
from lm.hf.io.reading import read_hf  # noqa: E402
from lm.hf.io.tokenizer import save_tokenizer  # noqa: E402
from lm.hf.io.writing import family_for, write_hf  # noqa: E402
from lm.nn.model_config import ModelConfig  # noqa: E402
from lm.nn.transformer import build_model  # noqa: E402
from lm.testing.models import random_model  # noqa: E402
from tests.conftest import Lm  # noqa: E402
from tests.hf.draws import held  # noqa: E402
from tests.hf.harness import change  # noqa: E402
from tests.nn.models import config as plain  # noqa: E402

QUICK = ("llama", "gpt2", "bert", "modernbert")
NAMES = ["calm", "wild", "neither"]


def telling(cfg: ModelConfig, name: str = "llama") -> ModelConfig:
    act = HEADS[name].act
    head = cfg.head if act is None else cfg.head.replace(transform=act, transform_norm=False)
    return cfg.replace(head=head.telling(NAMES, bias=cfg.kind == "encoder"))


def drawn(name: str) -> ModelConfig:
    """A random model that this family holds, as a classifier."""
    source = random.Random(name)
    while True:
        try:
            return telling(held(source, name), name)
        except ConfigError:
            continue


@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in HEADS])
def test_transformers_tells_the_same_and_the_way_back_leads_to_the_same_weights(name: str, tmp_path: Path) -> None:
    """The class is in transformers, and every weight in its place. Seen to fail: gemma2 with its softcap, bert with a norm."""
    cfg = drawn(name)
    family = family_for(cfg, name)
    assert family.homeless(cfg) == [] and family.architecture == classifiers()[name].architecture
    model = random_model(cfg, seed=1)
    weights = {key: p.detach() for key, p in model.named_parameters()}
    write_hf(tmp_path, family, cfg, weights, None)
    if family.pad is None:
        change(tmp_path, pad_token_id=0)  # as a tokenizer would, without which transformers takes one row at a time
    found = compare(tmp_path, family, model)
    assert found.spread > 1e-3 and found.difference < 1e-4 * max(1.0, found.spread)
    back = read_hf(tmp_path)
    assert back.config.head.labels == NAMES and back.family.name == name and back.weights.keys() == weights.keys()
    assert all(torch.equal(back.weights[key], weight) for key, weight in weights.items())


@pytest.fixture(params=["decoder", "encoder", "learned"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A classifier whose weights are random, with a tokenizer of bytes.  learned: a decoder that counts positions."""
    small = ["model.d_model=32", "model.n_layers=2", "model.attention.n_heads=2", "model.ffn.hidden=64", "data.seq_len=48"]
    models = {
        "decoder": ["model=nano"],
        "encoder": ["model=bert_tiny"],
        "learned": ["model=gpt2", "model.vocab_size=260", "model.max_seq_len=48"],
    }
    told = ["data=labels", "data.files=a.jsonl", "objective=classify", f"objective.labels=[{','.join(NAMES)}]"]
    cfg = lm.config(overrides=[*models[request.param], *small, *told])
    model = build_model(cfg.sized_model(260), seed=3)
    source = torch.Generator().manual_seed(0)
    for weight in (p for p in model.parameters() if p.ndim > 1):
        weight.data.normal_(std=0.3, generator=source)  # with those of a new model all texts are nearly alike
    lm.save(model, BytesConfig().build(), tmp_path / "ours")
    return tmp_path / "ours"


def test_the_pipeline_of_transformers_tells_of_texts_what_lm_does(folder: Path, tmp_path: Path) -> None:
    """With the exported tokenizer, side by side in rows with padding, and once more when it is imported again; of pairs too. Seen to fail:
    learned positions, with padding on the left, of which transformers' GPT-2 counts too; segments, which no tokenizer gave BERT."""
    draw = random.Random(0)
    texts = ["".join(draw.choices("abcde ", k=draw.randint(1, 40))) for _ in range(30)]
    pairs = [(first[:15], second[:15]) for first, second in pairwise(texts)]
    lm.export(folder, tmp_path / "theirs", say=lambda line: None)
    lm.import_model(tmp_path / "theirs", tmp_path / "back", say=lambda line: None)
    pipe = transformers.pipeline("text-classification", model=str(tmp_path / "theirs"), top_k=None)
    asked = [*texts, *({"text": first, "text_pair": second} for first, second in pairs)]
    expected = [{each["label"]: each["score"] for each in found} for found in pipe(asked, batch_size=7)]
    for where in (folder, tmp_path / "back"):
        found = lm.classify(*lm.load(where), [*texts, *pairs])
        assert all(one == pytest.approx(other, abs=1e-5) for one, other in zip(found, expected, strict=True))
    assert len({round(each["wild"], 3) for each in expected}) > 10


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_a_modernbert_is_read_off_where_its_config_says(pooling: str, tmp_path: Path) -> None:
    """Texts of several lengths, in rows with padding. Seen to fail: the mean, as which answerdotai/ModernBERT-base has it, was refused."""
    sizes = {"vocab_size": 260, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.ModernBertConfig(**sizes, pad_token_id=258, classifier_pooling=pooling, max_position_embeddings=32)
    config.id2label = dict(enumerate(NAMES))
    theirs = transformers.ModernBertForSequenceClassification(config)
    for weight in (p for p in theirs.parameters() if p.ndim > 1):
        weight.data.normal_(std=0.3, generator=torch.Generator().manual_seed(len(weight)))
    theirs.save_pretrained(tmp_path / "theirs")
    save_tokenizer(tmp_path / "theirs", BytesConfig().build(), drawn("bert"))
    pipe, texts = transformers.pipeline("text-classification", model=str(tmp_path / "theirs"), top_k=None), ["sea", "a flame", "x" * 29]
    expected = [{each["label"]: each["score"] for each in found} for found in pipe(texts, batch_size=3)]
    lm.import_model(tmp_path / "theirs", tmp_path / "ours", say=lambda line: None)
    lm.export(tmp_path / "ours", tmp_path / "again", say=lambda line: None)
    found = lm.classify(*lm.load(tmp_path / "ours"), texts)
    assert all(one == pytest.approx(other, abs=1e-5) for one, other in zip(found, expected, strict=True))
    assert json.loads((tmp_path / "again" / "config.json").read_text())["classifier_pooling"] == pooling
    with pytest.raises(ConfigError, match=r"model\.head\.pooling=mean must be token"):
        family_for(telling(plain()).replace(head={"labels": NAMES, "tied": False, "pooling": "mean"}))


@pytest.mark.slow
@pytest.mark.parametrize("own_pad", [True, False])
def test_a_text_that_the_tokenizer_ends_with_eos_is_read_to_it(own_pad: bool, tmp_path: Path) -> None:
    """As transformers reads it: where eos pads too, the label is at the token before. Seen to fail: read without it."""
    config = transformers.LlamaConfig(
        vocab_size=260, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, max_position_embeddings=32
    )
    config.id2label, config.pad_token_id = dict(enumerate(NAMES)), 258 if own_pad else 257
    theirs, tokenizer = transformers.LlamaForSequenceClassification(config), BytesConfig().build()
    for weight in (p for p in theirs.parameters() if p.ndim > 1):
        weight.data.normal_(std=0.3, generator=torch.Generator().manual_seed(len(weight)))
    theirs.save_pretrained(tmp_path / "theirs")
    save_tokenizer(tmp_path / "theirs", tokenizer, drawn("bert"))  # an encoder's: it writes [bos] text [eos]
    file = tmp_path / "theirs" / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "pad_token": "<|pad|>" if own_pad else "<|eos|>"}))
    pipe = transformers.pipeline("text-classification", model=str(tmp_path / "theirs"), top_k=None)
    texts = ["sea", "a flame", *(["x" * 40] if own_pad else [])]  # cut for the eos too, transformers' are a token shorter
    expected = [{each["label"]: each["score"] for each in found} for found in pipe(texts, batch_size=3, truncation=True, max_length=32)]
    lm.import_model(tmp_path / "theirs", tmp_path / "ours", say=lambda line: None)
    lm.export(tmp_path / "ours", tmp_path / "again", say=lambda line: None)
    lm.import_model(tmp_path / "again", tmp_path / "back", say=lambda line: None)
    for where in ("ours", "back"):
        found = lm.classify(*lm.load(tmp_path / where), texts)
        assert all(one == pytest.approx(other, abs=1e-5) for one, other in zip(found, expected, strict=True))


def around(first: str, second: str, segment: int) -> Any:
    """How a tokenizer.json of bytes writes a text and a pair.  segment: of the second text."""
    names = [(name, i) for name, i in (("<|bos|>", 256), ("<|eos|>", 257)) if name in first]
    return processors.TemplateProcessing(single=first, pair=f"{first} {second}".replace("$B", f"$B:{segment}"), special_tokens=names)


PROCESSORS: dict[str, tuple[str, Any]] = {
    "bert": ("Bert", processors.BertProcessing(("<|eos|>", 257), ("<|bos|>", 256))),
    "roberta": ("Roberta", processors.RobertaProcessing(("<|eos|>", 257), ("<|bos|>", 256))),
    "distilbert": ("DistilBert", around("<|bos|> $A <|eos|>", "$B <|eos|>:1", 1)),
    "llama": ("Llama", around("<|bos|> $A", "<|bos|>:1 $B", 1)),
    "qwen": ("Qwen3", processors.ByteLevel()),
}


@pytest.mark.parametrize(
    "named", [name if name in ("bert", "roberta") else pytest.param(name, marks=pytest.mark.slow) for name in PROCESSORS]
)
def test_a_pair_of_texts_is_read_as_transformers_reads_it(named: str, tmp_path: Path) -> None:
    """With the ids and segments of tokenizer(text, text_pair), the longer text cut first; and again behind an export of ours."""
    name, post = PROCESSORS[named]
    sizes = {"vocab_size": 260, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    sizes |= {"type_vocab_size": 1} if name == "Roberta" else {"head_dim": 8, "num_key_value_heads": 2} if name == "Qwen3" else {}
    sizes |= {"dim": 16, "hidden_dim": 32, "n_layers": 1, "n_heads": 2} if name == "DistilBert" else {}
    config = getattr(transformers, f"{name}Config")(**sizes, max_position_embeddings=34 if name == "Roberta" else 32, pad_token_id=258)
    config.id2label = dict(enumerate(NAMES))
    config.pad_token_id = 1 if name == "Roberta" else 258
    theirs = getattr(transformers, f"{name}ForSequenceClassification")(config).eval()
    for weight in (p for p in theirs.parameters() if p.ndim > 1):
        weight.data.normal_(std=0.3, generator=torch.Generator().manual_seed(len(weight)))
    theirs.save_pretrained(tmp_path / "theirs")
    raw = RawTokenizer.from_str(json.dumps(BytesConfig().build().content()))
    raw.post_processor = post
    raw.save(str(tmp_path / "theirs" / "tokenizer.json"))
    said = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|bos|>", "eos_token": "<|eos|>", "pad_token": "<|pad|>"}
    (tmp_path / "theirs" / "tokenizer_config.json").write_text(json.dumps(said))
    lm.import_model(tmp_path / "theirs", tmp_path / "ours", say=lambda line: None)
    if name != "Roberta":  # whose positions begin behind a padding token that bytes do not have
        lm.export(tmp_path / "ours", tmp_path / "again", say=lambda line: None)
    model, tokenizer = lm.load(tmp_path / "ours")
    draw, cut = random.Random(0), {"truncation": True, "max_length": 32, "return_tensors": "pt", "return_token_type_ids": True}
    pairs = [
        ("".join(draw.choices("abcde ", k=n)), "".join(draw.choices("abcde ", k=m))) for n in (1, 9, 14, 15, 40) for m in (2, 13, 16, 40)
    ]
    reading, expected = Reading(model.cfg, tokenizer, 32), []
    for where in ("theirs", "again") if name != "Roberta" else ("theirs",):
        read = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path / where)
        for pair in pairs:
            told, (ids, segments, _) = read(*pair, **cut), reading.text(*pair)
            assert told["input_ids"][0].tolist() == ids.tolist()
            assert (segments is not None) == (name == "Bert") and (
                segments is None or told["token_type_ids"][0].tolist() == segments.tolist()
            )
            asked = told if name == "Bert" else {"input_ids": told["input_ids"]}
            with torch.no_grad():
                expected.append(theirs(**asked).logits[0].softmax(-1).tolist())
    found = [list(each.values()) for each in lm.classify(model, tokenizer, pairs)]
    assert len({round(each[0], 3) for each in expected}) > 10
    assert torch.allclose(torch.tensor(found * (len(expected) // len(found))), torch.tensor(expected), atol=1e-5)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"id2label": {"0": "one", "1": "one", "2": "two"}}, "are not different names"),
        ({"architectures": ["LlamaForTokenClassification"]}, "score"),
        ({"id2label": None, "num_labels": 1_000_000_000}, "num_labels=1000000000 does not fit"),  # seen to fail: killed, out of memory
    ],
)
def test_what_is_no_classifier_is_refused(keys: dict[str, Any], said: str, tmp_path: Path) -> None:
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, num_labels=3
    )
    transformers.LlamaForSequenceClassification(config).save_pretrained(tmp_path)
    assert read_hf(tmp_path).config.head.labels == ["LABEL_0", "LABEL_1", "LABEL_2"]
    change(tmp_path, **keys)
    with pytest.raises((ConfigError, CheckpointError), match=said):
        read_hf(tmp_path)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("name", "own"), [("Llama", {"num_key_value_heads": 2}), ("ModernBert", {"pad_token_id": 0})])
def test_a_head_for_labels_is_read_whatever_that_of_tokens_was(name: str, own: dict[str, int], tied: bool, tmp_path: Path) -> None:
    """Seen to fail: ModernBERT's, and those of small Llamas, Qwens and Gemmas, which say that the head for tokens is the embedding."""
    sizes = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = getattr(transformers, f"{name}Config")(**sizes, **own, tie_word_embeddings=tied, num_labels=3)
    getattr(transformers, f"{name}ForSequenceClassification")(config).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"] is tied
    found = read_hf(tmp_path)
    assert not found.config.head.tied and found.weights["head.weight"].shape == (3, 16)


@pytest.mark.parametrize("problem", [None, "regression"])
def test_a_head_of_one_number_is_read_and_written(problem: str | None, tmp_path: Path) -> None:
    """As reward models have it: transformers names the number LABEL_0."""
    config = transformers.Qwen3Config(
        vocab_size=260,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        intermediate_size=32,
        num_labels=1,
        pad_token_id=258,
    )
    config.problem_type = problem
    theirs = transformers.Qwen3ForSequenceClassification(config).eval()
    theirs.score.weight.data.normal_(generator=torch.Generator().manual_seed(0))
    theirs.save_pretrained(tmp_path / "theirs")
    save_tokenizer(tmp_path / "theirs", BytesConfig().build(), drawn("qwen3"))
    lm.import_model(tmp_path / "theirs", tmp_path / "ours", say=lambda line: None)
    [use, _] = lm.export(tmp_path / "ours", tmp_path / "again", say=lambda line: None).uses
    assert use.command is not None and "input_ids" in use.command and "argmax" not in use.command
    model, tokenizer = lm.load(tmp_path / "ours")
    again = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "again").eval()
    for text in ("sea", "a flame"):
        [found] = lm.classify(model, tokenizer, [text])
        with torch.no_grad():
            ids = torch.tensor([[*tokenizer.prefix, *tokenizer.encode(text)]])
            assert [found] == [{"LABEL_0": pytest.approx(each(ids).logits.item(), abs=1e-5)} for each in (theirs,)]
            assert again(ids).logits.item() == pytest.approx(found["LABEL_0"], abs=1e-5)
            assert predicted(found, model.cfg.head) == {"LABEL_0": pytest.approx(found["LABEL_0"], abs=1e-6)}
    assert json.loads((tmp_path / "again" / "config.json").read_text())["problem_type"] == "regression"


@pytest.mark.slow
def test_other_programs_are_not_handed_a_classifier(folder: Path, lm: Lm) -> None:
    code, said, _ = lm("export", f"from={folder}", "format=hf", "out=there")
    assert code == 0 and "AutoModelForSequenceClassification" in said and "tells texts apart, and none was tried with such a model" in said
    card = Path("there/README.md").read_text()
    assert "pipeline_tag: text-classification" in card and not Path("there/generation_config.json").exists()
    assert json.loads(Path("there/config.json").read_text())["id2label"] == {str(i): name for i, name in enumerate(NAMES)}
    code, _, error = lm("export", f"from={folder}", "format=gguf", "out=file")
    assert (code == 2 and "model.head.labels" in error) or "model.kind=encoder" in error
    assert lm("import", "from=there", "out=back")[1].rstrip().endswith("lm classify from=back text=...")


@pytest.mark.parametrize(("name", "segments"), [("bert", 2), ("roberta", 1), ("distilbert", None)])
def test_the_layer_before_tokens_gives_way_to_that_of_the_classifier(name: str, segments: int | None) -> None:
    """Seen to fail: no family held a classifier that was trained from BERT, as its export told."""
    told = ["data=labels", "data.files=a.jsonl", "objective=classify", "objective.labels=[no,yes]", "model=bert_tiny"]
    more = ["model.norm.eps=1e-12", f"model.embed.segments={'null' if segments is None else segments}", "data.seq_len=48"]
    cfg = lm.config(overrides=[*told, *more]).sized_model(260)
    assert cfg.head.transform == HEADS[name].act and family_for(cfg, name).homeless(cfg) == []
    typed = lm.config(overrides=[*told, *more, "model.head.transform=silu", "model.head.transform_bias=false"]).sized_model(260)
    assert typed.head.transform == "silu" and typed.head.transform_norm  # ModernBERT's stays


def test_a_model_with_options_of_tokens_alone_names_them() -> None:
    with pytest.raises(ConfigError, match=r"head\.softcap=5.0 must be null"):
        family_for(telling(plain()).replace(head={"labels": NAMES, "tied": False, "softcap": 5.0}))
