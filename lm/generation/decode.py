"""Prompts of token ids continued, or answered, with the cache: one forward over all prompts, then one token a step."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from lm.errors import ConfigError, NumericsError
from lm.generation.config import SamplingConfig
from lm.generation.sampling import History, Logprob, choose, logprobs, row_keys
from lm.nn.batch import Batch
from lm.nn.head import last_position
from lm.nn.mixers.cache import Cache
from lm.nn.transformer import LM, EncoderConfig, EncoderDecoderConfig

OnToken = Callable[[int, int], bool]
ROWS = 32  # decoded together; more prompts follow in further batches


class Begun(Protocol):
    """What decoding starts from: the source, empty in a decoder, and the decoder's first tokens."""

    source: list[int]
    begin: list[int]


@dataclass
class Row(History):
    """A prompt, what it became, and how far it may go."""

    index: int = 0
    source: list[int] = field(default_factory=list)  # empty in a decoder
    limit: int = 0
    logprobs: list[Logprob] = field(default_factory=list)  # one of each new token, where cfg.logprobs asks for them


def generate(
    model: LM,
    prompts: Sequence[Sequence[int]],
    cfg: SamplingConfig,
    *,
    ends: Collection[int] = (),
    pad: int = 0,
    n_tokens: int | None = None,
    on_token: OnToken | None = None,
) -> list[list[int]]:
    """The new tokens of each prompt, cfg.n times each: `decode` without what else it tells."""
    return [row.new for row in decode(model, prompts, cfg, ends=ends, pad=pad, n_tokens=n_tokens, on_token=on_token)]


def decode(
    model: LM,
    prompts: Sequence[Sequence[int]],
    cfg: SamplingConfig,
    *,
    ends: Collection[int] = (),
    pad: int = 0,
    n_tokens: int | None = None,
    on_token: OnToken | None = None,
) -> list[Row]:
    """cfg.n rows of each prompt with their new tokens, less the one that ends a row: the same if prompts come together or one by one.

    A decoder continues a prompt; an encoder-decoder reads it as a source and answers behind its start token. Rows of one prompt that are
    decoded together read it once.
    A row ends at one of `ends`, at max_tokens, where the places of a position that has so many are full, or where on_token(row, token)
    returns True. Other positions go on beyond model.max_seq_len: each token then sees as many up to itself.

    n_tokens: ids from here on are never drawn (rows of the embedding that the tokenizer does not use). Raises ConfigError for a prompt
    that is empty or longer than those places. `stop` is the business of lm/generation/text.py.
    """
    n_tokens = n_tokens or model.vocab_size
    rows = rows_of(model, prompts, cfg, n_tokens)
    with decoding(model):
        for start in range(0, len(rows), ROWS):
            _decode(model, rows[start : start + ROWS], cfg, ends, pad, n_tokens, on_token)
    return rows


@contextmanager
def decoding(model: LM) -> Iterator[None]:
    """The model in eval mode, without gradients, in its weights' dtype."""
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode(), torch.autocast(model.embed.weight.device.type, enabled=False):  # the cache has the weights' dtype
            yield
    finally:
        model.train(was_training)


def rows_of(model: LM, prompts: Sequence[Sequence[int]], cfg: SamplingConfig, n_tokens: int) -> list[Row]:
    """Returns cfg.n rows of each prompt in turn, without new tokens. Raises ConfigError for what cannot be continued so."""
    cfg.require(n_tokens)
    reads, given = model.cfg.kind == "encoder_decoder", [list(prompt) for prompt in prompts for _ in range(cfg.n)]
    return [
        Row(key, begin(model, prompt), index=i, source=prompt if reads else [], limit=room(model, prompt, cfg))
        for i, (prompt, key) in enumerate(zip(given, row_keys(given, cfg.seed), strict=True))
    ]


def room(model: LM, prompt: Sequence[int], cfg: SamplingConfig) -> int:
    """How many new tokens fit: every token that is fed back needs a place, the last one does not, and only some positions have so many
    and no more. Raises ConfigError."""
    if not prompt:
        raise ConfigError("prompt: it has no tokens, and a model continues at least one. Start it with bos or eos.")
    position, first = model.cfg.position, begin(model, prompt)
    if not position.by_place:
        return cfg.max_tokens
    if len(prompt) > model.max_seq_len:
        raise ConfigError(
            f"prompt: {len(prompt)} tokens are more than model.max_seq_len={model.max_seq_len}, and position={position.kind} has no more"
            " places. Shorten it, or use a model with a longer context."
        )
    return min(cfg.max_tokens, model.max_seq_len - len(first) + 1)


def beyond(model: LM, prompt: Sequence[int], n_new: int) -> bool:
    """Whether so many new tokens, of which the last one is not read again, leave the context."""
    return len(begin(model, prompt)) + n_new - 1 > model.max_seq_len


def begin(model: LM, prompt: Sequence[int]) -> list[int]:
    """The decoder's first input: the prompt, or the start token where the prompt is a source. Raises ConfigError."""
    match model.cfg:
        case EncoderConfig():
            raise ConfigError(
                "generate: the model is an encoder, which fills in masked tokens and continues nothing."
                " Use a model of kind decoder or encoder_decoder."
            )
        case EncoderDecoderConfig(start_token=None):
            raise ConfigError("generate: model.start_token is null, and the decoder begins with it. Set it to the tokenizer's bos or pad.")
        case EncoderDecoderConfig(start_token=int(start)):
            return [start]
    return list(prompt)


def _decode(
    model: LM, rows: list[Row], cfg: SamplingConfig, ends: Collection[int], pad: int, n_tokens: int, on_token: OnToken | None
) -> None:
    device = model.embed.weight.device
    logits, cache = _read(model, rows, pad)
    while rows:
        ids = choose(finite(logits[:, :n_tokens]), rows, cfg)
        told = [] if cfg.logprobs is None else logprobs(logits, ids, cfg.logprobs)
        going = [i for i, token in enumerate(ids.tolist()) if _goes_on(rows[i], token, told[i : i + 1], ends, on_token)]
        if len(going) < len(rows):
            kept = torch.tensor(going, dtype=torch.int64, device=device)
            rows, ids = [rows[i] for i in going], ids[kept]
            cache.reorder(kept)
        if rows:
            logits = model(next_batch(rows, device), loss=last_position, cache=cache)  # (b, v)


def _read(model: LM, rows: Sequence[Row], pad: int) -> tuple[Tensor, Cache]:
    """Returns the logits behind the prompt of each row, (b, v), and the cache that holds it. Equal prompts are read once."""
    first: dict[tuple[int, ...], int] = {}
    which = [first.setdefault((*row.source, *row.begin), i) for i, row in enumerate(rows)]
    batch = filled([rows[i] for i in first.values()], pad, model.embed.weight.device)
    cache = spaces(model, batch, max(row.limit for row in rows))
    logits: Tensor = model(batch, loss=last_position, cache=cache)
    if len(first) < len(rows):
        places = {i: at for at, i in enumerate(first.values())}
        again = torch.tensor([places[i] for i in which], device=logits.device)
        logits = logits[again]
        cache.reorder(again)
    return logits, cache


def _goes_on(row: Row, token: int, told: list[Logprob], ends: Collection[int], on_token: OnToken | None) -> bool:
    if token in ends:
        return False
    row.new.append(token)
    row.logprobs += told
    ended = on_token is not None and on_token(row.index, token)
    return not ended and len(row.new) < row.limit


def next_batch(rows: Sequence[Row], device: torch.device) -> Batch:
    """The last new token of each row, behind what a cache holds of it."""
    positions = [[len(row.begin) + len(row.new) - 1] for row in rows]
    return Batch(torch.tensor([row.new[-1:] for row in rows], device=device), positions=torch.tensor(positions, device=device))


def spaces(model: LM, batch: Batch, n_new: int) -> Cache:
    """An empty cache for this batch and so many new tokens, which slides where they leave the context."""
    b, s = batch.tokens.shape
    return model.new_cache(b, s + n_new, horizon=model.max_seq_len if s + n_new > model.max_seq_len + 1 else None)


def finite(logits: Tensor) -> Tensor:
    """Them; NumericsError where they are not."""
    if not torch.isfinite(logits).all():
        raise NumericsError("generate: the model's logits hold NaN or infinity, and no token can be drawn. Use another checkpoint.")
    return logits


def filled(rows: Sequence[Begun], pad: int, device: torch.device) -> Batch:
    """What the cache is filled with: the sources too, whose keys and values it keeps."""
    tokens, positions = _left_padded([row.begin for row in rows], pad, device)
    if not rows[0].source:
        return Batch(tokens, positions=positions)
    source_tokens, source_positions = _left_padded([row.source for row in rows], pad, device)
    return Batch(tokens, positions=positions, source_tokens=source_tokens, source_positions=source_positions)


def _left_padded(rows: Sequence[list[int]], pad: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens that end together, and their positions; padding at position -1 is seen by nobody."""
    longest = max(map(len, rows))
    missing = [longest - len(row) for row in rows]
    tokens = [[pad] * n + row for n, row in zip(missing, rows, strict=True)]
    positions = [[-1] * n + list(range(longest - n)) for n in missing]
    return torch.tensor(tokens, device=device), torch.tensor(positions, device=device)
