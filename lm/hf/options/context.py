"""How long the rows are that an imported model is for."""

from lm.errors import ConfigError
from lm.nn.position.rope import RopeConfig
from lm.nn.position.scaling import LongRopeScaling
from lm.nn.transformer import AnyModelConfig


def changes_at(cfg: AnyModelConfig) -> int | None:
    """The length up to which transformers takes longrope's short list, where our model takes the long one for its longer context."""
    longrope = _longrope(cfg)
    return longrope.original_len if longrope is not None and (cfg.max_seq_len or 0) > longrope.original_len else None


def shortened(cfg: AnyModelConfig, max_seq_len: int) -> AnyModelConfig:
    """The same model for rows of so many tokens at most. Raises ConfigError where its weights are of another length, or it is shorter."""
    if cfg.position.kind == "learned" or max_seq_len > (cfg.max_seq_len or 0):
        why = "has a learned position for each" if cfg.position.kind == "learned" else "is for no more"
        raise ConfigError(f"max_seq_len={max_seq_len}: the model {why} of its {cfg.max_seq_len} tokens. Leave it out.")
    longrope = _longrope(cfg)
    if longrope is None or not isinstance(cfg.position, RopeConfig):
        return cfg.replace(max_seq_len=max_seq_len)
    scaling = longrope.replace(factor=longrope.factor or (cfg.max_seq_len or 0) / longrope.original_len)  # the amplitude stays
    return cfg.replace(max_seq_len=max_seq_len, position=cfg.position.replace(scaling=scaling))


def _longrope(cfg: AnyModelConfig) -> LongRopeScaling | None:
    scaling = cfg.position.scaling if isinstance(cfg.position, RopeConfig) else None
    return scaling if isinstance(scaling, LongRopeScaling) else None
