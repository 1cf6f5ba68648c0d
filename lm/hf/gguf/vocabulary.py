"""A tokenizer as llama.cpp reads it: byte-level BPE whose split into words is one that llama.cpp knows by name."""

from typing import Any

from lm.data.tokenizer.splits import GPT2, GPT4, QWEN2, SPLITS
from lm.data.tokenizer.templates import DEFAULT
from lm.data.tokenizer.tokenizer import Tokenizer
from lm.errors import ConfigError
from lm.hf.io.generation import ends
from lm.schema import Tree

_NAMES = {GPT2: "gpt-2", QWEN2: "qwen2", GPT4: "dbrx"}
_WHOLE_WORDS = "llama-bpe"  # GPT-4's split, and a word that is a token is not merged
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5


def vocabulary(tokenizer: Tokenizer, n_rows: int) -> Tree:
    """Returns the tokenizer's keys of the metadata.  n_rows: rows of the embedding; those beyond the vocabulary become unused tokens.

    Raises ConfigError for a tokenizer that llama.cpp has no form for.
    """
    content = tokenizer.content()
    model = content["model"]
    _require_bpe(content)
    vocab: dict[str, int] = model["vocab"]
    added = {token["id"]: token for token in content["added_tokens"]}
    names = {i: text for text, i in vocab.items()} | {i: token["content"] for i, token in added.items()}
    kinds = {i: _CONTROL if token["special"] else _USER_DEFINED for i, token in added.items()}
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    last = ends(tokenizer)
    if last is None:
        raise _refusal("it has no eos, and llama.cpp ends texts at token 11 then")
    eos, eot, eom, *_ = [*(last if isinstance(last, list) else [last]), None, None]
    found: Tree = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": _split(content),
        "tokenizer.ggml.tokens": [names.get(i, f"[PAD{i}]") for i in range(n_rows)],
        "tokenizer.ggml.token_type": [kinds.get(i, _NORMAL) if i in names else _UNUSED for i in range(n_rows)],
        # llama.cpp wants a merge at least: a tokenizer of bytes alone gets one that no text can match
        "tokenizer.ggml.merges": merges or [f"{names[tokenizer.vocab_size - 1]} {names[tokenizer.vocab_size - 1]}"],
        "tokenizer.ggml.bos_token_id": eos if tokenizer.bos is None else tokenizer.bos,
        "tokenizer.ggml.eos_token_id": eos,
        "tokenizer.ggml.padding_token_id": tokenizer.pad,
        "tokenizer.ggml.eot_token_id": eot,
        "tokenizer.ggml.eom_token_id": eom,  # llama.cpp ends a text at this one too, whatever it is called, and has no fourth
        "tokenizer.ggml.add_bos_token": bool(tokenizer.prefix),
        "tokenizer.ggml.add_eos_token": False,
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.chat_template": tokenizer.chat_template,
        "tokenizer.chat_templates": [name for name in tokenizer.templates if name != DEFAULT] or None,
    }
    found |= {f"tokenizer.chat_template.{name}": source for name, source in tokenizer.templates.items() if name != DEFAULT}
    return {key: value for key, value in found.items() if value is not None}


def unnamed_ends(tokenizer: Tokenizer) -> list[str]:
    """Returns the tokens that end a text but have no place in the file."""
    last = ends(tokenizer)
    return [tokenizer.added_names[i] for i in last[3:]] if isinstance(last, list) else []


def normalises(tokenizer: Tokenizer) -> str | None:
    """Returns the name of the tokenizer's normalizer (NFC, say), which llama.cpp does not apply; None where it has none."""
    normalizer = tokenizer.content().get("normalizer")
    return None if normalizer is None else str(normalizer["type"])


def _require_bpe(content: Tree) -> None:
    model, bytelevel = content["model"], [part["type"] for part in _parts(content)][-1:] == ["ByteLevel"]
    odd = [key for key in ("unk_token", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback") if model.get(key)]
    if model["type"] != "BPE" or not bytelevel or odd:
        which = f"{model['type']} with {odd[0]}" if odd else model["type"] if bytelevel else f"{model['type']}, not over bytes"
        raise _refusal(f"it is {which}, and llama.cpp's file has byte-level BPE alone")


def _split(content: Tree) -> str:
    """Returns llama.cpp's name of the split of text into words. Raises ConfigError for a split without one."""
    *before, last = _parts(content)
    if last.get("add_prefix_space"):
        raise _refusal("it puts a space before each text, which llama.cpp's byte-level BPE does not")
    patterns = [_pattern(part) for part in before] + ([GPT2] if last.get("use_regex", True) else [])
    if not content["model"]["merges"]:
        return _NAMES[GPT2]  # whatever the words are, no two bytes are joined
    name = _NAMES.get(patterns[0]) if len(patterns) == 1 else None
    whole = content["model"].get("ignore_merges", False)
    if name is None or (whole and patterns != [GPT4]):
        known = {split: f"tokenizer.pattern={pattern}" for pattern, split in SPLITS.items()}
        how = " and ".join(known.get(pattern, pattern) for pattern in patterns) or "nothing"
        raise _refusal(f"it splits text into words by {how}, and llama.cpp in no way that is the same")
    return _WHOLE_WORDS if whole else name


def _parts(content: Tree) -> list[dict[str, Any]]:
    cuts = content.get("pre_tokenizer") or {"type": "none"}
    parts: list[dict[str, Any]] = cuts["pretokenizers"] if cuts["type"] == "Sequence" else [cuts]
    return parts


def _pattern(part: dict[str, Any]) -> str:
    isolated = part["type"] == "Split" and part["behavior"] == "Isolated" and not part.get("invert", False)
    return str(part["pattern"].get("Regex", part["pattern"])) if isolated else str(part["type"])


def _refusal(why: str) -> ConfigError:
    return ConfigError(f"format=gguf: tokenizer: {why}. Train with tokenizer=bpe tokenizer.pattern=qwen2 (or gpt2, gpt4, llama3).")
