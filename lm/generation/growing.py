"""A model gets rows for special tokens that its tokenizer has not had before."""

from collections.abc import Mapping

import torch
from torch import Tensor

from lm.data.tokenizer.fitting import new_ids
from lm.data.tokenizer.tokenizer import Tokenizer
from lm.nn.embed import OF_TOKENS
from lm.nn.transformer import LM, build_model
from lm.storage.model_folder import copy_weights

ROWS = (*OF_TOKENS, "head.weight", "head.bias")
"""How the names of weights end that have a row for each entry of the vocabulary."""


def grown_weights(weights: Mapping[str, Tensor], before: Tokenizer, now: Tokenizer) -> dict[str, Tensor]:
    """Returns the weights of a model with rows for what `now` has and `before` has not, of which each is the mean of the rows of all tokens
    of `before`. They are rows beyond these tokens that the model has already, or else new ones.

    Hewitt 2021, "Initializing new word embeddings for pretrained language models"; transformers adds noise of 1e-9 of the covariance.
    """
    found, new = dict(weights), new_ids(before, now)
    n_rows = len(weights["embed.weight"])  # a classifier's head has rows for its labels
    for name in (name for name in weights if new and name.endswith(ROWS) and len(weights[name]) == n_rows):
        old = weights[name]
        mean = old[: before.vocab_size].mean(0, dtype=torch.float32).to(old.dtype)
        rows = torch.cat([old, mean.expand(max(0, now.vocab_size - len(old)), *mean.shape)])
        rows[new] = mean
        found[name] = rows
    return found


def grown_model(model: LM, before: Tokenizer, now: Tokenizer) -> LM:
    """Returns the model with rows as in `grown_weights`; itself where there are no new tokens."""
    if not new_ids(before, now):
        return model
    weights = grown_weights({name: p.detach() for name, p in model.named_parameters()}, before, now)
    like = model.embed.weight
    found = build_model(model.cfg.replace(vocab_size=len(weights["embed.weight"])), device=like.device).to(like.dtype)
    copy_weights(found.named_parameters(), weights, "the model that training starts from")
    return found.train(model.training)
