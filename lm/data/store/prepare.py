"""From a data config to token stores, through a cache that is keyed by everything that decides the tokens."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import Literal

from lm.data.config import DataConfig, SourceConfig
from lm.data.records.base import text_passages
from lm.data.sources.base import SPLITS, Source, Split
from lm.data.sources.fingerprint import short_hash
from lm.data.store.cache import Log, cache_root, code_version
from lm.data.store.contamination import Contamination
from lm.data.store.finished import complete_tokens, finish_tokens
from lm.data.store.sample import training_texts
from lm.data.store.shards import TokenStore, read_index
from lm.data.store.shared import Checked, is_json, shared_once
from lm.data.store.tokenise import tokenise
from lm.data.tokenizer.config import TokenizerConfig
from lm.data.tokenizer.templates import for_tools
from lm.data.tokenizer.tokenizer import Tokenizer, load_tokenizer
from lm.errors import ConfigError, LmError
from lm.progress import progress
from lm.schema import Tree
from lm.units import counted, sized

_FEW = 100  # up to so many documents the held-out part may be far from val_frac
_MUCH = 0.5  # shared part of the validation text to warn of; Python's standard library shares a fifth with next to no copies
_HASH = "hash"  # file beside a trained tokenizer with its hash


@dataclass(frozen=True)
class Part:
    """One tokenised source.  index: content of index.json."""

    folder: Path
    stores: dict[Split, TokenStore]
    index: Tree


@dataclass(frozen=True)
class Prepared:
    """Tokens ready to train on: a single source has the name '', those of a mixture have their own names.

    fingerprint: hash of the tokens and their packing, which a resumed run compares.  files: SHA-256 by name, for `changed_files`.
    zlib_bits_per_byte: of level 9 on (the first 64 MB of) the validation text.
    """

    tokenizer: Tokenizer
    parts: dict[str, Part]
    fingerprint: str
    zlib_bits_per_byte: float
    files: dict[str, str]

    @property
    def train(self) -> TokenStore:
        """The training split of the only source."""
        [part] = self.parts.values()
        return part.stores["train"]

    @property
    def val(self) -> TokenStore:
        """The validation split of the only source."""
        [part] = self.parts.values()
        return part.stores["val"]

    def beginnings(self, names: Collection[str], n: int, n_tokens: int) -> list[str]:
        """Returns the beginnings of the first n held-out documents of each of these sources, as texts of at most n_tokens tokens."""
        found = []
        for store in (part.stores["val"] for name, part in self.parts.items() if name in names):
            for begin, end in pairwise([*store.starts[: n + 1].tolist(), store.n_tokens][: n + 1]):
                ids = store.read(begin, min(end, begin + n_tokens)).tolist()
                found.append(self.tokenizer.decode(ids).rstrip("\ufffd"))  # a character that was cut
        return [text for text in found if text]

    def n_tokens(self, split: Split) -> int:
        """Returns the number of tokens of a split, over all sources."""
        return sum(part.stores[split].n_tokens for part in self.parts.values())


def prepare(
    data: DataConfig,
    tokenizer: TokenizerConfig | Tokenizer,
    *,
    log: Log,
    once: Log | None = None,
    specials: Sequence[str] = (),
    seed: int = 0,
) -> Prepared:
    """Returns the tokens of a data config; what is not in the cache yet is read, and tokenizer and tokens are made.

    log: told of what there is.  once: of how tokens are made, which is told but once; None: `log` is.
    specials: further special tokens for a tokenizer made here.  seed: decides which blocks of cached tokens are checked.
    """
    cache = cache_root(data.cache_dir, log)
    configs = {name: cfg.replace(test_frac=data.test_frac) for name, cfg in data.parts().items()}
    sources = {name: cfg.open(cache) for name, cfg in configs.items()}
    tokenizer = find_tokenizer(data, tokenizer, sources, cache, log, specials)
    if tokenizer.eos is None and any(cfg.records is None for cfg in configs.values()):
        log("tokenizer: no token of it is known to end a document (tokenizer.eos), so that no end of a text is learned")
    parts = {}
    for name, cfg in configs.items():
        folder = token_folder(cfg, sources[name], tokenizer, cache)

        def build(half: Path, cfg: SourceConfig = cfg, source: Source = sources[name], tokenizer: Tokenizer = tokenizer) -> None:
            build_tokens(cfg, source, tokenizer, half, once or log)

        shared_once(folder, build, once or log, data.remote, resume=True)
        parts[name] = _opened(folder, n_ids(cfg, tokenizer), data.verify, seed)
        for remark in sources[name].remarks:
            log(remark)
        _report(f"{name} " if name else "", parts[name].index, sources[name].held_out(), log)
        _contamination(parts[name].index).require(data.max_contamination)
    return _prepared(data, tokenizer, parts)


def find_tokenizer(
    data: DataConfig, given: TokenizerConfig | Tokenizer, sources: Mapping[str, Source], cache: Path, log: Log, specials: Sequence[str]
) -> Tokenizer:
    """Returns the given tokenizer, or one trained on the training splits and cached; sets the chat template of the data's chats."""
    asked = list(dict.fromkeys(name for cfg in data.parts().values() if cfg.records is not None for name in cfg.records.specials()))
    if isinstance(given, Tokenizer):
        tokenizer = given
    else:
        extra = [*specials, *asked]
        tokenizer = _trained(data, given, extra, sources, cache, log) if given.n_chars() else given.build(extra=extra)
        if given.n_chars() and tokenizer.vocab_size < (wanted := given.size(extra) or 0):
            log(f"tokenizer: {tokenizer.vocab_size:,} tokens, fewer than the {wanted:,} asked for: the text has no more")
    if missing := [name for name in asked if tokenizer.special([name]) is None]:
        raise ConfigError(
            f"data.record.template: it writes {missing[0]}, which is no special token of the tokenizer, so no answer would end. Leave it"
            f" out, or train with tokenizer.specials=[{','.join(asked)}], which adds them."
        )
    if (template := data.chat_template(tokenizer)) is not None:
        from lm.data.tokenizer.around import never_ends  # brings jinja2, which texts need not wait for

        tokenizer.chat_template = template
        if never_ends(template, tokenizer):
            log("the chat template writes no special token behind an answer, so no end of it is learned. Write {{ eos_token }} there")
    return tokenizer


def token_folder(data: SourceConfig, source: Source, tokenizer: Tokenizer, cache: Path) -> Path:
    """Returns the cache folder of this source's tokens, existing or not."""
    template = data.records.chat_template(tokenizer) if data.records is not None else None
    reading, tools = _reading(code_version(data, source, data.records), source), for_tools(template, tokenizer.templates)
    return cache / "tokens" / short_hash([reading, tokenizer.hash, template, tools, data.test_frac])


def build_tokens(data: SourceConfig, source: Source, tokenizer: Tokenizer, folder: Path, log: Log, whole: bool = True) -> None:
    """Tokenises a source into a folder.  whole: the source is not one of several parts, so that every split must have documents."""
    if whole and (index := complete_tokens(folder)) is not None:
        log("Going on after the tokens, all of which an earlier process has made.")
        finish_tokens(folder, index)
        return
    passages = text_passages if data.records is None else data.records.passages
    found = tokenise(source, passages(source.divided(data.test_frac), tokenizer), tokenizer, folder, log, keep=not whole)
    if whole:
        require_documents(found["documents"], source.looked_at(), source.skipped, data.test_frac)
    del found["documents"]
    finish_tokens(folder, {**found, "tokenizer": tokenizer.hash, "files": source.files}, whole)


def _reading(code: str, source: Source) -> list[object]:
    return [code, source.identity, source.files]


def _trained(
    data: DataConfig, cfg: TokenizerConfig, specials: Sequence[str], sources: Mapping[str, Source], cache: Path, log: Log
) -> Tokenizer:
    sizes = [source.total for source in sources.values()]
    total = None if None in sizes else sum(filter(None, sizes))

    def build(half: Path) -> None:
        with progress("Training a tokenizer" + (f" of {size:,} tokens" if (size := cfg.size()) else ""), total) as done:
            texts = chain(*(training_texts(source, done, cfg.n_chars() // len(sources)) for source in sources.values()))
            cfg.build(texts, specials).save(half)
        (half / _HASH).write_text(load_tokenizer(half).hash)  # of the file as read back, since it rounds a unigram model's scores

    code = code_version(cfg, *data.parts().values(), *sources.values(), data.records)
    reading = [_reading(code, source) for source in sources.values()]
    key = short_hash([reading[0] if len(reading) == 1 else reading, cfg.tree(), *specials])
    folder = shared_once(cache / "tokenizers" / key, build, log, data.remote, _TOKENIZER)
    tokenizer = load_tokenizer(folder)
    if not (folder / _HASH).is_file() or (folder / _HASH).read_text() != tokenizer.hash:
        raise ConfigError(f"{folder}/tokenizer.json: it is not the one that was trained here. Delete {folder}, and it is trained anew.")
    return tokenizer


def _fits(copy: Path) -> bool:
    """Whether a hash file has the hash of the tokenizer beside it."""
    try:
        return copy.read_bytes() == load_tokenizer(copy.parent).hash.encode()
    except LmError:
        return False


_TOKENIZER: Checked = {"tokenizer.json": is_json, "tokenizer_config.json": is_json, _HASH: _fits}


def require_documents(documents: Mapping[str, int], looked_at: str, n_skipped: int, test_frac: float) -> None:
    """Raises ConfigError where a split has no documents."""
    skipped = f" ({counted(n_skipped, 'record')} left out, broken, or with a blank text, answer or label)" if n_skipped else ""
    if not documents.get("train"):
        n_held = documents.get("val", 0) + documents.get("test", 0)
        held = f", and {n_held:,} held out" if n_held else ""
        raise ConfigError(
            f"data: 0 documents for training in {looked_at}{skipped}{held}. Give files with more text, or lower data.val_frac."
        )
    if not documents.get("val"):
        test = f" and {documents['test']} for the test (data.test_frac={test_frac:g})" if documents.get("test") else ""
        remedy = f"{'Lower data.test_frac, raise' if test else 'Raise'} data.val_frac"
        if documents["train"] == 1 and not test:  # on whichever side it is, the other has none
            remedy = "Give more documents, give this one as the only file, a .txt, whose end is held out"
        raise ConfigError(
            f"data: 0 documents for validation in {looked_at}{skipped}, and {documents['train']} for training{test}."
            f" {remedy}, or name held-out data."
        )
    if test_frac and not documents.get("test"):
        raise ConfigError(
            f"data.test_frac={test_frac:g}: 0 documents for the test in {looked_at}, and {documents['val']} for validation."
            " Raise data.test_frac or data.val_frac."
        )


def n_ids(data: SourceConfig, tokenizer: Tokenizer) -> int:
    """Returns the number that all ids of this source's tokens are below."""
    return tokenizer.vocab_size if data.records is None else data.records.n_ids(tokenizer)


def _opened(folder: Path, below: int, how: Literal["sample", "full"], seed: int) -> Part:
    stores = {split: TokenStore(folder, split) for split in SPLITS}
    for store in stores.values():
        if how == "full":
            store.verify(below)
        else:
            store.sample(below, seed)
    return Part(folder, stores, read_index(folder))


def _prepared(data: DataConfig, tokenizer: Tokenizer, parts: dict[str, Part]) -> Prepared:
    hashes = [sha for part in parts.values() for sha in (store.sha256 for store in part.stores.values())]
    fingerprint = short_hash([*hashes, tokenizer.hash, data.seq_len, data.mask_documents, *filter(None, [data.packing])])
    indices = {name: part.index for name, part in parts.items()}
    files = {f"{name}/{file}" if name else file: sha for name, index in indices.items() for file, sha in index["files"].items()}
    sizes = [index["zlib"] for index in data.judged(indices).values()]
    bits = 8 * sum(packed for _, packed in sizes) / max(1, sum(plain for plain, _ in sizes))
    return Prepared(tokenizer, parts, fingerprint, bits, files)


def _contamination(index: Tree) -> Contamination:
    return Contamination(**index["contamination"])


def _report(name: str, index: Tree, held_out: str | None, log: Log) -> None:
    """Logs what was read.  held_out: in words, which part of the documents is held out."""
    forms, unread = (index[key] for key in ("forms", "unread"))
    for said in [f"read as {' and as '.join(forms)}"] * bool(forms) + [f"not read: {', '.join(unread)}"] * bool(unread):
        log(f"{name}records: {said}")
    for split in SPLITS:
        found = index["splits"][split]
        if split == "test" and not found["n_documents"]:
            continue
        size, tokens = found["n_bytes"], found["n_tokens"]
        width = "" if found.get("n_parts") else f" of {size / max(1, tokens):.2f} bytes"  # of records, only what is learned counts as text
        log(f"{name}{split}: {counted(found['n_documents'], 'document')}, {sized(size)}, {counted(tokens, 'token')}{width}")
    if not index["lossless"]:
        log("tokenizer: decoding does not give the text back, so bits per byte do not compare with those of other tokenizers.")
    if index["skipped"]:
        log(f"{name}records: {counted(index['skipped'], 'record')} left out, broken, or with a blank text, answer or label")
    if held_out is not None and sum(index["splits"][split]["n_documents"] for split in SPLITS) <= _FEW:
        sizes = [index["splits"][split]["n_bytes"] for split in SPLITS]
        share = 1 - sizes[0] / max(1, sum(sizes))
        log(f"{name}val: held out is {held_out}: {share:.0%} of the text here. Change that, or name data.val_files.")
    if (found := _contamination(index)).documents:
        which = f"{counted(found.documents, 'training document')} {'is' if found.documents == 1 else 'are'}"
        log(f"data: {which} in validation too; val_loss is too good by that.")
    if found.shared_frac > _MUCH:
        shared = f"{found.shared_frac:.0%} of its runs of {found.n} tokens are in training too"
        log(f"{name}val: {shared}, so that val_loss tells more of what was seen than of what is new.")
