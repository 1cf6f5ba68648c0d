"""Models that are told a language: its token beside the source, and at the beginning of each answer."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import AddedToken, models, pre_tokenizers, processors
from tokenizers import Tokenizer as RawTokenizer

transformers = pytest.importorskip("transformers")

from lm.data.kinds import PairRecord, Seq2SeqConfig, TextConfig, TokenizerFileConfig  # noqa: E402
from lm.data.rows.build import split_rows  # noqa: E402
from lm.data.store.prepare import prepare  # noqa: E402
from lm.data.tokenizer.source import source_of  # noqa: E402
from lm.data.tokenizer.tokenizer import Specials, Tokenizer, load_tokenizer  # noqa: E402
from lm.errors import ConfigError  # noqa: E402
from lm.generation.generate import complete  # noqa: E402
from lm.generation.load import load  # noqa: E402
from lm.hf.io.export import export  # noqa: E402
from lm.hf.io.import_ import import_model  # noqa: E402
from lm.nn.batch import IGNORED  # noqa: E402
from lm.nn.model_config import model_config  # noqa: E402
from lm.nn.transformer import build_model  # noqa: E402
from tests.hf.harness import redraw  # noqa: E402
from tests.nn.models import config  # noqa: E402

PROMPTS = ["a b", "c", "", "d e f g h"]
FORMS = {"nllb": "de_DE $A </s>", "mbart": "$A </s> de_DE"}
SMALL = {key: value for key, value in config(vocab_size=320).tree().items() if key != "mtp"} | {"kind": "encoder_decoder"}
SPECIALS = ("<s>", "<pad>", "</s>", "<unk>", "de_DE", "en_XX", "fr_XX")


def tokenizer_of(single: str) -> Tokenizer:
    """A token a letter behind the special ones.  single: what is put around a text."""
    vocab = {name: i for i, name in enumerate((*SPECIALS, *"abcdefghij"))}
    raw = RawTokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    raw.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIALS])
    raw.post_processor = processors.TemplateProcessing(single=single, special_tokens=[(name, vocab[name]) for name in ("</s>", "de_DE")])
    return Tokenizer(raw, Specials("<s>", "</s>", "<pad>"), adds_bos=False)


@pytest.fixture(params=FORMS)
def theirs(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A random NLLB from German into English, its tokenizer as NLLB's, or as mBART's and an older NLLB's."""
    tokenizer, folder = tokenizer_of(FORMS[request.param]), tmp_path / "theirs"
    sizes: dict[str, Any] = {"vocab_size": 17, "d_model": 32, "max_position_embeddings": 64, "tie_word_embeddings": False}
    for stack in ("encoder", "decoder"):
        sizes |= {f"{stack}_layers": 2, f"{stack}_attention_heads": 4, f"{stack}_ffn_dim": 48}
    model = transformers.M2M100ForConditionalGeneration(transformers.M2M100Config(**sizes))
    redraw(model, 1.0, seed=10)  # whose answers differ, and end or do not
    model.generation_config.forced_bos_token_id = tokenizer.special(["en_XX"])
    model.save_pretrained(folder)
    tokenizer.save(folder)
    return folder


def loaded(folder: Path) -> tuple[Any, Any]:
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=torch.float64)
    return model, transformers.AutoTokenizer.from_pretrained(folder)


def their_answers(model: Any, tokenizer: Any, options: dict[str, Any]) -> tuple[list[list[int]], list[list[int]]]:
    """The ids that transformers reads for the prompts, and those that it answers behind the start token, without the end."""
    found = []
    for prompt in PROMPTS:
        asked = tokenizer(prompt, return_tensors="pt")
        [answer] = model.generate(input_ids=asked["input_ids"], attention_mask=asked["attention_mask"], do_sample=False, **options).tolist()
        found.append(answer[1 : answer.index(2, 1) if 2 in answer[1:] else None])
    return [tokenizer(prompt)["input_ids"] for prompt in PROMPTS], found


@pytest.mark.parametrize("language", [None, "fr_XX"])
def test_a_translator_answers_as_in_transformers_into_its_language_or_another(theirs: Path, tmp_path: Path, language: str | None) -> None:
    """Greedy and by beams, whose scores count the language as a token. Seen to fail: the source came without its language."""
    import_model(theirs, tmp_path / "ours", say=lambda line: None)
    model, tokenizer = load(tmp_path / "ours", "cpu")
    model.double()
    there = loaded(theirs)
    forced = tokenizer.special([language or "en_XX"])
    by_beams = [{"num_beams": 4, "length_penalty": 0.5, "early_stopping": True}, {"num_beams": 4, "length_penalty": 2.0}]
    ended = set[bool]()
    for options in [{}, *by_beams]:
        read, answers = their_answers(*there, {"max_new_tokens": 13, "forced_bos_token_id": forced, **options})
        own: dict[str, Any] = {key.replace("num_", ""): value for key, value in options.items()} or {"temperature": 0}
        found = complete(model, tokenizer, PROMPTS, max_tokens=12, first_token=language, **own)
        assert [source_of(tokenizer, prompt) for prompt in PROMPTS] == read
        assert [[forced, *each.tokens] for each in found] == answers, options
        ended |= {len(answer) < 13 for answer in answers}
    assert ended == {True, False}


@pytest.mark.slow
def test_both_languages_go_into_an_export(theirs: Path, tmp_path: Path) -> None:
    import_model(theirs, tmp_path / "ours", say=lambda line: None)
    export(tmp_path / "ours", tmp_path / "back", say=lambda line: None)
    first = load_tokenizer(tmp_path / "ours").special(["en_XX"])
    assert json.loads((tmp_path / "back" / "generation_config.json").read_text())["forced_bos_token_id"] == first
    back, before = (their_answers(*loaded(folder), {"max_new_tokens": 8}) for folder in (tmp_path / "back", theirs))
    assert back == before


def test_a_pair_is_read_and_said_with_its_languages_also_where_it_is_cut(tmp_path: Path) -> None:
    """What transformers' text_target makes of it. Seen to fail: of a cut source the end was eos alone."""
    (tmp_path / "pairs.jsonl").write_text('{"source": "a b c d e f", "target": "g h i j"}\n')
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text('{"source": "a", "target": "b"}\n')
    tokenizer_of(FORMS["mbart"]).save(tmp_path / "tokenizer")
    files = str(tmp_path / "pairs.jsonl")
    data = TextConfig(files=files, val_files=str(held_out), cache_dir=str(tmp_path), record=PairRecord(), seq_len=6)
    found = prepare(data, TokenizerFileConfig(path=str(tmp_path / "tokenizer")), log=lambda line: None)
    ids = found.tokenizer.encode
    model = model_config(SMALL | {"start_token": 2, "first_token": 5})
    for target_len, said in ((None, "g h i j"), (4, "g h")):
        [rows] = split_rows(Seq2SeqConfig(target_len=target_len), data, found, ["train"], model)
        batch = rows.batch(np.array([0]))
        assert batch.source_tokens is not None and batch.labels is not None
        assert batch.source_tokens[0, :6].tolist() == [*ids("a b c d"), 2, 4]
        learned = [5, *ids(said), 2]
        assert batch.labels[0, : len(learned)].tolist() == learned and batch.labels[0, len(learned)] == IGNORED
        assert batch.tokens[0, : len(learned)].tolist() == [2, *learned[:-1]]


@pytest.mark.parametrize("single", ["de_DE $A", "de_DE $A </s>"], ids=["no end", "no such letter"])
def test_what_a_tokenizer_puts_elsewhere_is_no_language(single: str) -> None:
    """GLM's [gMASK]<sop>, for which a decoder's pairs lost the end between source and target; and a vocabulary without the letter that is
    tried, of which nothing can be told: all would stand behind a text."""
    tokenizer = tokenizer_of(single)
    if "</s>" in single:
        content = tokenizer.content()
        content["normalizer"] = {"type": "Replace", "pattern": {"String": "a"}, "content": ""}
        tokenizer = Tokenizer(RawTokenizer.from_str(json.dumps(content)), tokenizer.specials, adds_bos=False)
    assert source_of(tokenizer, "b") == [*tokenizer.encode("b"), tokenizer.eos]


def test_a_first_token_that_there_is_not_is_refused() -> None:
    tokenizer = tokenizer_of("$A </s>")
    decoder = build_model(config(vocab_size=320), 0)
    with pytest.raises(ConfigError, match="first_token: it is of an encoder-decoder's answers"):
        complete(decoder, tokenizer, "a", first_token="en_XX")
    tree = SMALL | {"start_token": 2}
    model = build_model(model_config(tree), 0)
    with pytest.raises(ConfigError, match=r"first_token=en_X is no special token of the tokenizer\. Did you mean 'en_XX'"):
        complete(model, tokenizer, "a", first_token="en_X")
    with pytest.raises(ConfigError, match="first_token=320 is not below vocab_size=320"):
        model_config({**tree, "first_token": 320})
