"""Whether transformers computes from an exported folder what the model itself computes. Needs the extra `hf`."""

import importlib.util
from pathlib import Path
from typing import NamedTuple

import torch

from lm.hf.family import Family
from lm.model_folder import copy_weights
from lm.nn.batch import Batch
from lm.nn.rope import RopeConfig
from lm.nn.rope_scaling import LongRopeScaling
from lm.nn.transformer import LM, build_model

TOKENS = 64
LONGEST = 8192  # tokens of one row, where so many are needed


class Comparison(NamedTuple):
    """Of the logits of random tokens: the largest difference, and their spread.  left_out: what was not compared."""

    difference: float
    spread: float
    rows: int
    tokens: int
    left_out: str | None


def available() -> bool:
    """transformers is installed."""
    return importlib.util.find_spec("transformers") is not None


@torch.no_grad()
def compare(folder: Path, family: Family, model: LM) -> Comparison:
    """Both models in float32."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    theirs = getattr(transformers, family.auto).from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    rows, tokens, left_out = 2, min(TOKENS, model.max_seq_len), None
    original = _list_changes_at(model)
    if original is not None and original + TOKENS <= LONGEST:
        rows, tokens = 1, min(original + TOKENS, model.max_seq_len)
    elif original is not None:
        model, tokens = _within(model, original), min(TOKENS, original)
        left_out = f"rows of over {original:,} tokens, for which there are other rotary factors"
    model = model.float().eval()
    ids = torch.randint(0, model.vocab_size, (rows, tokens), generator=torch.Generator().manual_seed(0))
    if model.cfg.kind == "encoder_decoder":
        expected = theirs(input_ids=ids, decoder_input_ids=ids.flip(1)).logits
        found = model(Batch(ids.flip(1), source_tokens=ids))
    else:
        expected, found = theirs(ids).logits, model(Batch(ids))
    return Comparison(float((expected - found).abs().max()), float(expected.std()), rows, tokens, left_out)


def _list_changes_at(model: LM) -> int | None:
    """The length up to which transformers takes longrope's short list, where our model takes the long one for its longer context."""
    position = model.cfg.position
    if not isinstance(position, RopeConfig) or not isinstance(position.scaling, LongRopeScaling):
        return None
    return position.scaling.original_len if model.max_seq_len > position.scaling.original_len else None


def _within(model: LM, original: int) -> LM:
    """The same weights with the short list."""
    position = model.cfg.position
    assert isinstance(position, RopeConfig) and isinstance(position.scaling, LongRopeScaling)
    scaling = position.scaling.replace(factor=position.scaling.factor or model.max_seq_len / original)
    short = build_model(model.cfg.replace(max_seq_len=original, position=position.replace(scaling=scaling)))
    copy_weights(short.named_parameters(), dict(model.named_parameters()), "the exported model")
    return short
