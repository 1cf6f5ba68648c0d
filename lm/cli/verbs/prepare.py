"""`lm prepare data=... tokenizer=...`: tokenises what a training would read, whole or in parts on several machines."""

import re
from collections.abc import Sequence

from lm.cli.compose.arguments import take
from lm.cli.compose.sections import Corpus, take_corpus
from lm.cli.views.text import say
from lm.errors import ConfigError

_USAGE = """\
usage: lm prepare [prepare.part=I/N | merge=N] [overrides of lm train]

Trains the tokenizer where it has none yet, tokenises the data and keeps both below data.cache_dir, where `lm train` with the same data,
tokenizer and objective finds them. Killed at any point, it goes on with the next call; of two at once, one works and the other waits.

  prepare.part=I/N   only part I of N (1/4 ... 4/4), for several machines with one data.cache_dir
  merge=N            join the N parts: the result is what one machine would have made

On a cluster, with the cache on a disk that all nodes share:

  sbatch --array=1-16 --wrap 'lm prepare data=fineweb_edu tokenizer=file tokenizer.path=tok.json prepare.part=$SLURM_ARRAY_TASK_ID/16'
  lm prepare data=fineweb_edu tokenizer=file tokenizer.path=tok.json merge=16

An executor that numbers its tasks from 0, as datatrove's do, calls it with prepare.part=$((RANK + 1))/$WORLD_SIZE.
"""


def run(args: Sequence[str]) -> int:
    """The folder on stdout, progress on stderr."""
    part, rest = take(args, "prepare.part")
    parts, rest = take(rest, "merge")
    if part is not None and parts is not None:
        raise ConfigError(f"merge={parts}: prepare.part={part} makes one part, and merge joins all. Give one of them.")
    corpus = take_corpus("prepare", rest)
    specials = corpus.objective.specials()
    if part is None and parts is None:
        return _whole(corpus, specials)
    from lm.data.store.distributed import merge, prepare_part

    if part is not None:
        number, of = _part(part)
        print(prepare_part(corpus.data, corpus.tokenizer, number, of, log=say, specials=specials))
    else:
        print(merge(corpus.data, corpus.tokenizer, _count(str(parts)), log=say, specials=specials))
    return 0


def help_text(args: Sequence[str]) -> str:
    """Usage."""
    return _USAGE


def _whole(corpus: Corpus, specials: Sequence[str]) -> int:
    from lm.data.store.prepare import prepare

    found = prepare(corpus.data, corpus.tokenizer, log=say, specials=specials)
    for part in found.parts.values():
        print(part.folder)
    return 0


def _part(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    number, of = (int(group) for group in match.groups()) if match else (0, 0)
    if not 1 <= number <= of:
        raise ConfigError(f"prepare.part: {text!r} is no part. Write I/N with 1 <= I <= N, such as 1/4.")
    return number, of


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"merge: {text!r} is no number of parts. Write merge=4 where the parts were prepare.part=1/4 to 4/4.")
    return int(text)
