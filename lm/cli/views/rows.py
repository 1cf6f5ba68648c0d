"""A batch as text to look at."""

from collections.abc import Iterator

from torch import Tensor

from lm.data.tokenizer.tokenizer import Tokenizer
from lm.nn.batch import IGNORED, Batch

_COLOURS = ("\x1b[38;5;75m", "\x1b[38;5;180m")
_UNDERLINED, _END = "\x1b[4m", "\x1b[0m"
_NOTHING = "·"


def shown(batch: Batch, tokenizer: Tokenizer, colours: bool) -> str:
    """What each document of each row reads and predicts; what is seen from all sides is underlined, or in ⟨⟩."""
    return "\n".join(line for row in range(len(batch.tokens)) for line in _row(batch, row, tokenizer, colours))


def _row(batch: Batch, row: int, tokenizer: Tokenizer, colours: bool) -> Iterator[str]:
    assert batch.labels is not None
    for number, places in enumerate(_documents(batch.tokens, batch.positions, batch.documents, row)):
        if batch.source_tokens is not None:
            sources = _documents(batch.source_tokens, batch.source_positions, batch.source_documents, row)
            yield f"  source {number}: " + _text(batch.source_tokens[row][sources[number]], None, tokenizer, colours)
        prefix = batch.prefix[row][places] if batch.prefix is not None else None
        yield f"  reads {number}:  " + _text(batch.tokens[row][places], prefix, tokenizer, colours)
        yield f"  says {number}:   " + _text(batch.labels[row][places], None, tokenizer, colours)


def _documents(tokens: Tensor, positions: Tensor | None, documents: Tensor | None, row: int) -> list[Tensor]:
    """The places of each document of a row, as masks."""
    if documents is not None:
        return [documents[row] == number for number in range(int(documents[row].max()) + 1)]
    return [positions[row] >= 0 if positions is not None else tokens[row] == tokens[row]]


def _text(tokens: Tensor, prefix: Tensor | None, tokenizer: Tokenizer, colours: bool) -> str:
    texts = [_NOTHING if token == IGNORED else _visible(tokenizer, token) for token in tokens.tolist()]
    if colours:
        marks = [(_UNDERLINED if prefix is not None and prefix[at] else "") + _COLOURS[at % 2] for at in range(len(texts))]
        return "".join(f"{mark}{text}{_END}" for mark, text in zip(marks, texts, strict=True))
    seen = [prefix is not None and bool(prefix[at]) for at in range(len(texts))]
    return "│".join(f"⟨{text}⟩" if inside else text for text, inside in zip(texts, seen, strict=True))


def _visible(tokenizer: Tokenizer, token: int) -> str:
    """Specials by name, line ends as signs, bytes that are no text as U+FFFD."""
    text = tokenizer.decode([token]) or tokenizer.special_names.get(token, f"[{token}]")
    return text.replace("\r", "␍").replace("\n", "⏎").replace("\t", "⇥")
