"""Checks whether transformers computes from an exported folder what the model itself computes. Needs the extra `hf`."""

import importlib.util
import warnings
from pathlib import Path
from typing import NamedTuple

import torch

from lm.errors import ConfigError
from lm.hf.io.bodies import headless
from lm.hf.io.family import Family
from lm.hf.options.context import changes_at, shortened
from lm.nn.batch import Batch
from lm.nn.transformer import LM, build_model
from lm.storage.model_folder import copy_weights

TOKENS = 64
LONGEST = 8192  # tokens of one row, where so many are needed


class Comparison(NamedTuple):
    """Of the logits of random tokens, or the last states of an encoder without a head: the largest difference, and their spread.

    left_out: what was not compared.
    """

    difference: float
    spread: float
    rows: int
    tokens: int
    left_out: str | None
    what: str = "logit"  # or state


def why_not(family: Family, package: str = "transformers") -> str | None:
    """Returns why nothing can be compared here, with the remedy.  package: what compares, beside transformers."""
    for needed in ("transformers", package):
        if importlib.util.find_spec(needed) is None:
            return f"{needed} is not installed: pip install 'slotlm[hf]'"
    import transformers

    if family.name not in transformers.CONFIG_MAPPING:
        return f"transformers {transformers.__version__}, which is installed, has no {family.name}: pip install -U transformers"
    return None


@torch.no_grad()
def compare(folder: Path, family: Family, model: LM, adapter: Path | None = None) -> Comparison:
    """Compares the logits of the folder's model in transformers with those of `model`, both in float32, on random tokens.  adapter: a
    folder from which peft adds an adapter to transformers' model."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    theirs = getattr(transformers, family.auto).from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    if hasattr(theirs, "set_experts_implementation"):
        theirs.set_experts_implementation("eager")  # the grouped kernel takes no matrices whose rows are no multiple of 16 bytes
    if adapter is not None:
        import peft

        there = dict(theirs.named_modules())
        whole = peft.PeftConfig.from_pretrained(str(adapter)).modules_to_save
        if missing := [name for name in whole or () if name not in there]:  # peft would leave it aside without a word
            raise ConfigError(
                f"format=peft: {missing[0]} was trained whole, and transformers builds no module of that name. Use format=hf, which merges"
                " it into the model."
            )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers for what has a new name there
            theirs = peft.PeftModel.from_pretrained(theirs, adapter)
    rows, tokens, left_out = 2, min(TOKENS, model.max_seq_len), None
    original = changes_at(model.cfg)
    if original is not None and original + TOKENS <= LONGEST:
        rows, tokens = 1, min(original + TOKENS, model.max_seq_len)
        left_out = f"rows of up to {original:,} tokens, for which transformers has other rotary factors"
    elif original is not None:
        short = build_model(shortened(model.cfg, original))
        copy_weights(short.named_parameters(), dict(model.named_parameters()), "the exported model")
        model, tokens = short, min(TOKENS, original)
        left_out = f"rows of over {original:,} tokens, for which there are other rotary factors"
    model = model.float().eval()
    theirs.config.use_cache = False  # which some classes cannot fill where no layer attends
    ids = torch.randint(0, model.vocab_size, (rows, tokens), generator=torch.Generator().manual_seed(0))
    if family.pad is not None:
        ids[ids == family.pad] = family.pad + 1  # a padding token within a text has no position there
    body = headless(model.cfg) and family.auto == "AutoModel"
    if model.cfg.kind == "encoder_decoder":
        expected = theirs(input_ids=ids, decoder_input_ids=ids.flip(1)).logits
        found = model(Batch(ids.flip(1), source_tokens=ids))
    elif model.cfg.head.labels is not None:
        padding = theirs.config.pad_token_id
        ids, rows = (ids, rows) if padding is not None else (ids[:1], 1)  # of several rows transformers asks where each one ends
        ids[ids == padding] = 1 if padding == 0 else 0  # a label is read off at the last token that is no padding
        at = 0 if model.cfg.kind == "encoder" else -1
        expected, found = theirs(ids).logits, model(Batch(ids), read=lambda hidden, head, ctx: head(hidden[:, at]))
    elif body:
        expected, found = theirs(ids).last_hidden_state, model(Batch(ids), read=lambda hidden, head, ctx: hidden)
    else:
        expected, found = theirs(ids).logits, model(Batch(ids))
    spread = expected.std() if expected.numel() > 1 else expected.abs().max()  # a reward of one text is one number
    what = "state" if body else "logit"
    return Comparison(float((expected - found).abs().max()), float(spread), rows, tokens, left_out, what)
