"""The context length of a model, here and in transformers."""

from lm.errors import ConfigError
from lm.nn.position.rope import RopeConfig
from lm.nn.position.scaling import DynamicScaling
from lm.nn.transformer import ModelConfig


def changes_at(cfg: ModelConfig) -> int | None:
    """Returns the length up to which transformers takes longrope's short list, where our model takes the long one for its longer rows."""
    return cfg.position.changes_at(cfg.max_seq_len or 0)


def stretched_beyond(cfg: ModelConfig) -> int | None:
    """Returns the row length beyond which transformers stretches each row by its own length (dynamic NTK), and our model none."""
    scaling = cfg.position.scaling if isinstance(cfg.position, RopeConfig) else None
    return cfg.max_seq_len if isinstance(scaling, DynamicScaling) else None


def settled(cfg: ModelConfig) -> ModelConfig:
    """Returns the config with dynamic NTK as another base: transformers would stretch rows beyond max_seq_len, our model all of its own."""
    return cfg.replace(position=cfg.position.settled(cfg.attention.rotary_width(cfg.d_model), cfg.max_seq_len or 0))


def shortened(cfg: ModelConfig, max_seq_len: int) -> ModelConfig:
    """Returns the config with a shorter context. Raises ConfigError where the model has a learned position for each place, or a context
    that is shorter already."""
    length = cfg.max_seq_len or 0
    if cfg.position.by_place or max_seq_len > length:
        why = "has a learned position for each" if cfg.position.by_place else "is for no more"
        raise ConfigError(f"max_seq_len={max_seq_len}: the model {why} of its {length} tokens. Leave it out.")
    return cfg.replace(max_seq_len=max_seq_len, position=cfg.position.shortened(length))
