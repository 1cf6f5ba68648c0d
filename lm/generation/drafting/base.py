"""What proposes the next tokens of a row, so that one forward of the model checks several: speculative decoding.

The model's own draw decides each place, and it is a function of (seed, prompt, step), so that text with drafts is the text without.
Leviathan et al. 2022, arXiv:2211.17192; drafts draw by the same numbers, as in Daliri et al. 2024, arXiv:2408.07978.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from torch import Tensor

from lm.generation.config import SamplingConfig
from lm.generation.sampling import History

UNDRAFTED = 3  # first steps, which tell how long one token takes


@dataclass
class Tally:
    """What drafting gained."""

    drafted: int = 0
    accepted: int = 0
    tokens: int = 0  # of the longest row of each batch, behind its first
    steps: int = 0
    seconds: float = 0.0  # of those steps, drafting included
    one_by_one: list[float] = field(default_factory=list)  # seconds of the steps without a draft

    @property
    def ready(self) -> bool:
        """Returns whether it is known how long one token takes."""
        return len(self.one_by_one) >= UNDRAFTED

    def count(self, seconds: float, drafted: bool) -> None:
        """A step that took so long."""
        self.steps, self.seconds = self.steps + 1, self.seconds + seconds
        self.one_by_one += [] if drafted else [seconds]

    def accept(self, drafted: int, accepted: int) -> None:
        """So many of a draft."""
        self.drafted, self.accepted = self.drafted + drafted, self.accepted + accepted

    def sentence(self) -> str:
        """Returns what is told at the end."""
        rate = f" ({100 * self.accepted / self.drafted:.0f} %)" if self.drafted else ""
        said = f"{self.accepted} of {self.drafted} drafted tokens accepted{rate}"
        if self.steps == 0 or not self.one_by_one:
            return f"{said}."
        gain = median(self.one_by_one) * self.tokens / self.seconds
        return f"{said}; {self.tokens / self.steps:.2f} tokens a step, {gain:.2f} times as fast as one by one."


class Drafter:
    """Proposes up to `n_tokens` tokens of each row; of those that the model draws itself, all up to the first other one are kept.

    This one proposes nothing.
    """

    def __init__(self, n_tokens: int) -> None:
        self.n_tokens = n_tokens
        self.tally = Tally()

    def begin(self, rows: Sequence[History], cfg: SamplingConfig, n_tokens: int, n_new: int, hidden: Tensor, positions: Tensor) -> None:
        """New rows, whose first tokens the model has read.

        n_tokens: how many may be drawn; n_new: most new tokens of a row; hidden, positions: what the head read, (b, s, d), and where,
        (b, s), -1 on padding.
        """

    def see(self, hidden: Tensor, positions: Tensor) -> None:
        """The same of the tokens that the model has read since, drafts among them."""

    def propose(self, rows: Sequence[History]) -> list[list[int]]:
        """Returns a draft of each row."""
        return [[] for _ in rows]

    def reorder(self, kept: Tensor) -> None:
        """Row i goes on as what was row kept[i]."""


class Lookup(Drafter):
    """The last tokens are looked for earlier in the row, and in its source; what followed there is the draft.

    Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding.
    """

    def __init__(self, n_tokens: int, ngram: int) -> None:
        """ngram: tokens to look for; fewer where these did not stand there before."""
        super().__init__(n_tokens)
        self.ngram = ngram

    def propose(self, rows: Sequence[History]) -> list[list[int]]:
        return [self._continued("".join(map(chr, row.source + row.begin + row.new))) for row in rows]

    def _continued(self, text: str) -> list[int]:
        """text: a character of each token, so that the search is Python's. What repeats itself up to its end goes on to do so."""
        for n in range(min(self.ngram, len(text) - 1), 0, -1):
            if (at := text.rfind(text[-n:], 0, -1)) >= 0:
                period = len(text) - n - at
                return [ord(text[len(text) - period + i % period]) for i in range(self.n_tokens)]
        return []
