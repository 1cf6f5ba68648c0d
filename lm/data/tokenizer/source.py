"""What the encoder of an encoder-decoder reads of a text."""

from lm.data.tokenizer.tokenizer import Tokenizer


def source_of(tokenizer: Tokenizer, text: str) -> list[int]:
    """Returns the ids of a text as a source."""
    before, behind = around(tokenizer)
    return [*before, *tokenizer.encode(text), *behind]


def around(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Returns the ids before and behind the text of a source: the prefix and suffix of a document, or those that tokenizer.json itself puts
    there, where one of them is no bos or eos but a language (NLLB, mBART)."""
    saved, text = tokenizer.encode_as_saved("a"), tokenizer.encode("a")
    at = next((i for i in range(len(saved)) if saved[i : i + len(text)] == text), len(saved))
    before, behind = saved[:at], saved[at + len(text) :]
    usual = {tokenizer.bos, tokenizer.eos, tokenizer.pad, tokenizer.mask, tokenizer.unknown}
    return (before, behind) if {*before, *behind} - usual else (tokenizer.prefix, tokenizer.suffix)
