"""Rows for span corruption and for UL2's mixture of denoisers, for encoder-decoder and decoder-only models."""

from abc import abstractmethod
from typing import Literal, NamedTuple

import numpy as np
from pydantic import Field

from lm.data.layout.examples import Example, joined_batch
from lm.data.layout.windows import Windows
from lm.data.order import Ids, uniforms, widest
from lm.data.rows.base import LikelihoodConfig, Material, Rows
from lm.data.rows.seq2seq import seq2seq_batch
from lm.data.rows.spans import Chance, corrupted, counts, most_raw, noise_mask
from lm.data.store.shards import TokenStore
from lm.data.tokenizer.gap import CONTINUES, EXTREME, SPAN
from lm.data.tokenizer.tokenizer import Tokenizer
from lm.errors import ConfigError
from lm.nn.batch import Batch
from lm.schema import MOST

_TRIED = 256  # rows that are tried to find wide ones


class Denoiser(NamedTuple):
    """A way to corrupt text.  mean_span None: the end of the text is taken out, noise_frac of the text on average."""

    mode: str
    noise_frac: float
    mean_span: float | None


class DenoisingConfig(LikelihoodConfig):
    """What objectives share that take parts out of a text."""

    models = ("encoder_decoder", "decoder")
    needs_masked_documents = True

    sentinels: int
    """How many tokens <extra_id_0> ... there are to stand for spans."""

    def specials(self) -> tuple[str, ...]:
        return (*(f"{SPAN}{n}>" for n in range(self.sentinels)), *dict.fromkeys(d.mode for d in self.denoisers() if d.mode))

    @abstractmethod
    def denoisers(self) -> list[Denoiser]:
        """Returns the denoisers; each document gets one of them, drawn uniformly."""

    def rows(self, of: Material) -> Rows:
        return DenoisingRows(self, of.store, of.tokenizer, of.data.seq_len, of.start, of.seed, of.short)


class SpansConfig(DenoisingConfig):
    """Predict spans that were taken out of a text. Raffel et al. 2019, arXiv:1910.10683, section 3.1.4."""

    asked_as = "spans"

    kind: Literal["spans"] = "spans"
    noise_frac: float = Field(0.15, gt=0, lt=1)
    """Part of the tokens that are taken out."""
    mean_span: float = Field(3.0, ge=1)
    """Their mean number in a span."""
    sentinels: int = Field(100, gt=0, le=MOST)
    """How many tokens <extra_id_0> ... there are to stand for spans."""

    def denoisers(self) -> list[Denoiser]:
        return [Denoiser("", self.noise_frac, self.mean_span)]


class UL2Config(DenoisingConfig):
    """Span corruption of seven kinds, each announced by a mode token. Tay et al. 2022, arXiv:2205.05131, table 1."""

    asked_as = "modes"

    kind: Literal["ul2"] = "ul2"
    sentinels: int = Field(256, gt=0, le=MOST)
    """How many tokens <extra_id_0> ... there are to stand for spans."""

    def denoisers(self) -> list[Denoiser]:
        """Returns UL2's seven denoisers: two regular, one sequential (takes a quarter out on average) and four extreme ones."""
        regular = [Denoiser("<|R|>", 0.15, 3.0), Denoiser("<|R|>", 0.15, 8.0)]
        extreme = [Denoiser(EXTREME, 0.5, 3.0), Denoiser(EXTREME, 0.5, 8.0), Denoiser(EXTREME, 0.15, 64.0), Denoiser(EXTREME, 0.5, 64.0)]
        return [*regular, Denoiser(CONTINUES, 0.25, None), *extreme]


_Noised = tuple[Ids, Ids]  # (input tokens, target tokens)


class DenoisingRows(Rows):
    """A row has as much text as leaves room for sentinels and mode tokens; each of its documents is corrupted on its own, by one denoiser
    drawn uniformly.

    start: the decoder's first token; None: a decoder-only model, which reads the corrupted text as a prefix and goes on with the spans.
    Targets end with eos; so do an encoder's inputs of documents that end in the row, but not a decoder-only model's. Documents of a single
    token, and those at the end of a row for which there is no room, are left out.
    """

    def __init__(
        self,
        cfg: DenoisingConfig,
        store: TokenStore,
        tokenizer: Tokenizer,
        seq_len: int,
        start: int | None,
        seed: int,
        short: bool = False,
    ) -> None:
        self._denoisers = cfg.denoisers()
        self._seq_len, self._start, self._seed, self._tokenizer = seq_len, start, seed, tokenizer
        raw = min(self._most_raw(denoiser, int(denoiser.mode != "")) for denoiser in self._denoisers)
        if raw < 2:
            raise ConfigError(f"data.seq_len={seq_len}: a row has no room for a text of two tokens beside its sentinels. Raise it.")
        needed = max(counts(raw, d.noise_frac, d.mean_span)[1] for d in self._denoisers if d.mean_span is not None)
        if needed > cfg.sentinels:
            raise ConfigError(
                f"objective.sentinels={cfg.sentinels}: a row of {raw} tokens has {needed} spans. Raise it, or lower data.seq_len."
            )
        _require(tokenizer, cfg, needed)
        self._modes = [_ids(tokenizer, [d.mode] if d.mode else []) for d in self._denoisers]
        self._sentinels = _ids(tokenizer, [f"{SPAN}{n}>" for n in range(cfg.sentinels)])
        self._windows = Windows(store, raw, mask_documents=True, ahead=0, short=short)
        self.n_labels = store.n_tokens
        self.bytes_per_label = store.n_bytes / self.n_labels

    def __len__(self) -> int:
        return len(self._windows)

    def batch(self, ids: Ids, draw: int = 0) -> Batch:
        raw = self._windows.seq_len
        chance = uniforms(self._seed, draw, ids, 3 * raw).reshape(len(ids), 3, raw)
        documents = self._windows.read(ids).texts(following=False)
        rows = [self._row(texts, numbers) for texts, numbers in zip(documents, chance, strict=True)]
        if self._start is None:
            return joined_batch([[Example.of(*pair) for pair in row] for row in rows], self._seq_len, self._tokenizer.pad, prefix=True)
        return seq2seq_batch(rows, self._start, self._tokenizer.pad)

    def widest(self, n: int) -> Ids:
        """Returns the widest of the first rows, at draw 0. The spans drawn at random decide the widths of an encoder-decoder's rows."""
        some = [self.batch(np.array([i])) for i in range(min(len(self), max(n, _TRIED)))]
        sources = np.array([0 if batch.source_tokens is None else batch.source_tokens.shape[1] for batch in some])
        return widest(n, sources, np.array([batch.tokens.shape[1] for batch in some]))

    def describe(self) -> str:
        return f"{self._windows.store.split}: {self._windows.seq_len} tokens of text in a row of data.seq_len={self._seq_len}"

    def _row(self, documents: list[Ids], chance: Chance) -> list[_Noised]:
        row, at = [], 0
        room = np.array([self._seq_len, self._seq_len])  # of inputs and targets
        for document in documents:
            if len(document) > 1 + self._ended(document):
                given, learned = self._noised(document, chance[:, at:])
                needed = [len(given), len(learned)] if self._start is not None else [len(given) + len(learned) - 1, 0]
                if (room >= needed).all():
                    room -= needed
                    row.append((given, learned))
            at += len(document)
        return row

    def _noised(self, document: Ids, chance: Chance) -> _Noised:
        """Returns a document's inputs and targets.  chance: (3, length or more) numbers in [0, 1)."""
        which = int(chance[2, 0] * len(self._denoisers))
        denoiser, mode, eos = self._denoisers[which], self._modes[which], np.array(self._tokenizer.suffix, np.int64)
        ended = self._ended(document)
        if denoiser.mean_span is None:
            cut = len(document) - max(1, round(len(document) * 2 * denoiser.noise_frac * chance[2, 1]))
            return np.concatenate([mode, document[:cut]]), np.concatenate([document[cut:], eos[ended:]])
        text = document[: len(document) - ended]  # as in T5, eos ends inputs and targets, and is never taken out
        mask = noise_mask(len(text), denoiser.noise_frac, denoiser.mean_span, chance[:2])
        left, taken = corrupted(text, mask, self._sentinels)
        has_room = self._start is not None and len(mode) + len(left) < self._seq_len
        return np.concatenate([mode, left, eos[: ended * has_room]]), np.concatenate([taken, eos])

    def _ended(self, document: Ids) -> bool:
        return bool(document[-1] == self._tokenizer.eos)

    def _most_raw(self, denoiser: Denoiser, n_mode: int) -> int:
        """Returns how many tokens of text fit into a row with this denoiser, were they one document."""
        width = self._seq_len - n_mode
        if denoiser.mean_span is None:
            return width
        return most_raw(width, denoiser.noise_frac, denoiser.mean_span, joined=self._start is None)


def _ids(tokenizer: Tokenizer, names: list[str]) -> Ids:
    return np.array([tokenizer.special([name]) for name in names], np.int64)


def _require(tokenizer: Tokenizer, cfg: DenoisingConfig, needed: int) -> None:
    """Raises ConfigError where the tokenizer lacks special tokens, naming those without which rows with so many spans cannot be made."""
    if any(tokenizer.special([name]) is None for name in cfg.specials()):
        least = [name for name in cfg.replace(sentinels=needed).specials() if tokenizer.special([name]) is None]
        added = f" and tokenizer.specials=[{','.join(least)}]" if least else ""
        raise ConfigError(f"objective: the tokenizer lacks special tokens for {cfg.kind}. Set objective.sentinels={needed}{added}.")
