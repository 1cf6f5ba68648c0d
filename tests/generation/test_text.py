"""Stop texts, streaming, what a prompt becomes."""

import random
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers

import lm
from lm.data.kinds import BytesConfig
from lm.data.tokenizer.stream import Stream
from lm.data.tokenizer.tokenizer import Tokenizer, load_tokenizer
from lm.errors import CheckpointError, ConfigError
from lm.generation.sampling import SamplingConfig
from lm.generation.text import Continuation
from lm.generation.writer import Writer
from lm.nn.transformer import DecoderLM
from lm.schema import from_tree
from tests.generation.drawing import generate
from tests.nn.models import config, redrawn


def cfg(**options: object) -> SamplingConfig:
    return from_tree(SamplingConfig, {"max_tokens": 30, **options})


def cut(text: str, stops: list[str]) -> str:
    """The text up to the stop text that is complete first; of two complete at once, the one that begins first."""
    for n in range(len(text) + 1):
        found = [text[:n].find(stop) for stop in stops if stop in text[:n]]
        if found:
            return text[: min(found)]
    return text


def test_stop_texts_are_found_across_tokens_and_never_shown_in_part(tokenizer: Tokenizer) -> None:
    source = random.Random(0)
    found = 0
    for _ in range(2000):
        text = "".join(source.choices("abé", k=12))
        stops = ["".join(source.choices("abé", k=source.randint(1, 4))) for _ in range(source.randint(0, 3))]
        row, shown = Continuation(Stream(tokenizer), stops), ""
        for token in tokenizer.encode(text):
            shown += row.push(token)
            assert cut(text, stops).startswith(shown)
            if row.stopped:
                found += 1
                break
        shown += row.finish()
        assert shown == row.text == cut(text, stops)
        assert row.stopped == any(stop in text for stop in stops)
    assert found > 500


def test_text_that_cannot_become_a_stop_text_is_shown_at_once(tokenizer: Tokenizer) -> None:
    row = Continuation(Stream(tokenizer), ["\n\nclass", "##"])
    assert [row.push(token) for token in tokenizer.encode("a\nb#c##")] == ["a", "", "\nb", "", "#c", "", ""]
    assert row.stopped


def test_a_broken_character_at_the_end_is_shown_once(tokenizer: Tokenizer) -> None:
    row = Continuation(Stream(tokenizer), ["x"])
    assert "".join([*(row.push(token) for token in tokenizer.encode("aé")[:2]), row.finish()]) == row.text == "a\ufffd"


def test_generation_ends_at_a_stop_text_and_the_output_is_cut_there(model: DecoderLM, tokenizer: Tokenizer) -> None:
    free = Writer(model, tokenizer, cfg()).complete(["x", "yy"])
    stop = free[0].text[4:7]
    stopped = Writer(model, tokenizer, cfg(stop=stop)).complete(["x", "yy"])
    assert stopped[0].text == free[0].text[: free[0].text.find(stop)]
    assert stopped[0].n_tokens < 30
    assert stopped[1].text == cut(free[1].text, [stop])


def test_streamed_pieces_join_to_the_text_in_every_row(model: DecoderLM, tokenizer: Tokenizer) -> None:
    heard: dict[int, list[str]] = {0: [], 1: [], 2: []}
    found = Writer(model, tokenizer, cfg(stop=["zq"])).complete(["x", "yy", "x"], lambda row, piece: heard[row].append(piece))
    assert ["".join(pieces) for pieces in heard.values()] == [row.text for row in found]
    assert all(piece for pieces in heard.values() for piece in pieces)
    assert min(len(pieces) for pieces in heard.values()) > 2


def test_prompt_begins_as_documents_do_in_training(model: DecoderLM, tokenizer: Tokenizer) -> None:
    assert Writer(model, tokenizer).ids("a") == [tokenizer.bos, ord("a")] == tokenizer.document("ab")[:2]
    assert Writer(model, tokenizer).ids("") == [tokenizer.bos]


def words(tmp_path: Path, *specials: str) -> Tokenizer:
    """A tokenizer of whole words, which writes a space between words, and which has only these specials."""
    raw = RawTokenizer(models.WordLevel({word: i for i, word in enumerate([*specials, "[UNK]", "a", "b", "c"])}, unk_token="[UNK]"))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.WhitespaceSplit(), decoders.Metaspace("_", "always")
    raw.add_special_tokens(list(specials))
    raw.save(str(tmp_path / "tokenizer.json"))
    return load_tokenizer(tmp_path)


def test_empty_prompt_is_eos_where_there_is_no_bos(model: DecoderLM, tmp_path: Path) -> None:
    tokenizer = words(tmp_path, "</s>")
    assert Writer(model, tokenizer).ids("") == [tokenizer.eos]
    assert Writer(model, tokenizer).ids("a") == tokenizer.encode("a")


def test_empty_prompt_without_bos_and_eos_is_refused(model: DecoderLM, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="neither bos nor eos"):
        Writer(model, words(tmp_path)).ids("")


def test_space_between_prompt_and_continuation_is_kept(model: DecoderLM, tmp_path: Path) -> None:
    raw = RawTokenizer(models.BPE({"\u2581": 0, "a": 1, "b": 2, "\u2581a": 3, "\u2581b": 4}, [("\u2581", "a"), ("\u2581", "b")]))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    raw.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    found = Writer(redrawn(config(vocab_size=5)), tokenizer, cfg(top_k=1)).complete(["a b"])[0]
    whole = Writer(model, tokenizer).ids("a b")
    new = generate(redrawn(config(vocab_size=5)), [whole], cfg(top_k=1))[0]
    assert "a b" + found.text == tokenizer.decode(whole + new)


def test_text_that_is_not_unicode_is_refused_with_its_place(model: DecoderLM, tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigError, match=r"prompt: character 2 \('\\udcff'\)"):
        Writer(model, tokenizer, cfg()).complete(["ab\udcff"])


def test_tokenizer_of_another_model_is_refused_with_both_numbers(tokenizer: Tokenizer) -> None:
    with pytest.raises(CheckpointError, match=r"259 tokens .* 61 rows"):
        Writer(redrawn(config()), tokenizer, cfg()).complete(["a"])


def test_completion_says_whether_the_context_cut_it_short(model: DecoderLM, tokenizer: Tokenizer) -> None:
    exact, over, short = (Writer(model, tokenizer, cfg(max_tokens=n)).complete(["a" * 39])[0] for n in (9, 10, 2))
    assert [found.cut_short for found in (exact, over, short)] == [False, True, False]
    assert exact.n_tokens == over.n_tokens == 9


def test_python_door_takes_one_text_or_several(model: DecoderLM, tokenizer: Tokenizer) -> None:
    one = lm.generate(model, tokenizer, "a", max_tokens=9)
    assert isinstance(one, str)
    assert lm.generate(model, tokenizer, ["a", "b"], max_tokens=9) == [one, lm.generate(model, tokenizer, "b", max_tokens=9)]
    assert lm.generate(model, tokenizer, [], max_tokens=9) == []
    assert lm.generate(model, tokenizer, "a", max_tokens=np.int64(9), temperature=np.float32(0.5)) == lm.generate(
        model, tokenizer, "a", max_tokens=9, temperature=0.5
    )
    with pytest.raises(ConfigError, match="options: Object of type set is not JSON"):
        lm.generate(model, tokenizer, "a", stop={"e"})
    with pytest.raises(ConfigError, match="Did you mean 'max_tokens'"):
        lm.generate(model, tokenizer, "a", max_token=9)


def test_bytes_of_any_script_pass_through_a_prompt(model: DecoderLM) -> None:
    tokenizer = BytesConfig().build()
    for text in ("def f(x='a=b, c\"):\n\t", "日本語 🎉", "<|eos|>", "\x00", " "):
        assert tokenizer.decode(Writer(model, tokenizer).ids(text)) == text
