"""Exposure of a model to its own tokens: how unsure it is behind its own continuation of a text, and behind the true one."""

from collections.abc import Iterator, Sequence
from itertools import chain

import torch
from torch import Tensor

from lm.data.loader import eval_batches
from lm.data.order import Ids
from lm.data.rows.base import Rows
from lm.errors import ConfigError
from lm.generation.config import SamplingConfig
from lm.generation.decode import decode, eval_mode
from lm.generation.evaluate import Evaluator
from lm.generation.loop import Vocabulary
from lm.nn.batch import Batch
from lm.nn.context import Context
from lm.nn.head import CHUNK, Head, Reader
from lm.nn.transformer import LM
from lm.schema import Tree


def exposure(evaluator: Evaluator, parts: Sequence[tuple[Rows, Ids]], own_tokens: int) -> Tree:
    """Returns val_exposure = |mean_t H(p(. | c, y_<t)) - mean_t H(p(. | c, x_<t))|, t = 1 to `own_tokens`, in nats, and both means.

    c is a row without its last `own_tokens` tokens x; y are the tokens that the model draws behind c at temperature 1, up to an eos. The
    entropy H is the loss that a model expects of itself: val_exposure is 0 for a model whose text is like the true one, and more for one
    that loses the thread or falls into loops. Only the prefix is exchanged, as in He et al. 2019, arXiv:1905.10617; the drift of the
    entropy is that of Braverman et al. 2019, arXiv:1906.05664. It says nothing of how good the text is: read it beside the loss.

    parts: rows, and the ids of those to read, of which only rows that one document fills are used. Raises ConfigError where there is no
    such row. Every rank reads all of them, since each may hold only a part of the weights.
    """
    model, tokenizer = evaluator.model, evaluator.tokenizer
    require_filled(parts, evaluator.micro_batch)
    vocabulary = Vocabulary(tokenizer.vocab_size, [] if tokenizer.eos is None else [tokenizer.eos])
    device, totals = model.embed.weight.device, torch.zeros(3, dtype=torch.float64)
    cfg = SamplingConfig(max_tokens=own_tokens, temperature=1.0)
    with eval_mode(model):
        for batch in _batches(parts, evaluator.micro_batch):
            true = batch.tokens[_filled(batch)]
            if len(true):
                start = true.shape[1] - own_tokens
                new = [row.new for row in decode(model, true[:, :start].tolist(), cfg, vocabulary)]
                totals += _entropies(model, true.to(device), new, start)
    own, given, n = totals.tolist()
    return {"val_exposure": abs(own - given) / n, "val_own_entropy": own / n, "val_true_entropy": given / n}


def require_filled(parts: Sequence[tuple[Rows, Ids]], micro_batch: int) -> None:
    """Raises ConfigError where no row is filled by one document: reads up to the first that is."""
    if not any(_filled(batch).any() for batch in _batches(parts, micro_batch)):
        raise ConfigError("eval.own_tokens: no row of the held-out text is filled by one document. Lower data.seq_len, or leave it out.")


def _batches(parts: Sequence[tuple[Rows, Ids]], micro_batch: int) -> Iterator[Batch]:
    return chain.from_iterable(eval_batches(rows, ids, micro_batch) for rows, ids in parts)


def _entropies(model: LM, true: Tensor, new: list[list[int]], start: int) -> Tensor:
    """Returns (3,): the entropies behind own tokens and behind true tokens, summed over the same places, and the number of places."""
    own, n_own = true.clone(), true.shape[1] - start
    for row, tokens in enumerate(new):
        own[row, start : start + len(tokens)] = torch.tensor(tokens, dtype=own.dtype, device=own.device)
    reached = torch.arange(n_own, device=own.device) <= torch.tensor([[len(tokens)] for tokens in new], device=own.device)
    found = [model(Batch(tokens), read=_unsure(start - 1, n_own))[reached].cpu().double().sum() for tokens in (own, true)]
    return torch.stack([*found, reached.cpu().double().sum()])


def _filled(batch: Batch) -> Tensor:
    """Returns whether one document fills each row, (b,) bool."""
    if batch.positions is None:
        return torch.ones(len(batch.tokens), dtype=torch.bool)
    return (batch.positions == torch.arange(batch.tokens.shape[1])).all(-1)


def _unsure(start: int, n: int) -> Reader:
    """Returns a reader of (b, n), the entropy of the next token at the n places from `start` on. Logits exist only chunk by chunk."""

    def read(hidden: Tensor, head: Head, ctx: Context) -> Tensor:
        places = hidden[:, start : start + n].flatten(0, 1)  # (b, n, d) -> (b*n, d)
        logs = (head(part).float().log_softmax(-1) for part in places.split(CHUNK))
        return torch.cat([-(log.exp() * log).sum(-1) for log in logs]).unflatten(0, (-1, n))  # (b*n,) -> (b, n)

    return read
