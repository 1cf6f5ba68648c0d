"""What a difference is worth in tokens, in words."""

from lm.ablation.config import StudyConfig
from lm.ablation.exchange import LENGTHS
from lm.schema import Tree


def percent(worth: Tree | None, difference: Tree) -> str:
    """Returns a difference in tokens as '+23 % [+5 %, +45 %]': with so many more tokens the baseline would be as good."""
    if worth is None:
        return "-"
    least, most = f"under {LENGTHS[0] - 1:+.0%}", f"over {LENGTHS[-1] - 1:+.0%}"
    low, high = (f"{end - 1:+.0%}" if end is not None else beyond for end, beyond in zip(worth["interval"], (least, most), strict=True))
    beyond = most if difference["mean"] < 0 else least
    mean = beyond if worth["factor"] is None else f"{worth['factor'] - 1:+.0%}"
    return f"{mean} [{low}, {high}]".replace("%", " %")


def in_tokens(row: Tree) -> str:
    """Returns a sentence on a variant's worth in tokens; '' where it is not known."""
    if row["worth"] is None:
        return ""
    factor, (_, _, interval) = row["worth"]["factor"], percent(row["worth"], row["difference"]).partition(" [")
    if factor is None:
        said = "is worth more than twice the tokens" if row["difference"]["mean"] < 0 else "costs more than half of the tokens"
    else:
        said = f"is worth {factor - 1:.0%} more tokens" if factor >= 1 else f"costs {1 - factor:.0%} of the tokens"
    return f" It {said.replace('%', ' %')} (Holm-corrected 95 % interval {interval.rstrip(']').replace(', ', ' to ')})."


def short_of(config: StudyConfig, exchange: Tree | None, variants: Tree) -> list[str]:
    """Returns warnings on why differences are not, or cannot be, expressed in tokens."""
    notes = []
    for factor, length in (exchange or {}).items():
        runs = list(length["runs"].values())
        if len(runs) < config.seeds and factor != "1":
            notes.append(f"{config.baseline}: {len(runs)} of {config.seeds} runs at {factor} times its tokens have ended.")
        if None in runs:
            lost = f"{runs.count(None)} of {len(runs)} runs at {factor} times its tokens diverged"
            notes.append(f"{config.baseline}: {lost}, so no difference is told in tokens. Start from a lower rate.")
    told = [row for row in variants.values() if row["difference"] and row["difference"]["mean"] is not None]
    if exchange and told and not notes and not any(row["worth"] for row in told):
        notes.append(
            f"{config.baseline}: more tokens do not lower {config.metric}, so no difference is told in them. Use more text, or more seeds."
        )
    return notes
