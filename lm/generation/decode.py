"""Decoding with the cache: prompts of token ids are prefilled together, then each forward is over one new token of every row, or over a
draft of several tokens.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from lm.errors import ConfigError
from lm.generation.config import SamplingConfig
from lm.generation.drafting.base import Drafter
from lm.generation.loop import Ahead, Loop, OnEnd, OnToken, Row, Vocabulary, goes_ahead
from lm.generation.sampling import row_keys
from lm.nn.transformer import LM, EncoderConfig, EncoderDecoderConfig


def decode(
    model: LM,
    prompts: Sequence[Sequence[int]],
    cfg: SamplingConfig,
    vocabulary: Vocabulary | None = None,
    *,
    on_token: OnToken | None = None,
    drafter: Drafter | None = None,
) -> list[Row]:
    """Returns cfg.n rows of each prompt in turn with their new tokens, without the end token. The tokens of a row do not depend on which
    prompts are decoded together.

    A decoder continues a prompt; an encoder-decoder reads it as a source and answers behind its start token. Rows of one prompt that are
    decoded together prefill it once.
    A row ends at one of the vocabulary's ends, at max_tokens, or where on_token(row, token) returns True; and at the end of the context
    where the position encoding has a fixed number of places (learned positions, say). With other encodings it goes on beyond
    model.max_seq_len: each token then sees the last model.max_seq_len tokens, itself included.

    vocabulary: None: all of the model's tokens, none of which ends a row.  drafter: proposes tokens for speculative decoding. It changes no
    token, unless two are so near to each other that the rounding of one forward over several tokens decides.
    cfg.stop is not looked at here, but in lm/generation/writer.py.
    Raises ConfigError for a prompt that is empty, or longer than such a fixed number of places.
    """
    vocabulary = vocabulary or Vocabulary(model.vocab_size)
    rows = rows_of(model, prompts, cfg, vocabulary)
    go_on(model, rows, cfg, vocabulary, on_token, drafter)
    return rows


def go_on(
    model: LM,
    rows: Sequence[Row],
    cfg: SamplingConfig,
    vocabulary: Vocabulary,
    on_token: OnToken | None = None,
    drafter: Drafter | None = None,
    on_end: OnEnd | None = None,
) -> None:
    """As `decode`, for rows made by `rows_of`: appends the new tokens to each, and calls on_end(row) as soon as it has all of them."""
    drafter = drafter or Drafter(0)
    kind = Ahead if goes_ahead(model, cfg, drafter) else Loop
    with decoding(model):
        kind(model, rows, cfg, vocabulary, drafter, on_token, on_end).run()


@contextmanager
def eval_mode(model: LM) -> Iterator[None]:
    """Within the block, the model is in eval mode and computes without gradients."""
    was_training = model.training
    if was_training:  # eval() and train() visit all modules, and this block is often entered once a token
        model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        if was_training:
            model.train()


@contextmanager
def decoding(model: LM) -> Iterator[None]:
    """As `eval_mode`; the model computes in its weights' dtype, which its cache has too, and its GPU is the current one, to which streams
    and events belong."""
    weight = model.embed.weight
    with eval_mode(model), torch.autocast(weight.device.type, enabled=False), torch.cuda.device_of(weight):
        yield


def eager(compiled: bool) -> AbstractContextManager[None]:
    """Within the block, a compiled model runs eagerly, so that it is not compiled anew for each new shape, as in decoding."""
    return torch.compiler.set_stance("force_eager") if compiled else nullcontext()


def rows_of(
    model: LM, prompts: Sequence[Sequence[int]], cfg: SamplingConfig, vocabulary: Vocabulary, keys: Sequence[bytes] | None = None
) -> list[Row]:
    """Returns cfg.n rows of each prompt in turn, without new tokens.  keys: of the rows' draws; None: those that `row_keys` returns. Raises
    ConfigError for a prompt that the model cannot continue, and for a cfg whose logit_bias names a token that is none of the
    vocabulary's."""
    cfg.require(vocabulary.n_tokens)
    assert (cfg.form is None) == (vocabulary.grammar is None)
    reads, given = model.cfg.kind == "encoder_decoder", [list(prompt) for prompt in prompts for _ in range(cfg.n)]
    rows = []
    for i, (prompt, key) in enumerate(zip(given, keys or row_keys(given, cfg.seed), strict=True)):
        begun, limit = begin(model, prompt, vocabulary.first), room(model, prompt, cfg, vocabulary.first)
        rows.append(Row(key, begun, [], prompt if reads else [], vocabulary.matcher(), i, limit))
    return rows


def room(model: LM, prompt: Sequence[int], cfg: SamplingConfig, first: int | None = None) -> int:
    """Returns how many new tokens a row may get: max_tokens, or fewer where the position encoding has a fixed number of places, of which
    each token that is fed back takes one, and the last one none. Raises ConfigError for a prompt that is empty or too long."""
    if not prompt:
        raise ConfigError("prompt: it has no tokens, and a model continues at least one. Start it with bos or eos.")
    position, begun = model.cfg.position, begin(model, prompt, first)
    if not position.by_place:
        return cfg.max_tokens
    if len(prompt) > model.max_seq_len:
        raise ConfigError(
            f"prompt: {len(prompt)} tokens are more than model.max_seq_len={model.max_seq_len}, and position={position.kind} has no more"
            " places. Shorten it, or use a model with a longer context."
        )
    return min(cfg.max_tokens, model.max_seq_len - len(begun) + 1)


def begin(model: LM, prompt: Sequence[int], first: int | None = None) -> list[int]:
    """Returns the decoder's first input: the prompt, or for an encoder-decoder, which reads the prompt as a source, the start token and
    what each answer begins with: `first`, or else the model's first_token, if any. Raises ConfigError for an encoder or a classifier, and
    where there is no start token."""
    if model.cfg.head.labels is not None:
        raise ConfigError(f"generate: the model {model.cfg.head.does()} and continues none. Use lm classify.")
    if model.cfg.head.pooling == "mean":
        raise ConfigError("generate: the model reads the mean of a text (model.head.pooling=mean) and continues none. Use lm embed.")
    match model.cfg:
        case EncoderConfig():
            raise ConfigError(
                "generate: the model is an encoder, which fills in masked tokens and continues nothing."
                " Use lm fill, or a model of kind decoder or encoder_decoder."
            )
        case EncoderDecoderConfig(start_token=None):
            raise ConfigError("generate: model.start_token is null, and the decoder begins with it. Set it to the tokenizer's bos or pad.")
        case EncoderDecoderConfig(start_token=int(start), first_token=own):
            return [start, *(token for token in (own if first is None else first,) if token is not None)]
    return list(prompt)
