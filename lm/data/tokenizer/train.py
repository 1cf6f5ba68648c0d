"""Tokenizers that are made here: trained on texts, or plain bytes."""

from collections.abc import Iterable, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as RawTokenizer

from lm.data.tokenizer.bytelevel import ALPHABET
from lm.data.tokenizer.tokenizer import Specials, Tokenizer, split_text
from lm.errors import ConfigError

# GPT-4's split, except that a line break keeps the indentation after it (all but the last space, which belongs to the word), together
# with the punctuation before it: "):\n       " is one token. Bytes a token on held-out stdlib files at 4,096 tokens: 3.58; with
# GPT-4's split 3.37, with GPT-2's 3.42.
_INDENT = r"(?:[ \t]+(?!\S))?"
_OWN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+(?:[\r\n]+{_INDENT})?|\s*[\r\n]+{_INDENT}|\s+(?!\S)|\s+"
)
_GPT4 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLITS = {
    "own": _OWN_SPLIT,
    "gpt2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "gpt4": _GPT4,
    "llama3": _GPT4,  # the same
}
_OWN = Specials("<|bos|>", "<|eos|>", "<|pad|>")


def shared_arguments(vocab_size: int, further: Sequence[str]) -> dict[str, Any]:
    """Returns what every trainer takes.  further: special tokens beside bos, eos and pad. ConfigError where the vocabulary is too small."""
    specials = list(dict.fromkeys([*(name for name in _OWN if name), *further]))
    least = len(ALPHABET) + len(specials)
    if vocab_size < least:
        raise ConfigError(
            f"tokenizer.vocab_size={vocab_size}: 256 bytes and {len(specials)} special tokens need {least}. Raise it to that or more."
        )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return {"vocab_size": vocab_size, "special_tokens": specials, "show_progress": False, "initial_alphabet": alphabet}


def train_tokenizer(raw: RawTokenizer, trainer: Any, texts: Iterable[str], pattern: str, longest_word: int | None) -> Tokenizer:
    """Gives `raw` a vocabulary.  pattern: how text is cut into words before.  longest_word: in bytes; longer ones are cut."""
    split = pre_tokenizers.Split(Regex(_SPLITS[pattern]), "isolated")
    cuts = [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    if longest_word is not None:
        cuts.append(pre_tokenizers.Split(Regex(f".{{1,{longest_word}}}"), "isolated"))
    raw.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    raw.decoder = decoders.ByteLevel()
    raw.train_from_iterator((part for text in texts for part in split_text([text])), trainer)
    return Tokenizer(raw, _OWN)


def bytes_tokenizer(extra: Sequence[str]) -> Tokenizer:
    """Makes one whose tokens are the bytes.  extra: special tokens beside bos, eos and pad."""
    raw = RawTokenizer(models.BPE(vocab=ALPHABET, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in (*_OWN, *extra) if name])
    return Tokenizer(raw, _OWN)
