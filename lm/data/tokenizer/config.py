"""All options of `tokenizer`, and how each kind is built. Only building imports the library: composing a config need not wait for it."""

import os
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field, field_validator

from lm.data.tokenizer.bytelevel import ALPHABET
from lm.data.tokenizer.splits import Pattern
from lm.errors import CheckpointError
from lm.schema import MOST, Slot, Tree
from lm.storage.reading import read_json

if TYPE_CHECKING:
    from tokenizers.models import Model
    from tokenizers.trainers import Trainer

    from lm.data.tokenizer.tokenizer import Tokenizer

TEMPLATES: dict[str, tuple[str, ...]] = {
    "plain": (),
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "llama3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "gemma": ("<start_of_turn>", "<end_of_turn>"),
    "alpaca": (),
}
"""Chat templates that have a name, each with the special tokens that it writes beside bos and eos."""


class TokenizerConfig(Slot, group="tokenizer"):
    """How text becomes tokens."""

    @abstractmethod
    def build(self, texts: Iterable[str] = (), extra: Sequence[str] = ()) -> "Tokenizer":
        """Builds the tokenizer.  texts: training texts; only kinds with `n_chars` above 0 read them.

        extra: special tokens beside bos, eos and pad, for tokenizers made here; a tokenizer from a given file has those of its config.
        """

    def n_chars(self) -> int:
        """Returns how many characters of the training split `build` reads; where that is above 0, the tokenizer is kept in the cache."""
        return 0

    def size(self, specials: Sequence[str] = ()) -> int | None:
        """Returns the largest vocabulary size that the tokenizer will have, with the special tokens of an objective; None where that is not
        known before it is built."""
        return None


class FurtherSpecials(TokenizerConfig):
    """Tokenizers with special tokens of a user's choice."""

    specials: list[str] = []
    """Further special tokens. With init_from: those that the parent's tokenizer gets, behind its own, with rows that start as the mean of
    the others; an adapter trains embedding and head with them."""

    @field_validator("specials")
    @classmethod
    def _specials_are_different_texts(cls, specials: list[str]) -> list[str]:
        if twice := [name for number, name in enumerate(specials) if name in specials[:number]]:
            raise ValueError(f"{twice[0]!r} is named twice. Name it once.")
        if byte := next((name for name in specials if name in ALPHABET), None):
            raise ValueError(f"{byte!r} is how the vocabulary writes a byte, which texts would lose to it. Choose a longer name.")
        return specials


class TrainedConfig(FurtherSpecials):
    """Tokenizers trained on the training split, over bytes, so that every text comes back; specials <|bos|>, <|eos|>, <|pad|>."""

    vocab_size: int = Field(4096, ge=260, le=MOST)
    """Size of the vocabulary, with the 256 bytes and the special tokens."""
    pattern: Pattern = "gpt2"
    """How text is cut into words before: as by the tokenizers of these models; own: GPT-4's way, with whole indentations."""
    max_chars: int = Field(1 << 28, gt=0)
    """Characters to train on; of a larger corpus an even sample of its documents, or, of one whose size is not known (data=hub), the
    first."""

    def build(self, texts: Iterable[str] = (), extra: Sequence[str] = ()) -> "Tokenizer":
        from lm.data.tokenizer.train import train_tokenizer

        return train_tokenizer(self, texts, [*extra, *self.specials])

    def n_chars(self) -> int:
        return self.max_chars

    def size(self, specials: Sequence[str] = ()) -> int | None:
        return self.vocab_size

    @abstractmethod
    def untrained(self, shared: Tree) -> tuple["Model", "Trainer"]:
        """Returns a model without a vocabulary, and its trainer.  shared: arguments that every trainer takes."""

    def longest_word(self) -> int | None:
        """Returns the length in bytes to which words are cut before training; None: words are not cut."""
        return None


class BPEConfig(TrainedConfig):
    """Byte-pair encoding: Sennrich et al. 2015, arXiv:1508.07909; over bytes: Radford et al. 2019."""

    kind: Literal["bpe"] = "bpe"

    def untrained(self, shared: Tree) -> tuple["Model", "Trainer"]:
        from tokenizers import models, trainers

        return models.BPE(), trainers.BpeTrainer(**shared)


class UnigramConfig(TrainedConfig):
    """The likeliest cut under a unigram model: Kudo 2018, arXiv:1804.10959; here over bytes."""

    kind: Literal["unigram"] = "unigram"

    def untrained(self, shared: Tree) -> tuple["Model", "Trainer"]:
        from tokenizers import models, trainers

        return models.Unigram(), trainers.UnigramTrainer(**shared)


class WordPieceConfig(TrainedConfig):
    """The longest piece first: Wu et al. 2016, arXiv:1609.08144; here over bytes and without a continuation mark."""

    kind: Literal["wordpiece"] = "wordpiece"

    def untrained(self, shared: Tree) -> tuple["Model", "Trainer"]:
        from tokenizers import models, trainers

        unknown, longest = shared["special_tokens"][-1], self.longest_word()
        model = models.WordPiece(unk_token=unknown, continuing_subword_prefix="", max_input_chars_per_word=longest)
        return model, trainers.WordPieceTrainer(**shared, continuing_subword_prefix="")

    def longest_word(self) -> int:
        """WordPiece takes time quadratic in a word's length, and longer words than its limit would become the unknown token."""
        return 256


class BytesConfig(TokenizerConfig):
    """One token per UTF-8 byte (0-255), then bos 256, eos 257, pad 258."""

    kind: Literal["bytes"] = "bytes"

    def build(self, texts: Iterable[str] = (), extra: Sequence[str] = ()) -> "Tokenizer":
        from lm.data.tokenizer.train import bytes_tokenizer

        return bytes_tokenizer(extra)

    def size(self, specials: Sequence[str] = ()) -> int | None:
        return 259 + len(specials)


class TokenizerFileConfig(FurtherSpecials):
    """A given tokenizer.json of the `tokenizers` library."""

    kind: Literal["file"] = "file"
    path: str
    """Path of the tokenizer.json, its folder, or a run's. Of a model of lm it is the model's, with its special tokens and chat template."""
    bos: str | None = None
    """Text of the begin-of-document token. null: found as eos is."""
    eos: str | None = None
    """Text of the end-of-document token. null: found among the usual names, else by tokenizer_config.json beside the file."""
    pad: str | None = None
    """Text of the padding token. null: found among the usual names, else eos."""
    specials: list[str] = []
    """Further special tokens, which are added where the file lacks them. With init_from the model gets a row for each, which starts as the
    mean of the rows of its tokens."""

    def build(self, texts: Iterable[str] = (), extra: Sequence[str] = ()) -> "Tokenizer":
        from lm.data.tokenizer.fitting import grown
        from lm.data.tokenizer.tokenizer import Specials, load_tokenizer, read_tokenizer
        from lm.storage.manifest import MANIFEST

        file, named = self._file(), Specials(self.bos, self.eos, self.pad)
        of_model = file.name == "tokenizer.json" and (file.parent / MANIFEST).is_file() and not any(named)
        found = load_tokenizer(file) if of_model else read_tokenizer(file, named)
        if not of_model and found.eos is None and any(beside := _named_beside(file, found)):
            found = read_tokenizer(file, Specials(*(own or name for own, name in zip(found.specials, beside, strict=True))))
        return grown(found, self.specials)

    def gave(self, hash: str) -> bool:
        """Returns whether the file is that of a tokenizer with this hash: as `build` reads it, or, for older runs, without
        what the model's folder says."""
        from lm.data.tokenizer.tokenizer import Specials, read_tokenizer

        alone = read_tokenizer(self._file(), Specials(self.bos, self.eos, self.pad))
        return hash in (self.build().hash, alone.hash)

    def _file(self) -> Path:
        path = Path(os.path.expanduser(self.path))
        if not path.is_dir():
            return path
        of_run = path / "model" / "tokenizer.json"
        return of_run if of_run.exists() else path / "tokenizer.json"


def _named_beside(file: Path, found: "Tokenizer") -> list[str | None]:
    """Returns bos, eos and pad as tokenizer_config.json beside the file names them, those that the tokenizer has; else None."""
    config: Tree = {}
    with suppress(CheckpointError):
        config = read_json(file.with_name("tokenizer_config.json"), foreign=True)
    given = (config.get(f"{key}_token") for key in found.specials._fields)
    names = [name.get("content") if isinstance(name, dict) else name for name in given]
    return [name if isinstance(name, str) and found.special([name]) is not None else None for name in names]
