"""The special tokens with which a text between two others is asked for. Bavarian et al. 2022, arXiv:2207.14255."""

from dataclasses import dataclass

from lm.data.tokenizer.source import around
from lm.data.tokenizer.together import together
from lm.data.tokenizer.tokenizer import Tokenizer
from lm.errors import ConfigError

SENTINELS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
"""Those that are added for training: before the prefix, before the suffix, and before the middle, which comes last."""
SPAN = "<extra_id_"
"""What the names of T5's sentinels begin with."""
EXTREME, CONTINUES = "<|X|>", "<|S|>"
"""UL2's modes of long spans, and of the rest of a text. Tay et al. 2022, arXiv:2205.05131, section 3.1."""
_KNOWN = (
    SENTINELS,  # also of Qwen2.5-Coder, CodeGemma and Granite 4
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite Code
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder
)
_NEXT_FILE = (
    "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<fim_pad>", "<fim-pad>", "<repo_name>", "<reponame>", "<filename>", "<file_sep>",
)  # fmt: skip


@dataclass(frozen=True)
class Gap:
    """A gap in a text, between what comes before and what comes behind it."""

    prefix: str
    suffix: str


def sentinels(tokenizer: Tokenizer, where: str, remedy: str) -> tuple[int, int, int]:
    """Returns the ids of the tokens before prefix, suffix and middle. Raises ConfigError where the tokenizer has not all three.  where: the
    key that needs them; remedy: what else to do."""
    ids = {name: i for i, name in tokenizer.added_names.items()}
    for before, behind, between in _KNOWN:
        if before in ids and behind in ids and between in ids:
            return ids[before], ids[behind], ids[between]
    raise ConfigError(f"{where}: the tokenizer has not all of {', '.join(SENTINELS)}, nor such of another model. {remedy}")


def gap_ids(tokenizer: Tokenizer, gap: Gap) -> list[int]:
    """Returns the ids behind which a decoder writes what fills the gap: the prefix, the suffix, and the request for the middle (PSM)."""
    before, behind, between = sentinels(tokenizer, "suffix", "Use a model of objective=fim, or leave it out.")
    ids, _, _ = together(tokenizer, [before, gap.prefix, behind, gap.suffix, between])
    return [*tokenizer.prefix, *ids.tolist()]


def span_ids(tokenizer: Tokenizer, gap: Gap, mode: str | None, ended: bool) -> list[int]:
    """Returns the ids of a text with a sentinel for the gap, behind which a model of span corruption writes the sentinel and what fills it.
    Another sentinel stands for the rest of the text, since all texts of training end in one.

    mode: name of UL2's token that comes first; None: none does.  ended: eos ends the text, as an encoder's.
    """
    first = [] if mode is None else [_added(tokenizer, mode)]
    before, behind = around(tokenizer)
    ids, _, _ = together(tokenizer, [gap.prefix, _added(tokenizer, f"{SPAN}0>"), gap.suffix, _added(tokenizer, f"{SPAN}1>")])
    return [*first, *before, *ids.tolist(), *(behind if ended else [])]


def mode_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Returns the ids of a text that a model of UL2 is to go on with."""
    return [_added(tokenizer, CONTINUES), *tokenizer.prefix, *tokenizer.encode(text)]


def _added(tokenizer: Tokenizer, name: str) -> int:
    if (found := next((i for i, its in tokenizer.added_names.items() if its == name), None)) is None:
        raise ConfigError(f"suffix: the tokenizer has no token {name}, by which a gap is asked for. Use a model of objective=spans or ul2.")
    return found


def gap_ends(tokenizer: Tokenizer) -> list[int]:
    """Returns the tokens, beside those that end a text, behind which a model writes another file, or of another gap."""
    names = {*_NEXT_FILE, *(name for known in _KNOWN for name in known)}
    further = [i for i, name in tokenizer.added_names.items() if name.startswith(SPAN) and name != f"{SPAN}0>"]
    return sorted([*(i for i, name in tokenizer.added_names.items() if name in names), *further])
