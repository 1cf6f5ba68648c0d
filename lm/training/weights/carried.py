"""The optimizer's state that a run carries on from the checkpoint whose weights it starts with."""

from lm.errors import ConfigError
from lm.nn.model_config import model_config
from lm.nn.transformer import LM
from lm.storage.checkpoint import META, CheckpointReader, checkpoints
from lm.storage.model_folder import resolve_model
from lm.storage.run_folder import RunFolder
from lm.training.config import TrainConfig
from lm.training.state import Saved
from lm.units import shown


def state_reader(cfg: TrainConfig) -> CheckpointReader:
    """Returns a reader of the checkpoint that init_from names."""
    return CheckpointReader(resolve_model(str(cfg.init_from)), verified=True)  # its weights have been read


def require_state(model: LM, cfg: TrainConfig) -> None:
    """Raises ConfigError where init_from has no state that the run's optimizer could go on with.  model: the run's, on the meta device."""
    source = resolve_model(str(cfg.init_from))
    if not (source / META).is_file():
        newest = next(iter(checkpoints(RunFolder(source.parent).checkpoints)), None)
        such = f", such as {newest}" if newest is not None else ""
        raise ConfigError(f"init_optimizer=true: {source} holds weights alone. Give init_from a run's checkpoint{such}.")
    reader = state_reader(cfg)
    before = Saved.of(reader)
    said = f"init_optimizer=true: {source} has"
    there, here = before.config["optim"], cfg.optim.tree()
    for key in ("kind", *cfg.optim.shapes_state):
        if there[key] != here[key]:
            named = "optim" if key == "kind" else f"optim.{key}"
            what = f"the state of {named}={shown(there[key])}, and this run has {named}={shown(here[key])}"
            raise ConfigError(f"{said} {what}. Take the same, or leave it out.")
    if before.adapter is not None:
        raise ConfigError(f"{said} the state of an adapter, which this run merges into the weights. Leave it out.")
    if cfg.objective.runs_parent() and any("ema" in reader.kinds(name) for name in reader.names()):
        what = f"averages of its weights, with which objective={cfg.objective.kind} would compare, and not with those that the state is of"
        raise ConfigError(f"{said} {what}. Leave it out.")
    new = model.cfg.new_in_head(model_config(reader.meta["model"]))  # begins anew, whatever its shape
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    if wrong := [name for name, shape in shapes.items() if name in new or not reader.kinds(name) or reader.shape(name) != shape]:
        raise ConfigError(f"{said} no state for {wrong[0]} as this run has it. Leave it out, or leave out what changes the model.")
