"""`lm prepare data=... tokenizer=...`: tokenises what a training would read, whole or in parts on several machines."""

import re
from typing import Literal

from pydantic import Field

from lm.cli.compose.sections import take_corpus
from lm.cli.verb import Verb
from lm.errors import ConfigError
from lm.printing import note, say


class Prepare(Verb):
    """usage: lm prepare [part=I/N | merge=N] [overrides of lm train]

    Trains the tokenizer where it has none yet, tokenises the data and keeps both below data.cache_dir, where `lm train` with the same
    data, tokenizer and objective finds them. Killed at any point, it goes on with the next call; of two at once, one works and the other
    waits. On a cluster, with the cache on a disk that all nodes share, or with data.remote=s3://bucket/lm:

      sbatch --array=1-16 --wrap 'lm prepare data=fineweb_edu tokenizer=file tokenizer.path=tok.json part=$SLURM_ARRAY_TASK_ID/16'
      lm prepare data=fineweb_edu tokenizer=file tokenizer.path=tok.json merge=16

    On a Ray cluster engine=ray does both: parts are tasks, and one whose worker dies goes on elsewhere from its last state.

    An executor that numbers its tasks from 0, as datatrove's do, calls it with part=$((RANK + 1))/$WORLD_SIZE.
    """

    takes = None

    part: str | None = None
    """Only part I of N (1/4 ... 4/4), for several machines with one data.cache_dir or data.remote. null: all."""
    merge: int | None = Field(None, ge=1)
    """Join so many parts: the result is what one machine would have made."""
    engine: Literal["local", "ray"] = "local"
    """local: this machine; ray: `parts` tasks of the cluster of RAY_ADDRESS, or of one that is started here, and then joined."""
    parts: int | None = Field(None, ge=1)
    """Parts that engine=ray makes, at most as many as there are files. null: none, for engine=local."""
    cpus: int = Field(1, ge=1)
    """Cores of each part of engine=ray."""

    def run(self, rest: list[str]) -> None:
        """Prints the folder on stdout, progress on stderr."""
        if self.part is not None and self.merge is not None:
            raise ConfigError(f"merge={self.merge}: part={self.part} makes one part, and merge joins all. Give one of them.")
        self._require_engine()
        corpus = take_corpus(rest)
        specials = corpus.objective.specials()
        from lm.data.store.distributed import merge, prepare_part
        from lm.data.store.prepare import prepare

        if self.parts is not None:
            from lm.data.on_ray import prepare_on_ray

            say(str(prepare_on_ray(corpus, self.parts, self.cpus, log=note)))
        elif self.part is not None:
            say(str(prepare_part(corpus.data, corpus.tokenizer, *_numbers(self.part), log=note, specials=specials)))
        elif self.merge is not None:
            say(str(merge(corpus.data, corpus.tokenizer, self.merge, log=note, specials=specials)))
        else:
            for source in prepare(corpus.data, corpus.tokenizer, log=note, specials=specials).parts.values():
                say(str(source.folder))

    def _require_engine(self) -> None:
        if self.engine == "ray" and self.parts is None:
            raise ConfigError("engine=ray: how many parts is not said. Write parts=16, or leave engine out.")
        if self.engine == "ray" and (self.part is not None or self.merge is not None):
            raise ConfigError("engine=ray: it makes and joins all parts. Leave part and merge out.")
        if self.engine == "local" and (self.parts is not None or self.cpus != 1):
            key = f"parts={self.parts}" if self.parts is not None else f"cpus={self.cpus}"
            raise ConfigError(f"{key}: only engine=ray hands parts out. Write engine=ray as well, or leave it out.")


def _numbers(part: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)/(\d+)", part)
    number, of = (int(group) for group in match.groups()) if match else (0, 0)
    if not 1 <= number <= of:
        raise ConfigError(f"part: {part!r} is no part. Write I/N with 1 <= I <= N, such as 1/4.")
    return number, of
