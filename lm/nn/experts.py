"""The feed-forward layers of a mixture, as stacked weights: a loop to read, and a path that sorts tokens by expert."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lm.nn.ffn import ACTIVATIONS, MLPConfig


class Experts(nn.Module):
    """n MLPs of one shape. Weights are (e, out, in), biases (e, out)."""

    def __init__(self, cfg: MLPConfig, n: int, d_model: int) -> None:
        super().__init__()
        hidden = cfg.width(d_model)
        self.n, self.gated, self.act, self.combine = n, cfg.gated, ACTIVATIONS[cfg.activation], cfg.gate()
        self.up = nn.Parameter(torch.empty(n, hidden, d_model))
        self.gate = nn.Parameter(torch.empty(n, hidden, d_model)) if cfg.gated else None
        self.down = nn.Parameter(torch.empty(n, d_model, hidden))
        self.up_bias = nn.Parameter(torch.empty(n, hidden)) if cfg.bias else None
        self.gate_bias = nn.Parameter(torch.empty(n, hidden)) if cfg.bias and cfg.gated else None
        self.down_bias = nn.Parameter(torch.empty(n, d_model)) if cfg.bias else None
        self.dropout = nn.Dropout(cfg.dropout)

    def loop(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """The reference.  x: (t, d); experts, weights: (t, k). Returns (t, d)."""
        out = torch.zeros_like(x)
        for i in range(self.n):
            token, choice = (experts == i).nonzero(as_tuple=True)
            out = out.index_add(0, token, self._one(x[token], i) * weights[token, choice].unsqueeze(-1))
        return out

    def _one(self, x: Tensor, i: int) -> Tensor:
        def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            return F.linear(x, weight[i], None if bias is None else bias[i])

        up = linear(x, self.up, self.up_bias)
        inner = self.act(up) if self.gate is None else self.combine(linear(x, self.gate, self.gate_bias), up)
        return linear(self.dropout(inner), self.down, self.down_bias)

    def grouped(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """The same with each expert's tokens side by side, so that every matrix is multiplied once."""
        k = experts.shape[1]
        if torch.is_autocast_enabled(x.device.type):  # which knows nothing of the grouped kernel
            x = x.to(torch.get_autocast_dtype(x.device.type))
        chosen, order = experts.flatten().sort(stable=True)  # (t, k) -> (t*k)
        counts = torch.bincount(chosen, minlength=self.n)
        rows = x[order // k]  # (t, d) -> (t*k, d)
        up = _each(rows, self.up, self.up_bias, counts, chosen)
        inner = self.act(up) if self.gate is None else self.combine(_each(rows, self.gate, self.gate_bias, counts, chosen), up)
        out = _each(self.dropout(inner), self.down, self.down_bias, counts, chosen)
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        return torch.einsum("tkd,tk->td", out[back].unflatten(0, (-1, k)), weights)  # (t*k, d) -> (t, d)


def _each(x: Tensor, weight: Tensor, bias: Tensor | None, counts: Tensor, chosen: Tensor) -> Tensor:
    """x[rows of expert i] @ weight[i]^T + bias[i].  x: (n, in), rows of one expert side by side; counts: (e,)."""
    aligned = weight.shape[-1] % 8 == 0 and weight.shape[-2] % 8 == 0
    if x.device.type == "cuda" and x.dtype == torch.bfloat16 and aligned:  # what the grouped kernel takes
        out = F.grouped_mm(x, weight.to(x.dtype).transpose(-1, -2), offs=counts.cumsum(0).to(torch.int32))
    else:
        parts = zip(x.split(counts.tolist()), weight.unbind(), strict=True)
        out = torch.cat([part @ w.t() for part, w in parts])
    return out if bias is None else out + bias[chosen].to(out.dtype)
