"""From a folder to a model, its tokenizer and its drafter, and back into a folder."""

import os
from functools import reduce
from pathlib import Path
from typing import get_args

import torch
from torch import Tensor

from lm import heap
from lm.adapters.adapter import hold_bases
from lm.data.tokenizer.fitting import unlike
from lm.data.tokenizer.tokenizer import Tokenizer, load_tokenizer
from lm.errors import CheckpointError, ConfigError, expect
from lm.generation.config import CacheForm, Dtype, GenerateConfig
from lm.generation.drafting.base import Drafter, Lookup
from lm.generation.drafting.model import DraftModel
from lm.generation.drafting.mtp import MTP
from lm.generation.text import require_fit
from lm.generation.weights.prepare import prepare
from lm.nn.model_config import ModelConfig, model_config
from lm.nn.transformer import LM, EncoderConfig, EncoderDecoderConfig, build_model
from lm.ops.cache.cache import PerToken
from lm.ops.defaults import default_kind, device_unset, why_not_mac
from lm.plugins import used
from lm.schema import Tree
from lm.spelling import did_you_mean
from lm.storage.adapted import Adapted, read_apart, read_merged
from lm.storage.model_folder import copy_weights, resolve_model, save_model
from lm.storage.out import require_free


@device_unset()
@heap.returned()
def load(
    path: str | os.PathLike[str],
    device: str = "auto",
    merge: bool = True,
    dtype: Dtype | None = None,
    cache: CacheForm | None = None,
    compile: bool = False,
) -> tuple[LM, Tokenizer]:
    """Returns the model of a run, model or checkpoint folder, in eval mode and in the dtype that was saved, and its tokenizer.

    device: cpu, cuda, cuda:1 ..., mps, or auto: CUDA where there is a GPU. merge: an adapter is merged into the weights; otherwise it
    computes beside them. dtype: saved, fp32, bf16, fp16, int8 or int4: `prepare` makes the model ready to decode fast, with its matrices
    so; then it cannot be trained, and its layers take no hooks. cache: bf16 or int8: how the keys and values of each token are held in
    decoding; None: as they are computed. compile: with a dtype, compiles the decoding step of one row; on CUDA records that of all rows as
    a graph, too.
    Raises CheckpointError where config, weights and tokenizer do not fit each other, ConfigError for a dtype that the model cannot have,
    for a cache where no layer keeps anything of each token, and for a step that cannot be compiled.
    """
    for key, value, options in (("dtype", dtype, get_args(Dtype)), ("cache", cache, get_args(CacheForm))):
        if value is not None and value not in options:
            raise ConfigError(f"{key}={value!r} is not an option. {did_you_mean(str(value), options)}")
    if compile and dtype is None:
        raise ConfigError("compile=true is for a model that can do nothing but decode, and dtype is null. Set dtype=saved or another.")
    where = pick_device(device)
    folder = resolve_model(str(path))
    tree, weights = (read_merged if merge else read_apart)(folder)
    cfg, tokenizer = _described(tree, folder)
    if cache is not None:
        _require_kept(cfg, cache)
    model = _typed(build_model(cfg, device=where), weights)
    if not merge and (adapted := Adapted.of(folder, tree)) is not None:
        adapted.adapter.apply(model)
    copy_weights(model.named_parameters(), weights, str(folder))
    hold_bases(model)
    model.cache_form, model.asked_as = cache, tree.get("asked_as") or "text"
    return model.eval() if dtype is None else prepare(model, dtype, compile), tokenizer


def expect_loaded(model: object, tokenizer: object) -> None:
    """Raises ConfigError unless these are a model and a tokenizer."""
    remedy = "Give the model and the tokenizer that lm.load returned"
    expect("model", model, torch.nn.Module, remedy)
    expect("tokenizer", tokenizer, Tokenizer, remedy)


def unfilled(folder: Path) -> tuple[LM, Tokenizer, dict[str, Tensor]]:
    """Returns what `load` does, with the model on the meta device, and its weights by name; an adapter is merged into them."""
    tree, weights = read_merged(folder)
    cfg, tokenizer = _described(tree, folder)
    return _typed(build_model(cfg, device="meta"), weights), tokenizer, weights


def save(model: LM, tokenizer: Tokenizer, out: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
    """Writes a model folder, such as of a model that a loop of one's own has trained, for `load`, `evaluate`, `export` and all verbs.

    overwrite: replace a folder that lm has written before. Raises ConfigError for a model that is not as `build_model` makes it (prepared
    for decoding, with an adapter or with a module of another class) and for a folder that is in the way, NumericsError for weights that
    are not finite.
    """
    expect("model", model, LM, "Give what lm.build_model or lm.load returned")
    expect("tokenizer", tokenizer, Tokenizer, "Give that of lm.batches or lm.load")
    weights = dict(model.named_parameters())
    built = build_model(model.cfg, device="meta")
    made = {name: p.shape for name, p in built.named_parameters()}
    given = {name: p.shape for name, p in weights.items()}
    if made != given:
        first = next(name for name in {**given, **made} if given.get(name) != made.get(name))
        rule = f"model: its weights are not those of its config (see {first}), as of a model with a dtype or an adapter"
        raise ConfigError(f"{rule}. Save it as it was built.")
    kinds = {name: type(module).__name__ for name, module in built.named_modules()}
    for name, module in model.named_modules():
        if (found := type(module).__name__) != kinds.get(name):
            where = f"model.{name}".rstrip(".")
            raise ConfigError(f"{where}: {found} was put there, and a folder holds weights and config, which makes"
                              f" {kinds.get(name, 'nothing')} of them. Make it a kind of a plugin, or torch.save the model.")  # fmt: skip
    require_fit(tokenizer, model.vocab_size)
    extra = {"tokenizer_hash": tokenizer.hash, "plugins": used(model.cfg), "asked_as": model.asked_as}
    target = require_free(out, overwrite)
    save_model(target, model.cfg.tree(), weights, tokenizer.save, extra, overwrite)
    return target


def drafter_of(model: LM, tokenizer: Tokenizer, cfg: GenerateConfig, dtype: Dtype | None = None, compile: bool = False) -> Drafter | None:
    """Returns the drafter that cfg asks for; None where it asks for none.  dtype, compile: of a draft model, as in `load`.

    Raises ConfigError where it cannot draft for this model, and as `load` for a draft model.
    """
    if cfg.lookup is not None:
        return Lookup(cfg.draft_tokens, cfg.lookup)
    if cfg.draft is None:
        return None
    if cfg.draft == "mtp":
        return MTP(cfg.draft_tokens, model)
    draft, own = load(cfg.draft, str(model.embed.weight.device), dtype=dtype, compile=compile)
    if (other := unlike(own, tokenizer)) is not None:
        raise ConfigError(
            f"draft={cfg.draft}: it has another tokenizer, {other}, so what it drafts is of other tokens."
            " Draft with a model that has all tokens of this one."
        )
    return DraftModel(cfg.draft_tokens, draft, model)


def pick_device(name: str) -> torch.device:
    """Returns the device of this name. Raises ConfigError for one that is none of a CPU, CUDA and a Mac's GPU, or that torch does not find
    here."""
    if name == "auto":
        return torch.device(default_kind())
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        device = None
    if device is None or device.type not in ("cpu", "cuda", "mps"):  # torch also knows meta, xla, ...
        raise ConfigError(f"device: {name!r} is not a device. Write auto, cpu, cuda or mps.")
    if device.type == "mps" and (reason := why_not_mac()) is not None:
        raise ConfigError(f"device: {name} was asked for, and {reason}. Use device=auto or cpu.")
    if device.type == "mps" and device.index:
        raise ConfigError(f"device: {name} was asked for, and a Mac has one GPU. Use device=mps.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device: {name} was asked for, and torch finds {torch.cuda.device_count()} GPUs here. Use device=auto or cpu.")
    return device


def _typed(model: LM, weights: dict[str, Tensor]) -> LM:
    """Returns the model in the widest dtype of these weights: beside an adapter some may be narrower than the parent's, and routers'
    balancing biases, which are always in float32, do not count."""
    apart = model.self_updated()
    found = {weight.dtype for name, weight in weights.items() if name not in apart}
    return model.to(reduce(torch.promote_types, found) if found else torch.float32)


def _described(tree: Tree, folder: Path) -> tuple[ModelConfig, Tokenizer]:
    """Returns model config and tokenizer of a folder whose config file is `tree`. Raises CheckpointError where they do not fit."""
    cfg, tokenizer = _model_config(tree, folder), _tokenizer(folder)
    if isinstance(cfg, EncoderDecoderConfig) and cfg.start_token is None:
        cfg = cfg.replace(start_token=tokenizer.start)
    assert cfg.vocab_size is not None
    require_fit(tokenizer, cfg.vocab_size, str(folder / "tokenizer.json"))
    return cfg, tokenizer


def _model_config(tree: Tree, folder: Path) -> ModelConfig:
    try:
        cfg = model_config(tree.get("model") or {}, f"{folder}: model")
    except ConfigError as error:
        raise CheckpointError(error.sentence) from None
    if cfg.vocab_size is None or cfg.max_seq_len is None:
        raise CheckpointError(f"{folder}: model.vocab_size or model.max_seq_len is null, and a saved model has both. Use another folder.")
    return cfg


def _require_kept(cfg: ModelConfig, cache: CacheForm) -> None:
    """Raises ConfigError where decoding caches nothing of each token: in an encoder, or where all layers have states of fixed size."""
    if isinstance(cfg, EncoderConfig):
        raise ConfigError(f"cache={cache}: an encoder continues nothing, and keeps nothing. Leave it out.")
    parts = [cfg.parts(layer) for layer in range(cfg.n_layers)]
    states = [state for each in parts for state in each.mixer.states(cfg.d_model, each.layer)]
    if not any(isinstance(state, PerToken) for state in states):
        kinds = f"model.pattern=[{','.join(cfg.pattern)}]"
        raise ConfigError(f"cache={cache}: no layer of {kinds} keeps anything of a token, but states of fixed size. Leave it out.")


def _tokenizer(folder: Path) -> Tokenizer:
    try:
        return load_tokenizer(folder)
    except ConfigError as error:
        raise CheckpointError(f"{folder}: {error.sentence}") from None
