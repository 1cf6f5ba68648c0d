"""The special tokens with which a text between two others is asked for. Bavarian et al. 2022, arXiv:2207.14255."""

from dataclasses import dataclass

from lm.data.tokenizer.together import together
from lm.data.tokenizer.tokenizer import Tokenizer
from lm.errors import ConfigError

SENTINELS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
"""Those that are added for training: before the prefix, before the suffix, and before the middle, which comes last."""
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
    """Returns the ids behind which the model writes what fills the gap: the prefix, the suffix, and the request for the middle (PSM)."""
    before, behind, between = sentinels(tokenizer, "suffix", "Use a model of objective=fim, or leave it out.")
    ids, _, _ = together(tokenizer, [before, gap.prefix, behind, gap.suffix, between])
    return [*tokenizer.prefix, *ids.tolist()]


def gap_ends(tokenizer: Tokenizer) -> list[int]:
    """Returns the tokens, beside those that end a text, behind which a model of code writes another file, or another gap."""
    names = {*_NEXT_FILE, *(name for known in _KNOWN for name in known)}
    return [i for i, name in sorted(tokenizer.added_names.items()) if name in names]
