"""The context length of a model, here and in transformers."""

from lm.errors import ConfigError
from lm.nn.model_config import ModelConfig
from lm.nn.position.base import PositionConfig
from lm.nn.position.rope import RopeConfig
from lm.nn.position.scaling import DynamicScaling, LongRopeScaling, ScalingConfig


def _scaling(position: PositionConfig) -> ScalingConfig | None:
    return position.scaling if isinstance(position, RopeConfig) else None


def changes_at(cfg: ModelConfig) -> int | None:
    """Returns the length up to which transformers takes longrope's short list, where our model takes the long one for its longer rows."""
    scaling = _scaling(cfg.position)
    return scaling.original_len if isinstance(scaling, LongRopeScaling) and (cfg.max_seq_len or 0) > scaling.original_len else None


def stretched_beyond(cfg: ModelConfig) -> int | None:
    """Returns the row length beyond which transformers stretches each row by its own length (dynamic NTK), and our model none."""
    return cfg.max_seq_len if isinstance(_scaling(cfg.position), DynamicScaling) else None


def settled(cfg: ModelConfig) -> ModelConfig:
    """Returns the config with dynamic NTK as another base: transformers would stretch rows beyond max_seq_len, our model all of its own."""
    return cfg.replace(position=with_plain_base(cfg.position, cfg.attention.rotary_width(cfg.d_model), cfg.max_seq_len or 0))


def with_plain_base(position: PositionConfig, rotary: int, max_len: int) -> PositionConfig:
    """Returns the position with the same angles for rows of max_len, but without a dynamic scaling that transformers begins there only."""
    if not isinstance(position, RopeConfig) or not isinstance(position.scaling, DynamicScaling) or max_len == position.scaling.original_len:
        return position
    return position.replace(theta=position.scaling.theta(position.rotary_dim(rotary), position.theta, max_len), scaling=None)


def with_amplitude(position: PositionConfig, max_len: int) -> PositionConfig:
    """Returns the position with longrope's amplitude for rows of max_len written out, so that a model of shorter rows has it too."""
    scaling = _scaling(position)
    if not isinstance(scaling, LongRopeScaling):
        return position
    return position.replace(scaling=scaling.replace(factor=scaling.factor or max_len / scaling.original_len))


def shortened(cfg: ModelConfig, max_seq_len: int) -> ModelConfig:
    """Returns the config with a shorter context. Raises ConfigError where the model has a learned position for each place, or a context
    that is shorter already."""
    length = cfg.max_seq_len or 0
    if cfg.position.by_place or max_seq_len > length:
        why = "has a learned position for each" if cfg.position.by_place else "is for no more"
        raise ConfigError(f"max_seq_len={max_seq_len}: the model {why} of its {length} tokens. Leave it out.")
    return cfg.replace(max_seq_len=max_seq_len, position=with_amplitude(cfg.position, length))
