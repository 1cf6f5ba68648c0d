"""What the encoder of an encoder-decoder reads of a text."""

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
