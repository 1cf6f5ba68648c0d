"""A second, small attention that chooses which tokens the first one sees.  DeepSeek-V3.2, arXiv:2512.02556, section 2.1."""

from collections.abc import Sequence

import torch
from pydantic import Field
from torch import Tensor, nn

from lm.nn.activation_memory import Activations
from lm.nn.context import Context
from lm.nn.linear import Linear
from lm.nn.mixers.base import Attention
from lm.nn.position.base import PositionConfig
from lm.ops.attention.attend import weights
from lm.ops.attention.choosing import best, index_scores, log_chances, mean_divergence, rows_of
from lm.ops.attention.mask import Mask
from lm.schema import MOST, MOST_LAYERS, Config, Tree

LOSS = "indexer_loss"


class IndexerConfig(Config):
    """Each query sees the `top_k` keys that a small attention scores best: sum_h w_h relu(q_h k), with one head of keys (DeepSeek-V3.2,
    arXiv:2512.02556). It learns in training alone, by the divergence of what the large attention reads from its softmax, and nothing else
    learns of that: its inputs have no gradient. With `top_k` as long as the rows all keys are seen, and it learns beforehand."""

    n_heads: int = Field(gt=0, le=MOST)
    """Heads of its queries (DeepSeek-V3.2: 64)."""
    head_dim: int = Field(gt=0, le=MOST)
    """Width of one head, of which positions rotate as many dimensions as of a head of the large attention (DeepSeek-V3.2: 128)."""
    top_k: int = Field(gt=0, le=MOST)
    """Keys that a query sees; all where there are no more (DeepSeek-V3.2: 2048)."""
    loss: float = Field(1.0, gt=0)
    """Factor on its loss, the mean over the tokens of a row, summed over layers."""
    every: int = Field(1, gt=0, le=MOST_LAYERS)
    """Every n-th layer behind the first ones has an indexer; the others see what the last one before them chooses, which learns for them
    too (arXiv:2603.12201)."""
    first: int = Field(1, ge=1, le=MOST_LAYERS)
    """So many of the first layers have one each."""

    def owner(self, layer: int) -> int:
        """Returns the layer whose indexer chooses for this one."""
        return next(each for each in range(layer, -1, -1) if owns(each, self.every, self.first))

    def require(self, rotary: int, position: PositionConfig) -> None:
        """Raises ValueError where its heads are too narrow for the rotation of so many dimensions, or would not hear of positions at all:
        of two tokens that are alike, rounding would choose."""
        if position.acts == "bias":
            raise ValueError(
                f"indexer has scores of its own, which position={position.kind} does not bias. Use position=rope, learned or none."
            )
        if position.acts == "rotate" and self.head_dim < rotary:
            raise ValueError(
                f"indexer.head_dim={self.head_dim} is below the {rotary} dimensions that rotate. Raise it, or use position=none."
            )

    def require_layers(self, layers: Sequence[int], drafts: bool, window: int | None) -> None:
        """Raises ValueError where a layer that attends would see what none has chosen."""
        if self.every == 1:
            return
        if drafts:
            raise ValueError(f"indexer.every={self.every} has no form with mtp, whose blocks draft alone. Set it to 1, or mtp=null.")
        if window is not None:
            raise ValueError(
                f"indexer.every={self.every} has no form with a window, which layers may see otherwise. Set it to 1, or no window."
            )
        alone = [layer for layer in layers if self.owner(layer) not in layers]
        if alone:
            owner = f"what layer {self.owner(alone[0])} chooses, which does not attend"
            raise ValueError(f"indexer.every={self.every} has layer {alone[0]} see {owner}. Set it to 1.")

    def state(self, layer: int) -> tuple[tuple[int, int], ...]:
        """Returns the shapes of what a cache keeps of a token for it."""
        return ((1, self.head_dim),) if self.owner(layer) == layer else ()

    def implied(self, layers: Sequence[int]) -> Tree:
        """Returns the least `every` and `first` with the same effect, where these layers attend."""
        every, first = spaced([self.owner(layer) == layer for layer in range(max(layers, default=0) + 1)]) or (self.every, self.first)
        return {"indexer.every": every, "indexer.first": first}

    def flops(self, layer: int, seq_len: int) -> int:
        """Counts products of queries and keys, and their weighted sum."""
        return 2 * self.n_heads * (self.head_dim + 1) * seq_len if self.owner(layer) == layer else 0

    def saved_activations(self, layer: int) -> Activations:
        """Counts queries, the key before and behind its norm, and weights."""
        return Activations(self.n_heads, (self.n_heads + 2) * self.head_dim) if self.owner(layer) == layer else Activations(0, 0)

    def saved_scores(self, seq_len: int) -> Activations:
        """Counts scores of each head, their log softmax, and what is read, as if each layer had an indexer; what hides the other keys, as a
        bias and as a mask."""
        return Activations((self.n_heads + 2) * seq_len, seq_len, seq_len)

    @property
    def why_not_parallel(self) -> str:
        """Returns why no ranks share a row or a layer's heads, with the remedy."""
        return "model.attention.indexer chooses among whole rows for all heads, of which a rank has some. Set it to null"


def owns(layer: int, every: int, first: int) -> bool:
    """Returns whether this layer has an indexer, if so many first ones have and every n-th behind them."""
    return layer < first or (layer - first + 1) % every == 0


def spaced(own: Sequence[bool]) -> tuple[int, int] | None:
    """Returns the least (every, first) by which exactly these layers have an indexer; None where none does so."""
    n = len(own)
    return next(
        ((e, f) for e in range(1, n + 1) for f in range(1, n + 1) if all(owns(i, e, f) == each for i, each in enumerate(own))), None
    )


class Indexer(nn.Module):
    """The small attention of one layer."""

    def __init__(self, cfg: IndexerConfig, d_source: int, d_model: int) -> None:
        super().__init__()
        self.cfg, self.scale = cfg, (cfg.head_dim * cfg.n_heads) ** -0.5
        self.q = Linear(d_source, cfg.n_heads * cfg.head_dim, bias=False)
        self.k = Linear(d_model, cfg.head_dim, bias=False)
        self.k_norm = nn.LayerNorm(cfg.head_dim, 1e-6)
        self.weights = Linear(d_model, cfg.n_heads, bias=False)

    def extra_repr(self) -> str:
        return f"{self.cfg.n_heads} heads of {self.cfg.head_dim}, {self.cfg.top_k} keys"

    @property
    def learns(self) -> bool:
        """Whether it learns in this forward: itself, or an adapter beside its matrices."""
        return self.training and torch.is_grad_enabled() and any(p.requires_grad for p in self.parameters())

    def keys(self, x: Tensor, ctx: Context, layer: int) -> Tensor:
        """(b, s, d) -> (b, 1, s, c), of which a cache keeps those of earlier tokens."""
        k = self.k_norm(self.k(x.detach())).unsqueeze(1)
        return ctx.position.rotate(k, ctx.angles, layer)

    def forward(self, x: Tensor, source: Tensor, keys: Tensor, ctx: Context, layer: int) -> Tensor:
        """Returns the scores of keys, (b, q, k).  x: (b, q, d); source: (b, q, e), what queries are made of; keys: (b, 1, k, c)."""
        q = self.q(source.detach()).unflatten(-1, (self.cfg.n_heads, -1)).transpose(1, 2)  # (b, q, h*c) -> (b, h, q, c)
        return index_scores(ctx.position.rotate(q, ctx.angles, layer), keys, self.weights(x.detach()) * self.scale)


class Choosing(Attention):
    """Attention to what an indexer has chosen, its own or an earlier layer's."""

    indexer: Indexer | None

    def add_indexer(self, cfg: IndexerConfig, d_source: int, d_model: int) -> None:
        """Called at the end of __init__.  d_source: the width of what the indexer's queries are made of."""
        self.owner, self.shares, self.top_k, self.weight = cfg.owner(self.layer), cfg.every > 1, cfg.top_k, cfg.loss
        self.indexer = Indexer(cfg, d_source, d_model) if self.owner == self.layer else None

    def prepare(self, ctx: Context, rows: int) -> None:
        """Its bias is of this layer's input, and takes no form before that is there."""

    def index_keys(self, x: Tensor, ctx: Context) -> tuple[Tensor, ...]:
        """Returns the indexer's keys of these tokens, which a cache keeps; none where the layer has no indexer."""
        return () if self.indexer is None else (self.indexer.keys(x, ctx, self.layer),)

    def of_chosen(self, x: Tensor, source: Tensor, index_keys: Sequence[Tensor], qkv: Sequence[Tensor], ctx: Context) -> Tensor:
        """Returns what is read of the chosen keys, (b, h, q, w).  qkv: as in `Attend`; the rest as in `Indexer`."""
        q, k, v = qkv
        mask, hides = ctx.keys(self.layer), k.shape[2] > self.top_k
        shown, chances = self._choice(x, source, index_keys, mask, hides, ctx)
        if hides and q.shape[2] == 1 and mask.cached:
            at = shown[:, 0].float().topk(self.top_k).indices  # (b, n); where fewer are seen, hidden ones beside them
            narrow, (k, v) = mask.of_keys(at), (rows_of(each, at) for each in (k, v))
            return self.weighted(q, k, v, narrow, ctx.position)
        bias = self.bias(mask, ctx.position)
        if hides:
            only = torch.zeros_like(shown, dtype=q.dtype).masked_fill(~shown, float("-inf")).unsqueeze(1)  # (b, 1, q, k)
            bias = only if bias is None else bias + only
        for each in chances:
            with torch.no_grad():
                read = weights(q, k, mask, bias, self.how, self.sinks).sum(1)  # (b, h, q, k) -> (b, q, k)
            ctx.report_loss(LOSS, self.weight * mean_divergence(read, each, mask.q_positions >= 0))
        return self.attended(q, k, v, mask, bias)

    def _choice(
        self, x: Tensor, source: Tensor, index_keys: Sequence[Tensor], mask: Mask, hides: bool, ctx: Context
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """Returns which keys each query sees, and where their indexer learns, log chances of them, (b, q, k) each."""
        seen, at = mask.allowed(*self.how.sight)[:, 0], ("chosen", self.owner)
        if self.indexer is None:
            shown, *chances = ctx.shared.get(at, (seen,))
            return shown, chances
        if not hides and not self.indexer.learns:
            return seen, ()
        scores = self.indexer(x, source, *index_keys, ctx, self.layer)
        shown = best(scores.detach(), seen, self.top_k, mask)
        chances = [log_chances(scores, shown)] if self.indexer.learns else []
        if self.shares:
            ctx.shared[at] = (shown, *chances)
        return shown, chances
