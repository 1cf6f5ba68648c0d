"""Keys of config.json that are no options of ours: without effect on the logits, of another family, or not known."""

from fnmatch import fnmatchcase
from typing import Any

from lm.errors import ConfigError
from lm.hf.io.differing import alike
from lm.hf.io.family import ACTIVATIONS, Family, families, resolved
from lm.hf.io.generation import SAMPLING
from lm.hf.options.rope import ROPE_KEYS
from lm.hf.options.windows import FULL
from lm.nn.model_config import ModelConfig
from lm.schema import Tree

_NO_EFFECT: dict[str, tuple[str, ...]] = {
    "the file": ("architectures", "model_type", "transformers_version", "torch_dtype", "dtype", "auto_map", "name_or_path", "_*"),
    "tokens": ("*_token_id", "*_token_ids", "prefix", "tokenizer_class"),
    "training": ("initializer_*", "init_std", "*dropout*", "*pdrop", "gradient_checkpointing", "pretraining_tp", "*loss_coef",
                 "*_aux_loss*"),
    "outputs": ("use_cache", "output_*", "return_dict", "chunk_size_feed_forward", "is_decoder", "is_encoder_decoder"),
    "decoding": ("cache_implementation", *SAMPLING),
    "heads of other tasks": ("id2label", "label2id", "problem_type", "task_specific_params", "finetuning_task"),
}  # fmt: skip
"""Patterns of keys, by what they are about."""

_FACTORS = ("embedding_multiplier", "residual_multiplier", "logits_scaling")  # 1 changes nothing
_OF_TOKENIZERS = ("model_max_length",)  # also in config.json of Command R, where nothing is read of it; Kimi Linear has its context there


def unheard(where: str, hf: Tree, family: Family, cfg: ModelConfig) -> list[str]:
    """Returns, as a note for the user, the keys that are not used.  hf: config.json, from which the family read cfg.

    Raises ConfigError for a value that differs in the config.json that the family writes of this cfg, and for a key that means
    something in another family alone.
    """
    again, mine, options = family.hf(cfg), family.known_keys(), resolved(cfg)
    unused: list[str] = []
    if not hf.get("is_causal", True) and cfg.kind != "encoder" and cfg.attending():
        raise ConfigError(
            f"{where}: is_causal={hf['is_causal']!r} lets each token of a decoder see those behind it too, and in lm none does."
            " Import another model."
        )
    for key, value in hf.items():
        if without_effect(key):
            continue
        if key in again or key in mine:
            if (
                key in again
                and key not in (*ROPE_KEYS, *family.respelled, *family.idle)
                and value is not None
                and not alike(_meant(value), _meant(again[key]))
            ):
                raise ConfigError(
                    f"{where}: {key}={value!r} has no place in lm's {family.name}, which has {again[key]!r}."
                    " Import another model, or open an issue."
                )
        elif others := [other for other in families().values() if key in other.keys_with_effect() and key not in _OF_TOKENIZERS]:
            if not any(_neutral(key, value, hf, other, options) for other in others):
                known = min(others, key=lambda other: other.rare)
                raise ConfigError(
                    f"{where}: {key}={value!r} means something in {known.name}, and model_type={family.name} does not know it."
                    " Correct model_type, or remove the key where it changed nothing."
                )
        elif value:
            unused.append(f"{key}={value!r}")
    return [f"config.json: not used: {', '.join(unused)[:300]}"] if unused else []


def without_effect(key: str) -> bool:
    """Returns whether a key has no effect on the logits of a trained model, whatever its value."""
    return any(fnmatchcase(key, pattern) for patterns in _NO_EFFECT.values() for pattern in patterns)


def _neutral(key: str, value: Any, hf: Tree, other: Family, options: Tree) -> bool:
    """Returns whether the other family would do nothing by this value, or what this model does anyway."""
    if not value or (key in _FACTORS and value == 1) or (key == "layer_types" and set(value) == {FULL}):
        return True
    if key in ("sliding_window", "max_window_layers") and hf.get("use_sliding_window") is False:
        return True
    return any(theirs == key and ours in options and alike(options[ours], value) for ours, theirs, _ in other.places())


def _meant(value: Any) -> Any:
    """Returns the value, but for a name of an activation ours, so that two names of one activation are equal."""
    return ACTIVATIONS.get(value, value) if isinstance(value, str) else value
