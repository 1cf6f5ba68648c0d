"""What an export or an import returns."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from lm.hf.io.check import Comparison
from lm.hf.io.handing_on import Use


class Written(NamedTuple):
    """A folder that was written: `kind` is the architecture or family; `check` how the logits compare with those of transformers; `uses`
    what other programs do with it; `embeds` whether it has no head, and so makes vectors of texts alone."""

    folder: Path
    kind: str
    n_parameters: int
    check: Comparison | None = None
    uses: Sequence[Use] = ()
    embeds: bool = False
