"""The ranks of a run agree on what they train. Each machine has a command and files of its own; others would train on unnoticed."""

from lm.errors import ConfigError
from lm.schema import Tree, flatten
from lm.spelling import below
from lm.training.launch.config import LaunchConfig
from lm.training.launch.ranks import Ranks

_OF_A_MACHINE = ("data.cache_dir", "strategy.nvme", "launch.rendezvous")


def require_started(ranks: Ranks, launch: LaunchConfig) -> None:
    """Raises ConfigError where another number of ranks was started than the config says, by torchrun or by machines that differ in it."""
    if ranks.world != launch.world:
        raise ConfigError(
            f"launch: {ranks.world} ranks were started, and the config has nodes={launch.nodes} x devices={launch.devices}."
            " Give each machine the same launch.nodes and launch.devices, which are also torchrun's numbers."
        )


def require_same_config(ranks: Ranks, config: Tree) -> None:
    """Raises ConfigError on all ranks where the config of one differs from rank 0's in more than the folders of its machine."""
    require_same(ranks, {key: value for key, value in flatten(config).items() if not below(key, _OF_A_MACHINE)})


def require_same(ranks: Ranks, values: Tree) -> None:
    """Raises ConfigError on all ranks, naming the first value by name in which a rank differs from rank 0."""
    if ranks.world == 1:
        return
    first = ranks.from_first(lambda: values)
    other = [name for name in first | values if first.get(name) != values.get(name)][:1]
    told = ranks.each("".join(f"{name}={values.get(name)} on rank {ranks.rank}, but {first.get(name)}" for name in other))
    for said in filter(None, told):
        raise ConfigError(f"launch: {said} on rank 0. Start the same command, with the same lm and the same files, on each machine.")
