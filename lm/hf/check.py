"""Whether transformers computes from an exported folder what the model itself computes. Needs the extra `hf`."""

import importlib.util
from pathlib import Path

import torch

from lm.hf.family import Family
from lm.nn.batch import Batch
from lm.nn.transformer import LM

ROWS, TOKENS = 2, 64


def available() -> bool:
    """transformers is installed."""
    return importlib.util.find_spec("transformers") is not None


@torch.no_grad()
def largest_difference(folder: Path, family: Family, model: LM) -> tuple[float, float]:
    """Of all logits of random tokens, both models in float32, and the spread of the logits to compare it with."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    theirs = getattr(transformers, family.auto).from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    model = model.float().eval()
    length = min(TOKENS, model.max_seq_len)
    ids = torch.randint(0, model.vocab_size, (ROWS, length), generator=torch.Generator().manual_seed(0))
    if model.cfg.kind == "encoder_decoder":
        expected = theirs(input_ids=ids, decoder_input_ids=ids.flip(1)).logits
        found = model(Batch(ids.flip(1), source_tokens=ids))
    else:
        expected, found = theirs(ids).logits, model(Batch(ids))
    return float((expected - found).abs().max()), float(expected.std())
