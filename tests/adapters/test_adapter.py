"""LoRA beside the matrices of any model: what it adds, what it leaves alone, and what it refuses."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lm.adapters.adapter import LoRAConfig, adapting, hold_bases
from lm.adapters.held import HELD, Base, multiplied, nf4_levels
from lm.adapters.lowrank import DoRALinear, LoRAOnHeld, beside
from lm.losses.tokens import chunked_loss
from lm.nn.bare import without_adapter
from lm.nn.batch import Batch
from lm.nn.model_config import model_config
from lm.nn.transformer import LM, build_model
from lm.spelling import means
from lm.storage.model_folder import copy_weights
from lm.testing.models import BASE, redraw, same, tokens
from tests.nn.models import CONV, DELTA, MAMBA2, MIXTURES, MLA

pytestmark = pytest.mark.usefixtures("doubles")
MODELS: dict[str, dict[str, Any]] = {
    "dense": {},
    "latents": {"attention": MLA | {"q_rank": 12, "bias": True}},
    "latents without a query's": {"attention": MLA},
    "experts": {"ffn": MIXTURES[2]},
    "experts with biases": {"ffn": MIXTURES[4]},
    "experts one by one": {"ffn": MIXTURES[3]},
    "convolutions": {"recurrent": CONV, "pattern": ["recurrent", "attention"]},
    "gated delta rule": {"recurrent": DELTA, "pattern": ["recurrent", "attention"]},
    "mamba 2": {"recurrent": MAMBA2, "pattern": ["recurrent", "attention"]},
    "parallel": {"block": {"kind": "parallel"}, "mtp": {"depth": 1}},
    "encoder": {"kind": "encoder"},
    "encoder-decoder": {"kind": "encoder_decoder", "start_token": 0},
}
OF_64 = {"dense": None, "latents": ["ffn"], "experts": ["attention", "experts"]}  # matrices of 64 inputs, of a model as wide
DORA = ("dense", "latents", "convolutions", "encoder-decoder")


def adapted(changes: dict[str, Any], cfg: LoRAConfig) -> LM:
    """A model in eval mode with an adapter, every number of both random."""
    model = build_model(model_config(BASE | changes), seed=0)
    cfg.apply(model)
    model.load_state_dict({name: torch.zeros_like(p) for name, p in adapting(model).items()}, strict=False)
    redraw(model)
    return model.eval()


def merged(model: LM, cfg: LoRAConfig) -> LM:
    """The model without an adapter that computes the same."""
    own, added = {name: p.detach() for name, p in cfg.own(model).items()}, adapting(model)
    weights = {name: p.detach().clone() for name, p in model.named_parameters() if name not in added}
    weights |= {name: torch.zeros_like(p) for name, p in weights.items() if name in own}
    cfg.merge(weights, own)
    bare = build_model(model.cfg, seed=1).eval()
    copy_weights(bare.named_parameters(), weights, "merged")
    return bare


def logits(model: LM, cached: bool) -> Tensor:
    ids = tokens(2, 12)
    source = {"source_tokens": tokens(2, 9, seed=2)} if model.cfg.kind == "encoder_decoder" else {}
    if not cached:
        return model(Batch(ids, **source))
    cache = model.new_cache(2, 12)
    return torch.cat([model(Batch(ids[:, :7], **source), cache=cache), model(Batch(ids[:, 7:]), cache=cache)], dim=1)


@pytest.mark.parametrize(("name", "dora"), [*((name, False) for name in MODELS), *((name, True) for name in DORA)])
def test_merged_weights_compute_what_the_adapter_computes_beside_them(name: str, dora: bool) -> None:
    """Seen to fail with latents that are absorbed without the adapter, and with DoRA's lengths of columns."""
    cfg = LoRAConfig(rank=3, alpha=2.0, dropout=0.5, dora=dora)
    model = adapted(MODELS[name], cfg)
    bare = merged(model, cfg)
    for cached in (False, True)[: 1 if name == "encoder" else 2]:
        same(logits(model, cached), logits(bare, cached))
    plain = build_model(model.cfg, seed=1).eval()
    copy_weights(plain.named_parameters(), {n: p for n, p in model.named_parameters() if n not in adapting(model)}, "plain")
    assert (logits(plain, False) - logits(model, False)).abs().max() > 0.1


@pytest.mark.slow
def test_without_its_adapter_a_model_is_its_parent_in_eval_mode() -> None:
    """And afterwards what it was before, also where something has failed meanwhile."""
    cases: list[tuple[str, bool, Base]] = [("dense", False, "int8"), ("dense", True, "int8")]
    for name, dora, base in cases + [(name, False, "saved") for name in MODELS] + [(name, True, "saved") for name in DORA]:
        cfg = LoRAConfig(rank=4, alpha=16, dora=dora, dropout=0.5, base=base)
        model = adapted(MODELS[name] | {"dropout": 0.5}, cfg)
        weights = {each: p.detach().clone() for each, p in model.named_parameters() if each not in adapting(model)}
        cfg.round(weights, adapting(model))
        parent = build_model(model.cfg, seed=1).eval()
        copy_weights(parent.named_parameters(), weights, "parent")
        hold_bases(model)
        decodes = model.cfg.kind != "encoder"
        own, expected = logits(model, False), logits(parent, False)
        model.train()
        with without_adapter(model):
            torch.testing.assert_close(logits(model, False), expected)
            torch.testing.assert_close(logits(model, cached=decodes), logits(parent, cached=decodes))
        with pytest.raises(ZeroDivisionError), without_adapter(model):
            raise ZeroDivisionError
        assert all(module.training for module in model.modules())
        torch.testing.assert_close(logits(model.eval(), False), own)
        assert not torch.allclose(own, expected)


@pytest.mark.parametrize("name", MODELS)
def test_only_the_adapter_is_trained_and_every_matrix_of_a_block_but_the_router_has_one(name: str) -> None:
    model = build_model(model_config(BASE | MODELS[name]), seed=0)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    matrices = {
        n for n, p in before.items() if "blocks." in n and p.ndim > 1 < p.shape[-2] and not n.endswith(("bias", "kernel", "router.weight"))
    }
    matrices |= {n for n, p in before.items() if n.startswith("mtp.") and ".block." in n and p.ndim > 1}
    LoRAConfig(rank=2).apply(model)
    own = adapting(model)
    assert {n for n, p in model.named_parameters() if p.requires_grad} == own.keys()
    assert model.state_dict().keys() - {"head.weight"} == before.keys() | own.keys() - {"head.weight"}
    assert {n.removesuffix("lora_a").removesuffix("_").removesuffix(".") for n in own if n.endswith("a")} == {
        n.removesuffix(".weight") for n in matrices
    }
    assert sum(p.numel() for p in own.values()) == sum(2 * sum(before[n].shape[-2:]) * before[n][..., 0, 0].numel() for n in matrices)


@pytest.mark.parametrize("name", ["dense", "experts", "experts one by one"])
def test_an_adapter_starts_as_nothing_and_its_gradient_is_that_of_the_product(name: str) -> None:
    """The gradient of B is scale * dW A^T, and of A scale * B^T dW, dW being the gradient of the merged matrix."""
    cfg = LoRAConfig(rank=3, alpha=2.0, rslora=True, targets=["ffn"])
    fresh = build_model(model_config(BASE | MODELS[name]), seed=0).eval()
    alone = logits(fresh, False)
    cfg.apply(fresh)
    with torch.no_grad():
        for n, p in adapting(fresh).items():
            p.fill_(0.0 if n.endswith("b") else 0.3)
    same(logits(fresh, False), alone)  # frozen norms have other kernels
    model = adapted(MODELS[name], cfg)
    bare = merged(model, cfg)
    for each in (model, bare):
        logits(each, False).square().sum().backward()
    of, own = dict(bare.named_parameters()), adapting(model)
    a_name = next(n for n in own if n.endswith("lora_a"))
    stem = a_name.removesuffix("lora_a")
    grad, a, b = of[stem.removesuffix("_") if stem.endswith("_") else f"{stem}weight"].grad, own[a_name], own[f"{stem}lora_b"]
    assert grad is not None and a.grad is not None and b.grad is not None
    for found, expected in ((a.grad, cfg.scale * b.mT @ grad), (b.grad, cfg.scale * grad @ a.mT)):
        same(found, expected)


@pytest.mark.parametrize("base", ["saved", "bf16", "int8", "nf4"])
def test_dora_starts_as_nothing_and_its_gradients_are_those_of_its_formula(base: Base) -> None:
    """m V x / |V| + b with V = W + scale B A and a divisor that is a constant, by autograd.  Seen to fail with a gradient through it."""
    layer = nn.Linear(64, 5)
    module = beside(layer, base, True, 3, 1.5, 0.0)
    assert isinstance(module, DoRALinear)
    nn.init.zeros_(module.lora_m)
    redraw(module)
    hold_bases(module)
    held = isinstance(module, LoRAOnHeld)
    x, w = torch.randn(4, 64), module.held.whole(module.weight, module.scales) if held else module.weight.detach()
    m = (w.norm(dim=1) + module.lora_m.detach()).requires_grad_()
    a, b = (p.detach().clone().requires_grad_() for p in (module.lora_a, module.lora_b))
    v = w + 1.5 * b @ a
    expected = F.linear(x, (m / v.detach().norm(dim=1)).unsqueeze(1) * v, layer.bias)
    same(module(x), expected)
    module(x).square().sum().backward()
    expected.square().sum().backward()
    for found, wanted in ((module.lora_m, m), (module.lora_a, a), (module.lora_b, b)):
        assert found.grad is not None and wanted.grad is not None
        same(found.grad, wanted.grad)
    with torch.no_grad():
        module.lora_m.zero_()
        module.lora_b.zero_()
    same(module(x), F.linear(x, w, layer.bias))


@pytest.mark.parametrize("base", ["bf16", "int8", "nf4"])
@pytest.mark.parametrize("name", ["dense", "latents", "experts"])
def test_beside_a_rounded_base_it_computes_and_learns_as_beside_the_rounded_weights(name: str, base: Base) -> None:
    """Seen to fail with the gradient of W as it was, and with the merge of an unrounded one."""
    cfg = LoRAConfig(rank=3, alpha=2.0, base=base, targets=OF_64[name] if base == "nf4" else None)
    model = adapted({"d_model": 64, "ffn": {"kind": "mlp", "hidden": 64}} | MODELS[name], cfg)
    bare, own = merged(model, cfg), adapting(model)
    hold_bases(model)
    same(logits(model, False), logits(bare, False))
    same(logits(model, True), logits(bare, True))
    dtype = {"bf16": torch.bfloat16, "int8": torch.int8, "nf4": torch.uint8}[base]
    held = {n: p for n, p in model.named_parameters() if p.dtype == dtype}
    assert held.keys() == {f"{n.removesuffix('lora_a')}weight" for n in own if n.endswith(".lora_a")} and len(held) > 8
    for each in (model, bare):
        logits(each, False).square().sum().backward()
    of = dict(bare.named_parameters())
    for n in [n for n in own if n.endswith(".lora_a")]:
        stem = n.removesuffix("lora_a")
        same(own[n].grad, cfg.scale * own[f"{stem}lora_b"].mT @ of[f"{stem}weight"].grad)


def test_nf4_is_that_of_its_paper() -> None:
    """The levels as bitsandbytes has them; each weight becomes the nearest level times the largest of its 64 inputs, and is packed without
    loss."""
    levels = [
        -1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0.0,
        0.0795803, 0.1609302, 0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1.0,
    ]  # fmt: skip
    torch.testing.assert_close(nf4_levels(), torch.tensor(levels, dtype=torch.float32), rtol=0.0, atol=1e-6)
    weight = torch.randn(3, 128, dtype=torch.float32)
    weight[1, 64:] = 0.0
    stored, scales = HELD["nf4"].pack(weight)
    assert (stored.shape, stored.dtype, scales.shape) == ((3, 64), torch.uint8, (3, 2))
    found = HELD["nf4"].whole(stored, scales).unflatten(1, (2, 64))
    of, largest = weight.unflatten(1, (2, 64)), scales.float().unsqueeze(2)
    nearest = (of.unsqueeze(-1) - nf4_levels() * largest.unsqueeze(-1)).abs().argmin(-1)
    torch.testing.assert_close(found, nf4_levels()[nearest] * largest)
    assert torch.equal(HELD["nf4"].pack(found.flatten(1))[0][0], stored[0])
    assert ((found - of).abs() <= 0.16 * largest).all() and not found[1, 1].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("base", [*HELD])
def test_pieces_of_a_held_matrix_are_the_whole(base: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lm.adapters.held._PIECE", 200)
    held, weight = HELD[base], torch.randn(10, 192)
    stored, scales = held.pack(weight)
    whole = held.unpack(stored, scales, dtype)
    for dim in (0, 1):
        pieces = [*held.pieces(stored, scales, dtype, dim)]
        assert len(pieces) > 2 and torch.equal(torch.cat(pieces, dim), whole)


@pytest.mark.parametrize("base", [*HELD])
def test_products_with_a_held_matrix_are_of_float16_and_end_no_earlier_than_its_own(base: str) -> None:
    """Seen to fail: bfloat16 scales made float32 of them, and of int8 sums of integers came first, which overflowed at 40."""
    held, x, above = HELD[base], torch.full((3, 128), 40.0, dtype=torch.float32, requires_grad=True), torch.ones(3, 20, dtype=torch.float32)
    stored, scales = held.pack(torch.rand(20, 128) * 0.1)
    with torch.autocast("cpu", torch.float16):
        out = multiplied(x, stored, scales, held)
    assert out.dtype == torch.float16 and bool(out.isfinite().all())
    out.backward(above.half())
    whole = held.whole(stored, scales).float()
    assert x.grad is not None
    torch.testing.assert_close(out.float(), x.detach() @ whole.T, rtol=2e-3, atol=0)
    torch.testing.assert_close(x.grad, above @ whole, rtol=2e-3, atol=0)


def test_a_matrix_that_cannot_be_held_in_4_bits_is_refused() -> None:
    with pytest.raises(ValueError, match=r"adapter.base=nf4 holds 64 inputs together, and blocks\.0\.attention\.q has 32\. Leave it out"):
        adapted({}, LoRAConfig(base="nf4"))


WHOLE = {
    "dense": ["embed", "norm", "blocks.1.attention.q"],
    "latents": ["*.bias"],
    "experts with biases": ["embed", "experts.up", "router"],
    "mamba 2": ["embed", "recurrent.kernel", "norm"],
    "encoder-decoder": ["embed", "encoder.norm", "cross"],
}


@pytest.mark.parametrize("name", WHOLE)
def test_what_is_trained_whole_learns_as_in_the_bare_model_and_gets_no_adapter(name: str) -> None:
    """The others stay frozen.  Seen to fail with the merge of low-rank weights alone."""
    cfg = LoRAConfig(rank=3, alpha=2.0, whole=WHOLE[name])
    model = adapted(MODELS[name], cfg)
    own, bare = cfg.own(model), merged(model, cfg)
    whole = own.keys() - adapting(model).keys()
    assert {n for n, p in model.named_parameters() if p.requires_grad} == own.keys()
    assert {pattern for pattern in WHOLE[name] if any(means(pattern, n) for n in whole)} == set(WHOLE[name])
    assert not any(means(pattern, n) for pattern in WHOLE[name] for n in adapting(model) if "bias" not in pattern)
    same(logits(model, False), logits(bare, False))
    for each in (model, bare):
        logits(each, False).square().sum().backward()
    of = dict(bare.named_parameters())
    for n in whole:
        same(own[n].grad, of[n].grad)


def test_whole_names_weights_that_there_are() -> None:
    model = build_model(model_config(BASE), device="meta")
    for whole, message in (
        (["embd"], r"adapter\.whole names 'embd', and no weight is called so\. Near are embed\.weight"),
        (["head"], r"no weight is called so\. The head is the embedding here\."),
        (["blocks"], r"adapter\.whole names all matrices of adapter\.targets, so that nothing is of low rank\. Set adapter=null"),
    ):
        with pytest.raises(ValueError, match=message):
            LoRAConfig(rank=2, whole=whole).apply(model)


@pytest.mark.parametrize(
    ("targets", "found"),
    [
        (["attention.q"], {"blocks.0.attention.q", "blocks.1.attention.q", "blocks.2.attention.q"}),
        (["experts"], {f"blocks.{i}.ffn.experts.{name}" for i in (1, 2) for name in ("up", "gate", "down")}),
        (["experts.up", "blocks.0.*.o"], {"blocks.1.ffn.experts.up", "blocks.2.ffn.experts.up", "blocks.0.attention.o"}),
        (["blocks.1.ffn.shared"], {f"blocks.1.ffn.shared.{name}" for name in ("up", "gate", "down")}),
    ],
)
def test_targets_name_slots_parts_of_them_and_layers(targets: list[str], found: set[str]) -> None:
    model = build_model(model_config(BASE | MODELS["experts"]), device="meta")
    LoRAConfig(rank=2, targets=targets).apply(model)
    assert {name.removesuffix("lora_a").rstrip("._") for name in adapting(model) if name.endswith("lora_a")} == found


def test_matrices_beside_the_blocks_are_adapted_where_they_are_named() -> None:
    """As peft's all-linear does; the loss in chunks has the gradients of the head's layers."""
    narrow = {"embed": {"factorized": {"width": 12}}, "head": {"transform": "gelu", "bias": True}, "kind": "encoder"}
    cfg = LoRAConfig(rank=3, targets=["head.dense", "widen", "attention"])
    model = adapted(narrow, cfg)
    assert {"head.dense.lora_a", "widen.lora_b", "blocks.0.attention.q.lora_a"} <= adapting(model).keys()
    same(logits(model, False), logits(merged(model, cfg), False))
    hidden, labels, own = torch.randn(24, 32), tokens(2, 12).flatten(), [model.head.get_parameter(f"dense.lora_{n}") for n in "ab"]
    chunked, plain = chunked_loss(hidden, labels, model.head, chunk=7).total, F.cross_entropy(model.head(hidden), labels, reduction="sum")
    for found, right in zip(torch.autograd.grad(chunked, own), torch.autograd.grad(plain, own), strict=True):
        same(found, right)
    for targets in (None, ["*"], ["*d*", "o"], ["ffn", "attention"]):  # seen to fail for patterns: a run begun before was refused
        usual = build_model(model.cfg, device="meta")
        LoRAConfig(rank=3, targets=targets).apply(usual)
        assert all(name.startswith("blocks.") for name in adapting(usual)), targets
    for targets in (["head.*"], ["dense"]):
        LoRAConfig(rank=3, targets=targets).apply(beside := build_model(model.cfg, device="meta"))
        assert adapting(beside).keys() == {"head.dense.lora_a", "head.dense.lora_b"}


@pytest.mark.parametrize(
    ("cfg", "message"),
    [
        (LoRAConfig(targets=["attention", "fnf"]), r"names 'fnf', and no matrix is called so\. There are attention\.q, .*ffn\.down"),
        (LoRAConfig(targets=["router"]), "names 'router'"),
        (LoRAConfig(rank=2, dora=True), r"adapter\.dora has no form for stacked experts, as blocks\.1\.ffn\.experts\.up are"),
        (LoRAConfig(rank=33), r"adapter\.rank=33 is over the rank of blocks\.0\.attention\.q, which is 32 -> 32\. Set adapter\.rank=32"),
        (LoRAConfig(rank=17, targets=["experts"]), r"blocks\.1\.ffn\.experts\.up, which is 32 -> 16\. Set adapter\.rank=16 or less"),
    ],
)
def test_targets_of_nothing_and_ranks_over_the_width_are_refused(cfg: LoRAConfig, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cfg.apply(build_model(model_config(BASE | MODELS["experts"]), device="meta"))
