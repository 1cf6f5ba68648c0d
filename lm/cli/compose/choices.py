"""Finds the option of each group: Hydra composes them from the defaults lists in the catalog."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_search_path import ConfigSearchPath, SearchPathQuery
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lm import collector
from lm.cli.compose import catalog
from lm.errors import ConfigError
from lm.spelling import did_you_mean

Choices = dict[str, str | None]


def choices_of(chosen: Mapping[str, str | None]) -> Choices:
    """Returns the option of every group.  chosen: options from the command line; Hydra is needed only for those with defaults lists."""
    plain = {group: option for group, option in chosen.items() if option is None or catalog.chooses_nothing(group, option)}
    found = _hydra_choices(catalog.root(), catalog.own(), tuple((group, o) for group, o in chosen.items() if group not in plain))
    if plain.keys() <= found.keys():
        return found | plain
    return dict(_hydra_choices(catalog.root(), catalog.own(), tuple(chosen.items())))  # of a group that no defaults list has


@cache
def _hydra_choices(root: Path, own: Path | None, chosen: tuple[tuple[str, str | None], ...]) -> Choices:
    overrides = [f"{group}={'null' if o is None else o}" for group, o in chosen]
    try:
        for plugin in (_Catalog, _ThroughCatalog):
            Plugins.instance().register(plugin)
        with collector.paused(), initialize_config_dir(config_dir=str(root / "conf"), version_base="1.3"):
            made = hydra_compose("train", overrides, return_hydra_config=True)
    except RecursionError as error:
        raise ConfigError(f"{own or 'conf'}: the defaults of {dict(chosen)} lead back to themselves. Mend the file.") from error
    except (HydraException, OmegaConfBaseException, ValueError, TypeError, AttributeError) as error:  # Hydra's, for odd defaults
        said = " ".join(str(error).split()).partition(" Config search path")[0]
        raise ConfigError(_to_mend(said) or f"{own or 'conf'}: the groups do not compose ({said[:300]}). Mend the files.") from error
    return {str(group): option for group, option in made.hydra.runtime.choices.items() if not str(group).startswith("hydra/")}


def _to_mend(said: str) -> str | None:
    """Returns the sentence on the line that Hydra's message is about, in a file of the user's own; None where it is not found."""
    groups = catalog.groups()
    for group, option in catalog.own_options():
        entries = [entry for entry in catalog.defaults(group, option) if isinstance(entry, dict)]
        for key, value in [pair for entry in entries for pair in entry.items()]:
            bare = str(key).removeprefix("override ").strip()
            slot = bare.lstrip("/") if bare.startswith("/") or group in catalog.GLOBAL else f"{group}/{bare}"
            file = catalog.shown(catalog.file_of(group, option))
            if slot in groups and f"Could not find '{slot}/{value}'" in said:
                return f"{file}: defaults: {slot}: '{value}' is not an option. {did_you_mean(str(value), groups[slot])}"
            written = f"override /{slot}" if group in catalog.GLOBAL else f"override {bare}"
            if slot in groups and written != key and (f"values for {slot}." in said or f"In '{group}/{option}'" in said):
                return f"{file}: defaults: '{key}: {value}' does not replace the option of {slot}. Write '- {written}: {value}'."
    return None


class _Catalog(ConfigSource):
    """Gives Hydra only the defaults list of each option; the values are merged in lm itself."""

    @staticmethod
    def scheme() -> str:
        return "lm"

    def available(self) -> bool:
        return True

    def load_config(self, config_path: str) -> ConfigResult:
        group, _, option = _named(config_path)
        package = "_global_" if group in catalog.GLOBAL else None
        content = OmegaConf.create({"defaults": catalog.defaults(group, option)})
        return ConfigResult(self.provider, self.full_path(), content, {"package": package})

    def is_group(self, config_path: str) -> bool:
        below = f"{config_path.rstrip('/')}/"
        return any(f"{group}/{option}".startswith(below) for group, options in catalog.groups().items() for option in options)

    def is_config(self, config_path: str) -> bool:
        group, _, option = _named(config_path)
        return option in catalog.groups().get(group, ()) or (group, option) == ("", "train")

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        return [] if results_filter is ObjectType.GROUP else list(catalog.groups().get(config_path, ()))


class _ThroughCatalog(SearchPathPlugin):
    """Makes Hydra look into the catalog instead of lm's conf/; other programs' search paths stay as they are."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        conf = str(catalog.root() / "conf")
        if any(entry.path == conf for entry in search_path.get_path()):
            search_path.prepend("lm", "lm://", SearchPathQuery(path=conf))


def _named(path: str) -> tuple[str, str, str]:
    """Returns 'model/ffn/geglu' as 'model/ffn', '/', 'geglu'; the option of a recipe contains its folder."""
    return path.partition("/") if path.startswith("recipes/") else path.rpartition("/")
