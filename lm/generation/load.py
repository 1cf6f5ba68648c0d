"""From a folder to a model and its tokenizer, and from a prompt to text."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor, nn

from lm.config import Tree, from_tree
from lm.data.tokenizer import Tokenizer, load_tokenizer
from lm.errors import CheckpointError, ConfigError
from lm.generation.sampling import SamplingConfig
from lm.generation.text import complete, require_fit
from lm.model_folder import read_model, resolve_model
from lm.nn.transformer import DecoderLM, ModelConfig, build_model

_NAMED = 5  # wrong tensors that a message names


def load(path: str | Path, device: str = "auto") -> tuple[DecoderLM, Tokenizer]:
    """The model of a run, model or checkpoint folder, in eval mode and in the dtype that was saved, and its tokenizer.

    device: cpu, cuda, cuda:1 ..., or auto: CUDA where there is a GPU. Raises CheckpointError where the parts do not fit.
    """
    where = pick_device(device)
    folder = resolve_model(str(path))
    tree, weights = read_model(folder)
    cfg = _model_config(tree, folder)
    tokenizer = _tokenizer(folder)
    model = build_model(cfg, device="meta")
    require_weights(model, weights, str(folder))
    require_fit(tokenizer, model.vocab_size, str(folder / "tokenizer.json"))
    model = build_model(cfg, device=where).to(next(iter(weights.values())).dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    return model.eval(), tokenizer


@overload
def generate(model: DecoderLM, tokenizer: Tokenizer, prompt: str, **options: Any) -> str: ...
@overload
def generate(model: DecoderLM, tokenizer: Tokenizer, prompt: list[str], **options: Any) -> list[str]: ...
def generate(model: DecoderLM, tokenizer: Tokenizer, prompt: str | list[str], **options: Any) -> str | list[str]:
    """What follows the prompt, or each of several. options: the fields of SamplingConfig (max_tokens, temperature, seed, stop, ...)."""
    cfg = from_tree(SamplingConfig, options)
    texts = [found.text for found in complete(model, tokenizer, [prompt] if isinstance(prompt, str) else prompt, cfg)]
    return texts[0] if isinstance(prompt, str) else texts


def pick_device(name: str) -> torch.device:
    """Raises ConfigError for a device that torch does not know or does not find here."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device: {name!r} is not a device. Write auto, cpu or cuda.") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device: {name} was asked for, and torch finds {torch.cuda.device_count()} GPUs here. Use device=auto or cpu.")
    return device


def require_weights(model: nn.Module, weights: Mapping[str, Tensor], where: str) -> None:
    """CheckpointError naming the first tensors that are missing, unknown or misshapen. A tied head is stored once, as the embedding."""
    own = {name: tuple(p.shape) for name, p in model.named_parameters()}
    wrong = [f"{name} is missing" for name in own if name not in weights]
    wrong += [f"{name} is unknown to the model" for name in weights if name not in own]
    shapes = [(name, own[name], tuple(weight.shape)) for name, weight in weights.items() if name in own]
    wrong += [f"{name} has shape {there}, and the model's is {here}" for name, here, there in shapes if here != there]
    if wrong:
        more = f"; and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
        raise CheckpointError(f"{where}: the weights do not fit config.json: {'; '.join(wrong[:_NAMED])}{more}. Use another model folder.")


def _model_config(tree: Tree, folder: Path) -> ModelConfig:
    try:
        cfg = from_tree(ModelConfig, tree.get("model") or {}, f"{folder}: model")
    except ConfigError as error:
        raise CheckpointError(str(error)) from None
    if cfg.vocab_size is None or cfg.max_seq_len is None:
        raise CheckpointError(f"{folder}: model.vocab_size or model.max_seq_len is null, and a saved model has both. Use another folder.")
    return cfg


def _tokenizer(folder: Path) -> Tokenizer:
    try:
        return load_tokenizer(folder)
    except ConfigError as error:
        raise CheckpointError(f"{folder}: {error}") from None
