"""From a model of ours to a file that llama.cpp, and all that is built on it, loads. Needs the extra `gguf`."""

import importlib.util
from pathlib import Path

import torch

from lm.data.tokenizer.tokenizer import Tokenizer
from lm.errors import ConfigError
from lm.hf.gguf.architecture import Architecture
from lm.hf.gguf.dense import GPT2, Bloom, Gemma2, GPTNeoX, Granite, Llama, OLMo2, Phi3, Qwen2, Qwen3, StarCoder2
from lm.hf.gguf.mixtures import DeepSeek2, GptOss, Mixtral, Qwen3MoE
from lm.hf.gguf.vocabulary import vocabulary
from lm.hf.io.family import resolved
from lm.hf.io.writing import family_for
from lm.nn.model_config import ModelConfig
from lm.nn.transformer import LM
from lm.schema import Tree
from lm.storage.checkpoint import require_finite

ARCHITECTURES: tuple[Architecture, ...] = (
    Llama(), Mixtral(), Granite(), Qwen2(), Qwen3(), Qwen3MoE(), Gemma2(), GPT2(), Phi3(), OLMo2(), StarCoder2(), GPTNeoX(), Bloom(),
    DeepSeek2(), GptOss(),
)  # fmt: skip
FILE = "model.gguf"
TYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "q8_0": torch.float32}
"""What the matrices become, and what holds them until then; the rest is float32."""
_FILE_TYPES = {"f32": 0, "f16": 1, "bf16": 32, "q8_0": 7}  # llama.cpp's numbers of them
_SMALL = ("ffn_gate_inp.weight", "position_embd.weight", "rope_freqs.weight")  # stored in float32, as vectors are
_BLOCK = 32  # numbers that share a scale in q8_0
_SAMPLING = {"temperature": "temp", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}  # generation_config.json's names -> theirs


def require_gguf() -> None:
    """Raises ConfigError where the package gguf is missing."""
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError("format=gguf: the package gguf, which writes such files, is not installed. pip install 'slotlm[gguf]'.")


def architecture_for(cfg: ModelConfig, family: str | None = None, imported: str | None = None) -> Architecture:
    """Returns llama.cpp's architecture for this model, chosen as in `family_for`. Raises ConfigError naming an option that it lacks, and
    what to do instead."""
    known = {name: one for one in ARCHITECTURES for name in one.families}
    try:
        found = known[family_for(cfg, family, known, imported).name]
    except ConfigError as error:
        instead = _instead(cfg, imported)
        if imported is not None and instead:  # it is as it should be, and not to be trained otherwise
            raise ConfigError(f"format=gguf: lm writes no {imported} for llama.cpp. {instead}") from None
        raise ConfigError(f"format=gguf: {error} {instead}".rstrip()) from None
    found.refuse(resolved(cfg))
    return found


def _instead(cfg: ModelConfig, imported: str | None) -> str:
    """Returns the sentence on a model that a family of transformers holds; '' where none does."""
    try:
        name = family_for(cfg, imported=imported).name
    except ConfigError:
        return ""
    return f"format=hf writes it as {name}, and llama.cpp's convert_hf_to_gguf.py makes a file of that where llama.cpp knows {name}."


def write_gguf(
    file: Path, found: Architecture, model: LM, tokenizer: Tokenizer, dtype: str, name: str, sampling: Tree | None = None
) -> None:
    """Writes metadata, vocabulary and tensors.  dtype: a name of TYPES.  sampling: what generation_config.json said of it.

    Raises ConfigError for options, a tokenizer or matrices that have no form there, NumericsError for a tensor that is not finite.
    """
    import gguf

    ours = resolved(model.cfg)
    weights = {key: p.detach() for key, p in model.named_parameters()}
    keys: Tree = {"general.type": "model", "general.name": name, "general.file_type": _FILE_TYPES[dtype]}
    keys |= {"general.quantization_version": gguf.GGML_QUANT_VERSION, **_drawing(sampling or {})}
    keys |= {f"{found.name}.{key}": value for key, value in found.keys(model.cfg, ours).items()}
    writer = gguf.GGUFWriter(file, found.name)
    for key, value in (keys | vocabulary(tokenizer, model.vocab_size)).items():
        unsigned = type(value) is int and value >= 0
        writer.add_key_value(key, value, gguf.GGUFValueType.UINT32 if unsigned else gguf.GGUFValueType.get_type(value))
    for key, tensor in found.tensors(model.cfg, ours, weights):
        matrix = tensor.ndim > 1 and key.endswith(".weight") and not key.endswith(_SMALL)
        kind = gguf.GGMLQuantizationType[dtype.upper() if matrix else "F32"]
        if matrix and dtype == "q8_0" and tensor.shape[-1] % _BLOCK:
            rows = f"rows of {tensor.shape[-1]} numbers in {key} are not a multiple of {_BLOCK}"
            raise ConfigError(f"dtype=q8_0: {rows}, which share a scale. Use dtype=f16, bf16 or f32.")
        held = tensor.to(TYPES[dtype] if matrix else torch.float32)
        require_finite(key, held, f"export in {dtype}", "Use dtype=bf16 or f32, or another checkpoint")
        writer.add_tensor(key, gguf.quants.quantize(held.float().contiguous().numpy(), kind), raw_dtype=kind)
    writer.add_size_label(gguf.size_label(*writer.get_total_parameter_count()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _drawing(sampling: Tree) -> Tree:
    """Returns the keys of how llama.cpp draws tokens where it is told nothing else: what transformers does by this generation_config.json,
    which looks at its temperature only if it draws at all, and penalises what is anywhere in the text."""
    drawn = {
        f"general.sampling.{theirs}": sampling[key] for key, theirs in _SAMPLING.items() if sampling.get("do_sample") and key in sampling
    }
    penalty = sampling.get("repetition_penalty")
    return drawn | ({} if penalty is None else {"general.sampling.penalty_repeat": float(penalty), "general.sampling.penalty_last_n": -1})
