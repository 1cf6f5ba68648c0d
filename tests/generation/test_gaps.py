"""`suffix`: a model that has learned to fill in the middle writes what fills the gap between two texts."""

import io
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as RawTokenizer

import lm as library
from lm.data.kinds import BytesConfig
from lm.data.tokenizer.gap import SENTINELS, Gap, gap_ends, gap_ids
from lm.data.tokenizer.tokenizer import Specials, Tokenizer
from lm.errors import ConfigError
from lm.generation.writer import Writer
from lm.nn.transformer import DecoderLM
from lm.storage.model_folder import save_model
from tests.conftest import Lm
from tests.generation.test_answers import encoder_decoder
from tests.nn.models import config, redrawn

KNOWN = [
    SENTINELS,
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
]
LETTERS = [
    "data.files=[letters.jsonl]", "data.seq_len=64", "trainer.max_steps=150", "trainer.device=cpu", "data.val_rows=8",
]  # fmt: skip
BEFORE, BEHIND = "def größe(x):\n    ", "\n    return y\n"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return BytesConfig().build(extra=SENTINELS)


@pytest.fixture(scope="module")
def model(tokenizer: Tokenizer) -> DecoderLM:
    return redrawn(config(vocab_size=tokenizer.vocab_size, max_seq_len=128))


@pytest.fixture
def folder(tmp_path: Path, model: DecoderLM, tokenizer: Tokenizer) -> Path:
    save_model(tmp_path / "filler", model.cfg.tree(), dict(model.named_parameters()), tokenizer.save, {})
    return tmp_path / "filler"


def byte_level(names: tuple[str, ...], special: bool) -> RawTokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = RawTokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    raw.add_special_tokens([AddedToken("<|endoftext|>", special=True)])
    (raw.add_special_tokens if special else raw.add_tokens)([AddedToken(name, special=special, normalized=False) for name in names])
    return raw


def sentencepiece(names: tuple[str, ...], special: bool) -> RawTokenizer:
    """Puts a blank before a text, as Llama 2's does."""
    vocab = ["<unk>", "<|endoftext|>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *map(chr, range(33, 127))]
    raw = RawTokenizer(models.BPE({piece: i for i, piece in enumerate(vocab)}, [], unk_token="<unk>", byte_fallback=True))
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    raw.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    raw.add_special_tokens([AddedToken("<unk>", special=True), AddedToken("<|endoftext|>", special=True)])
    raw.add_special_tokens([AddedToken(name, special=special, normalized=False) for name in names])
    return raw


@pytest.mark.parametrize("names", KNOWN, ids=lambda names: names[0])
@pytest.mark.parametrize(
    ("made", "special"), [(byte_level, True), (byte_level, False), (sentencepiece, True)], ids=["special", "added", "blank"]
)
def test_the_model_reads_what_transformers_makes_of_the_same_tokens(made, special: bool, names: tuple[str, str, str]) -> None:
    transformers = pytest.importorskip("transformers")
    raw = made(names, special)
    pre, suf, mid = names
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=RawTokenizer.from_str(raw.to_str()))
    found = gap_ids(Tokenizer(raw, Specials(None, "<|endoftext|>", None)), Gap(BEFORE, BEHIND))
    assert found == theirs(f"{pre}{BEFORE}{suf}{BEHIND}{mid}", add_special_tokens=False)["input_ids"]


def test_text_that_spells_a_sentinel_stays_text(tokenizer: Tokenizer) -> None:
    found = gap_ids(tokenizer, Gap(f"a{SENTINELS[1]}b", "c"))
    assert sum(token in tokenizer.special_names for token in found) == len(tokenizer.prefix) + 3


@pytest.mark.slow
def test_a_model_learns_to_fill_gaps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the alphabet, whose middle follows from what is around it."""
    monkeypatch.chdir(tmp_path)
    draw = np.random.default_rng(0)
    letters = "abcdefghijklmnopqrstuvwxyz"
    starts = draw.integers(0, 14, 400)
    Path("letters.jsonl").write_text("".join(f"{json.dumps({'text': letters[start : start + 12]})}\n" for start in starts))
    run = library.train(library.config(overrides=["recipes=pretrain/fim_tiny", "tokenizer=bytes", "data=text", *LETTERS]))
    model, tokenizer = library.load(run.model, device="cpu")
    for start in (0, 3, 9):
        text = letters[start : start + 12]
        assert library.generate(model, tokenizer, text[:4], suffix=text[8:], temperature=0, max_tokens=12) == text[4:8]


def test_another_file_ends_what_fills_a_gap(model: DecoderLM) -> None:
    """And not what continues a text, where only the end of a text does."""
    tokenizer = BytesConfig().build(extra=(*SENTINELS, "<|file_sep|>"))
    other = redrawn(config(vocab_size=tokenizer.vocab_size, max_seq_len=128))
    (sep,) = (i for i, name in tokenizer.special_names.items() if name == "<|file_sep|>")
    assert sep in gap_ends(tokenizer)
    options = {"temperature": 0, "max_tokens": 5, "logit_bias": {sep: 100}}
    (filled,) = library.complete(other, tokenizer, "a", suffix="b", **options)
    (continued,) = library.complete(other, tokenizer, "a", **options)
    assert (filled.tokens, filled.finish) == ([], "stop") and continued.tokens == [sep] * 5


def test_all_ways_of_asking_write_the_same(
    lm: Lm, folder: Path, model: DecoderLM, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["max_tokens=9", "seed=3"]
    told = library.generate(model, tokenizer, "def f(", suffix=" end", max_tokens=9, seed=3)
    assert told != library.generate(model, tokenizer, "def f(", max_tokens=9, seed=3)
    code, out, _ = lm("generate", f"from={folder}", "prompt=def f(", "suffix= end", *options)
    assert (code, out) == (0, f"def f({told} end\n")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"def f("), encoding="utf-8"))
    code, out, _ = lm("generate", f"from={folder}", "suffix= end", *options)
    assert (code, out) == (0, f"def f({told} end\n")
    code, out, _ = lm("generate", f"from={folder}", "prompt=def f(", "suffix= end", "format=json", *options)
    (one,) = json.loads(out)
    assert (one["prompt"], one["suffix"], one["text"]) == ("def f(", " end", told)
    code, out, _ = lm("generate", f"from={folder}", "prompt=def f(", "prompt=a", "suffix= end", *options)
    assert out.startswith(f"--- 1 of 2 ---\ndef f({told} end\n--- 2 of 2 ---\na")
    Path("p.jsonl").write_text(json.dumps({"prompt": "def f(", "suffix": " end"}) + "\n")
    assert lm("generate", f"from={folder}", "prompts=p.jsonl", "out=a.jsonl", *options)[0] == 0
    assert json.loads(Path("a.jsonl").read_text())["answers"][0]["text"] == told


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["suffix=b", "chat=true"], "suffix: a chat has none."),
        (["suffix=b", "prompts=p.jsonl", "out=a"], "prompt, suffix, format: prompts=FILE has them"),
        (["suffix=\ud800", "prompt=a"], "suffix: "),
    ],
)
def test_a_suffix_that_cannot_be_used_is_refused(lm: Lm, folder: Path, args: list[str], said: str) -> None:
    code, out, err = lm("generate", f"from={folder}", *(["prompt=a"] if "prompt=a" not in args and "out=a" not in args else []), *args)
    assert (code, out) == (2, "") and said in err and err.count("\n") == 1


def test_a_model_that_fills_no_gaps_is_told(model: DecoderLM, tokenizer: Tokenizer) -> None:
    with pytest.raises(
        ConfigError, match=r"suffix: the tokenizer has not all of <\|fim_prefix\|>, .* Use a model of objective=fim, or leave it out\."
    ):
        Writer(redrawn(config(vocab_size=300)), BytesConfig().build()).in_gaps()
    with pytest.raises(ConfigError, match="suffix: a chat has none"):
        library.generate(model, tokenizer, "a", suffix="b", chat=True)
    with pytest.raises(ConfigError, match=r"suffix: 3 is no text\."):
        library.generate(model, tokenizer, "a", suffix=3)
    with pytest.raises(ConfigError, match="the tokenizer has no token <extra_id_0>, by which a gap is asked for"):
        library.generate(encoder_decoder(vocab_size=tokenizer.vocab_size), tokenizer, "a", suffix="b")
