"""Decoding with the cache: prompts of token ids are prefilled together, then each forward is over one new token of every row, or over a
draft of several tokens.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lm.errors import ConfigError, NumericsError
from lm.generation.config import SamplingConfig
from lm.generation.drafting.base import Drafter
from lm.generation.grammar import Grammar
from lm.generation.prefill import prefill, right_padded, uneven
from lm.generation.sampling import History, Logprob, choose, logprobs, row_keys
from lm.nn.batch import Batch
from lm.nn.head import every_position
from lm.nn.transformer import LM, EncoderConfig, EncoderDecoderConfig

OnToken = Callable[[int, int], bool]
ROWS = 32  # decoded together; more prompts follow in further batches


@dataclass
class Row(History):
    """One sample of a prompt with its new tokens.  index: of the row among all rows of a call; limit: how many new tokens it may get."""

    index: int = 0
    limit: int = 0
    logprobs: list[Logprob] = field(default_factory=list)  # one for each new token; empty unless cfg.logprobs asks for them


@dataclass(frozen=True)
class Vocabulary:
    """The tokens that may be drawn, and those that end a row or fill it up."""

    n_tokens: int  # ids from n_tokens on are never drawn: rows of the embedding that the tokenizer does not use
    ends: Collection[int] = ()  # a row ends at one of them, which is not part of it
    pad: int = 0


def generate(
    model: LM,
    prompts: Sequence[Sequence[int]],
    cfg: SamplingConfig,
    *,
    ends: Collection[int] = (),
    n_tokens: int | None = None,
    on_token: OnToken | None = None,
) -> list[list[int]]:
    """Returns only the new tokens of each row that `decode` returns: cfg.n rows of each prompt in turn."""
    vocabulary = Vocabulary(n_tokens or model.vocab_size, ends)
    return [row.new for row in decode(model, prompts, cfg, vocabulary, on_token=on_token)]


def decode(
    model: LM,
    prompts: Sequence[Sequence[int]],
    cfg: SamplingConfig,
    vocabulary: Vocabulary | None = None,
    *,
    on_token: OnToken | None = None,
    drafter: Drafter | None = None,
    grammar: Grammar | None = None,
    before: Counter[tuple[int, ...]] | None = None,
) -> list[Row]:
    """Returns cfg.n rows of each prompt in turn with their new tokens, without the end token. The tokens of a row do not depend on which
    prompts are decoded together.

    A decoder continues a prompt; an encoder-decoder reads it as a source and answers behind its start token. Rows of one prompt that are
    decoded together prefill it once.
    A row ends at one of the vocabulary's ends, at max_tokens, or where on_token(row, token) returns True; and at the end of the context
    where the position encoding has a fixed number of places (learned positions, say). With other encodings it goes on beyond
    model.max_seq_len: each token then sees the last model.max_seq_len tokens, itself included.

    vocabulary: None: all of the model's tokens, none of which ends a row.  drafter: proposes tokens for speculative decoding. It changes no
    token, unless two are so near to each other that the rounding of one forward over several tokens decides.  grammar: constrains the
    output; given just where cfg.form asks for one.  before: as in `row_keys`. cfg.stop is not looked at here, but in lm/generation/text.py.
    Raises ConfigError for a prompt that is empty, or longer than such a fixed number of places.
    """
    vocabulary = vocabulary or Vocabulary(model.vocab_size)
    rows = rows_of(model, prompts, cfg, vocabulary.n_tokens, grammar, before)
    go_on(model, rows, cfg, vocabulary, on_token, drafter)
    return rows


def go_on(
    model: LM,
    rows: Sequence[Row],
    cfg: SamplingConfig,
    vocabulary: Vocabulary,
    on_token: OnToken | None,
    drafter: Drafter | None = None,
) -> None:
    """As `decode`, for rows made by `rows_of`: appends the new tokens to each."""
    with decoding(model):
        for start in range(0, len(rows), ROWS):
            _Decoding(model, list(rows[start : start + ROWS]), cfg, vocabulary, on_token, drafter or Drafter(0)).run()


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
    """As `eval_mode`; the model computes in its weights' dtype, which its cache has too."""
    with eval_mode(model), torch.autocast(model.embed.weight.device.type, enabled=False):
        yield


def eager(compiled: bool) -> AbstractContextManager[None]:
    """Within the block, a compiled model runs eagerly, so that it is not compiled anew for each new shape, as in decoding."""
    return torch.compiler.set_stance("force_eager") if compiled else nullcontext()


def rows_of(
    model: LM,
    prompts: Sequence[Sequence[int]],
    cfg: SamplingConfig,
    n_tokens: int,
    grammar: Grammar | None = None,
    before: Counter[tuple[int, ...]] | None = None,
) -> list[Row]:
    """Returns cfg.n rows of each prompt in turn, without new tokens.  before: as in `row_keys`. Raises ConfigError for a prompt that the
    model cannot continue, and for a cfg whose logit_bias names a token that is not below n_tokens."""
    cfg.require(n_tokens)
    assert (cfg.form is None) == (grammar is None)
    reads, given = model.cfg.kind == "encoder_decoder", [list(prompt) for prompt in prompts for _ in range(cfg.n)]
    rows = []
    for i, (prompt, key) in enumerate(zip(given, row_keys(given, cfg.seed, before), strict=True)):
        matcher = grammar.matcher() if grammar is not None else None
        rows.append(Row(key, begin(model, prompt), [], prompt if reads else [], matcher, i, room(model, prompt, cfg)))
    return rows


def room(model: LM, prompt: Sequence[int], cfg: SamplingConfig) -> int:
    """Returns how many new tokens a row may get: max_tokens, or fewer where the position encoding has a fixed number of places, of which
    each token that is fed back takes one, and the last one none. Raises ConfigError for a prompt that is empty or too long."""
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
    """Returns whether a row with n_new new tokens, of which the last one is not fed back, is longer than the context."""
    return len(begin(model, prompt)) + n_new - 1 > model.max_seq_len


def begin(model: LM, prompt: Sequence[int]) -> list[int]:
    """Returns the decoder's first input: the prompt, or for an encoder-decoder, which reads the prompt as a source, the start token. Raises
    ConfigError for an encoder, and where there is no start token."""
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


class _Decoding:
    """Rows that are decoded together."""

    def __init__(
        self, model: LM, rows: list[Row], cfg: SamplingConfig, vocabulary: Vocabulary, on_token: OnToken | None, drafter: Drafter
    ) -> None:
        self.model, self.rows, self.cfg, self.vocabulary, self.on_token, self.drafter = model, rows, cfg, vocabulary, on_token, drafter
        n_new = max(row.limit for row in rows)
        self.cache, positions, hidden, self.logits = prefill(model, rows, vocabulary.pad, n_new, cfg.prefill_chunk, drafter.n_tokens)
        drafter.begin(rows, cfg, vocabulary.n_tokens, n_new, hidden, positions)
        self.drafts: list[list[int]] = [[] for _ in rows]  # drafted tokens that the last forward read behind each row's newest token

    def run(self) -> None:
        """Decodes until every row has ended."""
        all_rows, tally = self.rows, self.drafter.tally
        self._draw()
        while self.rows:
            begun = time.perf_counter()
            self._forward()
            drafted = any(self.drafts)
            self._draw()
            tally.count(time.perf_counter() - begun, drafted)
        tally.tokens += max(len(row.new) for row in all_rows) - 1

    def _forward(self) -> None:
        """Runs the model over each row's newest token and its draft, which is cut at the row's limit."""
        found = self.drafter.propose(self.rows) if self.drafter.tally.ready else [[]] * len(self.rows)
        self.drafts = [draft[: row.limit - len(row.new) - 1] for draft, row in zip(found, self.rows, strict=True)]
        given = [[row.new[-1], *draft] for row, draft in zip(self.rows, self.drafts, strict=True)]
        starts = [len(row.begin) + len(row.new) - 1 for row in self.rows]
        ids, positions = right_padded(given, starts, self.vocabulary.pad, self.logits.device)
        batch = Batch(ids, positions=positions, padded=uneven(given))
        hidden, self.logits = self.model(batch, read=every_position, cache=self.cache)  # (b, s, v)
        self.drafter.see(hidden, positions)

    def _draw(self) -> None:
        """Draws the model's own token at each place of the drafts. Each row takes them up to and including the first that
        differs from its draft; rejected drafts leave the cache, and so do rows that end."""
        places = [(i, j) for i, draft in enumerate(self.drafts) for j in range(len(draft) + 1)]
        logits = self.logits.squeeze(1)  # (b, 1, v) -> (rows, v)
        if any(self.drafts):
            which, where = torch.tensor(places, device=self.logits.device).unbind(1)
            logits = self.logits[which, where]  # (b, s, v) -> (drafts and rows, v)
        histories = [self.rows[i].extended(self.drafts[i][:j]) for i, j in places]
        ids = choose(finite(logits[:, : self.vocabulary.n_tokens]), histories, self.cfg)
        told = [] if self.cfg.logprobs is None else logprobs(logits, ids, self.cfg.logprobs)
        going, forgotten, first, drawn = [], [], 0, ids.tolist()
        for i, (row, draft) in enumerate(zip(self.rows, self.drafts, strict=True)):
            mine = slice(first, first := first + len(draft) + 1)
            n, goes_on = self._take(row, draft, drawn[mine], told[mine])
            self.drafter.tally.accept(len(draft), n - 1)
            forgotten.append(self.logits.shape[1] - n if goes_on else 0)
            going += [i] if goes_on else []
        if any(forgotten):
            self.cache.rewind(forgotten)
        if len(going) < len(self.rows):
            kept = torch.tensor(going, dtype=torch.int64, device=ids.device)
            self.rows = [self.rows[i] for i in going]
            self.cache.reorder(kept)
            self.drafter.reorder(kept)

    def _take(self, row: Row, draft: list[int], drawn: list[int], told: list[Logprob]) -> tuple[int, bool]:
        """Appends drawn tokens to the row, up to and including the first that differs from the draft. Returns how many the row took, one
        more than the draft's accepted tokens, and whether it goes on."""
        for n, token in enumerate(drawn, 1):
            if not self._goes_on(row, token, told[n - 1 : n]):
                return n, False
            if n > len(draft) or token != draft[n - 1]:
                break
        return n, True

    def _goes_on(self, row: Row, token: int, told: list[Logprob]) -> bool:
        if token in self.vocabulary.ends:
            return False
        row.new.append(token)
        row.logprobs += told
        ended = self.on_token is not None and self.on_token(row.index, token)
        return not ended and len(row.new) < row.limit


def finite(logits: Tensor) -> Tensor:
    """Returns the logits. Raises NumericsError where one is NaN or infinite. Their sum tells at a twentieth of the cost; only where it is
    not finite, which finite logits can cause too, each logit is checked."""
    if not math.isfinite(logits.sum(dtype=torch.float32)) and not torch.isfinite(logits).all():
        raise NumericsError("generate: the model's logits hold NaN or infinity, and no token can be drawn. Use another checkpoint.")
    return logits
