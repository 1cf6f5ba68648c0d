"""`lm tokenizer data=... kind=... out=FOLDER`: trains a tokenizer and says how short it makes held-out text."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from lm.cli.compose.arguments import take
from lm.cli.compose.sections import take_corpus
from lm.cli.views.text import say
from lm.data.sources.base import Document
from lm.errors import ConfigError
from lm.schema import did_you_mean

_KINDS = {"byte_bpe": "bpe", "bpe": "bpe", "unigram": "unigram", "wordpiece": "wordpiece", "bytes": "bytes"}
_KEYS = ("vocab_size", "pattern", "specials", "max_chars")
_HELD_OUT_CHARS = 1 << 22
_USAGE = """\
usage: lm tokenizer out=FOLDER [kind=byte_bpe|unigram|wordpiece|bytes] [vocab_size=N] [pattern=own|gpt2|gpt4|llama3]
                    [specials=[<|a|>,<|b|>]] [max_chars=N] [overrides of lm train, such as data=text data.files=...]

Trains on the training split of the data and writes tokenizer.json and tokenizer_config.json, for tokenizer=file
tokenizer.path=FOLDER/tokenizer.json. All kinds work on bytes, so that every text comes back. Prints bytes per token of held-out text.
"""


def run(args: Sequence[str]) -> int:
    """The figures on stdout, progress on stderr."""
    out, rest = take(args, "out")
    kind, rest = take(rest, "kind")
    if not out:
        raise ConfigError("out: no folder was given for the tokenizer. Write out=FOLDER.")
    if kind is not None and kind not in _KINDS:
        raise ConfigError(f"kind: {kind!r} is not an option. {did_you_mean(kind, _KINDS)}")
    overrides = [f"tokenizer.{arg}" if arg.split("=")[0] in _KEYS else arg for arg in rest]
    corpus = take_corpus("tokenizer", [f"tokenizer={_KINDS[kind or 'byte_bpe']}", *overrides])
    from lm.data.store.cache import cache_root
    from lm.data.store.prepare import find_tokenizer

    cache = cache_root(corpus.data.cache_dir, say)
    sources = {name: cfg.open(cache) for name, cfg in corpus.data.parts().items()}
    tokenizer = find_tokenizer(corpus.data, corpus.tokenizer, sources, cache, say, corpus.objective.specials())
    tokenizer.save(Path(out).expanduser())
    texts = list(_held_out(source.documents() for source in sources.values()))
    n_tokens, n_bytes = sum(len(ids) for ids in tokenizer.encode_arrays(texts)), sum(len(text.encode()) for text in texts)
    fewer = corpus.tokenizer.n_chars() and tokenizer.vocab_size < (corpus.tokenizer.size() or 0)
    short = ", fewer than asked for: the text has no more" if fewer else ""
    print(f"{out}: {tokenizer.vocab_size:,} tokens{short}")
    print(f"{n_bytes / max(1, n_tokens):.3f} bytes a token on {n_bytes / 1e6:.2f} MB of held-out text")
    return 0


def help_text(args: Sequence[str]) -> str:
    """Usage."""
    return _USAGE


def _held_out(sources: Iterator[Iterator[Document]]) -> Iterator[str]:
    from lm.data.tokenizer.tokenizer import split_text

    left = _HELD_OUT_CHARS
    for documents in sources:
        for document in documents:
            for text in split_text(document.chunks) if document.split == "val" else ():
                yield text
                left -= len(text)
                if left <= 0:
                    return
