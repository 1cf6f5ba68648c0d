"""A batch as readable text."""

from collections.abc import Iterator, Sequence

from torch import Tensor

from lm.data.tokenizer.tokenizer import Tokenizer
from lm.nn.batch import IGNORED, Batch

_COLOURS = ("blue", "sand")
_NOTHING = "·"
Line = list[tuple[str, str]]  # (text, style)


def shown(batch: Batch, tokenizer: Tokenizer, names: Sequence[str] | None = None) -> list[Line]:
    """Returns lines with the inputs and labels of each document of each row, those that count; inputs with bidirectional attention
    are in ⟨⟩.

    names: of labels that are no tokens.
    """
    return [line for row in range(len(batch.tokens)) for line in _row(batch, row, tokenizer, names)]


def _row(batch: Batch, row: int, tokenizer: Tokenizer, names: Sequence[str] | None) -> Iterator[Line]:
    assert batch.labels is not None
    labels = batch.labels if batch.shares is None else batch.labels.masked_fill(batch.shares == 0, IGNORED)
    for number, places in enumerate(_documents(batch.tokens, batch.positions, batch.documents, row)):
        if batch.source_tokens is not None:
            sources = _documents(batch.source_tokens, batch.source_positions, batch.source_documents, row)
            yield [(f"  source {number}: ", ""), *_spans(batch.source_tokens[row][sources[number]], None, tokenizer)]
        prefix = batch.prefix[row][places] if batch.prefix is not None else None
        yield [(f"  reads {number}:  ", ""), *_spans(batch.tokens[row][places], prefix, tokenizer)]
        told = names if batch.targets is None or names is None else [_told(batch.targets[row][number].tolist(), names)]
        yield [(f"  says {number}:   ", ""), *_spans(labels[row][places], None, tokenizer, told)]


def _told(targets: list[float], names: Sequence[str]) -> str:
    """Returns a number, or the names of the labels that are right."""
    if len(names) == 1:
        return f"{targets[0]:g}"
    return f"[{', '.join(name for name, target in zip(names, targets, strict=True) if target)}]"


def _documents(tokens: Tensor, positions: Tensor | None, documents: Tensor | None, row: int) -> list[Tensor]:
    """Returns a mask over a row's places for each of its documents."""
    if documents is not None:
        return [documents[row] == number for number in range(int(documents[row].max()) + 1)]
    return [positions[row] >= 0 if positions is not None else tokens[row] == tokens[row]]


def _spans(tokens: Tensor, prefix: Tensor | None, tokenizer: Tokenizer, names: Sequence[str] | None = None) -> Iterator[tuple[str, str]]:
    for at, token in enumerate(tokens.tolist()):
        text = _NOTHING if token == IGNORED else _visible(tokenizer, token) if names is None else names[token]
        inside = prefix is not None and bool(prefix[at])
        yield ("│" if at else "") + (f"⟨{text}⟩" if inside else text), _COLOURS[at % 2]


def _visible(tokenizer: Tokenizer, token: int) -> str:
    """Returns a token as visible text: special tokens by name, line breaks and tabs as signs, bytes that are no text as U+FFFD."""
    text = tokenizer.decode([token]) or tokenizer.special_names.get(token, f"[{token}]")
    return text.replace("\r", "␍").replace("\n", "⏎").replace("\t", "⇥")
