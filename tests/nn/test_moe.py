"""Mixtures of experts: the grouped path equals the loop, and routing, losses, loads and capacity follow their formulas."""

import math
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn

from lm.losses.cross_entropy import LossSums
from lm.losses.tokens import causal_reader
from lm.nn.batch import IGNORED, Batch
from lm.nn.context import Context
from lm.nn.ffn.experts import Experts
from lm.nn.ffn.mlp import ACTIVATIONS, MLPConfig
from lm.nn.ffn.moe import MoE, MoEConfig
from lm.nn.ffn.router import CorrectedRouter, SoftmaxRouter
from lm.nn.position.base import Position
from lm.nn.transformer import LM, build_model
from lm.ops.attention.mask import Mask, arange_positions
from lm.schema import from_tree
from lm.testing.models import redraw, tokens
from tests.nn.models import CLOSE, EXPERT, GPT_OSS, MIXTURES, config, redrawn

pytestmark = pytest.mark.usefixtures("doubles")

D, B, S = 16, 3, 10
M = TypeVar("M", bound=nn.Module)


def mixture(seed: int = 0, **fields: Any) -> MoE:
    """One layer with every weight drawn."""
    tree = {"n_experts": 4, "top_k": 2, "expert": EXPERT} | fields
    return drawn(MoE(from_tree(MoEConfig, tree), D, 5), seed)


def drawn(module: M, seed: int = 0) -> M:
    for p in module.parameters():
        p.data.zero_()
    redraw(module, seed)
    return module


def context(positions: Tensor | None = None) -> Context:
    at = arange_positions(S, torch.device("cpu")) if positions is None else positions
    return Context(Position(), Mask(at, at))


def inputs(seed: int = 0) -> Tensor:
    return torch.randn(B, S, D, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def test_the_norm_behind_a_mixture_reads_what_all_of_its_experts_give() -> None:
    shared: dict[str, Any] = {"n_experts": 4, "top_k": 2, "expert": EXPERT, "n_shared": 1}
    plain, x = mixture(**shared), inputs()
    normed = from_tree(MoEConfig, shared | {"out_norm": {"kind": "rms", "eps": 0.1}}).build(D, 5)
    missing = normed.load_state_dict(plain.state_dict(), strict=False).missing_keys
    assert missing == ["out_norm.weight"]
    weight = torch.linspace(0.5, 2.0, D)
    normed.get_parameter("out_norm.weight").copy_(weight)
    out = plain(x, context())
    torch.testing.assert_close(normed(x, context()), out / (out.square().mean(-1, keepdim=True) + 0.1).sqrt() * weight, **CLOSE)


@pytest.mark.parametrize("expert", [EXPERT, GPT_OSS, EXPERT | {"gated": False, "activation": "relu2", "bias": True}])
def test_grouped_experts_equal_the_loop_in_values_and_gradients(expert: dict[str, Any]) -> None:
    experts = drawn(Experts(from_tree(MLPConfig, expert), 5, D))
    x, weights = torch.randn(12, D, requires_grad=True), torch.rand(12, 2, requires_grad=True)
    chosen = torch.stack([torch.randperm(4)[:2] for _ in range(12)])  # the fifth expert gets no token
    results = []
    for run in (experts.loop, experts.grouped):
        out = run(x, chosen, weights)
        gradients = torch.autograd.grad(out.square().sum(), [x, weights, *experts.parameters()])
        results.append([out, *gradients])
    for name, fast, plain in zip(["out", "x", "weights", *dict(experts.named_parameters())], *results[::-1], strict=True):
        assert name.endswith("bias") or plain.abs().max() > 0
        torch.testing.assert_close(fast, plain, **CLOSE, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("tree", [{key: m[key] for key in m if key not in ("kind", "reference")} for m in MIXTURES])
@pytest.mark.parametrize("capacity", [None, 3])
def test_a_mixture_by_either_path_is_the_same(tree: dict[str, Any], capacity: int | None) -> None:
    layers = [mixture(**tree, capacity=capacity, reference=reference) for reference in (True, False)]
    x = inputs()
    results = []
    for layer in layers:
        out = layer(x, context())
        wanted = [p for p in layer.parameters() if p.requires_grad]
        results.append([out, *torch.autograd.grad(out.square().sum(), wanted)])
    torch.testing.assert_close(results[1], results[0], **CLOSE)


def softmax_by_hand(router: SoftmaxRouter, x: Tensor) -> dict[int, float]:
    """Weight of each chosen expert of one token."""
    scores = (router.weight @ x + (0 if router.bias is None else router.bias)).tolist()
    powers = [float(torch.tensor(s).exp()) for s in scores]
    size = len(powers) // router.cfg.n_groups
    ranked = sorted(range(router.cfg.n_groups), key=lambda g: -max(powers[g * size : (g + 1) * size]))
    open_ = [i for g in ranked[: router.cfg.top_groups] for i in range(g * size, (g + 1) * size)]
    best = sorted(open_, key=lambda i: -powers[i])[: router.top_k]
    total = sum(powers[i] for i in best) if router.cfg.normalize else sum(powers)
    return {i: powers[i] / total * router.cfg.scale for i in best}


@pytest.mark.parametrize("capacity", [None, 3])
def test_inputs_are_weighed_and_outputs_are_not(capacity: int | None) -> None:
    """As transformers' Llama 4 has it: an expert reads each token times its score, which is 0 where the token is another's."""
    layer = mixture(router={"kind": "plain_sigmoid", "normalize": False}, weigh_inputs=True, capacity=capacity)
    x = inputs()
    logits = x @ layer.router.weight.T
    chosen = logits >= logits.topk(2).values[..., -1:]
    if capacity is not None:
        first, second = (logits.topk(2).indices[..., i] for i in (0, 1))
        places = torch.stack([(torch.cat([first, second], 1) == e).cumsum(1) for e in range(4)], -1)  # (b, 2s, e)
        late = torch.stack([places[:, :S], places[:, S:]], 2).gather(-1, logits.topk(2).indices.unsqueeze(-1)).squeeze(-1) > capacity
        chosen = chosen.scatter(-1, logits.topk(2).indices, ~late)
        assert late.any()
    scores = logits.sigmoid() * chosen
    experts = layer.experts
    assert experts.gate is not None
    read = scores.unsqueeze(-1) * x.unsqueeze(-2)  # (b, s, e, d)
    inner = torch.einsum("bsed,ehd->bseh", read, experts.up) * nn.functional.silu(torch.einsum("bsed,ehd->bseh", read, experts.gate))
    expected = torch.einsum("bseh,edh->bsd", inner, experts.down)
    torch.testing.assert_close(layer(x, context()), expected, **CLOSE)


def corrected_by_hand(router: CorrectedRouter, x: Tensor) -> dict[int, float]:
    powers = [float(torch.tensor(s).exp()) for s in (router.weight @ x).tolist()]
    scores = [power / (1 + power if router.cfg.kind == "sigmoid" else sum(powers)) for power in powers]
    chosen_by = scores if getattr(router.cfg, "corrected", "scores") == "scores" else [math.log(power) for power in powers]
    biased = [s + float(b) for s, b in zip(chosen_by, router.correction_bias, strict=True)]
    size = len(scores) // router.cfg.n_groups
    groups = [range(g * size, (g + 1) * size) for g in range(router.cfg.n_groups)]
    ranked = sorted(groups, key=lambda group: -sum(sorted((biased[i] for i in group), reverse=True)[:2]))
    open_ = [i for group in ranked[: router.cfg.top_groups] for i in group]
    best = sorted(open_, key=lambda i: -biased[i])[: router.top_k]
    floor = getattr(router.cfg, "floor", 0.0)
    total = floor + sum(scores[i] for i in best) if router.cfg.normalize else 1.0
    return {i: scores[i] / total * router.cfg.scale for i in best}


@pytest.mark.parametrize(
    "router",
    [
        {"kind": "softmax"},
        {"kind": "softmax", "normalize": False, "bias": True},
        {"kind": "softmax", "n_groups": 4, "top_groups": 2, "normalize": False, "scale": 16.0},
        {"kind": "softmax", "n_groups": 2, "top_groups": 1},
        {"kind": "sigmoid", "scale": 2.5},
        {"kind": "sigmoid", "floor": 0.3},
        {"kind": "sigmoid", "n_groups": 4, "top_groups": 2, "normalize": False},
        {"kind": "sigmoid", "n_groups": 2, "top_groups": 1},
        {"kind": "sigmoid", "corrected": "logits"},
        {"kind": "sigmoid", "corrected": "logits", "n_groups": 4, "top_groups": 2, "normalize": False},
        {"kind": "corrected_softmax"},
        {"kind": "corrected_softmax", "n_groups": 4, "top_groups": 2, "normalize": False, "scale": 2.5},
    ],
)
@torch.no_grad()
def test_routing_equals_a_loop_by_hand(router: dict[str, Any]) -> None:
    layer, x = mixture(n_experts=8, router=router), inputs()
    routing = layer.router(x)
    by_hand = softmax_by_hand if isinstance(layer.router, SoftmaxRouter) else corrected_by_hand
    for row in range(B):
        for place in range(S):
            expected = by_hand(layer.router, x[row, place])
            found = dict(zip(routing.experts[row, place].tolist(), routing.weights[row, place].tolist(), strict=True))
            assert found == pytest.approx(expected, rel=1e-9)
    torch.testing.assert_close(routing.probabilities.sum(-1), torch.ones(B, S))


@pytest.mark.parametrize("kind", ["sigmoid", "corrected_softmax"])
def test_the_correction_bias_chooses_and_does_not_weigh(kind: str) -> None:
    layer, x = mixture(router={"kind": kind}), inputs()
    assert isinstance(layer.router, CorrectedRouter)
    layer.router.correction_bias.copy_(torch.tensor([0.0, 0.0, 0.0, 50.0]))
    routing = layer.router(x)
    scores = routing.logits.sigmoid() if kind == "sigmoid" else routing.logits.softmax(-1)
    assert (routing.experts == 3).any(-1).all()
    expected = scores.gather(-1, routing.experts)
    torch.testing.assert_close(routing.weights, expected / expected.sum(-1, keepdim=True))
    assert not layer.router.correction_bias.requires_grad


@torch.no_grad()
def test_experts_that_only_the_bias_chooses_keep_weights_next_to_nothing() -> None:
    """As ERNIE 4.5 in transformers, whose sums are at least 1e-12."""
    layer = mixture(router={"kind": "corrected_softmax"})
    layer.router.correction_bias.copy_(torch.tensor([0.0, 0.0, 50.0, 50.0]))
    layer.router.weight.copy_(torch.tensor([40.0, 0.0, 0.0, 0.0])[:, None] * torch.ones(4, D) / D)
    routing = layer.router(torch.ones(1, 1, D))
    assert sorted(routing.experts.flatten().tolist()) == [2, 3]
    torch.testing.assert_close(routing.weights, torch.full((1, 1, 2), math.exp(-40) / (1 + 3 * math.exp(-40)) / 1e-12))


def test_shared_experts_add_to_every_token() -> None:
    layer, x = mixture(n_shared=2), inputs()
    assert layer.shared is not None and layer.shared.up.weight.shape == (32, D)
    whole, ctx = layer(x, context()), context()
    shared, layer.shared = layer.shared, None
    torch.testing.assert_close(whole, layer(x, ctx) + shared(x, ctx))


def test_a_clamped_gate_follows_the_formula_of_gpt_oss() -> None:
    gate, up = torch.tensor([-9.0, 0.5, 9.0]), torch.tensor([-9.0, 0.5, 9.0])
    clamped = torch.tensor([-9.0, 0.5, 1.0])
    expected = (torch.tensor([-1.0, 0.5, 1.0]) + 1) * clamped * torch.sigmoid(1.702 * clamped)
    torch.testing.assert_close(from_tree(MLPConfig, GPT_OSS).gate(ACTIVATIONS["quick_gelu"])(gate, up), expected)


def losses_by_hand(layer: MoE, x: Tensor, shown: Tensor) -> list[float]:
    """Of each row: e sum_i f_i p_i * factor + the mean of logsumexp^2 * factor, over its real tokens."""
    cfg, out = layer.cfg, []
    routing = layer.router(x)
    for row in range(len(x)):
        real = [place for place in range(S) if shown[row, place]]
        f = [sum((routing.experts[row, t] == i).sum().item() for t in real) / (len(real) * cfg.top_k) for i in range(cfg.n_experts)]
        p = [sum(routing.probabilities[row, t, i].item() for t in real) / len(real) for i in range(cfg.n_experts)]
        z = sum(routing.logits[row, t].logsumexp(-1).item() ** 2 for t in real) / len(real)
        out.append(cfg.balance_loss * cfg.n_experts * sum(a * b for a, b in zip(f, p, strict=True)) + cfg.router_z_loss * z)
    return out


PADDED = torch.stack(
    [torch.arange(S), torch.cat([torch.full((4,), -1), torch.arange(6)]), torch.cat([torch.arange(3), torch.full((7,), -1)])]
)


@pytest.mark.parametrize("router", [{"kind": "softmax"}, {"kind": "sigmoid"}, {"kind": "corrected_softmax"}])
@pytest.mark.parametrize(("balance", "z"), [(0.7, 0.0), (0.0, 0.3), (0.7, 0.3)])
@torch.no_grad()
def test_losses_per_row_equal_the_formulas_without_padding(router: dict[str, Any], balance: float, z: float) -> None:
    layer, x, ctx = mixture(router=router, balance_loss=balance, router_z_loss=z), inputs(), context(PADDED)
    layer(x, ctx)
    ctx.collect(5)
    assert ctx.reported.losses["router_loss"]["", 5].tolist() == pytest.approx(losses_by_hand(layer, x, PADDED >= 0), rel=1e-9)
    chosen = layer.router(x).experts[PADDED >= 0]
    assert ctx.reported.loads["", 5].tolist() == [(chosen == i).sum().item() for i in range(4)]


@torch.no_grad()
@pytest.mark.parametrize("capacity", [{"capacity": 3}, {"capacity_factor": 0.75}, {"capacity_factor": 1.2, "top_k": 3}])
def test_capacity_drops_the_tokens_that_overflow_and_no_others(capacity: dict[str, Any]) -> None:
    limited, x, ctx = mixture(**capacity), inputs(1), context(PADDED)
    k, routing = limited.cfg.top_k, limited.router(x)
    expected, dropped = torch.zeros_like(x), 0
    for row in range(B):
        real = [place for place in range(S) if PADDED[row, place] >= 0]
        room = limited.cfg.capacity or -(-round(limited.cfg.capacity_factor * 100) * len(real) * k // 400)  # type: ignore[operator]
        taken = [0] * 4
        for choice in range(k):  # all first choices of a row come before its second ones
            for place in real:
                i = int(routing.experts[row, place, choice])
                taken[i] += 1
                dropped += taken[i] > room
                if taken[i] <= room:
                    one = limited.experts.loop(
                        x[row, place : place + 1], torch.tensor([[i]]), routing.weights[row, place, choice].view(1, 1)
                    )
                    expected[row, place] += one[0]
    assert dropped
    torch.testing.assert_close(limited(x, ctx)[PADDED >= 0], expected[PADDED >= 0], **CLOSE)


def loss_of(model: LM, ids: Tensor, labels: Tensor) -> LossSums:
    out: LossSums = model(Batch(ids), read=causal_reader(labels))
    return out


def test_the_split_into_micro_batches_changes_neither_loss_nor_gradients_nor_loads() -> None:
    fields = {"balance_loss": 0.5, "router_z_loss": 0.2, "capacity_factor": 0.8}
    model = redrawn(config(ffn=MIXTURES[0] | fields)).train()
    ids, labels = tokens(4, 12), tokens(4, 12, seed=2)
    for row, n in enumerate((0, 5, 9, 11)):
        labels[row, :n] = IGNORED
    whole = loss_of(model, ids, labels)
    gradients = torch.autograd.grad(whole.total, list(model.parameters()))
    assert float((whole.total - whole.nll).detach()) > 1
    parts = [loss_of(model, ids[rows], labels[rows]) for rows in (slice(0, 1), slice(1, 4))]
    torch.testing.assert_close(sum(part.total for part in parts), whole.total)
    assert torch.equal(sum(part.loads for part in parts), whole.loads)  # type: ignore[arg-type,misc]
    split = torch.autograd.grad(sum(part.total for part in parts), list(model.parameters()))  # type: ignore[arg-type]
    torch.testing.assert_close(split, gradients, **CLOSE)


@torch.no_grad()
def test_a_rows_losses_are_weighed_by_its_labels() -> None:
    model, ids, labels = redrawn(config(ffn=MIXTURES[0] | {"router_z_loss": 0.2})), tokens(3, 12), tokens(3, 12, seed=2)
    for row, n in enumerate((0, 5, 12)):
        labels[row, :n] = IGNORED
    sums, ctx = loss_of(model, ids, labels), model(Batch(ids), read=lambda hidden, head, ctx: ctx)
    rows = torch.stack(list(ctx.reported.losses["router_loss"].values())).sum(0)
    torch.testing.assert_close(sums.total - sums.nll, rows[0] * 12 + rows[1] * 7)


def test_which_layers_have_experts() -> None:
    cases = [({"first_dense": 2}, [2, 3, 4, 5]), ({"every": 2}, [1, 3, 5]), ({"every": 3, "first_dense": 3}, [5]), ({}, list(range(6)))]
    for fields, expected in cases:
        ffn = MIXTURES[0] | fields | ({"dense": {"kind": "mlp", "hidden": 24}} if fields else {})
        model = redrawn(config(n_layers=6, ffn=ffn))
        assert [layer for layer, block in enumerate(model.blocks) if isinstance(block.ffn, MoE)] == expected
        loads = loss_of(model, tokens(1, 8), tokens(1, 8)).loads
        assert loads is not None and loads.shape == (len(expected), 4) and loads.sum(1).eq(16).all()


def test_jitter_acts_in_training_only() -> None:
    layer, x = mixture(router={"kind": "softmax", "jitter": 0.3}), inputs()
    still = layer.eval().router(x).logits
    torch.testing.assert_close(still, x @ layer.router.weight.t())
    moved = layer.train().router(x).logits
    assert not torch.allclose(moved, still) and (moved - still).abs().max() < 0.3 * (x.abs() @ layer.router.weight.abs().t()).max()


@pytest.mark.slow
@pytest.mark.parametrize("rate", [pytest.param(0.0, marks=pytest.mark.slow), 0.004])
def test_moving_the_bias_evens_out_a_skewed_router_in_real_steps(rate: float) -> None:
    """Embeddings share a direction that two experts of each router like: without the bias they keep most of the load."""
    ffn = MIXTURES[0] | {"n_experts": 8, "router": {"kind": "sigmoid", "bias_rate": rate}}
    model = build_model(config(n_layers=2, ffn=ffn), seed=0).train()
    with torch.no_grad():
        direction = torch.randn(32, generator=torch.Generator().manual_seed(0))
        model.embed.weight.add_(0.02 * direction)
        for layer in model.mixtures().values():
            layer.router.weight[:2].add_(0.03 * direction)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    loads: list[Tensor] = []
    for step in range(80):
        ids = tokens(8, 65, seed=step)
        sums = loss_of(model, ids[:, :-1], ids[:, 1:])
        (sums.total / 512).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert sums.loads is not None
        model.balance(sums.loads)
        loads.append(sums.loads)
    first, last = (float((load.max(1).values / load.mean(1)).max()) for load in (loads[0], torch.stack(loads[-10:]).sum(0)))
    assert first > 2.5
    assert last < 1.3 if rate else last > 1.5, last
