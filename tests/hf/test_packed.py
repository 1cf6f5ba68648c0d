"""Folders with quantised matrices, as gpt-oss and DeepSeek-V3 are published, against what transformers makes of the same bytes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

transformers = pytest.importorskip("transformers")

from transformers.integrations.finegrained_fp8 import Fp8Dequantize  # noqa: E402
from transformers.integrations.mxfp4 import convert_moe_packed_tensors  # noqa: E402

from lm.errors import CheckpointError, ConfigError, NumericsError  # noqa: E402
from lm.hf.io.packed import Fp8Blocks  # noqa: E402
from lm.hf.io.reading import read_hf  # noqa: E402
from tests.hf.harness import VOCAB, change, redraw  # noqa: E402

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64,
}  # fmt: skip
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [32, 16]}


def saved(theirs: Any, folder: Path, quantization: dict[str, Any], packed: dict[str, dict[str, torch.Tensor]]) -> None:
    """A folder in which these matrices stand as their parts."""
    theirs.bfloat16().save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    for name, parts in packed.items():
        del weights[name]
        weights |= parts
    save_file(weights, folder / "model.safetensors")
    change(folder, quantization_config=quantization)


@torch.no_grad()
def gpt_oss(folder: Path) -> Any:
    """Random bytes and exponents for its experts; the model has what transformers reads in them."""
    source = torch.Generator().manual_seed(0)
    theirs = transformers.GptOssForCausalLM(transformers.GptOssConfig(**SIZES, num_local_experts=3, num_experts_per_tok=2)).bfloat16()
    redraw(theirs, 1.0)
    packed = {}
    for name, weight in theirs.state_dict().items():
        if name.endswith("_proj") and "experts" in name:
            e, inputs, outputs = weight.shape
            blocks = torch.randint(0, 256, (e, outputs, inputs // 32, 16), generator=source, dtype=torch.uint8)
            scales = torch.randint(118, 128, (e, outputs, inputs // 32), generator=source, dtype=torch.uint8)
            packed[name] = {f"{name}_blocks": blocks, f"{name}_scales": scales}
            weight.copy_(convert_moe_packed_tensors(blocks, scales))
    assert len(packed) == 4
    saved(theirs, folder, MXFP4, packed)
    return theirs


@torch.no_grad()
def llama(folder: Path) -> Any:
    """Every matrix of the blocks in float8, with a factor for each 32 x 16 of it."""
    source = torch.Generator().manual_seed(0)
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).bfloat16()
    redraw(theirs, 1.0)
    packed = {}
    for name, weight in theirs.state_dict().items():
        if "_proj" in name:
            rows, columns = weight.shape
            scale = 0.01 * torch.rand(rows // 32, columns // 16, generator=source)
            q = (100 * torch.randn(rows, columns, generator=source)).clamp(-448, 448).to(torch.float8_e4m3fn)
            packed[name] = {name: q, f"{name}_scale_inv": scale}
            weight.copy_(Fp8Dequantize(None)._dequantize_one(q, scale, torch.bfloat16))
    assert len(packed) == 14
    saved(theirs, folder, FP8, packed)
    return theirs


@pytest.mark.parametrize(("made", "method"), [(gpt_oss, "mxfp4"), (llama, "fp8")])
def test_what_is_read_is_what_transformers_reads(made: Any, method: str, tmp_path: Path) -> None:
    made(tmp_path / "packed").save_pretrained(tmp_path / "plain")
    packed, plain = read_hf(tmp_path / "packed"), read_hf(tmp_path / "plain")
    assert packed.config == plain.config
    assert all(torch.equal(weight, plain.weights[name]) for name, weight in packed.weights.items())
    assert any(f"matrices of {method} are bf16" in note for note in packed.notes) and not plain.notes


def test_blocks_at_the_ends_may_be_cut() -> None:
    """As those of DeepSeek-V3's 576 latents are."""
    q, scale = torch.ones(5, 7).to(torch.float8_e4m3fn), torch.arange(1.0, 7).view(2, 3)
    found = Fp8Blocks(3, 3).unpacked([q, scale])
    assert found.tolist() == [[scale[i // 3, j // 3].item() for j in range(7)] for i in range(5)]


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    llama(tmp_path)
    file, name = tmp_path / "model.safetensors", "model.layers.1.mlp.up_proj.weight"
    whole = load_file(file)
    for parts, error, message in (
        (
            {f"{name}_scale_inv": torch.ones(3, 3)},
            CheckpointError,
            r"up_proj\.weight is not packed as config\.json says \(blocks of 32 x 16",
        ),
        ({name: torch.ones(96, 64)}, CheckpointError, r"up_proj\.weight is not packed as config\.json says \(torch\.float32"),
        ({f"{name}_scale_inv": torch.full((3, 4), torch.nan)}, NumericsError, r"up_proj\.weight holds NaN"),
        ({name: None}, CheckpointError, r"up_proj\.weight is missing"),
    ):
        save_file({key: value for key, value in (whole | parts).items() if value is not None}, file)
        with pytest.raises(error, match=message):
            read_hf(tmp_path)
    for other in ({"quant_method": "gptq"}, {"quant_method": "fp8"}, {"bits": 4}, ["fp8"], FP8 | {"weight_block_size": [0, 128]}):
        change(tmp_path, quantization_config=other)
        with pytest.raises(ConfigError, match="mxfp4 and fp8 with a weight_block_size are read"):
            read_hf(tmp_path)
