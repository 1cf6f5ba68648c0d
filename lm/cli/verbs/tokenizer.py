"""`lm tokenizer data=... kind=... out=FOLDER`: trains a tokenizer and says how short it makes held-out text."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from lm.cli.compose.sections import take_corpus
from lm.cli.verb import Writing
from lm.printing import note, say
from lm.storage.out import out_folder, require_free
from lm.units import sized

if TYPE_CHECKING:
    from lm.data.sources.base import Document

_OPTIONS = ("vocab_size", "pattern", "specials", "max_chars")
_HELD_OUT_CHARS = 1 << 22


class Tokenizer(Writing):
    """usage: lm tokenizer out=FOLDER [kind=byte_bpe|unigram|wordpiece|bytes] [vocab_size=N]
                        [pattern=own|gpt2|gpt4|gpt4o|llama3|qwen2] [specials=[<|a|>,<|b|>]] [max_chars=N]
                        [overrides of lm train, such as data=text data.files=...]

    Trains on the training split of the data and writes tokenizer.json and tokenizer_config.json, for tokenizer=file
    tokenizer.path=FOLDER. All kinds work on bytes, so that every text comes back. Prints bytes per token of held-out text.
    """

    takes = None

    kind: Literal["byte_bpe", "bpe", "unigram", "wordpiece", "bytes"] = "byte_bpe"
    """The option of the group tokenizer; byte_bpe and bpe are one."""

    def run(self, rest: list[str]) -> None:
        """Prints the tokenizer's statistics on stdout, progress on stderr."""
        out = require_free(self.out, self.overwrite)
        options = [f"tokenizer.{arg}" if arg.split("=")[0] in _OPTIONS else arg for arg in rest]
        corpus = take_corpus([f"tokenizer={self.kind.removeprefix('byte_')}", *options])
        from lm.data.store.cache import cache_root
        from lm.data.store.prepare import find_tokenizer

        cache = cache_root(corpus.data.cache_dir, note)
        sources = {name: cfg.open(cache) for name, cfg in corpus.data.parts().items()}
        tokenizer = find_tokenizer(corpus.data, corpus.tokenizer, sources, cache, note, corpus.objective.specials())
        with out_folder(out, self.overwrite) as folder:
            tokenizer.save(folder)
        texts = list(_held_out(source.documents() for source in sources.values()))
        n_tokens, n_bytes = sum(len(ids) for ids in tokenizer.encode_arrays(texts)), sum(len(text.encode()) for text in texts)
        say(f"{self.out}: {tokenizer.vocab_size:,} tokens")
        if n_tokens:
            say(f"{n_bytes / n_tokens:.3f} bytes a token on {sized(n_bytes)} of held-out text")


def _held_out(sources: "Iterator[Iterator[Document]]") -> Iterator[str]:
    from lm.data.tokenizer.tokenizer import split_text

    left = _HELD_OUT_CHARS
    for documents in sources:
        for document in documents:
            for text in split_text(document.chunks) if document.split == "val" else ():
                yield text
                left -= len(text)
                if left <= 0:
                    return
