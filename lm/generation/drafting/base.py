"""What proposes the next tokens of a row, so that one forward of the model checks several: speculative decoding.

The model's own draw decides each place, and it is a function of (seed, prompt, step), so that text with drafts is the text without.
Leviathan et al. 2022, arXiv:2211.17192; drafts draw by the same numbers, as in Daliri et al. 2024, arXiv:2408.07978.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from torch import Tensor

from lm.generation.config import SamplingConfig
from lm.generation.sampling import History, choose

UNDRAFTED = 3  # first steps, which tell how long one token takes


def draw_on(drafts: Sequence[list[int]], logits: Tensor, rows: Sequence[History], cfg: SamplingConfig) -> None:
    """Draws the token behind each row's draft, and appends it to that.  logits: (b, v)."""
    drawn = choose(logits, [row.extended(draft) for row, draft in zip(rows, drafts, strict=True)], cfg)
    for draft, token in zip(drafts, drawn.tolist(), strict=True):
        draft.append(token)


@dataclass
class Tally:
    """Counts of drafted and accepted tokens and of steps, and their times: what drafting has gained."""

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
        """Counts a step that took so many seconds.  drafted: some row had a draft."""
        self.steps, self.seconds = self.steps + 1, self.seconds + seconds
        self.one_by_one += [] if drafted else [seconds]

    def accept(self, drafted: int, accepted: int) -> None:
        """Counts the tokens of a draft, and how many of them were accepted."""
        self.drafted, self.accepted = self.drafted + drafted, self.accepted + accepted

    def sentence(self) -> str:
        """Returns these figures in words, for the end of a generation."""
        rate = f" ({100 * self.accepted / self.drafted:.0f} %)" if self.drafted else ""
        said = f"{self.accepted} of {self.drafted} drafted tokens accepted{rate}"
        if self.steps == 0 or not self.one_by_one:
            return f"{said}."
        gain = median(self.one_by_one) * self.tokens / self.seconds
        return f"{said}; {self.tokens / self.steps:.2f} tokens a step, {gain:.2f} times as fast as one by one."


class Drafter:
    """Proposes up to `n_tokens` next tokens of each row; they are accepted up to the first that differs from the model's own draw.

    This base class proposes nothing.
    """

    def __init__(self, n_tokens: int) -> None:
        self.n_tokens = n_tokens
        self.tally = Tally()

    def begin(self, rows: Sequence[History], cfg: SamplingConfig, n_tokens: int, n_new: int, hidden: Tensor, positions: Tensor) -> None:
        """Starts with new rows, of which the model has prefilled the prompts.

        n_tokens: ids from n_tokens on are never drawn; n_new: most new tokens of a row; hidden: what the head read, (b, s, d); positions:
        where, (b, s), -1 on padding.
        """

    def see(self, hidden: Tensor, positions: Tensor) -> None:
        """Takes `hidden` and `positions`, as in `begin`, of the tokens that the model's last forward has read, drafts included."""

    def propose(self, rows: Sequence[History]) -> list[list[int]]:
        """Returns a draft of each row."""
        return [[] for _ in rows]

    def reorder(self, kept: Tensor) -> None:
        """Makes row i the former row kept[i]; the others have ended."""


class Lookup(Drafter):
    """The last tokens are looked for earlier in the row, and in its source; what followed there is the draft.

    Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding.
    """

    def __init__(self, n_tokens: int, ngram: int) -> None:
        """ngram: how many last tokens to look for; fewer where so many did not occur before."""
        super().__init__(n_tokens)
        self.ngram = ngram

    def propose(self, rows: Sequence[History]) -> list[list[int]]:
        return [self._continued("".join(map(chr, row.source + row.begin + row.new))) for row in rows]

    def _continued(self, text: str) -> list[int]:
        """Returns the draft.  text: one character for each token, so that Python's search of strings finds n-grams. A text that repeats
        itself up to its end goes on repeating."""
        for n in range(min(self.ngram, len(text) - 1), 0, -1):
            if (at := text.rfind(text[-n:], 0, -1)) >= 0:
                period = len(text) - n - at
                return [ord(text[len(text) - period + i % period]) for i in range(self.n_tokens)]
        return []
