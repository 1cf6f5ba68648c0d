"""From a data config to token stores, through a cache that is keyed by everything that decides the tokens."""

import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lm.config import Tree
from lm.data.cache import Log, build_once, cache_root, code_version, short_hash
from lm.data.config import BPEConfig, Chatted, DataConfig, StdlibConfig, StdlibDocstringsConfig, TextConfig, TokenizerConfig
from lm.data.pieces import MakePieces, Piece, piece_maker
from lm.data.progress import progress
from lm.data.shards import ShardWriter, TokenStore, read_index, write_index
from lm.data.source import Document, Source, Split
from lm.data.tokenizer import Tokenizer, build_tokenizer, load_tokenizer, pieces
from lm.errors import ConfigError

_SPLITS: tuple[Split, ...] = ("train", "val")
_BATCH_CHARS = 1 << 22
_BPE_CHARS = 1 << 28
_ZLIB_BYTES = 1 << 26


@dataclass(frozen=True)
class Prepared:
    """Tokens ready to train on.

    fingerprint: of the tokens and how they are packed; what a resumed run compares.  files: SHA-256 by name, for `changed_files`.
    zlib_bits_per_byte: level 9 over (the first 64 MB of) the validation text.  overlap: training documents that are in validation too.
    """

    tokenizer: Tokenizer
    train: TokenStore
    val: TokenStore
    fingerprint: str
    zlib_bits_per_byte: float
    files: dict[str, str]
    overlap: int
    skipped: int


def prepare(data: DataConfig, tokenizer: TokenizerConfig | Tokenizer, *, log: Log, specials: Sequence[str] = ()) -> Prepared:
    """Reads, trains and tokenises what is not in the cache yet. A BPE sees the first 256 million characters of the training split.

    specials: special tokens that a tokenizer made here gets beside its own.
    """
    cache = cache_root(data.cache_dir, log)
    source = _open(data, cache)
    reading: list[object] = [code_version(), source.identity, source.files]
    if isinstance(data.records, Chatted):
        specials = [*specials, *data.records.specials()]
    if not isinstance(tokenizer, Tokenizer):
        tokenizer = _tokenizer(tokenizer, specials, source, reading, cache, log)
    make_pieces, template = piece_maker(data, tokenizer)
    if template is not None:
        tokenizer.chat_template = template
    folder = cache / "tokens" / short_hash([reading, tokenizer.hash, *([template] if template is not None else [])])
    build_once(folder, lambda half: _tokenise(source, tokenizer, make_pieces, half, log), log)
    index = read_index(folder)
    train, val = TokenStore.open(folder, "train"), TokenStore.open(folder, "val")
    for store in (train, val):
        store.verify(tokenizer.vocab_size)
    _report(index, log)
    packing = [] if data.packing is None else [data.packing]
    fingerprint = short_hash([train.sha256, val.sha256, tokenizer.hash, data.seq_len, data.mask_documents, *packing])
    numbers = index["zlib_bits_per_byte"], index["files"], index["overlap"], index["skipped"]
    return Prepared(tokenizer, train, val, fingerprint, *numbers)


def changed_files(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Which files have changed between two `Prepared.files`, as 'notes.txt has changed', '... is new', '... is gone'."""
    found = [f"{name} is gone" if name not in now else f"{name} has changed" for name in before if now.get(name) != before[name]]
    return found + [f"{name} is new" for name in now if name not in before]


def _open(data: DataConfig, cache: Path) -> Source:
    if isinstance(data, StdlibConfig):
        from lm.data.corpus import StdlibSource

        return StdlibSource(data, cache)
    if isinstance(data, StdlibDocstringsConfig):
        from lm.data.docstrings import StdlibDocstringsSource

        return StdlibDocstringsSource(data, cache)
    if isinstance(data, TextConfig):
        from lm.data.files import TextSource

        return TextSource(data, cache)
    from lm.data.hub import HubSource

    return HubSource(data)


def _tokenizer(cfg: TokenizerConfig, specials: Sequence[str], source: Source, reading: list[object], cache: Path, log: Log) -> Tokenizer:
    if not isinstance(cfg, BPEConfig):
        return build_tokenizer(cfg, (), specials)

    def build(half: Path) -> None:
        with progress(f"Training a BPE of {cfg.vocab_size:,} tokens", source.total, log) as done:
            build_tokenizer(cfg, _training_texts(source, done), specials).save(half)

    return load_tokenizer(build_once(cache / "tokenizers" / short_hash([reading, cfg.tree(), *specials]), build, log))


def _training_texts(source: Source, done: Callable[[int], None]) -> Iterator[str]:
    left = _BPE_CHARS
    for document in source.documents():
        for text in pieces(document.chunks) if document.split == "train" else ():
            done(source.position())
            yield text
            left -= len(text)
            if left <= 0:
                return


def _tokenise(source: Source, tokenizer: Tokenizer, make_pieces: MakePieces, folder: Path, log: Log) -> None:
    stores = _Stores(folder, tokenizer)
    with progress("Tokenising", source.total, log) as done:
        for batch in _batches(piece for document in stores.counted(source.documents()) for piece in make_pieces(document)):
            stores.add(batch)
            done(source.position())
    if not stores.documents["train"]:
        skipped = f" ({source.skipped} broken records were skipped)" if source.skipped else ""
        raise ConfigError(f"data: 0 documents for training in {source.looked_at()}{skipped}. Give files with text in them.")
    if not stores.documents["val"]:
        raise ConfigError(
            f"data: 0 documents for validation in {source.looked_at()}, and {stores.documents['train']} for training."
            " Raise data.val_frac, or name held-out data."
        )
    write_index(folder, {**stores.close(), "tokenizer": tokenizer.hash, "files": source.files, "skipped": source.skipped})


def _batches(parts: Iterable[Piece]) -> Iterator[list[Piece]]:
    """As many pieces as are worth encoding at once; the number of characters bounds the memory."""
    batch: list[Piece] = []
    chars = 0
    for part in parts:
        batch.append(part)
        chars += len(part.text)
        if chars > _BATCH_CHARS:
            yield batch
            batch, chars = [], 0
    yield batch


class _Stores:
    """Both splits while they are written, and what is counted on the way."""

    def __init__(self, folder: Path, tokenizer: Tokenizer) -> None:
        self.documents: Counter[Split] = Counter()
        self._tokenizer = tokenizer
        self._writers = {split: ShardWriter(folder, split, tokenizer.vocab_size) for split in _SPLITS}
        self._val_keys: set[bytes] = set()
        self._overlap = 0
        self._lossless: bool | None = None
        self._zlib = zlib.compressobj(9)
        self._zlib_in = self._zlib_out = 0

    def counted(self, documents: Iterable[Document]) -> Iterator[Document]:
        """The documents, counted as they pass."""
        for document in documents:
            self.documents[document.split] += 1
            if document.split == "val":
                self._val_keys.add(document.key)
            else:
                self._overlap += document.key in self._val_keys
            yield document

    def add(self, batch: list[Piece]) -> None:
        """Encodes and writes."""
        for piece, ids in zip(batch, self._tokenizer.encode_arrays([piece.text for piece in batch]), strict=True):
            writer, data = self._writers[piece.split], piece.text.encode() if piece.counted else b""
            if self._lossless is None:
                self._lossless = self._tokenizer.decode(ids.tolist()) == piece.text
            if piece.starts:
                writer.start_document()
            if piece.part is not None:
                writer.start_part(piece.part)
            writer.add(np.concatenate([np.array(piece.head, np.uint32), ids, np.array(piece.tail, np.uint32)]), len(data))
            if piece.split == "val" and self._zlib_in < _ZLIB_BYTES:
                self._zlib_in += len(data)
                self._zlib_out += len(self._zlib.compress(data))

    def close(self) -> Tree:
        """Their part of index.json."""
        splits = {split: writer.close() for split, writer in self._writers.items()}
        zlib_bytes = self._zlib_out + len(self._zlib.flush())
        return {
            "splits": splits,
            "overlap": self._overlap,
            "lossless": self._lossless,
            "zlib_bits_per_byte": 8 * zlib_bytes / self._zlib_in,
        }


def _report(index: Tree, log: Log) -> None:
    for split in _SPLITS:
        found = index["splits"][split]
        size, tokens = found["n_bytes"], found["n_tokens"]
        log(f"{split}: {found['n_documents']:,} documents, {size / 1e6:,.1f} MB, {tokens:,} tokens of {size / tokens:.2f} bytes")
    if not index["lossless"]:
        log("tokenizer: decoding does not give the text back, so bits per byte do not compare with those of other tokenizers.")
    if index["skipped"]:
        log(f"data.on_bad_record=skip: {index['skipped']:,} broken records were left out.")
    if index["overlap"]:
        log(f"data: {index['overlap']:,} training documents are in validation too; val_loss is too good by that.")
