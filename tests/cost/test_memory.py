"""Memory by formula against what autograd and the optimizers really hold."""

from dataclasses import replace
from math import prod

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from lm.cli.compose.compose import compose
from lm.cost.memory import Setting, memory, multiplied
from lm.losses.tokens import causal_reader
from lm.nn.activation_memory import Precision
from lm.nn.batch import Batch
from lm.nn.mixers.base import Attention
from lm.nn.transformer import LM, EncoderDecoderConfig, build_model
from lm.ops.attention.attend import reference
from lm.ops.ranks import dispatch, tensor_parallel, ulysses, vocabulary
from lm.ops.ranks.tensor_parallel import Divisible, TensorParallel
from lm.ops.ranks.ulysses import Ulysses
from lm.ops.recompute import Recompute
from lm.training.config import TrainConfig
from lm.training.strategies.base import Strategy
from lm.training.weights.averages import averages_of
from tests.training.optim.optimizers import begun

SMALL = "model.vocab_size=96 model.d_model=128 model.n_layers=4 model.max_seq_len=64 model.dropout=0 data.seq_len=64"
SETTING = Setting(micro_batch=2, seq_len=64, chunk=16, device="cpu")
LONG = SMALL.replace("=64", "=512")
ROW = replace(SETTING, micro_batch=1, seq_len=512)
INDEXER = "indexer.n_heads=3 model.attention.indexer.head_dim=32 model.attention.indexer.top_k=64"
FUSED = {  # none has a soft-cap, dropout of weights or forget gates, for which no kernel on a CPU is fused
    "tiny": "",
    "llama_tiny": "model.attention.n_heads=4 model.ffn.hidden=256",
    "gpt2": "model.attention.n_heads=4",
    "gpt_oss_20b": "model.attention.n_heads=4 model.attention.n_kv_heads=4 model.attention.head_dim=32 model.attention.window=null"
    " model.ffn.expert.hidden=128 model.ffn.n_experts=4 model.ffn.top_k=2 model.attention.global_every=null",
    "bert_base": "objective=mlm model.attention.n_heads=4 model.attention.dropout=0",
    "bart_base": "objective=seq2seq data=stdlib_docstrings model.attention.n_heads=4 model.attention.dropout=0 model.ffn.dropout=0",
    "transformer_base": "objective=seq2seq data=stdlib_docstrings model.attention.n_heads=4",
    "t5_small": "objective=seq2seq data=stdlib_docstrings model.attention.n_heads=4",
    "t5_1_1_base": "objective=seq2seq data=stdlib_docstrings model.attention.n_heads=4 model.position.shared=false model.ffn.hidden=256"
    " model.attention.head_dim=32",
    "deepseek_tiny": "model.attention.n_heads=4 model.ffn.expert.hidden=64 model.ffn.n_experts=4",
    "gpt_neox_20b": "model.attention.n_heads=4 model.ffn.activation=xielu",
    "palm_8b": "model.attention.n_heads=4 model.attention.head_dim=32 model.ffn.hidden=512",
    "mixtral_8x7b": "model.attention.n_heads=4 model.attention.n_kv_heads=2 model.ffn.expert.hidden=256 model.ffn.n_shared=1"
    " model.ffn.shared_hidden=128 model.ffn.shared_gate=true",
    "qwen3_0_6b": "model.attention.out_gate=element model.attention.n_heads=4 model.attention.n_kv_heads=2 model.attention.head_dim=32"
    " model.ffn.hidden=256",
    "olmo2_1b": "model.attention.n_heads=4 model.ffn.hidden=256",
    "granite_3_1_2b": "model/attention=differential model.attention.n_heads=4 model.attention.n_kv_heads=2 model.ffn.hidden=256",
    "nanochat_d20": "model.attention.n_heads=4",
    "llama4_scout": "model.attention.n_heads=4 model.attention.n_kv_heads=2 model.attention.head_dim=32 model.ffn.expert.hidden=256"
    " model.ffn.n_experts=4 model.ffn.top_k=2 model.attention.window=null model.attention.chunked=false model.attention.global_every=null",
    "nano": "model.attention.n_heads=4 model.mtp.depth=3",
    "llama3_8b": "model.attention.n_heads=4 model.attention.n_kv_heads=4 model.ffn.hidden=256"
    " model/recurrent=gated_delta model.pattern=[recurrent,recurrent,attention]",
    "mistral_7b": "model.attention.n_heads=4 model.attention.n_kv_heads=4 model.ffn.hidden=256 model.attention.window=null"
    " model/recurrent=mamba2 model.pattern=[recurrent,recurrent,attention]",
    "llama3_2_1b": "model.attention.n_heads=4 model.attention.n_kv_heads=4 model.ffn.hidden=256"
    " model/recurrent=gla model.pattern=[recurrent,recurrent,attention]",
    "llama3_70b": "model.attention.n_heads=4 model.attention.n_kv_heads=4 model.ffn.hidden=256"
    " model/recurrent=gla model.recurrent.decay=head model.pattern=[recurrent,recurrent,attention]",
    "qwen3_1_7b": "model.attention.n_heads=4 model.attention.n_kv_heads=4 model.ffn.hidden=256"
    " model/recurrent=gated_delta model.recurrent.channels=true model.pattern=[recurrent,recurrent,attention]",
    "smollm3_3b": "model.attention.n_heads=4 model.attention.n_kv_heads=4 model.ffn.hidden=256"
    " model/recurrent=rg_lru model.pattern=[recurrent,recurrent,attention]",
    "recurrent_gemma_2b": "model.attention.n_heads=4 model.attention.n_kv_heads=1 model.attention.head_dim=32 model.ffn.hidden=256"
    " model.attention.window=null model.attention.global_every=null model/recurrent=mamba model.recurrent.width=256 model.recurrent.rank=8",
    "micro": "model.attention.n_heads=4 model.ffn.hidden=256 model/residual=hyper model.residual.streams=3",
    "mamba2_130m": "model.recurrent.n_heads=4 model.recurrent.state_dim=32",
    "falcon_h1_0_5b": "model.attention.n_heads=4 model.attention.n_kv_heads=2 model.attention.head_dim=32 model.recurrent.n_heads=4"
    " model.recurrent.state_dim=32 model.ffn.hidden=256",
    "nemotron_h_8b": "model.attention.n_heads=4 model.attention.n_kv_heads=2 model.attention.head_dim=32 model.recurrent.n_heads=4"
    " model.recurrent.groups=2 model.recurrent.state_dim=32 model.recurrent.step_floor=0.001 model.ffn.hidden=256"
    " model.pattern=[recurrent,ffn,attention]",
    "nemotron_3_nano": "model.attention.n_heads=4 model.attention.n_kv_heads=2 model.attention.head_dim=32 model.recurrent.n_heads=4"
    " model.recurrent.groups=2 model.recurrent.state_dim=32 model.ffn.expert.hidden=256 model.ffn.n_experts=8 model.ffn.top_k=2"
    " model.ffn.shared_hidden=128 model.ffn.latent_dim=64 model.pattern=[recurrent,ffn,attention]",
    "phi3_mini": "model.attention.n_heads=4 model.ffn.hidden=256 model/recurrent=short_conv model.pattern=[recurrent,recurrent,attention]",
}


def composed(*overrides: str) -> TrainConfig:
    return compose([part for text in overrides for part in text.split()]).config()


def batch_of(model: LM, setting: Setting = SETTING) -> Batch:
    rows = torch.randint(0, 96, (setting.micro_batch, setting.seq_len))
    return Batch(rows, rows, source_tokens=rows if isinstance(model.cfg, EncoderDecoderConfig) else None)


def kept_bytes(model: LM, slices: Ulysses | None = None, setting: Setting = SETTING) -> int:
    """Bytes of the distinct storages, weights aside, that the forward of this setting saves for its backward."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    storages: dict[int, torch.UntypedStorage] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in weights:
            storages[storage.data_ptr()] = storage  # kept alive, so that no address comes twice
        return x

    batch = batch_of(model, setting) if slices is None else batch_of(model, setting).sharded(slices)
    with saved_tensors_hooks(pack, lambda x: x):
        model(batch, causal_reader(batch.labels, chunk=setting.chunk))
    return sum(storage.nbytes() for storage in storages.values())


@pytest.mark.parametrize("preset", FUSED)
def test_activations_by_formula_are_what_autograd_keeps(preset: str) -> None:
    model = build_model(composed(f"model={preset}", FUSED[preset], SMALL).model, seed=0).train()
    found = memory(model, SETTING)
    head = 4 * (1 + len(model.mtp)) * sum(p.numel() for p in model.head.parameters())  # its gradient, by every loss
    assert found.activations + head == pytest.approx(kept_bytes(model), rel=0.07)


@pytest.mark.parametrize(("preset", "low", "high"), [("llama_tiny", 0.72, 0.8), ("gpt2", 0.85, 0.95), ("mixtral_8x7b", 0.68, 0.76)])
def test_what_is_compiled_keeps_less(preset: str, low: float, high: float) -> None:
    """By as much as the test below finds that a compiler does."""
    cfg = composed(f"model={preset}", FUSED[preset], SMALL, "trainer.precision=bf16-mixed", "trainer.compile=true")
    found = memory(build_model(cfg.model, device="meta"), cfg.setting()).activations
    assert low < found / memory(build_model(cfg.model, device="meta"), replace(cfg.setting(), compiled=False)).activations < high


ATTENDING = [preset for preset, changes in FUSED.items() if "recurrent" not in changes and preset != "mamba2_130m"]


@pytest.mark.slow
@pytest.mark.parametrize("preset", ATTENDING)
def test_activations_by_formula_are_nearly_what_a_compiler_keeps(preset: str) -> None:
    """By torch's own choice of what the backward computes again, without code for a device. Weights cast to bf16 count as weights."""
    torch._dynamo.reset()
    cfg, setting = composed(f"model={preset}", FUSED[preset], SMALL).model, replace(SETTING, precision="bf16-mixed", compiled=True)
    model = build_model(cfg, seed=0).train()
    model.compile(backend="aot_eager_decomp_partition")
    with torch.autocast("cpu", torch.bfloat16):
        model(batch := batch_of(model), causal_reader(batch.labels, chunk=SETTING.chunk))  # a mask is made here
        held = kept_bytes(model)
    head, cast = 4 * (1 + len(model.mtp)) * sum(p.numel() for p in model.head.parameters()), 2 * multiplied(model)
    assert memory(model, setting).activations + head + cast == pytest.approx(held, rel=0.1)


@pytest.mark.parametrize("preset", ["gpt2", "palm_8b", "transformer_base"])
@pytest.mark.parametrize("option", ["block.layer_scale=0.1", "attention.value_residual=true", "attention.value_embedding.every=2"])
def test_what_is_multiplied_by_learned_numbers_is_kept(preset: str, option: str) -> None:
    found, held = [], []
    for changes in ("", f"model.{option}"):
        model = build_model(composed(f"model={preset}", FUSED[preset], SMALL, changes).model, seed=0).train()
        found.append(memory(model, SETTING).activations)
        held.append(kept_bytes(model))
    assert found[1] - found[0] == held[1] - held[0] > 0


NORMED, WINDOWED = "model.attention.qk_norm=head", "model.attention.window=8 model.attention.global_every=2"


@pytest.mark.parametrize("preset", ["llama_tiny", "gpt2"])
@pytest.mark.parametrize(
    ("given", "option"),
    [
        ("", "block.stream_gain=true"), ("", "embed.per_layer.channels=16"), ("", "attention.value_norm=true"),
        (NORMED, "attention.values=keys"), (f"{NORMED} model.attention.value_norm=true", "attention.values=keys"),
        ("", "attention.shared_layers=2"), (f"{NORMED} model.attention.value_norm=true", "attention.shared_layers=2"),
        (WINDOWED, "attention.global_heads.head_dim=48"), ("", "ffn.last.n=1 model.ffn.last.hidden=320"),
    ],
)  # fmt: skip
def test_what_some_layers_alone_have_is_kept(given: str, option: str, preset: str) -> None:
    """But for a number of each norm's token or head."""
    found, held = [], []
    for changes in (given, f"{given} model.{option}"):
        model = build_model(composed(f"model={preset}", FUSED[preset], SMALL, changes).model, seed=0).train()
        found.append(memory(model, SETTING).activations)
        held.append(kept_bytes(model))
    assert found[1] - found[0] == pytest.approx(held[1] - held[0], rel=0.06) != 0


def added_by(preset: str, option: str, precision: Precision) -> tuple[int, int]:
    """What an option of attention adds to the activations of long rows: by the formula, and in bytes that autograd keeps."""
    found, held = [], []
    for changes in ("", f"model.attention.{option}"):
        model = build_model(composed(f"model={preset}", FUSED[preset], LONG, changes).model, seed=0).train()
        found.append(memory(model, replace(ROW, precision=precision)).activations)
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"):
            held.append(kept_bytes(model, setting=ROW))
    return found[1] - found[0], held[1] - held[0]


@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed"])
@pytest.mark.parametrize("option", ["forget=true", "softcap=30", "dropout=0.1", "softcap=9 model.attention.dropout=0.1"])
def test_attention_without_a_fused_kernel_keeps_the_weights_of_all_pairs(option: str, precision: Precision) -> None:
    """Some numbers of a token's own are left out: those of the gates, and under autocast queries, keys and values in float32."""
    found, held = added_by("gpt2", option, precision)
    assert found == pytest.approx(held, rel=0.03 if precision == "fp32" else 0.12)


@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed"])
@pytest.mark.parametrize("terms", ["query_and_key", "query", "key"])
def test_scores_of_distances_keep_the_weights_of_all_pairs_and_what_they_are_made_of(terms: str, precision: Precision) -> None:
    """Which vector is between which tokens is left out, int64 once for all layers, and under autocast q, k and v in float32."""
    found, held = added_by("gpt2", f"disentangled.n_buckets=40 model.attention.disentangled.terms={terms}", precision)
    rows = 8 * ROW.seq_len**2
    assert found == pytest.approx(held - rows, rel=0.03 if precision == "fp32" else 0.12)


@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed"])
@pytest.mark.parametrize("preset", ["gpt2", "deepseek_tiny"])
def test_an_indexer_keeps_the_scores_of_its_heads(preset: str, precision: Precision) -> None:
    """The mask that all layers share is left out, and under autocast the queries and keys of indexers in float32."""
    found, held = added_by(preset, INDEXER, precision)
    assert found == pytest.approx(held, rel=0.05 if precision == "fp32" else 0.12)


@pytest.mark.parametrize("preset", ["gpt2", "bart_base", "granite_3_1_2b"])
def test_scores_that_are_written_out_are_kept(preset: str) -> None:
    """As on a Mac's GPU. Keys and values that are repeated for their queries are left out: a part of them is as large as a head of a row of
    64 here, and the less the longer rows are."""
    model = build_model(composed(f"model={preset}", FUSED[preset], SMALL).model, seed=0).train()
    fused, held = memory(model, SETTING).activations, kept_bytes(model)
    for module in model.modules():
        if isinstance(module, Attention):
            module.attend = reference
    more = memory(model, replace(SETTING, device="mps")).activations - fused
    assert more == pytest.approx(kept_bytes(model) - held, rel=0.15 if preset == "granite_3_1_2b" else 0.03)


@pytest.mark.parametrize("preset", ["llama_tiny", "t5_small"])
def test_a_token_and_the_one_before_are_kept_where_they_are_mixed(preset: str) -> None:
    found, held = [], []
    for changes in ("", "model.embed.smear.channels=12"):
        model = build_model(composed(f"model={preset}", FUSED[preset], SMALL, changes).model, seed=0).train()
        found.append(memory(model, SETTING).activations)
        held.append(kept_bytes(model))
    assert held[1] - held[0] - (found[1] - found[0]) == 8 * len(model.stacks())  # the two numbers that choose the one before


@pytest.mark.parametrize("preset", ["llama_tiny", "t5_small"])
@pytest.mark.parametrize("n_layers", [4, 5])
@pytest.mark.parametrize("kind", ["x0", "unet", "dense", "loop", "hyper", "hyper model.residual.streams=2 model.residual.sinkhorn=3"])
def test_what_stands_between_layers_is_kept(kind: str, n_layers: int, preset: str) -> None:
    found, held = [], []
    for changes in ("", f"model/residual={kind}"):
        model = build_model(composed(f"model={preset}", FUSED[preset], SMALL, changes, f"model.n_layers={n_layers}").model, seed=0).train()
        found.append(memory(model, SETTING).activations)
        held.append(kept_bytes(model))
    exact = kind in ("x0", "unet", "dense")  # of a whole block some numbers more are kept
    assert found[1] - found[0] == pytest.approx(held[1] - held[0], rel=0 if exact else 0.01)


@pytest.mark.parametrize("preset", ["llama_tiny", "gpt2", "palm_8b", "mixtral_8x7b", "qwen3_0_6b", "granite_3_1_2b", "micro"])
def test_activations_of_slices_by_formula_are_what_autograd_keeps(preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank of four that sends to itself. palm_8b has one head of keys, mixtral_8x7b two."""
    monkeypatch.setattr(ulysses, "_all_to_all", lambda x, group, n, cut, joined: torch.cat(x.chunk(n, cut), joined))
    monkeypatch.setattr(ulysses, "summed", lambda x, group: x.clone())
    model = build_model(composed(f"model={preset}", FUSED[preset], SMALL).model, seed=0).train()
    found = memory(model, replace(SETTING, context=4))
    head = 4 * sum(p.numel() for p in model.head.parameters())
    assert found.activations + head == pytest.approx(kept_bytes(model, Ulysses(None, 1, 4)), rel=0.07)


@pytest.mark.parametrize("preset", ["llama_tiny", "gpt2", "gpt_neox_20b", "qwen3_0_6b", "mixtral_8x7b"])
def test_activations_of_slices_of_matrices_by_formula_are_what_autograd_keeps(preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank of two that hears itself."""
    monkeypatch.setattr(tensor_parallel, "_all_gather", lambda x, group, n: torch.cat([x] * n, 1))
    monkeypatch.setattr(tensor_parallel, "_reduce_scatter", lambda x, group, n: x.chunk(n, 1)[0].clone())
    monkeypatch.setattr(dispatch, "_exchanged", lambda x, group, sent, come: torch.cat([x] * 2)[: sum(come)])
    for module in (ulysses, vocabulary):
        monkeypatch.setattr(module, "reduced", lambda x, group, by: x.clone())
    model = build_model(composed(f"model={preset}", FUSED[preset], SMALL).model, seed=0).train()
    found, half = memory(model, replace(SETTING, context=2, tensor=2)), TensorParallel(None, 1, 2)
    for module in model.modules():
        if isinstance(module, Divisible):
            half.divide(module)
    model.tie()
    head = 4 * sum(p.numel() for p in model.head.parameters())
    assert head == found.loss - sum(p.numel() for p in model.head.parameters()) * 4 - 8 * 48 * SETTING.chunk
    assert found.activations + head == pytest.approx(kept_bytes(model, half), rel=0.07)


@pytest.mark.parametrize(
    ("precision", "device", "each"), [("fp32", "cuda", 4), ("bf16-mixed", "cuda", 2), ("fp32", "cpu", 4), ("bf16-mixed", "cpu", 6)]
)
def test_a_gpu_holds_a_chunks_logits_once_and_a_cpu_those_of_autocast_in_float32_too(precision: Precision, device: str, each: int) -> None:
    model = build_model(composed("model=gpt2", FUSED["gpt2"], SMALL).model, device="meta")
    few, more = (memory(model, replace(SETTING, chunk=chunk, precision=precision, device=device)).loss for chunk in (16, 48))
    assert more - few == (48 - 16) * 96 * each


@pytest.mark.parametrize("preset", ["llama_tiny", "gpt2", "palm_8b", "mixtral_8x7b", "phi3_mini", "smollm3_3b", "micro"])
def test_activations_by_formula_are_what_autocast_keeps(preset: str) -> None:
    model = build_model(composed(f"model={preset}", FUSED[preset], SMALL).model, seed=0).train()
    setting = replace(SETTING, precision="bf16-mixed")
    found, head = memory(model, setting), 4 * sum(p.numel() for p in model.head.parameters())
    casts = found.weights - memory(model, SETTING).weights
    with torch.autocast("cpu", dtype=torch.bfloat16):
        kept = kept_bytes(model)
    assert found.activations + head + casts == pytest.approx(kept, rel=0.07)


@pytest.mark.parametrize(
    "optim",
    [
        "adamw",
        "adamw optim.state_bits=8",
        "muon",
        "soap",
        "soap optim.one_sided=true",
        "soap optim.max_precondition_dim=1000",
        "adafactor",
        "adafactor optim.beta1=0.9",
        "lion",
        "sgd",
        "sgd optim.momentum=0.9",
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_and_optimizer_by_formula_are_what_is_allocated(optim: str, dtype: torch.dtype) -> None:
    cfg = composed("model=deepseek_v3", "model.n_layers=5", f"optim={optim}")
    model = build_model(cfg.model, device="meta").to(dtype)
    optimizer = begun(cfg.optim, model.named_parameters(), model.matrices())
    held = sum(x.nbytes for state in optimizer.state.values() for name, x in state.items() if name != "step")
    found = memory(model, replace(SETTING, precision="fp32" if dtype == torch.float32 else "bf16-true", states=cfg.optim.state_bytes))
    assert found.optimizer == held
    assert found.weights == sum(p.nbytes for p in model.parameters())
    assert found.gradients == sum(p.nbytes for p in model.parameters() if p.requires_grad)  # not of a correction bias


@pytest.mark.parametrize("option", ["trainer.ema_decay=0.9", "schedule=free", ""])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_averages_by_formula_are_what_is_allocated(option: str, dtype: torch.dtype) -> None:
    """Seen to fail: they were not counted at all."""
    cfg = composed("model=deepseek_v3", "model.n_layers=5", "optim=adamw", *filter(None, [option]))
    model = build_model(cfg.model, device="meta").to(dtype)
    averages = averages_of(cfg, Strategy(), model, Strategy().weights(model))
    found = memory(model, replace(cfg.setting(), precision="fp32" if dtype == torch.float32 else "bf16-true"))
    held = sum(piece.tensor.nbytes for piece in averages.pieces()) if averages is not None else 0
    assert found.averages == held


def test_frozen_weights_are_held_like_others_and_have_no_gradient_and_no_state() -> None:
    model = build_model(composed("model=deepseek_v3").model, device="meta").bfloat16()
    setting = replace(SETTING, precision="bf16-true", states=lambda shape, matrix, number: 4 * prod(shape))
    whole = memory(model, setting)
    model.blocks[:60].requires_grad_(False)
    found, trained = memory(model, setting), sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert found.weights == whole.weights == sum(p.nbytes for p in model.parameters())
    assert (found.gradients, found.optimizer) == (2 * trained, 4 * trained)


def test_each_stage_cuts_one_thing_more_into_slices() -> None:
    model = build_model(composed("model=llama3_8b").model, device="meta")
    whole, *stages = [memory(model, replace(SETTING, stage=stage, world=8)) for stage in range(4)]
    gathered = whole.weights - 31 * sum(p.numel() for p in model.blocks[0].parameters()) * 4  # all but the other blocks
    assert [found.optimizer for found in stages] == [whole.optimizer // 8] * 3
    assert [found.gradients for found in stages] == [whole.gradients, whole.gradients // 8, whole.gradients // 8]
    assert [found.weights for found in stages] == [whole.weights, whole.weights, whole.weights // 8 + gathered]
    assert {found.activations for found in stages} == {whole.activations}


def test_blocks_that_are_run_again_keep_their_input_and_one_has_all() -> None:
    model = build_model(composed("model=llama3_8b").model, device="meta")
    number = 4 * SETTING.micro_batch * SETTING.seq_len * model.cfg.d_model
    hows = Recompute(), Recompute("block"), Recompute("block", 2)
    plain, all_blocks, half = (memory(model, replace(SETTING, recompute=how)).activations for how in hows)
    one = (plain - 3 * number) // 32
    assert all_blocks == 3 * number + 31 * number + one
    assert half == 3 * number + 15 * number + 17 * one
