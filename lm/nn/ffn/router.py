"""Which experts a token goes to, and with which weights."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Literal, NamedTuple, Self

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from lm.nn.init import Declares, into_scores, ones
from lm.ops.norm import fast_rms_norm
from lm.ops.precision import without_autocast
from lm.ops.routing import within_groups
from lm.schema import Slot


class RouterConfig(Slot):
    """Which experts a token goes to."""

    normalize: bool = True
    """The weights of a token's k experts sum to 1, or to the kind's scale (Mixtral, gpt-oss); false leaves them as they are (Switch)."""

    @abstractmethod
    def build(self, d_model: int, n_experts: int, top_k: int) -> "Router":
        """Returns the router of one layer."""

    def require(self, n_experts: int, top_k: int) -> None:
        """Raises ValueError where this kind does not fit so many experts."""


class GroupedRouterConfig(RouterConfig):
    """Experts in groups, of which a token goes to a few."""

    n_groups: int = Field(1, gt=0)
    """Groups of neighbouring experts (DeepSeek-V2 and V3: 8); divides n_experts."""
    top_groups: int = Field(1, gt=0)
    """Groups that a token may go to, those with the best score (DeepSeek-V2: 3), or with a sigmoid the largest sum of their two best
    (DeepSeek-V3: 4)."""
    scale: float = Field(1.0, gt=0)
    """Factor on the weights (DeepSeek-V2: 16, DeepSeek-V3: 2.5)."""

    def require(self, n_experts: int, top_k: int) -> None:
        if n_experts % self.n_groups:
            raise ValueError(f"router.n_groups={self.n_groups} does not divide n_experts={n_experts}. Choose a divisor.")
        if self.top_groups > self.n_groups:
            raise ValueError(f"router.top_groups={self.top_groups} is over router.n_groups={self.n_groups}. Lower top_groups.")
        if top_k > self.top_groups * n_experts // self.n_groups:
            raise ValueError(
                f"top_k={top_k} experts are not in {self.top_groups} groups of {n_experts // self.n_groups}."
                " Lower top_k, or raise router.top_groups."
            )

    def allowed(self, scores: Tensor, counted: int) -> Tensor:
        """Returns scores, -inf outside of each token's best groups, (b, s, e).  counted: best scores that rank a group by their sum."""
        return within_groups(scores, self.n_groups, self.top_groups, counted)


class SoftmaxConfig(GroupedRouterConfig):
    """What kinds are configured by that take the top k of a softmax over all experts."""

    bias: bool = False
    """Bias on the scores (gpt-oss)."""
    jitter: float = Field(0.0, ge=0, lt=1)
    """Switch: in training, inputs are multiplied by numbers from 1 - jitter to 1 + jitter (Fedus et al. 2021, arXiv:2101.03961, 2.4)."""


class SoftmaxRouterConfig(SoftmaxConfig):
    """The top k of a softmax over all experts (Mixtral, Switch, gpt-oss; with groups DeepSeek-V2, arXiv:2405.04434, section 2.2.2)."""

    kind: Literal["softmax"] = "softmax"

    def build(self, d_model: int, n_experts: int, top_k: int) -> "Router":
        return SoftmaxRouter(self, d_model, n_experts, top_k)


class NormedSoftmaxRouterConfig(SoftmaxConfig):
    """The top k of a softmax that reads x / rms(x) times a learned factor of each channel and 1 / sqrt(d), with a learned factor on each
    expert's weights (Gemma 4, Google 2026)."""

    kind: Literal["normed_softmax"] = "normed_softmax"
    eps: float = Field(1e-6, ge=1e-30)
    """Added to the mean square before the root."""

    def build(self, d_model: int, n_experts: int, top_k: int) -> "Router":
        return NormedSoftmaxRouter(self, d_model, n_experts, top_k)


class PlainSigmoidRouterConfig(RouterConfig):
    """The top k of sigmoid scores, without a bias (Llama 4, Meta 2025)."""

    kind: Literal["plain_sigmoid"] = "plain_sigmoid"

    def build(self, d_model: int, n_experts: int, top_k: int) -> "Router":
        return PlainSigmoidRouter(self, d_model, n_experts, top_k)


class CorrectedRouterConfig(GroupedRouterConfig):
    """Scores, and a bias that is moved in training until loads are even."""

    bias_rate: float = Field(0.001, ge=0)
    """How far a step moves an expert's bias, up where its load is below the mean and down where it is above (DeepSeek-V3: 0.001)."""


class SigmoidRouterConfig(CorrectedRouterConfig):
    """Sigmoid scores, and a bias that is moved in training until loads are even (DeepSeek-V3, arXiv:2412.19437, section 2.1.2)."""

    kind: Literal["sigmoid"] = "sigmoid"
    floor: float = Field(1e-20, ge=0)
    """Added to the sum by which a token's weights are divided (DeepSeek-V3: 1e-20, LFM2: 1e-6)."""
    corrected: Literal["scores", "logits"] = "scores"
    """What the bias is added to where experts are chosen: their scores, or logits (Kolibri 1)."""

    def build(self, d_model: int, n_experts: int, top_k: int) -> "Router":
        chosen_by = SigmoidRouter if self.corrected == "scores" else LogitRouter
        return chosen_by(self, d_model, n_experts, top_k)


class CorrectedSoftmaxRouterConfig(CorrectedRouterConfig):
    """A softmax over all experts, and a bias that is moved in training until loads are even (ERNIE 4.5, Baidu 2025)."""

    kind: Literal["corrected_softmax"] = "corrected_softmax"

    def build(self, d_model: int, n_experts: int, top_k: int) -> "Router":
        return CorrectedSoftmaxRouter(self, d_model, n_experts, top_k)


class Routing(NamedTuple):
    """Of each token: chosen experts and their weights, (b, s, k); for the losses, all scores, summing to 1, and logits, (b, s, e)."""

    experts: Tensor
    weights: Tensor
    probabilities: Tensor
    logits: Tensor


class Router(Declares, nn.Linear):
    """From tokens, (b, s, d), to their `Routing`."""

    initializers = {"weight": into_scores}

    def forward(self, x: Tensor) -> Routing:  # type: ignore[override]
        return self.route(x)

    @abstractmethod
    def route(self, x: Tensor) -> Routing:
        """(b, s, d) -> (b, s, k) and (b, s, e)."""

    def balance(self, load: Tensor) -> None:
        """Updates the `self_updated` parameters, if there are any.  load: (e,), tokens of each expert in a whole optimizer step."""


class SoftmaxRouter(Router):
    """Logits, softmax and weights in float32."""

    def __init__(self, cfg: SoftmaxConfig, d_model: int, n_experts: int, top_k: int) -> None:
        super().__init__(d_model, n_experts, bias=cfg.bias)
        self.cfg, self.top_k = cfg, top_k

    def route(self, x: Tensor) -> Routing:
        wide = x.float()
        if self.training and self.cfg.jitter:
            wide = wide * torch.empty_like(wide).uniform_(1 - self.cfg.jitter, 1 + self.cfg.jitter)
        logits = _logits(self, wide)
        probabilities = logits.softmax(-1)
        weights, experts = self.cfg.allowed(probabilities, 1).topk(self.top_k, dim=-1)
        if self.cfg.normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        return Routing(experts, weights * self.cfg.scale, probabilities, logits)


class NormedSoftmaxRouter(SoftmaxRouter):
    """SoftmaxRouter of x / rms(x) * gain / sqrt(d), each weight times the gain of its expert; gains are 1 at first."""

    initializers = {**SoftmaxRouter.initializers, "gain": ones, "expert_gain": ones}

    def __init__(self, cfg: NormedSoftmaxRouterConfig, d_model: int, n_experts: int, top_k: int) -> None:
        super().__init__(cfg, d_model, n_experts, top_k)
        self.eps, self.gain, self.expert_gain = cfg.eps, nn.Parameter(torch.empty(d_model)), nn.Parameter(torch.empty(n_experts))

    def route(self, x: Tensor) -> Routing:
        found = super().route(fast_rms_norm(x.float(), self.gain.float(), self.eps) * x.shape[-1] ** -0.5)
        return found._replace(weights=found.weights * self.expert_gain[found.experts])


class PlainSigmoidRouter(Router):
    """Experts are chosen by logits: two scores that round to 1 are still different ones."""

    def __init__(self, cfg: PlainSigmoidRouterConfig, d_model: int, n_experts: int, top_k: int) -> None:
        super().__init__(d_model, n_experts, bias=False)
        self.cfg, self.top_k = cfg, top_k

    def route(self, x: Tensor) -> Routing:
        logits = _logits(self, x.float())
        best, experts = logits.topk(self.top_k, dim=-1)
        scores, weights = logits.sigmoid(), best.sigmoid()
        if self.cfg.normalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return Routing(experts, weights, scores / (scores.sum(-1, keepdim=True) + 1e-20), logits)


class CorrectedRouter(Router):
    """The correction bias affects which experts are chosen, not their weights; it has no gradient, `balance` updates it."""

    self_updated = ("correction_bias",)

    def __init__(self, cfg: CorrectedRouterConfig, d_model: int, n_experts: int, top_k: int) -> None:
        super().__init__(d_model, n_experts, bias=False)
        self.cfg, self.top_k = cfg, top_k
        self.correction_bias = nn.Parameter(torch.empty(n_experts, dtype=torch.float32), requires_grad=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Overrides the method that every cast passes through. The bias stays float32: in bf16, steps below its rounding would be lost."""
        bias = self.correction_bias.data
        moved = super()._apply(fn, recurse)
        if self.correction_bias.dtype.itemsize < torch.float32.itemsize:
            self.correction_bias.data = bias.to(self.correction_bias.device)
        return moved

    def route(self, x: Tensor) -> Routing:
        logits = _logits(self, x.float())
        scores = self.scores(logits)
        experts = self.cfg.allowed(self.chosen_by(scores, logits).detach() + self.correction_bias, 2).topk(self.top_k, dim=-1).indices
        weights = scores.gather(-1, experts)
        if self.cfg.normalize:
            weights = self.shares(weights)
        return Routing(experts, weights * self.cfg.scale, scores / (scores.sum(-1, keepdim=True) + 1e-20), logits)

    @abstractmethod
    def scores(self, logits: Tensor) -> Tensor:
        """(b, s, e) -> (b, s, e)."""

    def chosen_by(self, scores: Tensor, logits: Tensor) -> Tensor:
        """Returns what the correction bias is added to, (b, s, e)."""
        return scores

    @abstractmethod
    def shares(self, weights: Tensor) -> Tensor:
        """Returns weights, (b, s, k), that sum to 1; where they are next to 0, as in transformers."""

    @torch.no_grad()
    def balance(self, load: Tensor) -> None:
        self.correction_bias.add_(torch.sign(load.mean() - load), alpha=self.cfg.bias_rate)


class SigmoidRouter(CorrectedRouter):
    """Scores that do not depend on each other."""

    cfg: SigmoidRouterConfig

    def scores(self, logits: Tensor) -> Tensor:
        return logits.sigmoid()

    def shares(self, weights: Tensor) -> Tensor:
        return weights / (weights.sum(-1, keepdim=True) + self.cfg.floor)


class LogitRouter(SigmoidRouter):
    """Experts are chosen by logits and the bias, as in Kolibri 1 (Aleph Alpha 2026)."""

    def chosen_by(self, scores: Tensor, logits: Tensor) -> Tensor:
        return logits


class CorrectedSoftmaxRouter(CorrectedRouter):
    """Scores that sum to 1."""

    def scores(self, logits: Tensor) -> Tensor:
        return logits.softmax(-1)

    def shares(self, weights: Tensor) -> Tensor:
        return weights / weights.sum(-1, keepdim=True).clamp_min(1e-12)


def _logits(router: nn.Linear, x: Tensor) -> Tensor:
    """In float32 even under autocast: rounding here changes which expert a token goes to."""
    with without_autocast(x.device):
        return F.linear(x, router.weight.float(), None if router.bias is None else router.bias.float())
