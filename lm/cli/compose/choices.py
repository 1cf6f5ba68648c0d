"""Which option each group has: what Hydra composes."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from lm.cli import collector
from lm.cli.compose import catalog
from lm.cli.compose.quoting import quoted
from lm.errors import ConfigError

Choices = dict[str, str | None]


def choices_of(chosen: Mapping[str, str | None]) -> Choices:
    """The option of every group, with these chosen on the command line. Hydra is asked of those that choose others."""
    plain = {group: option for group, option in chosen.items() if option is not None and catalog.chooses_nothing(group, option)}
    found = _hydra_choices(catalog.root(), catalog.own(), tuple((group, o) for group, o in chosen.items() if group not in plain))
    if plain.keys() <= found.keys():
        return found | plain
    return dict(_hydra_choices(catalog.root(), catalog.own(), tuple(chosen.items())))


@cache
def _hydra_choices(root: Path, own: Path | None, chosen: tuple[tuple[str, str | None], ...]) -> Choices:
    """A tenth of a second each."""
    further = ",".join(quoted(f"file://{path}") for path in (root, own) if path is not None)
    overrides = [f"hydra.searchpath=[{further}]", *(f"{group}={'null' if o is None else o}" for group, o in chosen)]
    for group, kinds in catalog.plugin_kinds().items():
        for kind in kinds:
            ConfigStore.instance().store(group=group, name=kind, node={"kind": kind})
    try:
        with collector.paused(), initialize_config_dir(config_dir=str(root / "conf"), version_base="1.3"):
            made = hydra_compose("train", overrides, return_hydra_config=True)
    except yaml.YAMLError as error:
        raise ConfigError(f"conf: a file is not readable yaml ({' '.join(str(error).split())}). Mend the file.") from error
    except RecursionError as error:
        raise ConfigError(f"{own or 'conf'}: the defaults of {dict(chosen)} lead back to themselves. Mend the file.") from error
    except (HydraException, OmegaConfBaseException, ValueError, TypeError, AttributeError) as error:  # Hydra's, for odd defaults
        raise ConfigError(f"{own or 'conf'}: the groups do not compose ({' '.join(str(error).split())[:300]}). Mend the files.") from error
    return {str(group): option for group, option in made.hydra.runtime.choices.items() if not str(group).startswith("hydra/")}
