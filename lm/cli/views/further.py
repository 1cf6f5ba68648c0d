"""Suggests commands for a run that has ended."""

import shlex

from lm.cli.compose.quoting import in_shell
from lm.errors import LmError
from lm.schema import Tree, flatten
from lm.storage.reading import read_json
from lm.storage.run_folder import RunFolder


def next_commands(run: RunFolder) -> list[str]:
    """Returns lines of commands; where the model can generate, the first one does."""
    config, given = flatten(run.config()), f"from={shlex.quote(str(run.path))}"
    prompts = config.get("trainer.sample_prompts")
    prompt = str(prompts[0]) if isinstance(prompts, list) and prompts else run.samples.beginning() or "Once upon a time"
    objective, tokenizer = config.get("objective.kind"), _tokenizer_of(run)
    lines = []
    if objective == "diffusion":
        context = config.get("model.max_seq_len") or config.get("data.seq_len") or 256
        lines = [f"sample it: lm fill {given} text={in_shell(prompt)} max_tokens={min(64, max(1, context // 4))}"]
    elif objective == "mlm" and (mask := tokenizer.get("mask_token")):
        blank = "" if mask == "<|mask|>" else " "  # a part of the token of a word, where lm has made it
        lines = [f"try it: lm fill {given} text={in_shell(f'A{blank}{mask} text.')}"]
    elif objective == "reward":
        lines = [f"learn from it: lm train objective=grpo init_from=FOLDER objective.reward_model={shlex.quote(str(run.path))} data=..."]
    elif objective in ("classify", "multi_label", "regression"):
        second = " text_pair=TEXT" if config.get("data.record.text_pair") else ""
        lines = [f"try it: lm classify {given} text=TEXT{second}"]
    elif objective == "contrastive":
        lines = [f"try it: lm embed {given} text=[TEXT,ANOTHER]"]
    elif (kind := config.get("model.kind")) in ("decoder", "encoder_decoder"):
        says = "sample it" if kind == "decoder" else "try it"
        talks = bool(tokenizer.get("chat_template"))
        lines = [f"talk to it: lm generate {given}" if talks else f"{says}: lm generate {given} prompt={in_shell(prompt)}"]
    if objective in ("fim", "spans", "ul2"):
        lines.append(f"fill a gap: lm generate {given} prompt=TEXT suffix=TEXT")
    beside = shlex.quote(str(run.path.parent))
    return [*lines, f"further: lm eval {given} | lm compare {beside} | lm export {given} format=hf out=FOLDER"]


def _tokenizer_of(run: RunFolder) -> Tree:
    try:
        return read_json(run.model / "tokenizer_config.json")
    except LmError:
        return {}
