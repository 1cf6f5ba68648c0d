"""A published tokenizer without the tokens that its model has no row for; one with further special tokens; and what two have in common."""

import json
from collections.abc import Sequence
from typing import Any

from lm.data.tokenizer.specials import make_special
from lm.data.tokenizer.tokenizer import Tokenizer
from lm.errors import ConfigError
from lm.schema import Tree


def fitted(tokenizer: Tokenizer, rows: int) -> tuple[Tokenizer, list[str]]:
    """Returns the tokenizer without the added tokens that lie beyond so many rows of an embedding, and the names of these; as it is where
    bos or eos is one of them, or where ordinary tokens lie there too."""
    from tokenizers import Tokenizer as RawTokenizer

    content, specials = tokenizer.content(), tokenizer.specials
    beyond = [token["content"] for token in content["added_tokens"] if token["id"] >= rows]
    if not beyond or specials.bos in beyond or specials.eos in beyond:
        return tokenizer, []
    content["added_tokens"] = [token for token in content["added_tokens"] if token["id"] < rows]
    model: Tree = content["model"]
    if isinstance(model.get("vocab"), dict):  # where some files have the added tokens too
        model["vocab"] = {name: i for name, i in model["vocab"].items() if name not in beyond}
    kept = specials._replace(pad=None) if specials.pad in beyond else specials
    found = Tokenizer(RawTokenizer.from_str(json.dumps(content)), kept, adds_bos=bool(tokenizer.prefix))
    found.templates = tokenizer.templates
    return (found, beyond) if found.vocab_size <= rows else (tokenizer, [])


def grown(tokenizer: Tokenizer, names: Sequence[str]) -> Tokenizer:
    """Returns the tokenizer with these special tokens too, the new ones behind all others; itself where it has them all. Raises
    ConfigError where the library would give a new one the id of another token."""
    if all(tokenizer.special([name]) is not None for name in names):
        return tokenizer
    from tokenizers import Tokenizer as RawTokenizer

    raw, before = RawTokenizer.from_str(json.dumps(tokenizer.content())), _tokens(tokenizer)
    make_special(raw, names)
    found = Tokenizer(raw, tokenizer.specials, adds_bos=tokenizer.adds_bos)
    found.templates, found.further_ends = tokenizer.templates, tokenizer.further_ends
    if taken := [name for name in names if name not in before and raw.token_to_id(name) in before.values()]:
        raise ConfigError(
            f"tokenizer.specials: {taken[0]} would get the id {raw.token_to_id(taken[0])}, which another token has: the ids of this"
            " tokenizer have gaps. Name special tokens that it has."
        )
    return found


def new_ids(before: Tokenizer, now: Tokenizer) -> list[int]:
    """Returns the ids of tokens that `grown` has added."""
    if before.hash == now.hash:
        return []
    return sorted(now.special_names.keys() - set(_tokens(before).values()))


def unlike(other: Tokenizer, tokenizer: Tokenizer) -> str | None:
    """Returns what tells that the other tokenizer makes other tokens of a text; None where it makes the same, whatever special tokens it
    has besides, and whichever of them begins or ends a text."""
    if tokenizer.hash == other.hash:
        return None
    theirs = _tokens(other)
    if other_ids := [(i, name) for name, i in _tokens(tokenizer).items() if theirs.get(name) != i]:
        i, name = min(other_ids)
        return f"in which {name[:80]!r} is not token {i:,}"
    mine, its = tokenizer.content(), other.content()
    differs = mine["model"] != its["model"] or any(_cut(mine[part]) != _cut(its[part]) for part in ("pre_tokenizer", "normalizer"))
    return "which has all tokens of this one and cuts texts otherwise" if differs else None


def _cut(part: Any) -> Any:
    """Returns the part without what decides only from where in a text a token is said to be, which transformers 5 sets anew in saving."""
    if isinstance(part, list):
        return [_cut(each) for each in part]
    return {key: _cut(value) for key, value in part.items() if key != "trim_offsets"} if isinstance(part, dict) else part


def _tokens(tokenizer: Tokenizer) -> dict[str, int]:
    from tokenizers import Tokenizer as RawTokenizer

    return dict(RawTokenizer.from_str(json.dumps(tokenizer.content())).get_vocab(with_added_tokens=True))
