"""What every shipped preset and recipe keeps to."""

from lm.cli import catalog

RECIPES = catalog.groups()["recipes"]
PRESETS = catalog.groups()["model"]
SLOTS = {"model/attention", "model/block", "model/ffn", "model/norm", "model/position"}
NEEDED = {
    "text": ["data.files=a.txt"],
    "pairs": ["data.files=a.jsonl"],
    "chat": ["data.files=a.jsonl"],
    "preferences": ["data.files=a.jsonl"],
    "hub": ["data.name=a/b"],
    "file": ["tokenizer.path=tokenizer.json"],
}  # what an option leaves to the user
PARTNERS = {
    "data=pairs": ["objective=seq2seq"],
    "data=stdlib_docstrings": ["objective=seq2seq"],
    "data=chat": ["objective=sft"],
    "data=stdlib_chat": ["objective=sft"],
    "data=preferences": ["objective=preference", "init_from=runs/pretrain-tiny"],
    "objective=seq2seq": ["data=stdlib_docstrings"],
    "objective=sft": ["data=stdlib_chat"],
    "objective=preference": ["data=preferences", "data.files=a.jsonl", "init_from=runs/pretrain-tiny"],
}  # what an option does not go without
REFUSED = {"objective=mlm"}  # beside the default model
