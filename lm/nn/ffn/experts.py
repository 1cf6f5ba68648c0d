"""The experts of an MoE layer, as stacked weights: a readable loop, and a fast path that sorts tokens by expert."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from lm.nn.ffn.mlp import ACTIVATIONS, MLPConfig
from lm.nn.init import Declares, Initializer, into_residual, matrix
from lm.ops.experts import Sorting, by_expert
from lm.ops.linear import product
from lm.ops.ranks.dispatch import Dispatch
from lm.ops.ranks.tensor_parallel import Divisible, TensorParallel


class Experts(Declares, Divisible):
    """n MLPs of one shape. Weights are (e, out, in), biases (e, out)."""

    initializers = {"up": matrix, "gate": matrix, "down": into_residual}
    cut = dict.fromkeys(("up", "gate", "down", "up_bias", "gate_bias", "down_bias"), 0)

    dispatch: Dispatch | None = None  # set where other ranks hold other experts

    def __init__(self, cfg: MLPConfig, n: int, d_model: int, reference: bool = False, last: bool = True) -> None:
        """last: what they give is added to the residual stream, and not projected first."""
        super().__init__()
        self.last = last
        self.reference = reference
        self.cfg, self.d_model, self.hidden = cfg, d_model, (hidden := cfg.width(d_model))
        self.n, self.gated, self.act = n, cfg.gated, ACTIVATIONS[cfg.activation]
        self.combine = cfg.gate(self.act)
        self.up = nn.Parameter(torch.empty(n, hidden, d_model))
        self.gate = nn.Parameter(torch.empty(n, hidden, d_model)) if cfg.gated else None
        self.down = nn.Parameter(torch.empty(n, d_model, hidden))
        self.up_bias = nn.Parameter(torch.empty(n, hidden)) if cfg.bias else None
        self.gate_bias = nn.Parameter(torch.empty(n, hidden)) if cfg.bias and cfg.gated else None
        self.down_bias = nn.Parameter(torch.empty(n, d_model)) if cfg.bias else None
        self.dropout = nn.Dropout(cfg.dropout)

    def named_initializers(self) -> Mapping[str, Initializer]:
        return self.initializers if self.last else {**self.initializers, "down": matrix}

    def extra_repr(self) -> str:
        return f"{self.n} x ({self.d_model} -> {self.hidden} -> {self.d_model}){', gated' if self.gated else ''}"

    def forward(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """As `loop`. Callers call the module and not `loop` itself, for engines that gather weights in a hook of the call."""
        run = self.loop if self.reference else self.grouped
        return run(x, experts, weights) if self.dispatch is None else self.dispatch(run, x, experts, weights)

    def join(self, ranks: TensorParallel, sizes: Mapping[str, int]) -> None:
        self.dispatch, self.n = Dispatch(ranks, sizes["up"]), len(self.up)

    def loop(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """The reference.  x: (t, d); experts, weights: (t, k). Returns (t, d)."""
        out = torch.zeros_like(x)
        for i in range(self.n):
            token, choice = (experts == i).nonzero(as_tuple=True)
            out = out.index_add(0, token, self._one(x[token], i) * weights[token, choice].unsqueeze(-1))
        return out

    def _one(self, x: Tensor, i: int) -> Tensor:
        up = self.of_one("up", x, i, self.up, self.up_bias)
        inner = self.act(up) if self.gate is None else self.combine(self.of_one("gate", x, i, self.gate, self.gate_bias), up)
        return self.of_one("down", self.dropout(inner), i, self.down, self.down_bias)

    def of_one(self, name: str, x: Tensor, i: int, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Returns W x + b of expert i.  name: of the stacked matrix (up, gate, down), for adapters."""
        return product(x, weight[i], None if bias is None else bias[i])

    def grouped(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """As `loop`, with tokens sorted by expert, so that every matrix is multiplied once."""
        if not x.is_meta and torch.is_autocast_enabled(x.device.type):  # autocast does not know the grouped kernel
            x = x.to(torch.get_autocast_dtype(x.device.type))
        sorting = Sorting(experts, self.n)
        rows, at, gate = sorting.spread(x), (sorting.ends, sorting.chosen), self.gate
        up = self.of_all("up", rows, self.up, self.up_bias, *at)
        inner = self.act(up) if gate is None else self.combine(self.of_all("gate", rows, gate, self.gate_bias, *at), up)
        return sorting.gather(self.of_all("down", self.dropout(inner), self.down, self.down_bias, *at), weights)

    def of_all(self, name: str, x: Tensor, weight: Tensor, bias: Tensor | None, ends: Tensor, chosen: Tensor) -> Tensor:
        """Returns W x + b of the expert of each row, as `by_expert`.  name: as in `of_one`."""
        return by_expert(x, weight, bias, ends, chosen)
