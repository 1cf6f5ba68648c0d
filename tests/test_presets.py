"""Presets with published sizes have the published number of parameters, and shrink by plain overrides to models that train."""

import math
import shlex
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from lm.cli import catalog
from lm.cli.compose import compose
from lm.nn.batch import Batch
from lm.nn.loss import LossSums, causal_reader
from lm.nn.transformer import LM, EncoderDecoderConfig, build_model
from lm.training.config import TrainConfig
from lm.training.optim import begin_state, build_optimizer

OURS = {"tiny", "nano", "llama_tiny", "moe_tiny", "deepseek_tiny", "bert_tiny", "t5_tiny"}
SHAPES = {
    "gpt2": "model.vocab_size=50257 model.max_seq_len=1024",
    "transformer_base": "model.max_seq_len=256",
}  # left to tokenizer and data
OBJECTIVES = {
    **dict.fromkeys(("bert_base", "bert_tiny"), "objective=mlm"),
    **dict.fromkeys(
        ("t5_tiny", "transformer_base", "t5_small", "t5_1_1_base", "bart_base", "switch_base_8"), "objective=seq2seq data=stdlib_docstrings"
    ),
}

T5: dict[str, Any] = {"d_model": 768, "d_kv": 64, "num_layers": 12, "num_heads": 12}
PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {  # class, and what config.json of the release says beside the class's defaults
    "bert_base": ("BertForMaskedLM", {}),
    "gpt2": ("GPT2LMHeadModel", {}),
    "t5_small": ("T5ForConditionalGeneration", {}),
    "t5_1_1_base": ("T5ForConditionalGeneration", T5 | {"d_ff": 2048, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "bart_base": (
        "BartForConditionalGeneration",
        {
            "d_model": 768, "encoder_layers": 6, "decoder_layers": 6, "encoder_attention_heads": 12, "decoder_attention_heads": 12,
            "encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072,
        },
    ),
    "bloom_560m": ("BloomForCausalLM", {"hidden_size": 1024, "n_layer": 24, "n_head": 16}),
    "gpt_neox_20b": ("GPTNeoXForCausalLM", {"hidden_act": "gelu_fast"}),
    "switch_base_8": (
        "SwitchTransformersForConditionalGeneration",
        T5 | {"d_ff": 3072, "num_sparse_encoder_layers": 6, "num_sparse_decoder_layers": 6},
    ),
    "llama3_8b": (
        "LlamaForCausalLM",
        {
            "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
            "num_key_value_heads": 8, "tie_word_embeddings": False,
        },
    ),
    "mistral_7b": ("MistralForCausalLM", {}),
    "mixtral_8x7b": ("MixtralForCausalLM", {}),
    "qwen3_0_6b": (
        "Qwen3ForCausalLM",
        {
            "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
            "tie_word_embeddings": True,
        },
    ),
    "gemma2_2b": ("Gemma2ForCausalLM", {}),
    "olmo2_1b": (
        "Olmo2ForCausalLM",
        {
            "vocab_size": 100352, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 16,
            "num_key_value_heads": 16,
        },
    ),
    "deepseek_v3": ("DeepseekV3ForCausalLM", {}),
    "phi3_mini": ("Phi3ForCausalLM", {}),
    "granite_3_1_2b": (
        "GraniteForCausalLM",
        {
            "vocab_size": 49152, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 40, "num_attention_heads": 32,
            "num_key_value_heads": 8, "tie_word_embeddings": True,
        },
    ),
    "starcoder2_3b": ("Starcoder2ForCausalLM", {}),
    "gpt_oss_20b": ("GptOssForCausalLM", {"num_hidden_layers": 24, "num_local_experts": 32}),
}  # fmt: skip
BEYOND = {  # parameters that transformers has beyond the model
    "bart_base": 2 * 2 * 768,  # rows 0 and 1 of its position tables, which nothing reads
    "t5_1_1_base": -32128 * 768,  # version 5 ties the head, which the released weights do not
}

PAPERS = {  # the paper's figure, and what its rounding leaves open
    "palm_8b": (8.63e9, 0.005e9),
    "gpt3_6_7b": (6.7e9, 0.05e9),
    "transformer_base": (65e6, 2.5e6),  # whose vocabulary is "about 37,000"
}

MOE = "model.ffn.n_experts=4 model.ffn.expert.hidden=24"
MLA = (
    "model.attention.n_heads=4 model.attention.q_rank=16 model.attention.kv_rank=12 model.attention.nope_dim=8"
    " model.attention.rope_dim=4 model.attention.v_dim=8 model.ffn.first_dense=1 model.ffn.dense.hidden=64"
)
GQA = "model.attention.n_heads=4 model.attention.n_kv_heads=2"
T5_INIT = "model.head.scale=0.177 model.init.std=0.1"  # at 0.02 three steps are too few: the head starts sqrt(d_model) times smaller
TINY = {
    "tiny": GQA,
    "nano": "model.ffn.hidden=64",
    "llama_tiny": f"{GQA} model.ffn.hidden=64",
    "moe_tiny": f"{GQA} {MOE}",
    "deepseek_tiny": f"{MLA} model.ffn.router.n_groups=2 model.ffn.router.top_groups=1 {MOE}",
    "bert_tiny": "model.ffn.hidden=64",
    "t5_tiny": "model.ffn.hidden=64",
    "transformer_base": "model.attention.n_heads=4 model.ffn.hidden=64 model.embed.scale=5.66",
    "bert_base": "model.attention.n_heads=4 model.ffn.hidden=64",
    "gpt2": "model.attention.n_heads=4",
    "gpt3_6_7b": "model.attention.n_heads=4 model.attention.window=5",
    "t5_small": f"model.attention.n_heads=4 model.attention.head_dim=8 model.ffn.hidden=64 {T5_INIT}",
    "t5_1_1_base": "model.attention.n_heads=4 model.attention.head_dim=8 model.ffn.hidden=64",
    "bart_base": "model.attention.n_heads=4 model.ffn.hidden=64",
    "bloom_560m": "model.attention.n_heads=4",
    "gpt_neox_20b": "model.attention.n_heads=4",
    "palm_8b": "model.attention.n_heads=4 model.attention.head_dim=8 model.ffn.hidden=64 model.head.scale=0.177",
    "switch_base_8": f"model.attention.n_heads=4 model.attention.head_dim=8 model.ffn.dense.hidden=64 {T5_INIT} {MOE}",
    "llama3_8b": f"{GQA} model.ffn.hidden=64",
    "mistral_7b": f"{GQA} model.ffn.hidden=64 model.attention.window=5",
    "mixtral_8x7b": f"{GQA} {MOE}",
    "qwen3_0_6b": f"{GQA} model.attention.head_dim=16 model.ffn.hidden=64",
    "gemma2_2b": f"{GQA} model.attention.head_dim=16 model.attention.window=5 model.ffn.hidden=64 model.embed.scale=5.66",
    "olmo2_1b": "model.attention.n_heads=4 model.ffn.hidden=64",
    "deepseek_v3": f"{MLA} model.ffn.top_k=2 model.ffn.router.n_groups=2 model.ffn.router.top_groups=1 model.ahead.depth=1 {MOE}",
    "phi3_mini": "model.attention.n_heads=4 model.attention.window=5 model.ffn.hidden=64",
    "granite_3_1_2b": f"{GQA} model.ffn.hidden=64 model.head.scale=1.0",
    "starcoder2_3b": f"{GQA} model.attention.window=5 model.ffn.hidden=64",
    "gpt_oss_20b": f"{GQA} model.attention.head_dim=8 model.attention.window=5 model.ffn.top_k=2 {MOE}",
}
SMALL = "model.vocab_size=96 model.max_seq_len=16 model.d_model=32 model.n_layers=2 data.seq_len=16 optim=adamw optim.lr=1e-2"


def composed(preset: str, overrides: str = "") -> TrainConfig:
    return compose(shlex.split(f"model={preset} {OBJECTIVES.get(preset, '')} {overrides}")).config()


def trained_parameters(model: torch.nn.Module) -> int:
    """Without correction biases, which are a parameter without gradient here and a buffer in transformers."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def ours(preset: str) -> int:
    return trained_parameters(build_model(composed(preset, SHAPES.get(preset, "")).model, device="meta"))


def test_every_preset_is_counted_and_shrunk() -> None:
    presets = set(catalog.groups()["model"])
    assert len(presets) >= 26
    assert presets == OURS | PUBLISHED.keys() | PAPERS.keys() == TINY.keys()


@pytest.mark.parametrize("preset", PUBLISHED)
def test_a_preset_has_the_parameters_of_transformers_model(preset: str) -> None:
    name, changes = PUBLISHED[preset]
    found = getattr(transformers, name)
    with torch.device("meta"):
        theirs = found(found.config_class(**changes))
    assert ours(preset) == trained_parameters(theirs) - BEYOND.get(preset, 0)


@pytest.mark.parametrize("preset", PAPERS)
def test_a_preset_has_the_parameters_that_its_paper_tells(preset: str) -> None:
    told, rounding = PAPERS[preset]
    assert abs(ours(preset) - told) <= rounding


@pytest.mark.parametrize("preset", TINY)
def test_a_preset_shrinks_by_overrides_to_a_model_that_trains(preset: str) -> None:
    cfg = composed(preset, f"{SMALL} {TINY[preset]}")
    model = build_model(cfg.model, seed=0)
    assert sum(p.numel() for p in model.parameters()) < 100_000
    losses = [float(loss) for loss in three_steps(cfg, model)]
    assert losses[0] == pytest.approx(math.log(96), rel=0.25)  # nothing is known yet
    assert losses[0] > losses[1] > losses[2]
    assert losses[2] < losses[0] - 0.1


def three_steps(cfg: TrainConfig, model: LM) -> list[Tensor]:
    """Losses of a fixed batch, nats a token."""
    torch.manual_seed(0)
    source = torch.randint(0, 96, (4, 16)) if isinstance(cfg.model, EncoderDecoderConfig) else None
    batch, labels = Batch(torch.randint(0, 96, (4, 16)), source_tokens=source), torch.randint(0, 96, (4, 16))
    optimizer = build_optimizer(cfg.optim, model.named_parameters(), model.matrices())
    begin_state(optimizer)
    losses = []
    for _ in range(3):
        sums: LossSums = model(batch, causal_reader(labels))
        optimizer.zero_grad()
        (sums.total / labels.numel()).backward()
        optimizer.step()
        if sums.loads is not None:
            model.balance(sums.loads)
        losses.append(sums.nll / labels.numel())
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    return losses
