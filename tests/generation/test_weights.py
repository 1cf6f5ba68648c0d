"""A model made ready to decode against the readable one, and matrices in fewer bits against what they stand for."""

import copy
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import lm as library
from lm.adapters.adapter import LoRAConfig, adapting
from lm.errors import ConfigError
from lm.generation.config import Dtype, SamplingConfig
from lm.generation.weights.fused import FusedGQA, FusedMLP, QuickRMSNorm
from lm.generation.weights.inference_linear import InferenceLinear, OneDNN, Plain
from lm.generation.weights.prepare import KINDS as WAYS
from lm.generation.weights.prepare import InferenceHead, _Preparing, prepare, ranked
from lm.generation.weights.quantised import GROUP, Int4, Int4Reference, Int8, Int8Reference
from lm.nn.batch import Batch
from lm.nn.init import init_weights
from lm.nn.model_config import model_config
from lm.nn.transformer import LM
from lm.ops.attention.flex import Flex
from lm.schema import from_tree
from lm.testing.models import Doubles, random_model, redraw, same, tokens
from tests.conftest import Lm
from tests.generation.drawing import generate
from tests.nn.grid import PARTS, decoding
from tests.nn.models import ATTENTIONS, HEADS, MIXING, MIXTURES, NORMS, POSITIONS, SMEARED, config, redrawn

MODELS: list[dict[str, Any]] = [
    {"attention": ATTENTIONS[1], "norm": NORMS[6], "head": HEADS[2]},
    {"attention": ATTENTIONS[2], "position": POSITIONS[5]},
    {"attention": ATTENTIONS[2], "norm": NORMS[8], "embed": {"norm": True}},
    {"attention": ATTENTIONS[3], "head": HEADS[4]},
    {"attention": ATTENTIONS[4], "block": {"kind": "parallel"}},
    {"attention": ATTENTIONS[1], "block": {"kind": "sequential", "layer_scale": 0.5}},
    {"attention": ATTENTIONS[1], "position": {"kind": "alibi"}},
    {"attention": ATTENTIONS[6]},
    {"attention": ATTENTIONS[10], "ffn": MIXTURES[2]},
    {"attention": ATTENTIONS[11]},
    {"attention": ATTENTIONS[12]},
    {"attention": ATTENTIONS[15]},
    SMEARED,
    {"attention": ATTENTIONS[1] | {"dropout": 0.5}},
    {"attention": ATTENTIONS[-1], "ffn": {"kind": "mlp", "inner_norm": {"kind": "rms"}}},
    MIXING[5],
]


def stepped(model: LM) -> Tensor:
    """Logits of six tokens, then of one at a time, of two rows of which one begins later."""
    ids = tokens(2, 10)
    positions = torch.stack([torch.arange(10), torch.arange(-2, 8).clamp(min=-1)])
    cache, start, out = model.new_cache(2, 10), 0, []
    for n in (6, 1, 1, 1, 1):
        batch = Batch(ids[:, start : start + n], positions=positions[:, start : start + n])
        if model.cfg.kind == "encoder_decoder" and start == 0:
            batch = Batch(batch.tokens, positions=batch.positions, source_tokens=tokens(2, 7, 2))
        out.append(model(batch, cache=cache)[:, -1:])
        start += n
    return torch.cat(out, dim=1)


def agree_in_float64(model: LM) -> LM:
    with Doubles(), torch.no_grad():
        model.double()
        expected = stepped(model)
        prepared = prepare(copy.deepcopy(model))
        same(stepped(prepared), expected)
    return prepared


@pytest.mark.parametrize("dtype", ["saved", "bf16", "int8"])
def test_what_has_been_replaced_is_freed_before_the_next_matrix_is_made(dtype: Dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen to fail: all matrices stood beside those made of them, and 124 M parameters took 1,441 MiB to prepare as int8, 818 without."""
    model = random_model(config(n_layers=6))
    first, left, real = [weakref.ref(each) for each in model.parameters()], [], _Preparing._held

    def held(self: Any, *of: Any) -> InferenceLinear:
        there = {id(each) for each in self.model.parameters()}
        left.append(sum(each is not None and id(each) not in there for each in (ref() for ref in first)))
        return real(self, *of)

    monkeypatch.setattr(_Preparing, "_held", held)
    prepare(model, dtype)
    assert len(left) > 20 and max(left) <= 6  # of a layer


@pytest.mark.parametrize("changes", MODELS, ids=str)
def test_a_prepared_model_gives_the_logits_of_the_readable_one(changes: dict[str, Any]) -> None:
    agree_in_float64(redrawn(config(**changes)))


@pytest.mark.slow
@pytest.mark.parametrize("start", PARTS)
def test_every_pair_of_slots_gives_the_logits_of_the_readable_model(start: int) -> None:
    for tree in decoding(start):
        agree_in_float64(random_model(model_config(tree)))


@pytest.mark.parametrize("options", [{}, {"targets": ["attention", "ffn.up"]}, {"targets": ["attention.q"], "dora": True}], ids=str)
def test_an_adapter_beside_the_weights_computes_in_a_prepared_model_too(options: dict[str, Any]) -> None:
    model = redrawn(config(attention=ATTENTIONS[1]))
    from_tree(LoRAConfig, {"rank": 4, **options}).apply(model)
    init_weights(model, model.cfg.init, model.cfg.growth(), model.sublayers, 3, list(adapting(model)))  # empty before
    redraw(model, seed=3)
    agree_in_float64(model)


def test_what_is_known_is_fused_and_every_other_matrix_is_held() -> None:
    kinds = [type(module) for module in agree_in_float64(redrawn(config(attention=ATTENTIONS[2]))).modules()]
    counts = {kind: kinds.count(kind) for kind in (FusedGQA, FusedMLP, QuickRMSNorm, InferenceHead, Plain, torch.nn.Linear)}
    assert counts == {
        FusedGQA: 3,
        FusedMLP: 3,
        QuickRMSNorm: 3 * 3 + 1,
        InferenceHead: 1,
        Plain: 3 * 5 + 1,
        torch.nn.Linear: 0,
    }  # of a layer q k v, its gate, o, gate up, down


@torch.no_grad()
def test_one_token_without_a_cache_is_read_by_the_backend_that_a_gpu_would_choose() -> None:
    """Seen to fail: its heads were passed as several queries, of which that backend's mask knew nothing."""
    model, batch = redrawn(config(attention={"n_heads": 4, "n_kv_heads": 2, "softcap": 5.0})), Batch(tokens(3, 1))
    prepared = prepare(copy.deepcopy(model))
    for module in prepared.modules():
        if isinstance(module, FusedGQA):
            module.attend = Flex(flex_attention, create_block_mask)
    torch.testing.assert_close(prepared(batch), model(batch))


def test_a_prepared_model_draws_the_same_tokens_and_leaves_the_embedding() -> None:
    model = redrawn(config(attention=ATTENTIONS[1]))
    prepared, prompts = prepare(copy.deepcopy(model)), [[5, 6, 7], [3], [9] * 9]
    assert torch.equal(prepared.embed.weight, model.embed.weight)
    assert "(head): InferenceHead" in str(prepared)
    for options in (SamplingConfig(max_tokens=30, temperature=0), SamplingConfig(max_tokens=30, temperature=0.9, top_p=0.9)):
        assert generate(prepared, prompts, options) == generate(model, prompts, options)


def drawn(out: int, inputs: int) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(out)
    return torch.randn(out, inputs, generator=source) * 0.1 + 0.01, torch.randn(out, generator=source)


KINDS: list[tuple[type[InferenceLinear], type[InferenceLinear], torch.dtype]] = [
    (OneDNN, Plain, torch.float32),
    (OneDNN, Plain, torch.bfloat16),
    (Int8, Int8Reference, torch.float32),
    (Int4, Int4Reference, torch.float32),
]


@pytest.mark.parametrize("kind, reference, dtype", KINDS)
@pytest.mark.parametrize("shape", [(48, 64), (50, 96), (7, 128)])
def test_a_fast_way_to_hold_a_matrix_agrees_with_the_reference(
    kind: type[InferenceLinear], reference: type[InferenceLinear], dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    weight, bias = drawn(*shape)
    if kind is OneDNN and dtype == torch.bfloat16 and not kind.fits(weight.to(dtype)):
        pytest.skip("this CPU multiplies no bfloat16")
    assert kind.fits(weight.to(dtype))
    fast, plain = (each(weight.to(dtype), bias) for each in (kind, reference))
    for rows in (1, 3, 5, 80):
        x = torch.randn(rows, 2, shape[1], generator=torch.Generator().manual_seed(rows))
        expected = F.linear(x.to(plain.takes).double(), plain.matrix().double(), bias.double())
        rounding = 1e-6 if plain.takes == torch.float32 else 2**-7
        for found in (fast(x), plain(x)):
            assert found.dtype == x.dtype
            torch.testing.assert_close(found.double(), expected, rtol=0.0, atol=rounding * float(expected.abs().max()))
    torch.testing.assert_close(fast.matrix().float(), plain.matrix().float(), rtol=2**-8, atol=2**-10)


@pytest.mark.parametrize("kind", [Int8, Int4])
def test_a_row_of_few_bits_is_the_same_alone_and_among_others(kind: type[InferenceLinear]) -> None:
    held, x = kind(*drawn(48, 64)), torch.randn(30, 64)
    assert torch.equal(held(x), torch.cat([held(row) for row in x.split(1)]))


@pytest.mark.parametrize("kind, steps", [(Int8Reference, 254), (Int4Reference, 15)])
def test_fewer_bits_are_at_most_half_a_step_off(kind: type[InferenceLinear], steps: int) -> None:
    weight, _ = drawn(20, 3 * GROUP)
    groups = weight.unflatten(1, (-1, GROUP)) if steps == 15 else weight.unsqueeze(1)
    width = groups.amax(2) - groups.amin(2) if steps == 15 else 2 * groups.abs().amax(2)
    off = (kind(weight, None).matrix() - weight).view_as(groups).abs() / (width / steps).unsqueeze(2)
    assert off.max() <= 0.6  # a scale of 8 bits cuts the ends off a little
    assert off.max() > 0.4
    assert steps > 15 or (off[groups.abs() == groups.abs().amax(2, keepdim=True)] < 0.3).all()  # the ends are met


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16", "int8", "int4"])
def test_a_dtype_changes_the_logits_as_little_as_its_bits(dtype: Dtype) -> None:
    model = redrawn(config(d_model=64, ffn={"hidden": 96}))
    with torch.no_grad():
        found, expected = stepped(prepare(copy.deepcopy(model), dtype)), stepped(model)
    error = float((found - expected).square().mean() / expected.square().mean()) ** 0.5
    assert (prepare(model.bfloat16(), dtype).embed.weight.dtype == torch.float32) == (dtype == "fp32")
    low, high = {"fp32": (0.0, 1e-5), "bf16": (1e-3, 0.02), "fp16": (1e-4, 0.0025), "int8": (1e-3, 0.04), "int4": (0.02, 0.7)}[dtype]
    assert low <= error < high


@pytest.mark.parametrize("kind", [Int8, Int4])
def test_rows_that_lie_apart_are_multiplied_too(kind: type[InferenceLinear]) -> None:
    """As the last places of several prompts do. Seen to fail: "expect A to be contiguous"."""
    held, x = kind(torch.randn(32, 64), None), torch.randn(3, 5, 64, dtype=torch.bfloat16)
    assert torch.equal(held.product(x[:, -1]), held.product(x[:, -1].clone()))


def test_a_model_in_float64_is_prepared_in_float64() -> None:
    """Seen to fail within torch's norm."""
    model = redrawn(config(d_model=64, ffn={"hidden": 96})).double()
    with torch.no_grad():
        torch.testing.assert_close(stepped(prepare(copy.deepcopy(model), "saved")), stepped(model), rtol=1e-6, atol=1e-6)  # float32 angles


def test_the_reference_serves_where_no_kernel_does() -> None:
    weight = torch.randn(8, 40)
    assert [kind.fits(weight) for kind in (Int8, Int8Reference)] == [False, True]  # 40 is no multiple of what the kernel reads at once
    held = prepare(redrawn(config(d_model=40, ffn={"hidden": 64})), "int8").modules()
    assert {type(each) for each in held if isinstance(each, InferenceLinear)} == {Int8, Int8Reference}  # inputs of 64 and of 40
    assert not Int4.fits(weight.to("meta")) and not OneDNN.fits(weight.double())


@pytest.mark.parametrize("native", [True, False])
def test_onednn_holds_bfloat16_where_it_has_kernels_for_it(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: native)
    weight = torch.randn(8, 40)
    assert OneDNN.fits(weight.bfloat16()) is native and OneDNN.fits(weight)


def test_a_seed_gives_the_same_text_tomorrow_since_only_clear_races_between_large_matrices_count(monkeypatch: pytest.MonkeyPatch) -> None:
    def timed(seconds: dict[type[InferenceLinear], float]) -> None:
        monkeypatch.setattr("lm.generation.weights.prepare._seconds", lambda held, row: seconds[type(held)])

    timed({})  # whoever asks fails
    for dtype, kinds in WAYS.items():
        weight = torch.zeros(8, 64, dtype=torch.bfloat16 if dtype == "bf16" else torch.float32)
        blocked = OneDNN in kinds and OneDNN.fits(weight)
        assert ranked(kinds, weight) == [*(reversed(kinds) if blocked else kinds)]
    assert ranked(WAYS["int8"], torch.zeros(1024, 512))[0] is Int8
    for plain, first in ((1.0, OneDNN), (0.7, OneDNN), (0.6, Plain)):
        timed({Plain: plain, OneDNN: 1.0})
        assert ranked(WAYS["saved"], torch.zeros(1024, 512))[0] is first


@pytest.mark.slow
def test_on_other_devices_the_reference_multiplies_and_nothing_is_fused() -> None:
    prepared = prepare(redrawn(config(d_model=64, ffn={"hidden": 96})).to("meta"), "int4")
    kinds = {type(module) for module in prepared.modules()}
    assert Int4Reference in kinds and not kinds & {FusedGQA, FusedMLP, QuickRMSNorm, Int4, torch.nn.Linear}
    assert prepared(Batch(tokens(2, 5).to("meta"))).shape == (2, 5, 61)


def test_what_cannot_be_held_or_done_is_refused_by_name(model_folder: Path) -> None:
    model = redrawn(config(ffn={"hidden": 40}))
    with pytest.raises(ConfigError, match=r"dtype=int4: blocks\.0\.ffn\.down has 40 inputs, which is no multiple of 32"):
        prepare(model, "int4")
    prepared = prepare(model, "int8")
    for refused in (prepared.train, prepared.bfloat16, prepared.state_dict):
        with pytest.raises(ConfigError, match="held for decoding"):
            refused()
    assert prepared.eval() is prepared
    for layer in ("blocks.0.attention.o", "blocks.0.ffn", "blocks.1.attention_residual", "norm", "head"):  # some would never be called
        module = prepared.get_submodule(layer)
        for hooking in (module.register_forward_hook, module.register_forward_pre_hook):
            with pytest.raises(ConfigError, match=r"past hooks\. Load it without dtype to look inside\."):
                hooking(lambda *given: None)
    with pytest.raises(ConfigError, match=r"dtype='int5' is not an option\. Did you mean 'int"):
        library.load(model_folder, dtype="int5")


def test_verbs_take_a_dtype(lm: Lm, model_folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("".join(f"line {i}: {i * i} and {i % 7}\n" for i in range(60)))
    found = {}
    for dtype in ("null", "saved", "int8"):
        args = [f"from={model_folder}", "data=text", f"data.files={text}", f"data.cache_dir={tmp_path / 'cache'}", f"dtype={dtype}"]
        code, out, err = lm("eval", *args, "format=json")
        assert code == 0, err
        found[dtype] = json.loads(out)["val_bits_per_byte"]
    assert found["saved"] == pytest.approx(found["null"], rel=1e-6) and 0 < abs(found["int8"] - found["null"]) < 0.1
    for dtype, given in (("int8", "int8"), (None, "null")):
        code, out, err = lm("generate", f"from={model_folder}", "prompt=abc", "max_tokens=8", f"dtype={given}", "seed=3")
        model, tokenizer = library.load(model_folder, dtype=dtype)
        assert (code, out) == (0, "abc" + library.generate(model, tokenizer, "abc", max_tokens=8, seed=3) + "\n")
    assert lm("generate", f"from={model_folder}", "prompt=abc", "dtype=int9")[0] == 2
