"""Everything that is read through `datasets`: local csv and parquet files, and datasets of the Hugging Face hub."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from lm.config import Tree
from lm.data.config import HubConfig
from lm.data.sources.base import Document, Source, Split
from lm.data.sources.records import BadRecord, RecordReader
from lm.errors import ConfigError

Row = Mapping[str, Any]


class HubSource(Source):
    """The rows of a hub dataset, streamed. Without a revision the cache keeps what was newest when it was first read."""

    def __init__(self, cfg: HubConfig) -> None:
        identity: Tree = cfg.model_dump(
            mode="json", include={"kind", "name", "config", "revision", "split", "val_split", "val_frac", "field", "max_documents"}
        )
        identity |= {"record": cfg.record.tree()} if cfg.record is not None else {}
        identity |= {"on_bad_record": "skip"} if cfg.on_bad_record == "skip" else {}
        super().__init__({}, identity, None)
        self._cfg = cfg
        self._read_bytes = 0
        self._part = 1, 1

    def documents(self) -> Iterator[Document]:
        self._read_bytes = self.skipped = 0
        if self._cfg.val_split is not None and self._part[0] == 1:
            yield from self._split(self._cfg.val_split, "val")
        yield from self._split(self._cfg.split, self._cfg.val_frac if self._cfg.val_split is None else "train")

    def select(self, part: int, parts: int) -> None:
        self._part = part, parts

    def position(self) -> int:
        return self._read_bytes

    def looked_at(self) -> str:
        return f"{self._cfg.name} of the hub"

    def _split(self, name: str, split: Split | float) -> Iterator[Document]:
        cfg = self._cfg

        part, parts = self._part if name == cfg.split else (1, 1)

        def load(load_dataset: Callable[..., Any]) -> Iterable[Row]:
            found = load_dataset(cfg.name, cfg.config, revision=cfg.revision, split=name, streaming=True)
            rows: Iterable[Row] = found if parts == 1 else found.shard(parts, part - 1, contiguous=True)
            return rows

        reader = RecordReader(cfg.field, cfg.record)
        rows = _rows(load, f"data.name: {cfg.name}, split {name}", "Check data.name, data.config, data.split and the network")
        for number, row in enumerate(islice(rows, cfg.max_documents), 1):
            try:
                found = reader.document(row, f"{cfg.name} split {name} row {number}", split)
            except BadRecord:
                if cfg.on_bad_record == "error":
                    raise
                self.skipped += 1
                continue
            if found:
                self._read_bytes += sum(len(value) for value in row.values() if isinstance(value, str))
                yield found


def read_csv(path: Path, columns: Iterable[str]) -> Iterator[Row]:
    """The rows of a local file, packed or not, all of these columns as they are written: 'NA', '' and '12' are strings."""
    as_written = dict.fromkeys(columns, str)

    def load(load_dataset: Callable[..., Iterable[Row]]) -> Iterable[Row]:
        return load_dataset("csv", data_files=str(path.absolute()), split="train", streaming=True, converters=as_written)

    return _rows(load, str(path), "Fix the file or leave it out")


def read_parquet(path: Path) -> Iterator[Row]:
    """The rows of a local file."""

    def load(load_dataset: Callable[..., Iterable[Row]]) -> Iterable[Row]:
        return load_dataset("parquet", data_files=str(path.absolute()), split="train", streaming=True)

    return _rows(load, str(path), "Fix the file or leave it out")


def _rows(load: Callable[[Callable[..., Iterable[Row]]], Iterable[Row]], where: str, remedy: str) -> Iterator[Row]:
    try:
        import datasets

        yield from load(datasets.load_dataset)
    except Exception as error:  # pandas, pyarrow, fsspec and the hub's client each raise their own
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"{where}: cannot be read ({reason[:300]}). {remedy}.") from None
