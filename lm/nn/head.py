"""The two modules that know the vocabulary: the embedding of tokens, and the head, from the last hidden states to logits."""

from collections.abc import Callable, Mapping
from typing import Any, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from lm.nn.context import Context
from lm.nn.ffn.mlp import Activation, activation_of
from lm.nn.init import Declares, into_logits
from lm.nn.linear import Embedding, Linear
from lm.nn.norm import NormConfig
from lm.ops.attention.mask import Mask
from lm.ops.linear import product
from lm.ops.ranks.tensor_parallel import Divisible, TensorParallel
from lm.ops.ranks.ulysses import UNSHARDED, RowSharding
from lm.ops.ranks.vocabulary import Vocabulary, VocabularySlice
from lm.schema import Config

CHUNK = 1024  # tokens whose logits exist at once, unless told otherwise
OF_HEAD = frozenset(f"{at}.{name}" for at in ("head", "head.dense", "head.norm", "head.narrow") for name in ("weight", "bias"))
"""The names of all weights that heads have."""
WIDE, WIDE_CPU = 1 << 24, 1 << 20  # logits that a loss converts to float32 at a time: 64 MiB keep a kernel busy, 4 MiB stay in a cache


class HeadConfig(Config):
    """The output head."""

    tied: bool = True
    """Its matrix is the embedding."""
    bias: bool = False
    """Bias on the logits (BERT, BART, GPT-J)."""
    scale: float = Field(1.0, gt=0)
    """Factor on hidden states before the matrix (T5 1.0: 1 / sqrt(d_model); Granite)."""
    softcap: float | None = Field(None, gt=0)
    """Logits become softcap * tanh(logits / softcap) (Gemma 2). null: off."""
    transform: Activation | Literal["tanh"] | None = None
    """A dense layer, this activation and a norm come first (BERT). null: they do not."""
    transform_bias: bool = True
    """That dense layer has a bias (false in ModernBERT)."""
    transform_norm: bool = True
    """A norm follows it (false in BERT's head for labels)."""
    labels: list[str] | None = None
    """Names of what a classifier tells apart, or of the one number that a reward model or a regression tells: its logits are of these
    instead of tokens. null: it is a language model."""
    several: bool = False
    """Any number of labels may be right at once, each with a probability of its own (sigmoid); else one is, among all (softmax)."""
    pooling: Literal["token", "mean"] = "token"
    """Whether labels are read off at one token, the first of an encoder and the last of a decoder, or off the mean of all (as in published
    classifiers of ModernBERT)."""

    @model_validator(mode="after")
    def _bias_needs_its_layer(self) -> Self:
        for name in ("transform_bias", "transform_norm"):
            if self.transform is None and not getattr(self, name):
                raise ValueError(f"{name}=false has no effect without transform. Set transform, or drop it.")
        return self

    @model_validator(mode="after")
    def _labels_are_told_apart(self) -> Self:
        if self.labels is None and self.several:
            raise ValueError("several=true is of labels, and there are none. Set labels, or objective=multi_label, which sets both.")
        if self.labels is None:
            return self
        names = [name.strip() for name in self.labels]
        if len({*names}) < max(len(names), 1) or not all(names):
            raise ValueError(f"labels={self.labels} are not different names. Name each once, as in labels=[negative,positive].")
        if self.tied:
            raise ValueError("labels have vectors of their own, and tied=true takes those of tokens. Set tied=false as well.")
        return self

    def tells_number(self) -> bool:
        """Returns whether its only logit is what it tells, as of a reward model."""
        return len(self.labels or []) == 1 and not self.several

    def does(self) -> str:
        """Returns in words what a model with labels does, instead of predicting tokens."""
        if self.tells_number():
            return "tells a number of a text"
        return "tells which labels are right of a text" if self.several else "tells texts apart"

    def labelling(self) -> tuple[list[str] | None, bool]:
        """Returns what it tells: the labels, and whether several may be right; another answer is another meaning of its weights."""
        return self.labels, self.several

    def answer(self, logits: Tensor) -> Tensor:
        """(..., labels): the number that it tells, or the probability of each label."""
        logits = logits.float()
        if self.tells_number():
            return logits
        return logits.sigmoid() if self.several else logits.softmax(-1)

    def unlike(self, other: "HeadConfig") -> set[str]:
        """Returns the names of weights that have another meaning in a model with the other head, which tells other things apart; none
        where both tell the same."""
        if self.labelling() == other.labelling():
            return set()
        before = all(getattr(self, name) == getattr(other, name) for name in _BEFORE)
        return {"head.weight", "head.bias"} if before else {*OF_HEAD}

    def telling(self, labels: list[str], bias: bool, several: bool = False) -> Self:
        """Returns a head that tells these, with the layer before it, if any."""
        kept = {name: getattr(self, name) for name in (*_BEFORE, "pooling")}
        return self if self.labelling() == (labels, several) else type(self)(**kept, labels=labels, several=several, tied=False, bias=bias)

    def size(self, vocab_size: int) -> int:
        """Returns how many logits there are."""
        return vocab_size if self.labels is None else len(self.labels)


_BEFORE = ("transform", "transform_bias", "transform_norm")  # options of what stands before the matrix


class OfVocabulary(Divisible):
    """A module whose weight has a row for each entry of the vocabulary, of which ranks may hold slices."""

    cut = {"weight": 0, "bias": 0}

    vocabulary = Vocabulary()

    def join(self, ranks: TensorParallel, sizes: Mapping[str, int]) -> None:
        self.vocabulary = VocabularySlice(ranks, sizes["weight"])


class TokenEmbedding(OfVocabulary, Embedding):
    """A vector for each token."""

    def forward(self, tokens: Tensor, sharding: RowSharding = UNSHARDED) -> Tensor:
        """(b, s) -> (b, s, d).  sharding: how ranks share the rows of the batch."""
        return self.vocabulary.embedded(self.weight, tokens, sharding)


class Head(Declares, OfVocabulary, nn.Linear):
    """softcap(W (scale * transform(x)) + b); in place of a transform, a matrix may make x as narrow as W."""

    initializers = {"weight": into_logits}

    def __init__(self, cfg: HeadConfig, norm: NormConfig, d_model: int, vocab_size: int, narrowed: int | None = None) -> None:
        """narrowed: numbers of what the matrix reads, where these are not the hidden states."""
        width = narrowed or d_model
        super().__init__(width, cfg.size(vocab_size), bias=cfg.bias)
        self.scale, self.softcap = cfg.scale, cfg.softcap
        self.dense = self.norm = self.narrow = None
        if cfg.transform is not None:
            self.act = torch.tanh if cfg.transform == "tanh" else activation_of(cfg.transform)
            self.dense = Linear(d_model, width, bias=cfg.transform_bias)
            self.norm = norm.build(width) if cfg.transform_norm else nn.Identity()
        elif narrowed is not None:
            self.narrow = Linear(d_model, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.vocabulary.whole(self._capped(self.product(self._ready(x))))

    def part(self, x: Tensor, weight: Tensor) -> Tensor:
        """Returns logits of this rank's entries, for the tokens of all ranks that share the vocabulary; all logits where no ranks do.

        weight: what `cast` returned.
        """
        return self._capped(product(self.vocabulary.all_gather(self._ready(x)), weight, self.bias))

    def cast(self) -> Tensor:
        """Returns the matrix in the dtype of autocast, detached: a leaf of its own to autograd."""
        weight, device = self.weight.detach(), self.weight.device.type
        if weight.dtype == torch.float32 and device != "meta" and torch.is_autocast_enabled(device):
            weight = weight.to(torch.get_autocast_dtype(device))
        return weight.requires_grad_(self.weight.requires_grad)

    def _ready(self, x: Tensor) -> Tensor:
        """Returns the input of the matrix: hidden states, transformed or narrowed, and scaled."""
        if self.dense is not None and self.norm is not None:
            x = self.norm(self.act(self.dense(x)))
        x = x if self.narrow is None else self.narrow(x)
        return x if self.scale == 1.0 else x * self.scale

    def _capped(self, logits: Tensor) -> Tensor:
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def product(self, x: Tensor) -> Tensor:
        """W x + b."""
        return product(x, self.weight, self.bias)


def pooled(hidden: Tensor, mask: Mask) -> Tensor:
    """(b, s, d): at each token the mean over all tokens of its document, in float32."""
    b, s, _ = hidden.shape
    documents = mask.q_documents if mask.q_documents is not None else -(mask.q_positions < 0).int().expand(b, s)
    of = (documents + 1 + torch.arange(b, device=hidden.device).unsqueeze(1) * (s + 1)).flatten()  # (b, s) -> (b*s,), padding as one
    each = F.pad(hidden.flatten(0, 1).float(), (0, 1), value=1)  # (b, s, d) -> (b*s, d+1), a column of ones to count tokens
    sums = each.new_zeros(b * (s + 1), each.shape[1]).index_add(0, of, each)[of]
    return (sums[:, :-1] / sums[:, -1:]).to(hidden.dtype).view_as(hidden)


Reader = Callable[[Tensor, Head, Context], Any]
"""What a forward may be asked to make of the last hidden states (b, s, d) instead of logits."""


def last_position(hidden: Tensor, head: Head, ctx: Context) -> Tensor:
    """A reader: logits of the last position only, (b, v)."""
    logits: Tensor = head(hidden[:, -1])
    return logits


def every_position(hidden: Tensor, head: Head, ctx: Context) -> tuple[Tensor, Tensor]:
    """A reader: the hidden states that the head reads, (b, s, d), and the logits, (b, s, v)."""
    return hidden, head(hidden)


def first_read(hidden: Tensor, head: Head, ctx: Context) -> tuple[Tensor, Tensor]:
    """A reader: the hidden states that the head reads, (b, s, d), and the logits of the last position, (b, 1, v)."""
    return hidden, head(hidden[:, -1]).unsqueeze(1)
