"""Makes tokenizers: trained on texts, or plain bytes."""

import re
from collections.abc import Iterable, Iterator, Sequence

from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as RawTokenizer

from lm.data.tokenizer.bytelevel import ALPHABET
from lm.data.tokenizer.config import TrainedConfig
from lm.data.tokenizer.splits import SPLITS
from lm.data.tokenizer.tokenizer import Specials, Tokenizer, split_text
from lm.errors import ConfigError

_LONGEST = 4096  # characters of a word: training takes time quadratic in that
_BLANKS = re.compile(r"\s{2,}")
_OWN = "<|bos|>", "<|eos|>", "<|pad|>"


def train_tokenizer(cfg: TrainedConfig, texts: Iterable[str], extra: Sequence[str]) -> Tokenizer:
    """Trains a tokenizer.  extra: special tokens beside bos, eos and pad.  Raises ConfigError where vocab_size is too small for them."""
    specials = list(dict.fromkeys([*_OWN, *extra]))
    least = len(ALPHABET) + len(specials)
    if cfg.vocab_size < least:
        raise ConfigError(
            f"tokenizer.vocab_size={cfg.vocab_size}: 256 bytes and {len(specials)} special tokens need {least}. Raise it to that or more."
        )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    shared = {"vocab_size": cfg.vocab_size, "special_tokens": specials, "show_progress": False, "initial_alphabet": alphabet}
    model, trainer = cfg.untrained(shared)
    split = pre_tokenizers.Split(Regex(SPLITS[cfg.pattern]), "isolated")
    cuts = [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    if (longest := cfg.longest_word()) is not None:
        cuts.append(pre_tokenizers.Split(Regex(f".{{1,{longest}}}"), "isolated"))
    raw = RawTokenizer(model)
    raw.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    raw.decoder = decoders.ByteLevel()
    raw.train_from_iterator((piece for text in texts for part in split_text([text]) for piece in _shortened(part)), trainer)
    return Tokenizer(raw, Specials(*_OWN))


def _shortened(text: str) -> Iterator[str]:
    """Yields the text as it is, or in pieces of _LONGEST characters where a word of it, or a run of blanks, is longer."""
    longest = max(map(len, (*text.split(), *_BLANKS.findall(text))), default=0)
    size = _LONGEST if longest > _LONGEST else max(1, len(text))
    return (text[start : start + size] for start in range(0, len(text), size))


def bytes_tokenizer(extra: Sequence[str]) -> Tokenizer:
    """Makes a tokenizer whose tokens are the bytes.  extra: special tokens beside bos, eos and pad."""
    raw = RawTokenizer(models.BPE(vocab=ALPHABET, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in (*_OWN, *extra)])
    return Tokenizer(raw, Specials(*_OWN))
