"""Text to token ids and back, over the `tokenizers` library. Special tokens are never read out of text."""

import hashlib
import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from lm.data.tokenizer.bytelevel import is_plain, token_bytes, unknown_token
from lm.data.tokenizer.panics import encoded, sound
from lm.data.tokenizer.specials import make_special
from lm.data.tokenizer.templates import DEFAULT, read_templates, written
from lm.errors import CheckpointError, ConfigError
from lm.schema import MOST, Tree
from lm.spelling import did_you_mean
from lm.storage.reading import parse_json, read_bytes, read_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RawTokenizer

T = TypeVar("T")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")  # set explicitly, else the library warns at every later fork

MOST_CHARS = 1 << 18  # most characters of a document that are encoded at once
_LAST_CUT = re.compile(r".*[^\W_](?=[ \t\n])", re.DOTALL)


class Specials(NamedTuple):
    """The texts of the special tokens."""

    bos: str | None
    eos: str | None
    pad: str | None


_MASKS = ("<|mask|>", "[MASK]", "<mask>")
_USUAL = {
    "bos": ("<|bos|>", "<s>", "<bos>", "<|begin_of_text|>", "<|startoftext|>", "[BOS]", "[CLS]"),
    "eos": ("<|eos|>", "</s>", "<eos>", "<|end_of_text|>", "<|endoftext|>", "[EOS]", "[SEP]"),
    "pad": ("<|pad|>", "<pad>", "[PAD]", "<|padding|>", "<|finetune_right_pad_id|>"),
}


class Tokenizer:
    """A `tokenizers` tokenizer that knows its bos, eos and pad. Text that spells a special token is encoded as text."""

    def __init__(self, raw: "RawTokenizer", specials: Specials, adds_bos: bool = True) -> None:
        """adds_bos: documents begin with bos, if bos and eos are different tokens."""
        raw.no_truncation()
        raw.no_padding()
        make_special(raw, filter(None, specials))
        raw.encode_special_tokens = True
        self._raw = raw
        self.specials = specials
        self.bos = raw.token_to_id(specials.bos) if specials.bos else None
        self.eos = raw.token_to_id(specials.eos) if specials.eos else None
        pad = raw.token_to_id(specials.pad) if specials.pad else None
        self.pad: int = next((i for i in (pad, self.eos, self.bos) if i is not None), 0)
        self.vocab_size: int = max(raw.get_vocab(with_added_tokens=True).values()) + 1
        self.adds_bos, state = adds_bos, self.content()
        decides = [state, specials] if adds_bos else [state, specials, adds_bos]
        self.hash: str = hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()
        self.added_names = {i: token.content for i, token in raw.get_added_tokens_decoder().items()}
        self.special_names = {i: token.content for i, token in raw.get_added_tokens_decoder().items() if token.special}
        self._ids = {name: i for i, name in self.special_names.items()}
        self.mask = self.special(_MASKS)
        self.unknown = unknown_token(state)
        self._bytes = token_bytes(state)
        self._plain = self._bytes is not None and is_plain(state, self._bytes)
        self._leaks = self._leaking()
        self._begins = self.bos is not None and self.as_saved("a")[0][:1] == [self.bos]  # by itself, as OPT's, whose bos is eos
        self.templates: dict[str, str] = {}  # chat templates by name
        self.further_ends: list[int] = []  # further tokens that end answers, beside eos and the chat template's

    def content(self) -> Tree:
        """Returns the content of tokenizer.json."""
        return dict(json.loads(self._raw.to_str()))

    @property
    def chat_template(self) -> str | None:
        """The source text of the default chat template; another one that is set takes the place of all."""
        return self.templates.get(DEFAULT)

    @chat_template.setter
    def chat_template(self, source: str | None) -> None:
        if source != self.chat_template:
            self.templates = {} if source is None else {DEFAULT: source}

    def special(self, names: Sequence[str]) -> int | None:
        """Returns the id of the first of these names that is a special token here; None where none is."""
        return next((self._ids[name] for name in names if name in self._ids), None)

    def special_ids(self) -> NDArray[np.int64]:
        """The ids of all special tokens, ascending."""
        return np.array(sorted(self.special_names), np.int64)

    def split_specials(self, text: str) -> list[int | str]:
        """Returns the text with every special token that it spells replaced by its id: for text of templates, never for text of users."""
        parts = self._spelled.split(text) if self._spelled is not None else [text]
        return [self._ids.get(part, part) for part in parts if part]

    @cached_property
    def _spelled(self) -> re.Pattern[str] | None:
        """Finds the names of special tokens, the longest first; None where there is none."""
        names = "|".join(re.escape(name) for name in sorted(self._ids, key=len, reverse=True))
        return re.compile(f"({names})") if names else None

    def encode(self, text: str) -> list[int]:
        """Returns the ids of the text alone, without bos or eos."""
        return list(self.encode_arrays([text])[0].tolist())

    def encode_arrays(self, texts: list[str]) -> list[NDArray[np.uint32]]:
        """Returns the ids of each text alone. Runs on all cores, except for plain bytes, which need no encoding."""
        if self._plain:
            return [np.frombuffer(text.encode(), np.uint8).astype(np.uint32) for text in texts]
        parts = [self._leaks.split(text) if self._leaks else [text] for text in texts]
        found = iter(encoded(self._raw.encode_batch_fast, [part for split in parts for part in split], add_special_tokens=False))
        arrays = [[np.array(next(found).ids, np.uint32) for _ in split] for split in parts]
        return [found[0] if len(found) == 1 else np.concatenate(found) for found in arrays]

    def places(self, text: str, specials: bool) -> NDArray[np.int64]:
        """Returns (3, n): id, start and end of each token of the text alone, as character offsets; together these cover the text.

        specials: special tokens that the text spells are read as such, as the library does by default.
        """
        found, at = [np.empty((3, 0), np.int64)], 0
        for part in self._leaks.split(text) if self._leaks and not specials else [text]:
            encoding = encoded((self._reader if specials else self._raw).encode, part, add_special_tokens=False)
            starts, ends = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
            ends = np.maximum.accumulate(ends)
            starts = np.minimum(starts, np.concatenate([[0], ends[:-1]]))  # what lies between two tokens is the later one's
            found.append(np.stack([np.array(encoding.ids, np.int64), starts + at, ends + at]))
            at += len(part)
        return np.concatenate(found, 1)

    @cached_property
    def _reader(self) -> "RawTokenizer":
        """The same tokenizer, but with special tokens read out of text."""
        raw = type(self._raw).from_str(self._raw.to_str())
        raw.encode_special_tokens = False
        return raw

    def as_saved(self, text: str, second: str | None = None) -> tuple[list[int], list[int]]:
        """Returns the ids of a text, or two, with the special tokens that tokenizer.json itself adds, and of which text each is: 0 or 1."""
        found = self._raw.encode(text, second, add_special_tokens=True)
        return list(found.ids), list(found.type_ids)

    def document(self, text: str) -> list[int]:
        """Returns [bos] text [eos], as far as the tokenizer has them; only eos where bos is eos, unless tokenizer.json itself adds bos."""
        return [*self.prefix, *self.encode(text), *self.suffix]

    @property
    def prefix(self) -> list[int]:
        """The ids that start a document."""
        return [self.bos] if self.adds_bos and self.bos is not None and (self.bos != self.eos or self._begins) else []

    @property
    def start(self) -> int:
        """The default start token of an encoder-decoder's decoder: bos, or else pad."""
        return self.bos if self.bos is not None else self.pad

    @property
    def suffix(self) -> list[int]:
        """The ids that end a document."""
        return [self.eos] if self.eos is not None else []

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of the ids, a list or a tensor. Specials and ids outside the vocabulary give no text, broken UTF-8 U+FFFD."""
        if self._bytes is not None:
            return b"".join(self._bytes.get(i, b"") for i in map(int, ids)).decode("utf-8", "replace")
        return str(sound(self._raw.decode, [i for i in map(int, ids) if 0 <= i < self.vocab_size], skip_special_tokens=True))

    def token_bytes(self) -> NDArray[np.int32] | None:
        """Returns (v,) number of UTF-8 bytes of each token, 0 for specials; None where tokens are not bytes (SentencePiece, WordPiece)."""
        if self._bytes is None:
            return None
        return np.array([len(self._bytes.get(i, b"")) for i in range(self.vocab_size)], np.int32)

    def token_text(self, token: int) -> bytes | None:
        """Returns the bytes of one token; None where tokens are not bytes."""
        return None if self._bytes is None else self._bytes.get(token, b"")

    def save(self, folder: Path) -> None:
        """Writes tokenizer.json and tokenizer_config.json, as `transformers` reads them, into a folder that is not complete yet."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tokenizer.json").write_text(self._raw.to_str(pretty=True), encoding="utf-8")
        names: Tree = {f"{key}_token": name for key, name in self.specials._asdict().items()}
        names |= {"mask_token": self.special_names[self.mask]} if self.mask is not None else {}
        names |= {"chat_template": written(self.templates)} if self.templates else {}
        names |= {"further_ends": self.further_ends} if self.further_ends else {}
        names |= {} if self.adds_bos else {"add_bos_token": False}
        config: Tree = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **names}
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

    def _leaking(self) -> re.Pattern[str] | None:
        """Returns a pattern of places where text must be cut before encoding; None: nowhere. Some models (Unigram, ignore_merges) have
        special tokens also as ordinary pieces, and would else find these in text."""
        names = [name for name, i in self._ids.items() if len(name) > 1 and i in self._raw.encode(name, add_special_tokens=False).ids]
        return re.compile("|".join(f"(?<={re.escape(name[0])})(?={re.escape(name[1:])})" for name in names)) if names else None


def split_text(chunks: Iterable[str]) -> Iterator[str]:
    """Yields a document in parts of at most MOST_CHARS characters, whose ids, concatenated, are those of the whole.

    Cuts are after a letter or digit and before a blank, where all usual pre-tokenizers split. Two exceptions: a part without such a place
    is cut anywhere, and tokenizers that put a space before each text (SentencePiece style) put one before each part.
    """
    rest = ""
    for chunk in chunks:
        for at in range(0, len(chunk), MOST_CHARS):
            rest += chunk[at : at + MOST_CHARS]
            while len(rest) > MOST_CHARS:
                found = _LAST_CUT.match(rest, 0, MOST_CHARS)
                end = found.end() if found else MOST_CHARS
                yield rest[:end]
                rest = rest[end:]
    if rest:
        yield rest


def load_tokenizer(path: Path, foreign: bool = False) -> Tokenizer:
    """Loads a tokenizer from a model folder or a tokenizer.json. tokenizer_config.json beside it names the special tokens, and says whether
    documents begin with bos; for names that it lacks, the usual ones are looked for.

    foreign: another program made it. If tokenizer_config.json then does not say whether documents begin with bos, tokenizer.json decides.
    """
    file = path / "tokenizer.json" if path.is_dir() else path
    config = file.with_name("tokenizer_config.json")
    named = _read(lambda path: read_json(path, foreign=True), config) if os.path.lexists(config) else {}
    names = {key: _content(named.get(f"own_{key}", named.get(f"{key}_token"))) for key in _USUAL}  # own_pad: of an export of ours
    raw, specials = _load(file, Specials(**names), [key for key in _USUAL if f"{key}_token" not in named])
    adds_bos = named.get("add_bos_token")
    if not isinstance(adds_bos, bool):
        adds_bos = not foreign or specials.bos in raw.encode("a", add_special_tokens=True).tokens[:1]
    tokenizer = Tokenizer(raw, specials, adds_bos)
    tokenizer.templates = _read(lambda folder: read_templates(folder, named.get("chat_template")), file.parent)
    if isinstance(further := named.get("further_ends"), list):
        tokenizer.further_ends = [i for i in further if isinstance(i, int) and i in tokenizer.added_names]
    return tokenizer


def read_tokenizer(file: Path, named: Specials) -> Tokenizer:
    """Reads a tokenizer.json alone; special tokens that are not named are looked for by their usual names."""
    return Tokenizer(*_load(file, named, _USUAL))


def _require_ids(data: bytes, file: Path) -> None:
    """Raises ConfigError for ids of billions: the library, which needs no added tokens, would ask for as much memory and abort."""
    with suppress(ValueError):  # of which the library says what is wrong
        tree = parse_json(data, foreign=True)
        model, added = (tree.get(key) if isinstance(tree, dict) else None for key in ("model", "added_tokens"))
        vocab = model.get("vocab") if isinstance(model, dict) else None
        ids = [*vocab.values()] if isinstance(vocab, dict) else []
        ids += [token.get("id") for token in added if isinstance(token, dict)] if isinstance(added, list) else []
        if (highest := max((number for number in ids if isinstance(number, int)), default=0)) >= MOST:
            raise ConfigError(f"tokenizer: {file} has the id {highest:,}, and ids are below {MOST:,}. Save it again.")


def _load(file: Path, named: Specials, open_to_guess: Collection[str]) -> tuple["RawTokenizer", Specials]:
    """Returns raw tokenizer and special tokens.  open_to_guess: the specials that are looked for by usual names where none is given."""
    if not os.path.lexists(file):
        made = ", which transformers writes: AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        raise ConfigError(f"tokenizer: {file} does not exist. Give the path of a tokenizer.json{made}.")
    from tokenizers import Tokenizer as RawTokenizer

    data = _read(read_bytes, file)
    _require_ids(data, file)
    try:
        raw = sound(RawTokenizer.from_buffer, data)
    except Exception as error:  # the library raises no other
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"tokenizer: {file} is not a tokenizer.json of the tokenizers library ({reason}). Save it again.") from None
    vocab = raw.get_vocab(with_added_tokens=True)
    for key, name in named._asdict().items():
        if name is not None and name not in vocab:
            added = [token.content for token in raw.get_added_tokens_decoder().values()]
            raise ConfigError(f"tokenizer.{key}: {name[:80]!r} is not in the vocabulary of {file}. {did_you_mean(name[:80], added)}")
    usual = {key: next((name for name in _USUAL[key] if name in vocab), None) for key in open_to_guess}
    return raw, Specials(**{key: name or usual.get(key) for key, name in named._asdict().items()})


def _read(how: Callable[[Path], T], path: Path) -> T:
    """Reads a file that a user may have named, so that errors are raised as ConfigError."""
    try:
        return how(path)
    except CheckpointError as error:
        raise ConfigError(f"tokenizer: {error}") from None


def _content(token: Any) -> str | None:
    """Returns the text of a special token of tokenizer_config.json, where it is a text or an object."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None
