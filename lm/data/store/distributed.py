"""Preparing one source on several machines: each makes a part, and one merges the parts into what a single machine would have made."""

from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import numpy as np

from lm.data.config import DataConfig, SourceConfig
from lm.data.sources.base import SPLITS, Source, Split
from lm.data.store.cache import Log, cache_root
from lm.data.store.finished import finish_tokens
from lm.data.store.prepare import build_tokens, find_tokenizer, n_ids, require_documents, token_folder
from lm.data.store.shards import ShardWriter, TokenStore, read_index
from lm.data.store.shared import fetched, shared_once
from lm.data.store.squeezed import Squeezed, kept
from lm.data.tokenizer.config import TokenizerConfig
from lm.data.tokenizer.tokenizer import Tokenizer
from lm.errors import ConfigError
from lm.progress import progress
from lm.schema import Tree


def prepare_part(data: DataConfig, tokenizer: TokenizerConfig, part: int, parts: int, *, log: Log, specials: Sequence[str] = ()) -> Path:
    """Tokenises part `part` of 1..parts into a folder beside that of the whole; returns the folder."""
    folder, cfg, source, found = whole(data, tokenizer, log, specials)
    source.select(part, parts)
    own = part_folder(folder, part, parts)
    return shared_once(own, lambda half: build_tokens(cfg, source, found, half, log, whole=False), log, data.remote, resume=True)


def merge(data: DataConfig, tokenizer: TokenizerConfig, parts: int, *, log: Log, specials: Sequence[str] = ()) -> Path:
    """Merges the parts into the whole and returns its folder; the parts are kept. Raises ConfigError naming missing parts."""
    folder, cfg, _, found = whole(data, tokenizer, log, specials)
    folders = [part_folder(folder, part, parts) for part in range(1, parts + 1)]
    missing = [] if fetched(folder, log, data.remote) else [path.name for path in folders if not fetched(path, log, data.remote)]
    if missing:
        raise ConfigError(
            f"merge={parts}: of {parts} parts {len(missing)} are missing in {folder.parent} ({', '.join(missing[:3])}). Prepare them first."
        )
    return shared_once(folder, lambda half: _join(folders, n_ids(cfg, found), half, data.test_frac), log, data.remote)


def whole(data: DataConfig, given: TokenizerConfig, log: Log, specials: Sequence[str]) -> tuple[Path, SourceConfig, Source, Tokenizer]:
    """Returns the folder of the whole, existing or not, with config, source and tokenizer. Trains the tokenizer where it has to be."""
    sources = data.parts()
    if list(sources) != [""]:
        raise ConfigError("data: a mixture is not prepared in parts. Prepare each of its sources by itself.")
    cfg, cache = sources[""], cache_root(data.cache_dir, log)
    source = cfg.open(cache)
    tokenizer = find_tokenizer(cfg, given, {"": source}, cache, log, specials)
    return token_folder(cfg, source, tokenizer, cache), cfg, source, tokenizer


def part_folder(folder: Path, part: int, parts: int) -> Path:
    """Returns the folder of a part of this whole, existing or not."""
    return folder.with_name(f"{folder.name}.part-{part}-of-{parts}")


def _join(folders: list[Path], below: int, half: Path, test_frac: float) -> None:
    indices = [read_index(folder) for folder in folders]
    documents: dict[str, int] = {split: sum(index["splits"][split]["n_documents"] for index in indices) for split in SPLITS}
    require_documents(documents, f"the {len(folders)} parts", sum(index["skipped"] for index in indices), test_frac)
    total = sum(index["splits"][split]["n_bytes"] for index in indices for split in SPLITS)
    done = 0
    splits: Tree = {}
    with progress("Joining", total) as told:
        for split in SPLITS:
            writer = ShardWriter(half, split, below)
            for folder in folders:
                done += _append(writer, folder, split, below)
                told(done)
            splits[split] = writer.close()
    squeezed = Squeezed()
    for text in chain.from_iterable(map(kept, folders, indices)):
        squeezed.add(text)
    first = {key: value for key, value in indices[0].items() if key != "val_texts"}
    finish_tokens(half, {**first, "splits": splits, **_totals(indices), **squeezed.close()})


def _append(writer: ShardWriter, folder: Path, split: Split, below: int) -> int:
    store = TokenStore(folder, split)
    writer.starts_at(np.asarray(store.starts), np.asarray(store.parts))
    for tokens in store.checked(below):
        writer.add(tokens)
    writer.n_bytes += store.n_bytes
    return store.n_bytes


def _totals(indices: list[Tree]) -> Tree:
    lossless = [index["lossless"] for index in indices if index["lossless"] is not None]
    named = {key: sorted({name for index in indices for name in index[key]}) for key in ("forms", "unread")}
    return {"lossless": all(lossless), "skipped": sum(index["skipped"] for index in indices), **named}
