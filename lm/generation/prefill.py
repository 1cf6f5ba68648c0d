"""What is read before the first new token: prompts, a few tokens at a time, so that a long one takes no more memory than its cache."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from lm.nn.batch import Batch
from lm.nn.head import first_read
from lm.nn.transformer import LM
from lm.ops.cache.cache import Cache

_LEAST = 64  # tokens of a row at a time, however many rows there are: a recurrent layer goes through the last of each piece one by one


class Begun(Protocol):
    """What decoding starts from: the source, empty in a decoder, and the decoder's first tokens."""

    source: list[int]
    begin: list[int]


def read(model: LM, rows: Sequence[Begun], pad: int, n_new: int, chunk: int, ahead: int = 0) -> tuple[Cache, Tensor, Tensor, Tensor]:
    """Returns a cache that holds what each row begins with, the positions that were read, (b, s), what the head read there, (b, s, d), and
    the logits behind, (b, 1, v). The cache has room for n_new more tokens and a draft of `ahead`. Equal prompts are read once.

    chunk: of `pieces`.
    """
    first: dict[tuple[int, ...], int] = {}
    which = [first.setdefault((*row.source, *row.begin), len(first)) for row in rows]
    different = dict(zip(which, rows, strict=True))
    batch = filled([*different.values()], pad, model.embed.weight.device)
    cache = spaces(model, batch, n_new, ahead)
    found = [model(piece, read=first_read, cache=cache) for piece in pieces(batch, chunk)]
    assert batch.positions is not None
    hidden, logits = torch.cat([hidden for hidden, _ in found], dim=1), found[-1][1]
    if len(first) == len(rows):
        return cache, batch.positions, hidden, logits
    again = torch.tensor(which, device=logits.device)
    cache.reorder(again)
    return cache, batch.positions[again], hidden[again], logits[again]


def pieces(batch: Batch, chunk: int) -> Iterator[Batch]:
    """Yields the tokens of all rows from left to right, `chunk` at a time of one row, of many together about as many. A source is whole."""
    assert batch.positions is not None
    width = min(chunk, max(_LEAST, chunk // len(batch.tokens)))
    for tokens, positions in zip(batch.tokens.split(width, 1), batch.positions.split(width, 1), strict=True):
        yield replace(batch, tokens=tokens, positions=positions)
        batch = replace(batch, source_tokens=None, source_positions=None)


def spaces(model: LM, batch: Batch, n_new: int, ahead: int = 0) -> Cache:
    """An empty cache for this batch and so many new tokens, which slides where they leave the context.  ahead: tokens of a draft."""
    b, s = batch.tokens.shape
    return model.new_cache(b, s + n_new + ahead, max(8, ahead + 1), model.max_seq_len if s + n_new > model.max_seq_len + 1 else None)


def filled(rows: Sequence[Begun], pad: int, device: torch.device) -> Batch:
    """What the cache is filled with: the sources too, whose keys and values it keeps."""
    tokens, positions = left_padded([row.begin for row in rows], pad, device)
    batch = Batch(tokens, positions=positions, padded=uneven([row.begin for row in rows]))
    if not rows[0].source:
        return batch
    source_tokens, source_positions = left_padded([row.source for row in rows], pad, device)
    return replace(batch, source_tokens=source_tokens, source_positions=source_positions)


def uneven(rows: Sequence[Sequence[int]]) -> bool:
    """Whether some are shorter than others."""
    return len({len(row) for row in rows}) > 1


def left_padded(rows: Sequence[list[int]], pad: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens that end together, and their positions; padding at position -1 is seen by nobody."""
    longest = max(map(len, rows))
    missing = [longest - len(row) for row in rows]
    tokens = [[pad] * n + row for n, row in zip(missing, rows, strict=True)]
    positions = [[-1] * n + list(range(longest - n)) for n in missing]
    return torch.tensor(tokens, dtype=torch.int64, device=device), torch.tensor(positions, dtype=torch.int64, device=device)


def right_padded(rows: Sequence[list[int]], starts: Sequence[int], pad: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens that begin together, each row at a position of its own, and their positions."""
    longest = max(map(len, rows))
    tokens = [row + [pad] * (longest - len(row)) for row in rows]
    positions = [[*range(n, n + len(row)), *[-1] * (longest - len(row))] for n, row in zip(starts, rows, strict=True)]
    return torch.tensor(tokens, dtype=torch.int64, device=device), torch.tensor(positions, dtype=torch.int64, device=device)
