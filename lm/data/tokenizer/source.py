"""What stands around a text that a model reads as a whole: the source of an encoder-decoder, or what is told apart."""

from lm.data.tokenizer.tokenizer import Tokenizer


def source_of(tokenizer: Tokenizer, text: str) -> list[int]:
    """Returns the ids of a text as a source."""
    before, behind = around(tokenizer)
    return [*before, *tokenizer.encode(text), *behind]


def around(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Returns the ids before and behind the text of a source: the prefix and suffix of a document, or those that tokenizer.json itself puts
    there, where eos is one of them and another is neither that nor bos, but a language (NLLB, mBART)."""
    saved, text = tokenizer.as_saved("a")[0], tokenizer.encode("a")
    at = next((i for i in range(len(saved)) if text and saved[i : i + len(text)] == text), None)
    if at is None:
        return tokenizer.prefix, tokenizer.suffix
    before, behind = saved[:at], saved[at + len(text) :]
    beside, usual = {*before, *behind}, {tokenizer.bos, tokenizer.eos, tokenizer.pad, tokenizer.mask, tokenizer.unknown}
    return (before, behind) if tokenizer.eos in beside and beside - usual else (tokenizer.prefix, tokenizer.suffix)


def between(tokenizer: Tokenizer, both_ways: bool) -> tuple[list[int], int]:
    """Returns the ids between two texts that are told apart as a pair, and the segment of the second: those of tokenizer.json itself, or,
    where it puts nothing around a text, what ends one here, or else begins it.  both_ways: it is an encoder."""
    text, (saved, segments) = tokenizer.encode("a"), tokenizer.as_saved("a", "a")
    first, *others = [i for i in range(len(saved)) if text and saved[i : i + len(text)] == text] or [0]
    if not others or tokenizer.as_saved("a")[0] == text:
        return behind(tokenizer, both_ways) or tokenizer.prefix, 1
    return saved[first + len(text) : others[0]], segments[others[0]]


def behind(tokenizer: Tokenizer, both_ways: bool) -> list[int]:
    """Returns the ids behind a text that is told apart: eos in an encoder; in a decoder where tokenizer.json itself puts it there, unless
    eos pads too, since transformers then reads the label off at the token before.  both_ways: it is an encoder."""
    ends = tokenizer.as_saved("a")[0][-1:] == tokenizer.suffix and tokenizer.eos != tokenizer.pad
    return tokenizer.suffix if both_ways or ends else []
