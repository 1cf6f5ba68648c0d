"""`lm export from=FOLDER format=hf out=FOLDER`: a model becomes what transformers, vLLM, llama.cpp and lm-eval load."""

import sys
from collections.abc import Sequence
from typing import Literal

from lm.cli.compose.literal import parse_literal
from lm.cli.compose.source import HELP, take_from
from lm.cli.verbs.import_ import require_new
from lm.cli.views.describe import listing
from lm.config import Config
from lm.errors import CheckpointError, ConfigError

_USAGE = """\
usage: lm export from=FOLDER format=hf out=FOLDER [key=value ...]

Writes config.json, generation_config.json, safetensors, tokenizer files and a model card, and compares the logits with those of
transformers, where that is installed. A model with an option that no family of transformers has is refused by naming the option.
"""

_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


class ExportConfig(Config):
    """What `lm export` takes beside `from`."""

    format: Literal["hf"]
    """hf: the format of Hugging Face transformers."""
    out: str
    """Folder to write; it must not exist."""
    family: str | None = None
    """Model type to write (llama, gpt2, t5, ...). null: the most general that can hold the model."""
    dtype: Literal["keep", "fp32", "bf16", "fp16"] = "keep"
    """Type of the weights. keep: as they are."""
    mtp: Literal["drop", "keep"] = "drop"
    """Blocks that predict further tokens: leave them out, or write them where the family has a place for them (DeepSeek-V3)."""
    check: bool = True
    """Load the result with transformers and compare logits."""


def run(args: Sequence[str]) -> int:
    """Two lines on stdout."""
    source, rest = take_from("export", args)
    cfg = parse_literal(ExportConfig, rest)
    out = require_new(cfg.out)
    import torch

    from lm.generation.load import load
    from lm.hf.io import check
    from lm.hf.io.card import model_card
    from lm.hf.io.writing import drop_mtp, family_for, write_hf

    model, tokenizer = load(source, "cpu")
    further = len(model.mtp_blocks())
    if cfg.mtp == "keep" and not further:
        raise ConfigError("mtp=keep: the model has no blocks that predict further tokens (model.mtp is null). Leave it out.")
    if cfg.mtp == "drop" and further:
        print(f"model.mtp: the {further} blocks that predict further tokens are left out", file=sys.stderr)
        drop_mtp(model)
    family = family_for(model.cfg, cfg.family)
    if cfg.dtype != "keep":
        model = model.to(getattr(torch, _DTYPES[cfg.dtype]))
    weights = {name: p.detach() for name, p in model.named_parameters()}
    write_hf(out, family, model.cfg, weights, tokenizer, model_card(source, family, model))
    print(f"{out}: {family.architecture}, {sum(w.numel() for w in weights.values()) / 1e6:,.1f} M parameters")
    if not cfg.check or not check.available():
        why = "check=false" if not cfg.check else "transformers is not installed: pip install 'slotlm[hf]'"
        print(f"not compared with transformers ({why})", file=sys.stderr)
        return 0
    found = check.compare(out, family, model)
    print(
        f"largest logit difference to transformers: {found.difference:.1e}"
        f" (float32, {found.rows} x {found.tokens} tokens, logits of std {found.spread:.2g})"
    )
    if found.left_out is not None:
        print(f"not compared with transformers: {found.left_out}", file=sys.stderr)
    if not found.difference <= 1e-3 * max(1.0, found.spread):
        raise CheckpointError(
            f"{out}: transformers computes other logits from it, by up to {found.difference:.2g}. Do not use it; report it."
        )
    return 0


def help_text(args: Sequence[str]) -> str:
    """Usage and options."""
    return f"{_USAGE}\n  {HELP}\n{listing(ExportConfig)}"
