"""The README.md of an exported model: what it is and where it comes from, and no claim beyond that."""

from pathlib import Path

from lm.hf.io.family import Family
from lm.nn.transformer import LM
from lm.schema import Tree
from lm.units import si

_TASKS = {"decoder": "text-generation", "encoder": "fill-mask", "encoder_decoder": "text2text-generation"}


def model_card(saved: Tree, source: str, family: Family, model: LM) -> str:
    """Returns Markdown with the header that the hub reads.  saved, source: the config and the folder that the model was read from."""
    size = sum(p.numel() for p in model.parameters())
    facts = {
        "Architecture": f"{family.architecture}, {si(size)} parameters",
        "Context": f"{model.max_seq_len:,} tokens",
        "Run": _text(saved, "run"),
        "Optimizer steps": _text(saved, "step"),
        "Started from": _text(saved, "parent"),
    }
    table = "\n".join(f"| {fact} | {value} |" for fact, value in facts.items() if value)
    task = _TASKS[model.cfg.kind] if model.cfg.head.labels is None else "text-classification"
    return (
        f"---\nlibrary_name: transformers\npipeline_tag: {task}\n---\n\n# {name(saved, source)}\n\n"
        f"Trained with lm (slotlm) and exported to the format of transformers.\n\n| | |\n|---|---|\n{table}\n\n"
        "Intended use, training data and limits are for its author to state.\n"
    )


def name(saved: Tree, source: str) -> str:
    """Returns the name of an exported model: its run's, or else its folder's."""
    return str(saved.get("run") or Path(source).resolve().name)


def _text(saved: Tree, key: str) -> str:
    return str(saved[key]) if saved.get(key) is not None else ""
