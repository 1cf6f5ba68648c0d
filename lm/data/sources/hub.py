"""Sources read through `datasets`: local parquet files, and datasets of the Hugging Face hub."""

from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from lm.data.sources.base import TOOLS, Document, Source, share
from lm.data.sources.fingerprint import Files
from lm.data.sources.recorded import RecordedConfig, RecordedSource
from lm.errors import ConfigError
from lm.schema import Tree

Row = Mapping[str, Any]


class HubConfig(RecordedConfig):
    """A dataset of the Hugging Face hub, read through `datasets`."""

    kind: Literal["hub"] = "hub"
    name: str
    """Dataset name, such as HuggingFaceFW/fineweb-edu."""
    config: str | None = None
    """Configuration name. null: the only one."""
    revision: str | None = None
    """Commit or tag. null: the newest."""
    split: str = "train"
    """Split to train on."""
    val_split: str | None = None
    """Split to validate on. null: a hash split of the documents by val_frac."""
    val_frac: float = Field(0.001, gt=0, lt=1)
    """Part of the documents held out where val_split is null."""
    max_documents: int | None = Field(None, gt=0)
    """Stop after this many documents. null: all."""

    def open(self, cache: Path) -> Source:
        return HubSource(self, _local_files(Path(self.name), cache))


class HubSource(RecordedSource):
    """The rows of a hub dataset, streamed. Without a revision the cache keeps the revision that was newest when it was first read."""

    def __init__(self, cfg: HubConfig, hashed: Files | None = None) -> None:
        """hashed: the files of a local folder, which `datasets` reads like a dataset of the hub."""
        super().__init__(cfg, cfg.identity(), hashed, by_hash=cfg.val_split is None)
        self._cfg = cfg
        self._part = 1, 1

    def _pass(self) -> Iterator[Document]:
        self._begin()
        if self._cfg.val_split is not None and self._part[0] == 1:
            yield from self._documents_of(self._rows(self._cfg.val_split), "val")
        yield from self._documents_of(self._rows(self._cfg.split), self._cfg.val_frac if self._cfg.val_split is None else "train")

    def select(self, part: int, parts: int) -> None:
        super().select(part, parts)
        self._part = part, parts

    def looked_at(self) -> str:
        return f"{self._cfg.name} of the hub"

    def _rows(self, name: str) -> Iterator[tuple[str, Row]]:
        """Yields the rows of a split, each with its place."""
        cfg = self._cfg
        options = {"path": cfg.name, "name": cfg.config, "revision": cfg.revision, "split": name}
        where, remedy = f"data.name: {cfg.name}, split {name}", "Check data.name, data.config, data.split and the network"
        part, parts = self._part if name == cfg.split else (1, 1)
        first, end = 0, cfg.max_documents
        if end is not None:  # of all parts together
            first, end, part, parts = (part - 1) * end // parts, part * end // parts, 1, 1
        rows = _rows(options, where, remedy, self._column, part, parts)
        for number, row in enumerate(islice(rows, first, end), first + 1):
            self._position += sum(len(value) for value in row.values() if isinstance(value, str))
            yield f"{cfg.name} split {name} row {number}", row


def read_parquet(path: Path, column: str | None) -> Iterator[Row]:
    """Yields the rows of a local parquet file.  column: as in `_rows`."""
    options = {"path": "parquet", "data_files": str(path.absolute()), "split": "train"}
    return _rows(options, str(path), "Fix the file or leave it out", column)


def _rows(options: Tree, where: str, remedy: str, column: str | None, part: int = 1, parts: int = 1) -> Iterator[Row]:
    """Yields the rows that `datasets` reads with these options, or part `part` of 1..parts of them.  column: the only one to make Python's
    values of, where there is such a column."""
    few = 0
    try:
        import datasets

        datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # errors are reported here, once
        found = _saved(options) if is_saved(Path(options["path"])) else datasets.load_dataset(**options, streaming=True)
        if column in (found.column_names or ()):  # None where only the rows tell
            found = found.select_columns([column])
        if found.num_shards < parts:
            few = found.num_shards
        else:
            named = _named(found.features or {})
            yield from (named(_without_filled(row)) for row in (found.shard(parts, part - 1, contiguous=True) if parts > 1 else found))
    except ImportError as error:  # as of a pyarrow that is newer than numpy
        fault = " ".join(str(error).split())[:300]
        raise ConfigError(f"{where}: a package that reads it is missing or does not fit ({fault}). Install what it asks for.") from None
    except Exception as error:  # pyarrow, fsspec and the hub's client each raise their own
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"{where}: cannot be read ({reason[:300]}). {remedy}.") from None
    if few:
        share(range(few), part, parts, "file")  # raises


def _named(features: Mapping[str, Any]) -> Callable[[dict[str, Any]], Row]:
    """Returns what puts into a row the names of labels that `datasets` has as numbers; of -1, a text without a label, null."""
    import datasets

    each = {key: getattr(kind, "feature", kind) for key, kind in features.items()}  # of a list that of its elements
    names = {key: dict(enumerate(kind.names)) for key, kind in each.items() if isinstance(kind, datasets.ClassLabel)}

    def named(value: Any, of: Mapping[int, str]) -> Any:
        return [of.get(one) for one in value] if isinstance(value, list) else of.get(value)

    return lambda row: {**row, **{key: named(row[key], of) for key, of in names.items()}} if names else row


def _without_filled(value: Any, within: bool = False) -> Any:
    """Returns a row without the nulls in its tools and tool calls: Arrow's rows have the same keys, and so the keys of every other tool.
    within: the value is a part of these."""
    if isinstance(value, Mapping):
        kept = ((key, each) for key, each in value.items() if not (within and each is None))
        return {key: _without_filled(each, within or key in (TOOLS, "tool_calls")) for key, each in kept}
    return [_without_filled(each, within) for each in value] if isinstance(value, list) else value


def is_saved(folder: Path) -> bool:
    """Whether `save_to_disk` of `datasets` wrote this folder, of a single dataset or of several splits."""
    return (folder / "dataset_dict.json").is_file() or ((folder / "state.json").is_file() and (folder / "dataset_info.json").is_file())


def _saved(options: Tree) -> Any:
    """Returns the rows of a folder that `save_to_disk` wrote: of the split of this name, or of a single dataset, which data.split may also
    call train. From datasets 5.0 on `load_dataset` reads such splits too; before, it takes state.json for their rows."""
    import datasets

    found, split = datasets.load_from_disk(options["path"]), options["split"]
    if isinstance(found, datasets.DatasetDict):
        if split not in found:
            raise ValueError(f"save_to_disk wrote there the splits {', '.join(found)}")
        found = found[split]
    elif split not in ("train", str(found.split)):
        raise ValueError("the folder is one dataset that save_to_disk wrote, and has no other splits")
    return found.to_iterable_dataset(num_shards=max(1, min(len(found), len(found.cache_files))))


def _local_files(folder: Path, cache: Path) -> Files | None:
    """Returns the files in a folder, without hidden ones; None where there is no such folder."""
    if not folder.is_dir():
        return None
    paths = (path for path in sorted(folder.rglob("*")) if not any(name.startswith(".") for name in path.relative_to(folder).parts))
    return Files([path for path in paths if path.is_file()], cache, folder)
