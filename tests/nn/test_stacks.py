"""Encoder and decoder layers against torch.nn's, weights copied, every kind of mask; and what an encoder-decoder does with a source."""

import pytest
import torch
from torch import Tensor, nn

from lm.errors import ConfigError
from lm.nn.batch import Batch
from lm.nn.context import Context
from lm.nn.model_config import model_config
from lm.nn.transformer import EncoderDecoderConfig, EncoderDecoderLM, build_model
from lm.ops.attention.mask import Mask, arange_positions
from lm.schema import from_tree
from lm.testing.models import BASE, random_model, redraw, tokens
from tests.nn.models import CLOSE, packed, with_kinds

pytestmark = pytest.mark.usefixtures("doubles")

S, M, D, LAYERS = 9, 7, 32, 2
PLAIN = {
    "kind": "encoder_decoder", "n_layers": LAYERS, "position": {"kind": "none"}, "head": {"tied": False},
    "attention": {"n_heads": 4, "qkv_bias": True, "out_bias": True},
    "ffn": {"activation": "relu", "gated": False, "bias": True, "hidden": 40},
}  # fmt: skip


def names(blocks: str, theirs: str, cross: bool) -> dict[str, tuple[str, ...]]:
    """Our names and theirs; q, k and v are one matrix there."""
    out: dict[str, tuple[str, ...]] = {}
    attentions = {"attention": "self_attn", **({"cross": "multihead_attn"} if cross else {})}
    norms = ["attention", "cross", "ffn"] if cross else ["attention", "ffn"]
    for i in range(LAYERS):
        for s in ("weight", "bias"):
            for ours, them in attentions.items():
                out[f"{theirs}.{i}.{them}.in_proj_{s}"] = tuple(f"{blocks}.{i}.{ours}.{p}.{s}" for p in "qkv")
                out[f"{theirs}.{i}.{them}.out_proj.{s}"] = (f"{blocks}.{i}.{ours}.o.{s}",)
            out[f"{theirs}.{i}.linear1.{s}"], out[f"{theirs}.{i}.linear2.{s}"] = ((f"{blocks}.{i}.ffn.{p}.{s}",) for p in ("up", "down"))
            out |= {f"{theirs}.{i}.norm{n}.{s}": (f"{blocks}.{i}.{norm}_residual.norm.{s}",) for n, norm in enumerate(norms, 1)}
    return out


def both(norm_first: bool) -> tuple[EncoderDecoderLM, nn.Transformer]:
    """Our model, and torch's with its weights, every one of them redrawn. In training mode (without dropout), since torch's eval takes
    a fast path with other answers on padding."""
    cfg = model_config(with_kinds(BASE | PLAIN | {"norm": {"kind": "layer", "place": "pre" if norm_first else "post"}}))
    model = random_model(cfg)
    assert isinstance(model, EncoderDecoderLM)
    theirs = nn.Transformer(D, 4, LAYERS, LAYERS, 40, 0.0, batch_first=True, norm_first=norm_first)
    if not norm_first:
        theirs.encoder.norm = theirs.decoder.norm = None
    found, weights = model.state_dict(), {}
    table = names("encoder.blocks", "encoder.layers", cross=False) | names("blocks", "decoder.layers", cross=True)
    if norm_first:
        table |= {
            f"{there}.norm.{s}": (f"{here}norm.{s}",)
            for there, here in (("encoder", "encoder."), ("decoder", ""))
            for s in ("weight", "bias")
        }
    for there, here in table.items():
        weights[there] = torch.cat([found.pop(name) for name in here])
    assert set(found) == {"embed.weight", "head.weight"}
    theirs.load_state_dict(weights, strict=True)
    return model, theirs


def hidden(model: EncoderDecoderLM, batch: Batch) -> Tensor:
    out: Tensor = model(batch, read=lambda hidden, head, ctx: hidden)
    return out


def lengths_mask(lengths: list[int], width: int) -> Tensor:
    """True on padding, as torch has it, (b, width)."""
    return torch.arange(width)[None] >= torch.tensor(lengths)[:, None]


def positions(padding: Tensor) -> Tensor:
    return torch.arange(padding.shape[1]).expand_as(padding).masked_fill(padding, -1)


@pytest.mark.parametrize("norm_first", [True, False])
def test_an_encoder_decoder_with_padding_on_both_sides_equals_torchs(norm_first: bool) -> None:
    model, theirs = both(norm_first)
    ids, source = tokens(3, S), tokens(3, M, seed=2)
    target_padding, source_padding = lengths_mask([9, 4, 6], S), lengths_mask([5, 7, 1], M)
    expected = theirs(
        model.embed(source), model.embed(ids), tgt_mask=nn.Transformer.generate_square_subsequent_mask(S), tgt_is_causal=True,
        src_key_padding_mask=source_padding, tgt_key_padding_mask=target_padding, memory_key_padding_mask=source_padding,
    )  # fmt: skip
    batch = Batch(ids, positions=positions(target_padding), source_tokens=source, source_positions=positions(source_padding))
    out = hidden(model, batch)
    assert expected.std() > 0.5 and out.isfinite().all()
    torch.testing.assert_close(out[~target_padding], expected[~target_padding], **CLOSE)
    unpadded = Batch(ids, source_tokens=source)
    everything = theirs(model.embed(source), model.embed(ids), tgt_mask=nn.Transformer.generate_square_subsequent_mask(S))
    torch.testing.assert_close(hidden(model, unpadded), everything, **CLOSE)


def explicit(q: int, k: int, seed: int, heads: int = 1) -> Tensor:
    """Who may see whom, at random, and each query at least one key; (1, heads, q, k)."""
    allowed = torch.rand(heads, q, k, generator=torch.Generator().manual_seed(seed)) > 0.5
    allowed[:, torch.arange(q), torch.arange(q) % k] = True
    return allowed[None]


def stacked(model: EncoderDecoderLM, x: Tensor, memory: Tensor, mask: Mask, memory_mask: Mask) -> Tensor:
    ctx = Context(model.position, mask, memory_mask=memory_mask)
    ctx.memory = memory
    out: Tensor = model.norm(model.through_blocks(x, ctx))
    return out


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("heads", [1, 4])
def test_a_decoder_with_explicit_masks_equals_torchs(norm_first: bool, heads: int) -> None:
    model, theirs = both(norm_first)
    x, memory = torch.randn(2, S, D), torch.randn(2, M, D)
    own, cross = explicit(S, S, 0, heads), explicit(S, M, 1, heads)
    hidden_keys = lengths_mask([9, 8], S)
    cross_keys = lengths_mask([7, 7], M)
    shape = (lambda m: ~m[0, 0]) if heads == 1 else (lambda m: ~m[0].repeat(2, 1, 1))
    expected = theirs.decoder(
        x, memory, tgt_mask=shape(own), memory_mask=shape(cross), tgt_key_padding_mask=hidden_keys, memory_key_padding_mask=cross_keys
    )
    at = arange_positions(S, x.device)
    mask = Mask(at, positions(hidden_keys), causal=False, explicit=own)
    out = stacked(model, x, memory, mask, Mask(at, positions(cross_keys), causal=False, explicit=cross))
    torch.testing.assert_close(out, expected, **CLOSE)


@pytest.mark.parametrize("norm_first", [True, False])
def test_an_encoder_with_an_explicit_mask_equals_torchs(norm_first: bool) -> None:
    model, theirs = both(norm_first)
    x, own = torch.randn(2, S, D), explicit(S, S, 0)
    at, encoder = arange_positions(S, x.device), model.encoder
    mask = Mask(at, at, causal=False, square=True, explicit=own)
    out = encoder.norm(encoder.through_blocks(x, Context(encoder.position, mask)))
    torch.testing.assert_close(out, theirs.encoder(x, mask=~own[0, 0]), **CLOSE)


@pytest.mark.parametrize("norm_first", [True, False])
def test_a_fully_padded_row_gives_zeros_of_attention_where_torch_gives_nan(norm_first: bool) -> None:
    model, theirs = both(norm_first)
    x = torch.randn(2, S, D, requires_grad=True)
    padding = lengths_mask([6, 0], S)
    with torch.no_grad(), torch._C.DisableTorchFunction():  # the fast path of eval; torch's training path gives zeros too
        there = theirs.encoder.layers[0].eval()(x, src_key_padding_mask=padding)
    assert there[1].isnan().all()
    block, ctx = model.encoder.blocks[0], Context(model.encoder.position, Mask(positions(padding), positions(padding), causal=False))
    out = block(x, ctx)
    torch.testing.assert_close(out[0, :6], there[0, :6], **CLOSE)
    attended = block.attention(x, ctx)
    torch.testing.assert_close(attended[1], block.attention.o.bias.expand(S, -1))  # attention itself: zeros
    gradients = torch.autograd.grad(out.square().sum(), [x, *block.parameters()])
    assert out.isfinite().all() and all(g.isfinite().all() for g in gradients)


def test_a_row_without_a_source_gives_finite_logits_and_gradients() -> None:
    model, _ = both(norm_first=True)
    empty = lengths_mask([M, 0], M)
    batch = Batch(tokens(2, S), source_tokens=tokens(2, M, seed=2), source_positions=positions(empty))
    out = model(batch)
    out.square().sum().backward()
    assert out.isfinite().all() and all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    alone = model(Batch(batch.tokens[:1], source_tokens=batch.source_tokens[:1]))  # type: ignore[index]
    torch.testing.assert_close(out[:1], alone, **CLOSE)


def small(**changes: object) -> EncoderDecoderConfig:
    return from_tree(EncoderDecoderConfig, with_kinds(BASE | {"kind": "encoder_decoder", "n_encoder_layers": 2} | changes))


@torch.no_grad()
def test_the_memory_is_projected_once_and_follows_its_rows() -> None:
    model = random_model(small())
    ids, source = tokens(3, 8), tokens(3, M, seed=2)
    full, cache = model(Batch(ids, source_tokens=source)), model.new_cache(3, 8)
    projected: list[Tensor] = []
    for block in model.blocks:
        block.cross.k.register_forward_hook(lambda module, given, out: projected.append(out))
    first = model(Batch(ids[:, :5], source_tokens=source), cache=cache)
    cache.reorder(torch.tensor([2, 0, 1]))
    rest = [model(Batch(ids[[2, 0, 1], t : t + 1]), cache=cache) for t in range(5, 8)]
    assert len(projected) == 3  # one a layer
    torch.testing.assert_close(first, full[:, :5], **CLOSE)
    torch.testing.assert_close(torch.cat(rest, 1), full[[2, 0, 1], 5:], **CLOSE)


@torch.no_grad()
def test_a_new_source_replaces_the_old_one_in_the_cache() -> None:
    model = random_model(small())
    ids, cache = tokens(2, 4), model.new_cache(2, 8)
    model(Batch(ids, source_tokens=tokens(2, M, seed=2)), cache=cache)
    cache.rewind(4)
    other = Batch(ids, source_tokens=tokens(2, M + 2, seed=3))
    torch.testing.assert_close(model(other, cache=cache), model(other), **CLOSE)


def test_an_encoder_of_another_depth_shares_the_embedding_and_nothing_else() -> None:
    model = build_model(small(), seed=0)
    assert isinstance(model, EncoderDecoderLM)
    assert (len(model.encoder.blocks), len(model.blocks), len(model.units())) == (2, 3, 5)
    assert model.units() == [*model.encoder.blocks, *model.blocks]
    assert not torch.equal(model.encoder.blocks[0].attention.q.weight, model.blocks[0].attention.q.weight)
    assert [name for name in model.state_dict() if "embed" in name] == ["embed.weight"]


def test_segments_are_added_and_absent_ones_are_the_first() -> None:
    model = random_model(model_config(with_kinds(BASE | {"kind": "encoder", "embed": {"segments": 2}})))
    ids, second = tokens(1, 6), torch.tensor([[0, 0, 0, 1, 1, 1]])
    torch.testing.assert_close(model(Batch(ids)), model(Batch(ids, segments=torch.zeros_like(second))))
    assert (model(Batch(ids)) - model(Batch(ids, segments=second))).abs().max() > 1e-2


def test_what_a_stack_cannot_read_is_refused() -> None:
    model = random_model(small())
    with pytest.raises(ConfigError, match=r"cross-attention needs a source, and batch.source_tokens is None\. Give"):
        model(Batch(tokens(1, 4)))
    with pytest.raises(ConfigError, match="cross-attention needs a source"):
        model(Batch(tokens(1, 4)), cache=model.new_cache(1, 4))
    half = packed([3, 4])
    half.source_tokens = tokens(1, 5)
    with pytest.raises(ValueError, match=r"documents and batch.source_documents one is None\. Give both"):
        model(half)
    half.source_documents = torch.zeros_like(half.source_tokens, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"source_documents was given without batch\.source_positions\. Give both"):
        model(half)
    half.positions = None
    with pytest.raises(ValueError, match=r"documents was given without batch\.positions, which restart in each document\. Give both"):
        model(half)
    encoder = random_model(model_config(with_kinds(BASE | {"kind": "encoder"})))
    with pytest.raises(ConfigError, match="an encoder sees all of its input at once"):
        encoder.new_cache(1, 4)


def test_redrawing_leaves_no_weight_of_the_reference_at_its_default() -> None:
    model, theirs = both(norm_first=True)
    redraw(model, seed=4)
    assert all(p.std() > 0.1 for p in theirs.parameters())
