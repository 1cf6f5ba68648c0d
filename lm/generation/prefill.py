"""Prefill: prompts are read into the cache a piece at a time, so that a long one takes no more memory than its cache."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from lm.nn.batch import Batch
from lm.nn.head import first_read
from lm.nn.transformer import LM
from lm.ops.cache.cache import Cache

_LEAST = 64  # tokens of a row in a piece, however many rows: a recurrent layer goes through the last tokens of each piece one by one


class Begun(Protocol):
    """What decoding starts from: the source, empty in a decoder, and the decoder's first tokens."""

    source: list[int]
    begin: list[int]


def prefill(model: LM, rows: Sequence[Begun], pad: int, n_new: int, chunk: int, ahead: int = 0) -> tuple[Cache, Tensor, Tensor, Tensor]:
    """Prefills what each row begins with; returns the cache, the positions that were read, (b, s), the hidden states that the head read
    there, (b, s, d), and the logits behind the last token, (b, 1, v). The cache has room for n_new more tokens and a draft of `ahead`
    tokens. Equal prompts are read once.

    chunk: as in `chunks`.
    """
    first: dict[tuple[int, ...], int] = {}
    which = [first.setdefault((*row.source, *row.begin), len(first)) for row in rows]
    different = dict(zip(which, rows, strict=True))
    batch = asked_batch(model, [*different.values()], pad)
    cache = new_cache(model, batch.tokens.shape, n_new, ahead)
    found = [model(piece, read=first_read, cache=cache) for piece in chunks(batch, chunk)]
    assert batch.positions is not None
    hidden, logits = torch.cat([hidden for hidden, _ in found], dim=1), found[-1][1]
    if len(first) == len(rows):
        return cache, batch.positions, hidden, logits
    again = torch.tensor(which, device=logits.device)
    cache.reorder(again)
    return cache, batch.positions[again], hidden[again], logits[again]


def chunks(batch: Batch, chunk: int) -> Iterator[Batch]:
    """Yields the batch in pieces from left to right: `chunk` tokens of a single row, or of many rows about `chunk` together, but no fewer
    than min(chunk, 64) of each. The first piece holds the whole source. A prompt that is seen from all sides is one piece."""
    assert batch.positions is not None
    if batch.prefix is not None:
        yield batch
        return
    width = min(chunk, max(_LEAST, chunk // len(batch.tokens)))
    for tokens, positions in zip(batch.tokens.split(width, 1), batch.positions.split(width, 1), strict=True):
        yield replace(batch, tokens=tokens, positions=positions)
        batch = replace(batch, source_tokens=None, source_positions=None)


def new_cache(model: LM, shape: Sequence[int], n_new: int, ahead: int = 0) -> Cache:
    """Returns an empty cache with room for tokens of this shape, (b, s), and n_new new ones of each row; where these leave the context, it
    slides: the oldest tokens make room.  ahead: tokens of a draft."""
    b, s = shape
    return model.new_cache(b, s + n_new + ahead, max(8, ahead + 1), model.max_seq_len if s + n_new > model.max_seq_len + 1 else None)


def prompt_batch(rows: Sequence[Begun], pad: int, device: torch.device) -> Batch:
    """Returns the batch to prefill: what the decoder reads first, left-padded, and the sources, whose keys and values the cache keeps."""
    tokens, positions = left_padded([row.begin for row in rows], pad, device)
    batch = Batch(tokens, positions=positions, padded=uneven([row.begin for row in rows]))
    if not rows[0].source:
        return batch
    source_tokens, source_positions = left_padded([row.source for row in rows], pad, device)
    return replace(batch, source_tokens=source_tokens, source_positions=source_positions)


def asked_batch(model: LM, rows: Sequence[Begun], pad: int) -> Batch:
    """As `prompt_batch`, for a model that sees prompts as its objective has had them: a decoder maybe from all sides."""
    batch = prompt_batch(rows, pad, model.embed.weight.device)
    return replace(batch, prefix=batch.positions >= 0) if sees_whole(model) and batch.positions is not None else batch


def sees_whole(model: LM) -> bool:
    """Whether the model sees a prompt from all sides, as a prefix."""
    return model.cfg.kind == "decoder" and model.asked_as in ("prefix", "spans", "modes")


def uneven(rows: Sequence[Sequence[int]]) -> bool:
    """Returns whether some rows are shorter than others."""
    return len({len(row) for row in rows}) > 1


def left_padded(rows: Sequence[list[int]], pad: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns the rows padded on the left, so that they end together, and their positions, (b, s) each. Padding has position -1, which no
    token sees."""
    longest = max(map(len, rows))
    missing = [longest - len(row) for row in rows]
    tokens = [[pad] * n + row for n, row in zip(missing, rows, strict=True)]
    positions = [[-1] * n + list(range(longest - n)) for n in missing]
    return torch.tensor(tokens, dtype=torch.int64, device=device), torch.tensor(positions, dtype=torch.int64, device=device)


def right_padded(rows: Sequence[list[int]], starts: Sequence[int], pad: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns the rows padded on the right, and their positions, (b, s) each: of row i from starts[i] on, of padding -1."""
    longest = max(map(len, rows))
    tokens = [row + [pad] * (longest - len(row)) for row in rows]
    positions = [[*range(n, n + len(row)), *[-1] * (longest - len(row))] for n, row in zip(starts, rows, strict=True)]
    return torch.tensor(tokens, dtype=torch.int64, device=device), torch.tensor(positions, dtype=torch.int64, device=device)
