"""Special tokens of a `tokenizers` tokenizer."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RawTokenizer


def make_special(raw: "RawTokenizer", names: Iterable[str]) -> None:
    """Makes these special tokens, the new ones behind all others. One that is there already keeps what it says of the text beside it, such
    as that it takes in blanks."""
    from tokenizers import AddedToken  # imported only when a tokenizer is made: rows and configs just name the type

    there = {token.content: token for token in raw.get_added_tokens_decoder().values()}
    tokens = [there.get(name) or AddedToken(name, normalized=False) for name in names]
    for token in tokens:
        token.special = True
    raw.add_special_tokens(tokens)
