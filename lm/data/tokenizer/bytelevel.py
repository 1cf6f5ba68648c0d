"""Facts about tokens from the content of a tokenizer.json: the bytes of each token, and the unknown token."""

from typing import Any

from lm.schema import Tree


def _alphabet() -> dict[str, int]:
    """Each byte's character in byte-level vocabularies (Radford et al. 2019): itself where printable, else the next from U+0100."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}


ALPHABET = _alphabet()


def token_bytes(state: Tree) -> dict[int, bytes] | None:
    """Returns the bytes of each id: of an added token its text, of a special one none, of any other the bytes of its characters.

    Returns None where tokens are not bytes (SentencePiece, WordPiece).
    """
    if not _is_byte_level(state):
        return None
    found = {i: as_bytes(token) for token, i in _vocabulary(state["model"]).items()}
    return {**found, **{token["id"]: b"" if token["special"] else token["content"].encode() for token in state["added_tokens"]}}


def as_bytes(token: str) -> bytes:
    """Returns the bytes of a token of a byte-level vocabulary."""
    return bytes(ALPHABET.get(c, 0) for c in token)


def is_plain(state: Tree, found: dict[int, bytes]) -> bool:
    """Whether the tokens are just the 256 bytes, each with its value as id.  found: from `token_bytes`."""
    return state["model"].get("merges") == [] and state["normalizer"] is None and all(found.get(i) == bytes([i]) for i in range(256))


def unknown_token(state: Tree) -> int | None:
    """Returns the id of the token for text that the vocabulary cannot express; None where there is no such token."""
    model = state["model"]
    name = model.get("unk_token")
    found = model.get("unk_id") if name is None else _vocabulary(model).get(name)
    return found if isinstance(found, int) else None


def _vocabulary(model: Tree) -> dict[str, int]:
    vocab: Any = model["vocab"]
    return {token: i for i, (token, _) in enumerate(vocab)} if isinstance(vocab, list) else dict(vocab)


def _is_byte_level(state: Tree) -> bool:
    decoder = state.get("decoder")
    parts = decoder.get("decoders", [decoder]) if isinstance(decoder, dict) else []
    return any(part["type"] == "ByteLevel" for part in parts)
