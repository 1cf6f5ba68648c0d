"""A published tokenizer without the tokens that its model has no row for."""

import json

from lm.data.tokenizer.tokenizer import Tokenizer
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
    found.chat_template = tokenizer.chat_template
    return (found, beyond) if found.vocab_size <= rows else (tokenizer, [])
