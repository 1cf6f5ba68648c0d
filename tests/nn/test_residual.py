"""Ways around layers, and layers that are run again: against their formulas, and hyper-connections against transformers' DeepSeek-V4."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as theirs
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config

from lm.cost.count import count
from lm.errors import ConfigError
from lm.losses.tokens import causal_reader
from lm.nn.batch import Batch
from lm.nn.context import Context
from lm.nn.hyper import HyperConfig, HyperConnection, HyperResidual, HyperWeights
from lm.nn.model_config import model_config
from lm.nn.norm import Branch, PreNorm, RMSNormConfig
from lm.nn.parametrization import CompletePConfig
from lm.nn.transformer import LM, build_model
from lm.ops.recompute import NOTHING, Recompute
from lm.schema import Tree
from lm.testing.models import BASE, random_model, redraw, tokens


def blocks_of(model: LM, x: Tensor) -> list[Any]:
    """The layers as functions of their input alone."""
    ctx = Context.alone(x, model.position)
    return [lambda x, block=block: block(x, ctx) for block in model.blocks]


def by_formula(kind: str, model: LM, x: Tensor) -> Tensor:
    """The stack's output as the papers write it, layer by layer, with lists of all that came before."""
    layers, n, stack = blocks_of(model, x), len(model.blocks), model.residual
    read, wrote = [], [x]
    for i, layer in enumerate(layers):
        if kind == "x0":
            read.append(stack.keep[i] * wrote[-1] + stack.first[i] * x)
        elif kind == "unet":
            mirrored = n - 1 - i
            read.append(wrote[-1] + (stack.skip[i - (n - n // 2)] * wrote[mirrored + 1] if i > mirrored else 0.0))
        else:
            at = i * (i + 3) // 2 - (i + 1)
            read.append(x if i == 0 else torch.einsum("j,jbsd->bsd", stack.shares[at : at + i + 1], torch.stack(wrote)))
        wrote.append(layer(read[-1]))
    return wrote[-1] if kind != "dense" else torch.einsum("j,jbsd->bsd", stack.shares[-(n + 1) :], torch.stack(wrote))


@pytest.mark.parametrize(("kind", "n_layers"), [(kind, n) for kind in ("x0", "unet", "dense") for n in (2 if kind == "unet" else 1, 4, 5)])
def test_a_stack_is_what_its_formula_says(kind: str, n_layers: int, doubles: None) -> None:
    model = random_model(model_config(BASE | {"n_layers": n_layers, "residual": {"kind": kind}}))
    x = torch.randn(2, 9, 32)
    out = model.through_blocks(x, Context.alone(x, model.position))
    torch.testing.assert_close(out, by_formula(kind, model, x), rtol=1e-9, atol=1e-9)


AGAIN: Tree = {"residual": {"kind": "loop", "times": 3}, "n_layers": 2}
FIRST_VALUES: Tree = {"attention": {"kind": "gqa", "n_heads": 4, "window": 5, "global_every": 2, "value_residual": True}}
EXPERTS: Tree = {"ffn": {"kind": "moe", "n_experts": 4, "top_k": 2, "balance_loss": 0.3, "expert": {"kind": "mlp", "hidden": 16}}}


def copies(model: LM, tree: Tree, times: int) -> LM:
    """A plain model with a copy of each block for each time that it is run."""
    n = len(model.blocks)
    plain = random_model(model_config(tree | {"n_layers": times * n, "residual": {"kind": "plain"}}))
    weights = model.state_dict()
    for i in range(n, times * n):
        weights |= {f"blocks.{i}.{name}": p for name, p in model.blocks[i % n].state_dict().items()}
    plain.load_state_dict(weights)
    return plain


@pytest.mark.parametrize("changes", [{}, {"kind": "encoder"}, {"block": {"kind": "parallel"}}, {"position": {"kind": "alibi"}}], ids=str)
def test_layers_that_are_run_again_are_copies_whose_gradients_add_up(changes: Tree, doubles: None) -> None:
    model = random_model(model_config(BASE | AGAIN | changes))
    plain, ids = copies(model, BASE | changes, 3), tokens(2, 9)
    out, expected = model(ids), plain(ids)
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)
    to = torch.randn_like(out)
    (out * to).sum().backward()
    (expected * to).sum().backward()
    of = dict(plain.named_parameters())
    for name, p in model.named_parameters():
        each = [f"blocks.{int(name.split('.')[1]) + 2 * i}.{name.split('.', 2)[2]}" for i in range(3)] if "blocks." in name else [name]
        torch.testing.assert_close(p.grad, torch.stack([of[its].grad for its in each]).sum(0), rtol=1e-9, atol=1e-9)


def test_each_pass_has_keys_values_and_a_share_of_the_residual_stream_of_its_own() -> None:
    cfg = model_config(BASE | AGAIN)
    once, again = build_model(cfg.replace(residual={"kind": "plain"}), seed=0), build_model(cfg, seed=0)
    assert len(again.states()) == 3 * len(once.states())
    assert count(cfg, 9).cache_bytes_per_token == 3 * count(once.cfg, 9).cache_bytes_per_token
    assert sum(p.numel() for p in again.parameters()) == sum(p.numel() for p in once.parameters())
    torch.testing.assert_close(again.blocks[0].attention.o.weight * 3**0.5, once.blocks[0].attention.o.weight)
    depths = [build_model(cfg.replace(parametrization=CompletePConfig(base_width=32, base_depth=n)), seed=0) for n in (6, 2)]
    assert [block.cfg.growth().depth for block in depths] == [1, 3]


@pytest.mark.parametrize("how", ["block", "selective"])
@pytest.mark.parametrize("changes", [FIRST_VALUES, EXPERTS], ids=["values of the first layer", "experts"])
def test_a_pass_that_is_run_again_for_the_backward_reads_what_it_read(changes: Tree, how: Any) -> None:
    """Values of the first layer are of the same pass: seen to fail where all passes had one context."""
    model = random_model(model_config(BASE | AGAIN | changes)).train()
    labels = tokens(2, 9, 3)
    read, found = causal_reader(labels), []
    for recompute in (NOTHING, Recompute(how)):
        model.recomputes(recompute)
        sums = model(Batch(tokens(2, 9)), read)
        found.append([sums.total, *torch.autograd.grad(sums.total, [p for p in model.parameters() if p.requires_grad])])
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


def test_experts_count_the_tokens_of_all_passes() -> None:
    model, labels = random_model(model_config(BASE | AGAIN | EXPERTS)).train(), tokens(2, 9, 3)
    loads = model(Batch(tokens(2, 9)), causal_reader(labels)).loads
    assert loads.shape == (2, 4) and loads.sum(1).tolist() == [2 * 3 * 18] * 2


def reference(n: int, times: int, d: int) -> DeepseekV4Config:
    return DeepseekV4Config(hidden_size=d, hc_mult=n, hc_sinkhorn_iters=times, hc_eps=1e-6, rms_norm_eps=1e-6)


def random(part: torch.nn.Module) -> None:
    """A part of a model is made with whatever memory holds, and only the whole model draws it."""
    for p in part.parameters():
        torch.nn.init.ones_(p)
    redraw(part)


def give(ours: HyperWeights, fn: Tensor, base: Tensor, scale: Tensor) -> None:
    with torch.no_grad():
        for there, here in ((fn, ours.weight), (base, ours.bias), (scale, ours.scale)):
            there.copy_(here)


@pytest.mark.parametrize(("n", "times"), [(4, 20), (2, 1), (3, 5)])
def test_a_hyper_connection_is_that_of_deepseek_v4_forward_and_backward(n: int, times: int) -> None:
    """As in DeepseekV4DecoderLayer, around a sublayer that is a product. In float32, since transformers' is always."""
    d, cfg = 24, HyperConfig(streams=n, sinkhorn=times)
    ours = HyperConnection(cfg, PreNorm(RMSNormConfig(), d, Branch(0.0)), d, 1)
    random(ours)
    other = theirs.DeepseekV4HyperConnection(reference(n, times, d))
    give(ours.weights, other.fn, other.base, other.scale)
    x, by, to = torch.randn(2, 7, n, d, requires_grad=True), torch.randn(d, d), torch.randn(2, 7, n, d)
    out = ours(x, lambda h: h @ by)
    post, comb, collapsed = other(x)
    expected = post.unsqueeze(-1) * (ours.sublayer.norm(collapsed) @ by).unsqueeze(-2) + comb.transpose(-1, -2) @ x
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    found = torch.autograd.grad((out * to).sum(), [x, *ours.weights.parameters()])
    wanted = torch.autograd.grad((expected * to).sum(), [x, other.fn, other.base, other.scale])
    for mine, its in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-4)


def test_the_streams_end_as_in_deepseek_v4() -> None:
    ours, other = HyperResidual(HyperConfig(streams=3), 24), theirs.DeepseekV4HyperHead(reference(3, 20, 24))
    random(ours)
    give(ours.weights, other.hc_fn, other.hc_base, other.hc_scale)
    x = torch.randn(2, 7, 24)
    layers = [lambda streams: streams * torch.arange(1.0, 4.0)[:, None]]
    torch.testing.assert_close(ours(x, layers), other(layers[0](x.unsqueeze(2).expand(-1, -1, 3, -1))), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["x0", "dense", "hyper"])
def test_a_model_is_the_plain_one_at_first(kind: str, doubles: None) -> None:
    changes: Tree = {"norm": {"kind": "rms", "eps": 1e-20}, "n_layers": 5}
    residual: Tree = {"kind": kind} | ({"eps": 1e-20} if kind == "hyper" else {})
    plain, other = (build_model(model_config(BASE | changes | {"residual": of}), seed=3) for of in ({"kind": "plain"}, residual))
    ids = tokens(2, 20)
    torch.testing.assert_close(other(ids), plain(ids), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("kind", "expected"), [("decoder", [0, 1, 2, 0, 1, 2]), ("encoder_decoder", [0, 1, 2, 0, 1, 2, 0, 1, 2])])
def test_each_sublayer_reads_the_next_stream_at_first(kind: str, expected: list[int]) -> None:
    model = build_model(model_config(BASE | {"kind": kind, "residual": {"kind": "hyper", "streams": 3}}), seed=0)
    found = {name: module for name, module in model.blocks.named_modules() if isinstance(module, HyperConnection)}
    order = ["attention_residual", "cross_residual", "ffn_residual"]
    at = sorted(found, key=lambda name: (int(name.split(".")[0]), order.index(name.split(".")[1])))
    assert [int(found[name].weights.bias[:3].argmax()) for name in at] == expected


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"norm": {"kind": "rms", "place": "post"}}, "norm.place=post"),
        ({"block": {"kind": "parallel"}}, "Use block=sequential"),
        ({"mtp": {"depth": 1}}, "Set mtp=null"),
    ],
)
def test_several_streams_are_refused_where_there_is_one(changes: Tree, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        model_config(BASE | {"residual": {"kind": "hyper"}} | changes)


def test_layers_that_are_run_again_are_refused_where_others_draft_behind_them() -> None:
    with pytest.raises(ConfigError, match=r"residual=loop runs them again\. Set mtp=null"):
        model_config(BASE | AGAIN | {"mtp": {"depth": 1}})


@pytest.mark.parametrize("of", [{"n_layers": 1}, {"kind": "encoder_decoder", "n_encoder_layers": 1}])
def test_halves_of_one_layer_are_refused(of: Tree) -> None:
    """Seen to fail: a model was trained, without a weight, and then could not be read."""
    with pytest.raises(ConfigError, match=r"residual=unet joins .* a stack of one layer has none. Give it more, or set residual=plain"):
        model_config(BASE | {"residual": {"kind": "unet"}} | of)
