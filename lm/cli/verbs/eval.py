"""`lm eval from=FOLDER [data=...]`: loss and bits per byte of a model on any data."""

import json
from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from lm.cli.compose.arguments import FROM, parse_literal, take_from
from lm.cli.compose.sections import take_examined
from lm.cli.views.text import listing, say, table
from lm.schema import Config
from lm.storage.model_folder import read_config, resolve_model
from lm.storage.run_folder import RunFolder

_USAGE = """\
usage: lm eval from=FOLDER [key=value ...] [data=..., objective=..., recipes=... and their keys, as lm train takes them]

Without data, those of the run that the model comes from. The tokenizer is the model's own. Rows of other data are as long as the
model's context unless data.seq_len is set; without an objective, what models of this kind are mostly trained for is predicted.
"""


class EvalConfig(Config):
    """What `lm eval` takes beside `from`, data and objective."""

    split: Literal["val", "train", "all"] = "val"
    """The part that `lm train` would hold out, the part that it would train on, or both."""
    micro_batch: int = Field(8, gt=0)
    """Rows per forward."""
    device: str = "auto"
    """auto (CUDA where there is a GPU), cpu, cuda or cuda:N."""
    format: Literal["text", "json"] = "text"
    """json: one object on one line."""


def run(args: Sequence[str]) -> int:
    """Figures on stdout, progress on stderr."""
    folder, rest = take_from("eval", args)
    own = [arg for arg in rest if arg.split("=")[0] in (*EvalConfig.model_fields, "traceback")]
    cfg, model = parse_literal(EvalConfig, own), resolve_model(folder)
    saved = read_config(model)
    examined, says_length = take_examined([arg for arg in rest if arg not in own], list(EvalConfig.model_fields), RunFolder.around(model))
    from lm.generation.examine import evaluate

    data = examined.data if says_length else examined.data.replace(seq_len=saved["model"]["max_seq_len"])
    found = evaluate(model, data, examined.objective, split=cfg.split, micro_batch=cfg.micro_batch, device=cfg.device, log=say)
    if cfg.format == "json":
        print(json.dumps(found))
        return 0
    units = {"val_loss": "nats/token", "val_bits_per_byte": "", "tokens": "predicted", "bytes": "", "zlib_bits_per_byte": "(level 9)"}
    print(table([(name, f"{value:,}" if isinstance(value, int) else f"{value:.4f}", units[name]) for name, value in found.items()], ""))
    return 0


def help_text(args: Sequence[str]) -> str:
    """Usage and options."""
    return f"{_USAGE}\n  {FROM}\n{listing(EvalConfig)}"
