"""The names under which loggers show a record's numbers."""

from lm.schema import Tree

_PERF = ("tokens_per_second", "step_s", "data_s", "draw_s", "judge_s", "memory_gib", "mfu_pct")
_DATA = ("tokens", "epochs")
_EXPERTS = ("expert_load", "idle_experts", "router_loss")


def grouped(record: Tree) -> dict[str, float]:
    """Returns a record's numbers by hierarchical tags: train/loss, val/loss, val/loss/NAME, test/loss, perf/step_s, data/tokens,
    experts/NAME. An event has none: its loss is that of the step's own record."""
    found: dict[str, float] = {}
    for key, value in record.items() if "event" not in record else ():
        if key == "step" or isinstance(value, bool) or not isinstance(value, int | float):
            continue
        name, _, part = key.partition("/")
        if name.startswith(("val_", "test_")):
            tag = key.replace("_", "/", 1)
        elif name in _EXPERTS:
            tag = f"experts/{part or name}"
        else:
            tag = f"{'perf' if name in _PERF else 'data' if name in _DATA else 'train'}/{key}"
        found[tag] = value
    return found
