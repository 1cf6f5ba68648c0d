"""What stands around a text that a model reads as a whole: the source of an encoder-decoder, or what is told apart."""

from lm.data.tokenizer.tokenizer import Tokenizer


def source_of(tokenizer: Tokenizer, text: str) -> list[int]:
    """Returns the ids of a text as a source."""
    before, behind = around(tokenizer)
    return [*before, *tokenizer.encode(text), *behind]


def around(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Returns the ids before and behind the text of a source: the prefix and suffix of a document, or those that tokenizer.json itself puts
    there, where eos is one of them and another is neither that nor bos, but a language (NLLB, mBART)."""
    saved, text = tokenizer.encode_as_saved("a"), tokenizer.encode("a")
    at = next((i for i in range(len(saved)) if text and saved[i : i + len(text)] == text), None)
    if at is None:
        return tokenizer.prefix, tokenizer.suffix
    before, behind = saved[:at], saved[at + len(text) :]
    beside, usual = {*before, *behind}, {tokenizer.bos, tokenizer.eos, tokenizer.pad, tokenizer.mask, tokenizer.unknown}
    return (before, behind) if tokenizer.eos in beside and beside - usual else (tokenizer.prefix, tokenizer.suffix)


def behind(tokenizer: Tokenizer, both_ways: bool) -> list[int]:
    """Returns the ids behind a text that is told apart: eos in an encoder; in a decoder where tokenizer.json itself puts it there, unless
    eos pads too, since transformers then reads the label off at the token before.  both_ways: it is an encoder."""
    ends = tokenizer.encode_as_saved("a")[-1:] == tokenizer.suffix and tokenizer.eos != tokenizer.pad
    return tokenizer.suffix if both_ways or ends else []
