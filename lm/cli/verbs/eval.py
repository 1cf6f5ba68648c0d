"""`lm eval from=FOLDER data=KIND ...`: loss and bits per byte of a model on any data."""

import json
import sys
from collections.abc import Sequence
from typing import Literal

import yaml
from pydantic import Field

from lm.cli.compose.literal import parse_literal
from lm.cli.compose.source import HELP, take_from
from lm.cli.views.describe import listing, table
from lm.config import Config, Tree, from_tree
from lm.data.kinds import DataConfig, ObjectiveConfig
from lm.data.rows.base import usual
from lm.errors import CheckpointError, ConfigError

_USAGE = """\
usage: lm eval from=FOLDER [data=stdlib | data=text data.files=FILE | data=hub data.name=NAME] [key=value ...]

The tokenizer is the model's own. Rows are as long as the model's context unless data.seq_len is set; `lm explain data` tells of its keys.
"""


class EvalConfig(Config):
    """What `lm eval` takes beside `from`."""

    data: DataConfig | None = None
    """What to evaluate on. null: the data and the objective of the run that the model comes from."""
    objective: ObjectiveConfig | None = None
    """What is predicted. null: what models of this kind are mostly trained for."""
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
    cfg = parse_literal(EvalConfig, rest)
    found = _evaluate(folder, cfg)
    if cfg.format == "json":
        print(json.dumps(found))
        return 0
    units = {"val_loss": "nats/token", "val_bits_per_byte": "", "tokens": "predicted", "bytes": "", "zlib_bits_per_byte": "(level 9)"}
    print(table([(name, f"{value:,}" if isinstance(value, int) else f"{value:.4f}", units[name]) for name, value in found.items()], ""))
    return 0


def help_text(args: Sequence[str]) -> str:
    """Usage and options."""
    return f"{_USAGE}\n  {HELP}\n{listing(EvalConfig)}"


def _evaluate(folder: str, cfg: EvalConfig) -> Tree:
    from lm.data.order import spread
    from lm.data.rows.build import build_rows
    from lm.data.store.prepare import prepare
    from lm.generation.evaluate import evaluate
    from lm.generation.load import load
    from lm.nn.transformer import ModelConfig

    given = cfg if cfg.data is not None else _of_run(folder)
    data, objective = given.data, cfg.objective or given.objective
    assert data is not None
    model, tokenizer = load(folder, cfg.device)
    model_cfg = model.cfg
    assert isinstance(model_cfg, ModelConfig)
    objective = objective or usual(model_cfg.kind)
    try:
        objective.require_fit(objective.kind, model_cfg.kind, data)
    except ValueError as error:
        raise ConfigError(f"objective: {error}") from None
    seq_len = data.seq_len if cfg.data is None or "seq_len" in data.model_fields_set else model.max_seq_len
    if seq_len > model.max_seq_len:
        raise ConfigError(f"data.seq_len={seq_len} is over model.max_seq_len={model.max_seq_len}. Lower it, or leave it out.")
    prepared = prepare(data, tokenizer, log=lambda line: print(line, file=sys.stderr))
    parts = []
    found_parts = prepared.parts.values()
    stores = {"val": [part.val for part in found_parts], "train": [part.train for part in found_parts]}
    for store in stores.get(cfg.split, [*stores["train"], *stores["val"]]):
        rows = build_rows(objective, data.replace(seq_len=seq_len), store, tokenizer, model_cfg)
        parts.append(evaluate(model, rows, spread(len(rows), data.val_rows), tokenizer, cfg.micro_batch))
    tokens, n_bytes = sum(part["tokens"] for part in parts), sum(part["bytes"] for part in parts)
    loss = sum(part["val_loss"] * part["tokens"] for part in parts) / tokens
    bits = sum(part["val_bits_per_byte"] * part["bytes"] for part in parts) / n_bytes
    found: Tree = {"val_loss": loss, "val_bits_per_byte": bits, "tokens": tokens, "bytes": n_bytes}
    return found if cfg.split != "val" else found | {"zlib_bits_per_byte": prepared.zlib_bits_per_byte}


def _of_run(folder: str) -> EvalConfig:
    """Data and objective of the config.yaml of the run that this folder is, or that it lies in."""
    from lm.storage.model_folder import resolve_model

    model = resolve_model(folder)
    for path in (parent / "config.yaml" for parent in (model, *model.absolute().parents[:2])):
        if path.is_file():
            break
    else:
        raise ConfigError(
            f"data: {folder} is in no run folder, so the data must be given. Write data=text data.files=FILE, or data=stdlib."
        )
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
        return from_tree(EvalConfig, {"data": tree["data"], "objective": tree.get("objective")})
    except (yaml.YAMLError, UnicodeDecodeError, KeyError, TypeError, ConfigError) as error:
        raise CheckpointError(f"{path}: its data section cannot be read ({error}). Restore the file, or give data=...") from None
