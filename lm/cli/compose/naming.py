"""Default names of run folders: from the overrides of a single run, or from those that differ between the jobs of a sweep."""

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache

from pydantic.fields import FieldInfo

from lm import plugins
from lm.cli.compose import catalog
from lm.cli.compose.overrides import Given, parse
from lm.cli.compose.quoting import as_text, path_of, plain
from lm.cli.listing import known
from lm.errors import ConfigError
from lm.schema import Config, find_field, variants
from lm.spelling import below

_LONGEST = 120  # of RunConfig.name
_LONGEST_VARIANT = 60  # of StudyConfig.variants
_PLACE = ("run.name", "run.dir")

WHERE_AND_HOW = (
    *("run", "logger", "checkpoint", "resume", "launch", "traceback", "check", "plan", "budget"),
    *("trainer.device", "trainer.log_every", "trainer.profile", "data.cache_dir", "data.remote", "data.workers", "data.verify"),
)
"""Keys that change where and how a run goes, not what comes out: two runs that differ in these only are one run."""


def run_name(given: Sequence[Given]) -> str:
    """Returns a run's name from recipe and sorted overrides, e.g. 'pretrain-tiny+ffn-geglu+seed-1'; cut, with a hash, where too long.

    It has no '=' and no ',', so that `init_from=runs/...` needs no quotes.
    """
    base, covered = _base(given)
    return _name(base, [item for item in given if item.key not in covered and not below(item.key, WHERE_AND_HOW)])


def job_names(jobs: Sequence[Sequence[str]]) -> list[str]:
    """Returns the overrides of each job that differ between a sweep's jobs, with short keys: 'lr=0.003 seed=1'; of a single job all."""
    varied = differing(jobs) or range(len(jobs[0]))
    return [" ".join(f"{short(path_of(job[at]))}={job[at].partition('=')[2]}" for at in varied) for job in jobs]


def told_apart(jobs: Sequence[Sequence[str]]) -> list[list[str]]:
    """Returns the overrides of each job of a sweep with a folder of its own, named by what varies: after the recipe's name, or inside the
    folder that run.name names.

    A job that parse() refuses stays as it is; composing it raises the error later.
    """
    varied = differing(jobs)
    found = [_placed(job, varied) for job in jobs]
    places = [placed[-len(_PLACE) :] for placed in found]
    alike = [places.count(place) > 1 for place in places]
    return [_placed(job, varied, mark=_digest(*job)) if like else placed for job, placed, like in zip(jobs, found, alike, strict=True)]


def variant_names(jobs: Sequence[Sequence[str]]) -> dict[str, list[str]]:
    """Returns the overrides that vary, by a name for each job: the value where one key varies, keys with values where several do.

    Raises ConfigError for an override that parse() refuses.
    """
    varied = differing(jobs)
    told = [parse([job[at] for at in varied]) for job in jobs]
    names = [(_plain(_text(items[0].value)) if len(items) == 1 else _name("", items)).lstrip("_") for items in told]
    marks = [_digest(*job) if not name or names.count(name) > 1 else "" for job, name in zip(jobs, names, strict=True)]
    named = [cut(name, _LONGEST_VARIANT, mark) for name, mark in zip(names, marks, strict=True)]
    return {name: [job[at] for at in varied] for name, job in zip(named, jobs, strict=True)}


def name_of(overrides: Sequence[str]) -> str:
    """Returns a name made of overrides, keys with values. Raises ConfigError for an override that parse() refuses."""
    return cut(_name("", parse(overrides)), _LONGEST_VARIANT)


def cut(name: str, longest: int, mark: str = "") -> str:
    """Returns a name of at most `longest` letters, still unique: it ends in the mark, if given, or in its hash, if it is too long."""
    mark = mark or (_digest(name) if len(name) > longest else "")
    return f"{name[: longest - 9]}-{mark}".strip("-") if mark else name


def _placed(job: Sequence[str], varied: Sequence[int], mark: str = "") -> list[str]:
    """Returns one job as `told_apart` does.  varied: places of the overrides that differ between jobs.  mark: as in `_name`."""
    try:
        given = parse(job)
    except ConfigError:
        return list(job)
    run = {item.key: as_text(_field(item.key), item.raw, item.value) for item in given if item.key in _PLACE}
    told = [item for item in parse([job[at] for at in varied]) if item.key not in run]  # logger=[a,b] is several of `given`
    if not told:
        return list(job)
    folder, base = run.get("run.dir", _field("run.dir").default), ""
    if "run.name" in run:
        folder = f"{folder}/{run['run.name']}"
    else:
        base = _base([item for item in given if item not in told])[0]
    rest = [item.text for item in given if item.key not in run]
    return [*rest, f"run.dir={plain(folder)}", f"run.name={plain(_name(base, told, mark))}"]


def short(path: str) -> str:
    """Returns the shortest ending of a dotted path that no other key has: 'lr' of optim.lr, 'norm.eps' of model.norm.eps."""
    keys, parts = known_keys(), path.split(".")
    if path not in keys:
        return path
    endings = [".".join(parts[-n:]) for n in range(1, len(parts))]
    return next((end for end in endings if sum(f".{other}".endswith(f".{end}") for other in keys) == 1), path)


def known_keys() -> frozenset[str]:
    """Returns the dotted paths of all keys of all kinds, and of their sections."""
    return _keys_of(known.root(), tuple(plugins.loaded()))


@cache
def _keys_of(cls: type[Config], loaded: tuple[plugins.Plugin, ...]) -> frozenset[str]:
    """Returns the dotted paths of all keys of a class.  loaded: not read, but other plugins give the same class other kinds."""
    return frozenset(_paths(cls, "", ()))


def _field(path: str) -> FieldInfo:
    _, found = find_field(known.root(), {}, path.split("."))
    assert found is not None
    return found


def _paths(cls: type[Config], prefix: str, above: tuple[type[Config], ...]) -> Iterator[str]:
    """Yields the keys of a class and of all kinds below it.  above: classes that hold it, in which it would not end."""
    for key, field in cls.model_fields.items():
        yield f"{prefix}{key}"
        for inner in set(variants(field.annotation).values()) - {*above}:
            yield from _paths(inner, f"{prefix}{key}.", (*above, inner))


def _base(given: Sequence[Given]) -> tuple[str, set[str]]:
    """Returns a name's first part, and the keys that it covers: the chosen recipe, or else the default recipe with the chosen `model` in
    place of tiny."""
    chosen = {item.key: str(item.value) for item in given if item.is_group}
    default = next(str(entry["recipes"]) for entry in catalog.defaults("", "train") if "recipes" in entry)
    of_model = default.replace("tiny", chosen.get("model", "tiny"))
    if "recipes" in chosen or (of_model != default and of_model in catalog.groups()["recipes"]):
        return chosen.get("recipes", default), {"recipes"}
    return of_model, {"recipes", "model"}


def differing(jobs: Sequence[Sequence[str]]) -> list[int]:
    """Returns the positions of the overrides that are not the same in all jobs."""
    return [at for at, texts in enumerate(zip(*jobs, strict=True)) if len(set(texts)) > 1]


def _name(base: str, items: Iterable[Given], mark: str = "") -> str:
    """Returns a name of base and overrides.  mark: makes it unique where it would equal another, as letters are left out or it is cut."""
    parts = {short(path_of(item.text)): _text(item.value) for item in items}
    name = "+".join(filter(None, map(_plain, [base, *(f"{key}-{parts[key]}" for key in sorted(parts))])))
    return cut(name, _LONGEST, mark)


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode(errors="surrogateescape")).hexdigest()[:8]


def _text(value: object) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value).replace("e+", "e")  # 1e+30 and 1e-30 are two names


def _plain(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.")
