"""What blocks compute again for the backward: the same bits, counted once."""

import inspect
from collections import Counter
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

from lm.nn.batch import Batch
from lm.nn.context import Context
from lm.nn.head import Head
from lm.nn.transformer import LM
from lm.ops.recompute import KERNELS, PRODUCTS, Policy, Recompute, recomputed
from lm.testing.models import tokens
from tests.nn.models import ATTENTIONS, BLOCKS, FFNS, MIXING, MIXTURES, MLA, config, packed, redrawn
from tests.nn.test_moe import loss_of
from tests.nn.test_mtp import S, labels_of, loss, with_mtp

HOWS = [Recompute("block"), Recompute("block", 2), Recompute("selective"), Recompute("selective", 2)]
T5: dict[str, Any] = {"position": {"kind": "t5_relative", "n_buckets": 8, "max_distance": 12}}
JITTER: dict[str, Any] = {"ffn": MIXTURES[0] | {"router": {"kind": "softmax", "jitter": 0.3}}}
SLOTS: list[dict[str, Any]] = [
    *({"attention": attention} for attention in ATTENTIONS),
    *MIXING,
    *({"ffn": ffn} for ffn in FFNS if ffn["kind"] != "none"),
    *({"block": block} for block in BLOCKS),
    *({"norm": {"kind": "rms", "place": place}} for place in ("post", "sandwich", "output")),
    T5,
    {"position": T5["position"] | {"shared": False}},
    T5 | {"attention": {"n_heads": 4, "window": 4, "keep_first": 3}},
    JITTER,
]


class Calls(TorchDispatchMode):
    """How often each operation is called."""

    def __init__(self) -> None:
        super().__init__()
        self.n: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        self.n[func.name()] += 1
        return func(*args, **(kwargs or {}))

    def of(self, names: set[str]) -> int:
        """Calls of all of them."""
        return sum(self.n[name] for name in names)


def gradients(model: LM, how: Recompute, batch: Batch) -> list[Tensor]:
    """Of all weights, with the same draws, by logits and what layers add to the loss."""
    model.recomputes(how)
    torch.manual_seed(3)
    return [*torch.autograd.grad(model(batch, read=_summed), [p for p in model.parameters() if p.requires_grad])]


def _summed(hidden: Tensor, head: Head, ctx: Context) -> Tensor:
    added = [loss.sum() for losses in ctx.reported.losses.values() for loss in losses.values()]
    logits: Tensor = head(hidden)
    return logits.square().sum() + sum(added)


@pytest.mark.parametrize("slots", [pytest.param(each, marks=[pytest.mark.slow] * (i % 2)) for i, each in enumerate(SLOTS)], ids=str)
def test_what_is_computed_again_changes_no_bit_of_a_gradient(slots: dict[str, Any]) -> None:
    for dropout, batch in ((0.0, packed([5, 12])), (0.2, Batch(tokens(2, 17)))):
        model = redrawn(config(**slots, dropout=dropout)).float().train()
        expected = gradients(model, Recompute(), batch)
        for how in HOWS:
            found = gradients(model, how, batch)
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), how


@pytest.mark.parametrize("attention", [{"n_heads": 4, "dropout": 0.3}, MLA | {"dropout": 0.3}], ids=str)
def test_dropped_attention_weights_are_drawn_alike_again(attention: dict[str, Any]) -> None:
    model, batch = redrawn(config(attention=attention, dropout=0.2)).float().train(), Batch(tokens(2, 17))
    expected = gradients(model, Recompute(), batch)
    for how in HOWS:
        assert all(torch.equal(a, b) for a, b in zip(gradients(model, how, batch), expected, strict=True)), how


def test_matrix_products_and_attention_are_computed_once_where_they_are_kept_and_the_rest_twice() -> None:
    model, calls = redrawn(config()).float().train(), {}
    for how in (Recompute(), Recompute("block"), Recompute("selective"), Recompute("selective", 2)):
        with Calls() as calls[how]:
            gradients(model, how, Batch(tokens(2, 17)))
    plain, block, selective, half = calls.values()
    assert [c.of(PRODUCTS) - plain.of(PRODUCTS) for c in (block, selective, half)] == [
        3 * 6,
        0,
        0,
    ]  # q, k, v, o, gate, up; down gives nothing
    assert [c.of(KERNELS) for c in calls.values()] == [3, 6, 3, 3]
    assert [c.n["aten::silu"] for c in calls.values()] == [3, 6, 6, 5]


@pytest.mark.parametrize("name", ["flash_attention", "efficient_attention", "cudnn_attention"])
def test_a_kernel_that_drops_weights_is_run_again(name: str) -> None:
    """Kept, it would not draw in the backward, and what is dropped behind it would be something else."""
    op = getattr(torch.ops.aten, f"_scaled_dot_product_{name}").default
    assert op.name() in KERNELS
    at = [argument.name for argument in op._schema.arguments].index("dropout_p")
    for dropout, expected in ((0.1, CheckpointPolicy.PREFER_RECOMPUTE), (0.0, CheckpointPolicy.MUST_SAVE)):
        assert Policy()(None, op, *[None] * at, dropout) == expected


@pytest.mark.skipif("op_output" not in inspect.signature(SelectiveCheckpointContext).parameters, reason="torch 2.11 tells no results")
def test_a_product_that_is_changed_in_place_is_refused() -> None:
    """Its change would be made a second time: torch does not see it where a product of rows of tokens was given another shape."""

    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                out = super().forward(x)
            return out.mul_(2) * x

    block, x = Doubled(4, 4, bias=False), torch.randn(2, 3, 4, requires_grad=True)
    recomputed(block, "block", x).sum().backward()
    with pytest.raises(RuntimeError, match=r"aten::mul_\.Tensor changes the result of a matrix product in place"):
        recomputed(block, "selective", x)


def test_a_change_in_place_is_refused_in_the_forward_alone() -> None:
    """torch up to 2.12 asks again in the backward, when another tensor may lie where a kept one lay."""
    policy, out = Policy(), torch.zeros(2, 2)
    forward, backward = SimpleNamespace(is_recompute=False, op_output=out), SimpleNamespace(is_recompute=True)
    for ctx in (forward, backward):
        assert policy(ctx, torch.ops.aten.mm.default, out, out) == CheckpointPolicy.MUST_SAVE
    assert policy(backward, torch.ops.aten.add_.Tensor, out, 1) == CheckpointPolicy.PREFER_RECOMPUTE
    with pytest.raises(RuntimeError, match=r"aten::add_\.Tensor changes"):
        policy(forward, torch.ops.aten.add_.Tensor, out, 1)


@pytest.mark.parametrize("how", HOWS, ids=str)
def test_blocks_that_are_run_again_for_the_backward_count_once(how: Recompute) -> None:
    model = redrawn(config(ffn=MIXTURES[2] | {"balance_loss": 0.5, "router_z_loss": 0.2})).train()
    ids, labels = tokens(2, 12), tokens(2, 12, seed=2)
    wanted = [p for p in model.parameters() if p.requires_grad]
    plain = loss_of(model, ids, labels)
    expected = torch.autograd.grad(plain.total, wanted)
    model.recomputes(how)
    again = loss_of(model, ids, labels)
    assert plain.loads is not None and again.loads is not None
    assert plain.loads.sum(1).tolist() == [2 * 12 * 2] * 2  # two layers of three have experts
    torch.testing.assert_close(torch.autograd.grad(again.total, wanted), expected, rtol=0, atol=0)
    assert torch.equal(again.loads, plain.loads)


def test_further_blocks_are_computed_again_in_the_backward_where_blocks_are() -> None:
    runs, gradients = [], []
    for how in (Recompute(), Recompute("block"), Recompute("block", 2), Recompute("selective")):
        model, ids = with_mtp(2, ffn=MIXTURES[2] | {"balance_loss": 0.1}), tokens(2, S)
        model.recomputes(how)
        called: list[object] = []
        for block in model.mtp:
            block.register_forward_pre_hook(lambda block, given, called=called: called.append(block))
        loss(model, Batch(ids, labels=labels_of(ids))).total.backward()
        runs.append([called.count(block) for block in model.mtp])
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.requires_grad})
    assert runs == [[1, 1], [2, 2], [1, 2], [2, 2]]  # they are blocks 3 and 4, counted from 0
    assert len(model.blocks) == 3
    for found in gradients[1:]:
        torch.testing.assert_close(found, gradients[0], rtol=0, atol=0)
