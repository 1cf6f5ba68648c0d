"""`lm prepare data=... tokenizer=...`: tokenises what a training would read, whole or in parts on several machines."""

import re

from pydantic import Field

from lm.cli.compose.sections import take_corpus
from lm.cli.verb import Verb
from lm.errors import ConfigError
from lm.printing import note, say


class Prepare(Verb):
    """usage: lm prepare [part=I/N | merge=N] [overrides of lm train]

    Trains the tokenizer where it has none yet, tokenises the data and keeps both below data.cache_dir, where `lm train` with the same
    data, tokenizer and objective finds them. Killed at any point, it goes on with the next call; of two at once, one works and the other
    waits. On a cluster, with the cache on a disk that all nodes share:

      sbatch --array=1-16 --wrap 'lm prepare data=fineweb_edu tokenizer=file tokenizer.path=tok.json part=$SLURM_ARRAY_TASK_ID/16'
      lm prepare data=fineweb_edu tokenizer=file tokenizer.path=tok.json merge=16

    An executor that numbers its tasks from 0, as datatrove's do, calls it with part=$((RANK + 1))/$WORLD_SIZE.
    """

    takes = None

    part: str | None = None
    """Only part I of N (1/4 ... 4/4), for several machines with one data.cache_dir. null: all."""
    merge: int | None = Field(None, ge=1)
    """Join so many parts: the result is what one machine would have made."""

    def run(self, rest: list[str]) -> None:
        """Prints the folder on stdout, progress on stderr."""
        if self.part is not None and self.merge is not None:
            raise ConfigError(f"merge={self.merge}: part={self.part} makes one part, and merge joins all. Give one of them.")
        corpus = take_corpus(rest)
        specials = corpus.objective.specials()
        from lm.data.store.distributed import merge, prepare_part
        from lm.data.store.prepare import prepare

        if self.part is not None:
            say(str(prepare_part(corpus.data, corpus.tokenizer, *_numbers(self.part), log=note, specials=specials)))
        elif self.merge is not None:
            say(str(merge(corpus.data, corpus.tokenizer, self.merge, log=note, specials=specials)))
        else:
            for source in prepare(corpus.data, corpus.tokenizer, log=note, specials=specials).parts.values():
                say(str(source.folder))


def _numbers(part: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)/(\d+)", part)
    number, of = (int(group) for group in match.groups()) if match else (0, 0)
    if not 1 <= number <= of:
        raise ConfigError(f"part: {part!r} is no part. Write I/N with 1 <= I <= N, such as 1/4.")
    return number, of
