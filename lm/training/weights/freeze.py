"""Frozen weights, which no step changes: frozen means requires_grad=False, and only that."""

from torch import nn

from lm.adapters.adapter import hold_bases
from lm.errors import ConfigError
from lm.nn.model_config import ModelConfig
from lm.nn.transformer import LM, build_model
from lm.spelling import means
from lm.training.config import TrainSetup
from lm.training.optim.traits import unnamed


def on_meta(cfg: TrainSetup, model: ModelConfig) -> LM:
    """Returns the model as it will be trained, on the meta device: with its adapter on a held base, and with weights frozen.

    model: the config's model with its sizes filled in.
    """
    built = build_model(model, device="meta")
    if cfg.adapter is not None:
        cfg.adapter.apply(built)
        hold_bases(built)
    built.runs_mtp = cfg.objective.trains_mtp
    freeze_untrained(built, cfg)
    return built


def freeze_untrained(model: LM, cfg: TrainSetup) -> set[str]:
    """Freezes the weights that no step moves, and returns their names: those of trainer.freeze, and what training does not run, blocks of
    mtp (`runs_mtp`) and the head, whose gradient some engines take for 0, so that they would decay."""
    idle = ["mtp"] if model.mtp and not model.runs_mtp else []
    if not cfg.objective.trains_head:
        idle += [name for name, _ in model.named_parameters() if name.startswith("head.")]
    return freeze(model, [*cfg.trainer.freeze, *idle])


def freeze(model: LM, patterns: list[str]) -> set[str]:
    """Freezes all weights that match a pattern such as `blocks.0.*` or `ffn`; returns their names, with routers' balancing biases included.

    Raises ConfigError where a pattern matches nothing, or where no weight would be left to train.
    """
    names, found = [name for name, _ in model.named_parameters()], set[str]()
    for pattern in patterns:
        matched = {name for name in names if means(pattern, name)}
        if not matched:
            raise unnamed("trainer.freeze", "weight", pattern, names, model.cfg)
        found |= matched
    left = [name for name in trainable(model) if name not in found]
    if not left:
        raise ConfigError(f"trainer.freeze={','.join(patterns)}: all weights are frozen, and one at least must learn. Freeze fewer.")
    for name, p in model.named_parameters():
        if name in found:
            p.requires_grad_(False)
    return found


def trainable(model: LM) -> dict[str, nn.Parameter]:
    """Returns the weights that the optimizer trains, by name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}
