"""`check_kind(config)`: whether a kind of one's own keeps what lm promises of every kind; for the tests of whoever writes one."""

from collections.abc import Iterator
from typing import Any

from lm.errors import ConfigError
from lm.nn.model_config import ModelConfig, model_config
from lm.schema import Slot, Tree
from lm.testing.invariants import check_model, check_positions, check_rows_of_the_cache, check_sizes
from lm.testing.models import BASE, slot_of


def check_kind(config: Slot, **where: Any) -> None:
    """Puts a kind of any slot through the invariants that hold for ours: small models with it, or its optimizer, and a run.

    where: what it needs beside, by section of the run's config, such as model={"d_model": 64} or init_from="runs/base".
    Raises AssertionError with the invariant that does not hold, and LmError where `lm train` does.
    """
    from lm.testing.runs import check

    slot = slot_of(ModelConfig, config)
    if slot is not None:
        pattern = {"pattern": ["recurrent", "attention"]} if slot == "recurrent" else {}
        where["model"] = {slot: config.tree(), **pattern, **where.get("model", {})}
        for cfg in _models(BASE | where["model"]):
            check_model(cfg)
            check_sizes(cfg)
            check_rows_of_the_cache(cfg)
            if slot == "attention":
                check_positions(cfg)
    check(config, where)


def _models(tree: Tree) -> Iterator[ModelConfig]:
    """Yields the config of the decoder, and those of the other kinds of models that accept this part."""
    yield model_config(tree)
    for kind in ("encoder", "encoder_decoder"):
        try:
            yield model_config(tree | {"kind": kind})
        except ConfigError:  # of one that a decoder takes: it has no form for such a model
            continue
