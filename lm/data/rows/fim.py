"""Rows for fill-in-the-middle: the middle of some documents is moved to their end. Bavarian et al. 2022, arXiv:2207.14255."""

from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from lm.data.layout.examples import Example, joined_batch
from lm.data.layout.windows import Packing
from lm.data.order import Ids, uniforms
from lm.data.rows.base import LikelihoodConfig, Material, Rows
from lm.data.rows.packed import PackedRows
from lm.data.tokenizer.gap import SENTINELS, sentinels
from lm.data.tokenizer.tokenizer import Tokenizer
from lm.nn.batch import Batch

_ADDED = len(SENTINELS)


class FIMConfig(LikelihoodConfig):
    """Predict the next token of documents whose middle was moved to the end. Bavarian et al. 2022, arXiv:2207.14255."""

    packings = ("split", "fit")
    needs_masked_documents = True

    kind: Literal["fim"] = "fim"
    rate: float = Field(0.5, ge=0, le=1)
    """Part of the documents that are rearranged."""
    suffix_first: float = Field(0.5, ge=0, le=1)
    """Part of those in which the suffix comes before the prefix (SPM)."""

    def specials(self) -> tuple[str, ...]:
        return SENTINELS

    def rows(self, of: Material) -> Rows:
        return FIMRows(self, of.packing(ahead=1), of.tokenizer, of.seed)


class FIMRows(PackedRows):
    """Each document of a row is rearranged with probability `rate`, half of them suffix first; cuts fall between tokens, uniformly.

    Rearranging adds three tokens to a document, so as many are cut from the row's end before anything is moved. Of a document that goes
    on in the next row, or comes from the previous one, only the part in this row is rearranged (the paper's context-level FIM).
    """

    def __init__(self, cfg: FIMConfig, packing: Packing, tokenizer: Tokenizer, seed: int) -> None:
        self._sentinels = np.array(sentinels(tokenizer, "objective=fim", "Add them by tokenizer.specials."), np.int64)
        super().__init__(packing, tokenizer, seed)
        self._cfg, self._tokenizer = cfg, tokenizer

    def batch(self, ids: Ids, draw: int = 0) -> Batch:
        s = self.packing.seq_len
        chance = uniforms(self.seed, draw, ids, 4 * s)
        texts = self.packing.read(ids).texts(following=True)
        return joined_batch([self._row(documents, numbers) for documents, numbers in zip(texts, chance, strict=True)], s, self.pad)

    def _row(self, documents: list[Ids], chance: NDArray[np.float64]) -> list[Example]:
        """Returns the row's examples.  chance: (4 s,), four numbers for each place of the row; a document uses those of its first place."""
        numbers = chance.reshape(4, -1)
        row, at, room = [], 0, self.packing.seq_len
        for document in documents:
            rate, order, *cuts = numbers[:, min(at, numbers.shape[1] - 1)]
            moved = rate < self._cfg.rate and len(document) > _ADDED
            at += len(document)
            kept = document[: room + 1 - _ADDED * moved]
            tokens = self._rearranged(kept, order < self._cfg.suffix_first, cuts) if moved and len(kept) > _ADDED else kept
            if len(tokens) > 1:
                row.append(Example(tokens, np.ones(len(tokens), np.bool_)))
                room -= len(tokens) - 1
            if room < 2:
                break
        return row

    def _rearranged(self, document: Ids, suffix_first: bool, cuts: list[float]) -> Ids:
        """Returns the document with its middle moved to the end; bos and eos stay first and last."""
        first = int(document[0] == self._tokenizer.bos)
        last = len(document) - int(document[-1] == self._tokenizer.eos)
        low, high = sorted(first + int(cut * (last - first + 1)) for cut in cuts)
        head, tail = document[:first], document[last:]
        parts = document[first:low], document[low:high], document[high:last]
        return np.concatenate([head, rearranged(*parts, self._sentinels, suffix_first), tail])


def rearranged(prefix: Ids, middle: Ids, suffix: Ids, sentinels: Ids, suffix_first: bool) -> Ids:
    """Returns PSM: <pre> prefix <suf> suffix <mid> middle; with suffix_first SPM: <pre> <suf> suffix <mid> prefix middle (section 3)."""
    pre, suf, mid = sentinels[:1], sentinels[1:2], sentinels[2:]
    if suffix_first:
        return np.concatenate([pre, suf, suffix, mid, prefix, middle])
    return np.concatenate([pre, prefix, suf, suffix, mid, middle])
