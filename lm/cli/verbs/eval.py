"""`lm eval from=FOLDER [data=...]`: loss and bits per byte of a model on any data."""

import json
from typing import Literal

from pydantic import Field

from lm.cli.compose.sections import take_examined
from lm.cli.verb import Verb
from lm.cli.views.text import say
from lm.report.units import table
from lm.storage.model_folder import read_config, resolve_model
from lm.storage.run_folder import RunFolder

_UNITS = {"val_loss": "nats/token", "tokens": "predicted", "zlib_bits_per_byte": "(level 9)"}


class Eval(Verb):
    """usage: lm eval from=FOLDER [key=value ...] [data=..., objective=..., recipes=... and their keys, as lm train takes them]

    Without data, those of the run that the model comes from. The tokenizer is the model's own. Rows of other data are as long as the
    model's context unless data.seq_len is set; without an objective, what models of this kind are mostly trained for is predicted.
    """

    from_: str
    """Run, model or checkpoint folder."""
    split: Literal["val", "train", "all"] = "val"
    """The part that `lm train` would hold out, the part that it would train on, or both."""
    micro_batch: int = Field(8, gt=0)
    """Rows per forward."""
    device: str = "auto"
    """auto (CUDA where there is a GPU), cpu, cuda or cuda:N."""
    format: Literal["text", "json"] = "text"
    """json: one object on one line."""

    def run(self, rest: list[str]) -> None:
        """Prints figures on stdout, progress on stderr."""
        model = resolve_model(self.from_)
        saved = read_config(model)
        examined, says_length = take_examined(rest, list(type(self).model_fields), RunFolder.around(model))
        from lm.generation.examine import evaluate

        data = examined.data if says_length else examined.data.replace(seq_len=saved["model"]["max_seq_len"])
        objective, micro_batch = examined.objective, self.micro_batch
        found = evaluate(model, data, objective, split=self.split, micro_batch=micro_batch, device=self.device, log=say)
        if self.format == "json":
            print(json.dumps(found, allow_nan=False))
        else:
            shown = {name: f"{value:,}" if isinstance(value, int) else f"{value:.4f}" for name, value in found.items()}
            print(table([(name, value, _UNITS.get(name, "")) for name, value in shown.items()], ""))
