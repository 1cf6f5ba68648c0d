"""`lm remodel from=FOLDER out=FOLDER ...`: another architecture that begins with a model's weights."""

import re
import shlex

from pydantic import Field

from lm.cli.verb import Writing
from lm.errors import ConfigError
from lm.printing import note, say
from lm.schema import MOST
from lm.storage.model_folder import read_config, resolve_model
from lm.units import si

_SHOWN = 5


class Remodel(Writing):
    """usage: lm remodel from=FOLDER out=FOLDER [model/SLOT=OPTION ...] [model.KEY=VALUE ...] [layers=0-5,3-8]

    A run, model or checkpoint becomes a model folder of another architecture, which is what init_from= takes, and begins with its weights:

      model/ffn=moe                every expert is a copy of the feed-forward that it replaces (sparse upcycling)
      model.attention.n_kv_heads   heads of keys and values become means of those that they replace, or copies where they become more
      layers                       the old layers that the new ones begin as, in order: repeated, left out, in another order
      model/residual=loop          the same layers, several times
      model.head.tied=false        the head begins as a copy of the embedding
      model.attention.indexer.*    indexers that are drawn, and hide nothing in rows of up to top_k tokens

    Other weights of the same name and shape are copied. What is new is drawn, and 0 where it writes to the residual stream. Width and
    vocabulary stay. It says how far the logits of both models are apart, for random tokens.
    """

    takes = ("model",)

    from_: str
    """Run, model or checkpoint folder."""
    layers: str | None = None
    """Numbers from 0, and ranges with both ends. null: all, each once."""
    silent: bool = False
    """Second and later copies of a layer add nothing to the residual stream at first, unless a norm stands behind it (Wu et al. 2024,
    arXiv:2401.02415)."""
    seed: int = Field(0, ge=0, lt=MOST)
    """Of what is drawn."""

    def run(self, rest: list[str]) -> None:
        """Prints what became of the weights, on stdout."""
        self.refuse([arg for arg in rest if not arg.lstrip("+~").startswith(("model.", "model/", "model="))])
        layers = None if self.layers is None else _numbers(self.layers)
        folder = resolve_model(self.from_)
        from lm.cli.compose.remodeled import remodeled
        from lm.generation.remodeling import remodel
        from lm.nn.model_config import model_config

        before = model_config(read_config(folder)["model"], str(folder)).tree()
        cfg = model_config(remodeled(before, str(folder), rest)) if rest else None
        found = remodel(folder, self.out, cfg, layers=layers, silent=self.silent, seed=self.seed, overwrite=self.overwrite)
        parts = {"as they were": found.kept, "made of others": found.made, "drawn": sum(found.drawn.values())}
        told = ", ".join(f"{si(n)} {what}" for what, n in parts.items() if n)
        say(f"{found.folder}: {si(found.n_parameters)} parameters, {told}.")
        for what, names in (("drawn", found.drawn), ("left out", found.left)):
            if names:
                more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
                note(f"{what}: {', '.join([*names][:_SHOWN])}{more}")
        apart = f"{found.apart:.0e}" if found.agrees else f"{float(f'{100 * found.apart:.2g}'):g} %"
        what = f"what {self.from_} does" if found.agrees else f"something else than {self.from_} until it is trained"
        say(f"It computes {what}: logits of a row of {found.probed} random tokens are {apart} of their norm apart.")
        say(f"Train it: lm train init_from={shlex.quote(self.out)} ...")


def _numbers(text: str) -> list[int]:
    """`0-2,1,4` -> [0, 1, 2, 1, 4]; raises ConfigError for another form."""
    found: list[int] = []
    for part in text.strip("[] ").replace(" ", "").split(","):
        if (ends := re.fullmatch(r"(\d{1,4})(?:-(\d{1,4}))?", part)) is None:
            raise ConfigError(f"layers={text}: {part!r} is neither a layer's number nor a range. Write layers=0-5,3-8, say.")
        first, last = int(ends[1]), int(ends[2] or ends[1])
        if last < first:
            raise ConfigError(f"layers={text}: {part} names no layers. Write the smaller number first.")
        found += range(first, last + 1)
    return found
