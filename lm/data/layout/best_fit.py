"""Best-fit packing: whole pieces side by side in rows. Ding et al. 2024, arXiv:2404.10830, section 3.2."""

import numpy as np
from numpy.typing import NDArray

from lm.data.layout.examples import side_by_side
from lm.data.layout.windows import PADDING, Packed, places
from lm.data.order import Ids
from lm.data.store.shards import TokenStore
from lm.errors import ConfigError
from lm.nn.batch import IGNORED
from lm.units import counted


def best_fit(lengths: Ids, width: int) -> tuple[Ids, Ids]:
    """Returns (ids of the pieces, row after row; bounds: row i has the pieces bounds[i] to bounds[i + 1]).

    The longest piece comes first; each goes into the fullest row that has room, of several into the one that came to this room last.
    Pieces of one length go together: as many as fit into each of the rows of one room. lengths: of the pieces, each 1 to width.
    """
    by_room: list[list[Ids]] = [[] for _ in range(width + 1)]  # the rows, in pieces of a stack
    rooms = 0  # bit n: some row has room for n tokens; finds the smallest sufficient room fast
    n_rows, row_of = 0, [np.empty(0, np.int64)]
    longest_first, counts = (found[::-1].tolist() for found in np.unique(lengths, return_counts=True))
    for length, left in zip(longest_first, counts, strict=True):
        while left:
            sufficient = rooms >> length
            room = length + (sufficient & -sufficient).bit_length() - 1 if sufficient else width
            each = min(room // length, left)
            if sufficient:
                rows = by_room[room].pop()
                rows, rest = rows[::-1][: left // each], rows[: -(left // each)]
                if len(rest):
                    by_room[room].append(rest)
                rooms ^= 0 if by_room[room] else 1 << room
            else:
                rows = np.arange(n_rows, n_rows + left // each)
                n_rows += len(rows)
            by_room[room - each * length].append(rows)
            rooms |= 1 << room - each * length
            row_of.append(np.repeat(rows, each))
            left -= each * len(rows)
    row = np.concatenate(row_of)
    order = np.argsort(-lengths, kind="stable")[np.argsort(row, kind="stable")]
    return order, np.cumsum(np.append(0, np.bincount(row, minlength=n_rows)))


class BestFit:
    """Rows of whole documents; a document longer than a row is cut into full rows and a rest. Documents do not attend to each other.

    ahead: 1 where a document's last token is only a label, never an input, and so takes no place; else 0.
    """

    def __init__(self, store: TokenStore, seq_len: int, ahead: int) -> None:
        self.store, self.seq_len = store, seq_len
        lengths = np.diff(store.starts, append=store.n_tokens) - ahead
        begins, sizes, complete = _cut(np.asarray(store.starts)[lengths > 0], lengths[lengths > 0], seq_len)
        if not len(begins):
            raise ConfigError(f"data: the {store.split} split has no document of two tokens or more. Give more text.")
        order, self._bounds = best_fit(sizes, seq_len)
        self._begins, self._sizes = begins[order], sizes[order]
        self._complete = complete[order] & (ahead == 0)  # its last place has no label
        self.fill = float(sizes.sum() / (len(self) * seq_len))

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def read(self, ids: Ids) -> Packed:
        tokens = np.full((len(ids), self.seq_len), PADDING, np.int64)
        following = np.full_like(tokens, IGNORED)
        rows, columns = [], []
        for row, (low, high) in enumerate(zip(self._bounds[ids].tolist(), self._bounds[ids + 1].tolist(), strict=True)):
            at = 0
            spans = zip(self._begins[low:high].tolist(), self._sizes[low:high].tolist(), self._complete[low:high].tolist(), strict=True)
            for begin, size, complete in spans:
                tokens[row, at : at + size] = self.store.read(begin, begin + size)
                labels = self.store.read(begin + 1, begin + size + (not complete))
                following[row, at : at + len(labels)] = labels
                rows.append(row)
                columns.append(at)
                at += size
        documents, positions = places(tokens, np.array(rows), np.array(columns))
        return Packed(tokens, following, documents, positions)

    def documents(self, ids: Ids) -> Ids:
        pieces = [slice(low, high) for low, high in zip(self._bounds[ids].tolist(), self._bounds[ids + 1].tolist(), strict=True)]
        of = [np.searchsorted(self.store.starts, self._begins[row], "right") - 1 for row in pieces]
        return side_by_side([[np.repeat(each, self._sizes[row])] for each, row in zip(of, pieces, strict=True)], self.seq_len, -1).numpy()

    def describe(self) -> str:
        return f"{self.store.split}: {counted(len(self), 'row')} of {self.seq_len} tokens, {self.fill:.2%} full"


def _cut(begins: Ids, lengths: Ids, width: int) -> tuple[Ids, Ids, NDArray[np.bool_]]:
    """Returns begin and length of the pieces of at most `width` tokens into which documents are cut, and whether each ends its document."""
    counts = -(-lengths // width)
    number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    rest = np.repeat(lengths, counts) - number * width
    return np.repeat(begins, counts) + number * width, np.minimum(rest, width), rest <= width
