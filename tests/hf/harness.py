"""A family against transformers, both in float64: import, logits, export, import again, and greedy decoding with the cache."""

import inspect
import json
from collections.abc import Iterable
from copy import deepcopy
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers
from torch import Tensor

from lm.generation.sampling import SamplingConfig
from lm.hf.io.family import Family, resolved
from lm.hf.io.reading import Imported, read_hf
from lm.hf.io.writing import family_for, write_hf
from lm.hf.options.keys import without_effect
from lm.nn.batch import Batch
from lm.nn.transformer import LM, build_model
from lm.schema import Tree
from lm.storage.model_folder import copy_weights
from lm.testing.models import Doubles, same
from tests.generation.drawing import generate

VOCAB, LENGTH = 61, 50
SHIFTED = ("roberta", "xlm-roberta", "camembert", "data2vec-text", "roberta-prelayernorm", "xlm-roberta-xl")
FIRST = dict.fromkeys(SHIFTED, 2)  # position, where it is not 0


def cases(named: Iterable[str], quick: int = 1) -> list[Any]:
    """Those of a family for a parametrised test: the first always, the others in `make test-all`."""
    return [name if i < quick else pytest.param(name, marks=pytest.mark.slow) for i, name in enumerate(named)]


def change(folder: Path, **keys: Any) -> None:
    """Of config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **keys}))


@torch.no_grad()
def redraw(theirs: torch.nn.Module, embed_gain: float, seed: int = 0) -> None:
    """Every weight and stored buffer random: matrices so that activations keep their size, norms, biases and sinks far from 0 and 1.
    Tables of sines and xIELU's numbers are none."""
    source = torch.Generator().manual_seed(seed)
    tables = {f"{name}.weight" for name, module in theirs.named_modules() if "Sinusoidal" in type(module).__name__}
    fixed = tables | {name for name in theirs.state_dict() if name.endswith((".act_fn.beta", ".act_fn.eps"))}
    stored = {name: tensor for name, tensor in theirs.state_dict().items() if name not in fixed}
    drawn: set[int] = set()
    for name in sorted(stored):
        tensor = stored[name]
        if tensor.data_ptr() in drawn or not tensor.is_floating_point():
            continue
        drawn.add(tensor.data_ptr())
        noise = torch.randn(tensor.shape, generator=source)
        tensor.copy_(noise * 1.5 / tensor.shape[-1] ** 0.5 if tensor.ndim > 1 else tensor + 0.5 * noise)
        if any(part in name for part in ("embed", "wte", "shared", "lm_head")):
            tensor.mul_(embed_gain)
    for shared in [name for name in stored if name.endswith("shared.weight")]:  # one embedding, where each stack stores its own
        for name in stored:
            if name.endswith("coder.embed_tokens.weight"):
                stored[name].copy_(stored[shared])


def tokens(b: int, s: int, seed: int) -> Tensor:
    """None is 0 or 1, which some families take for padding."""
    return torch.randint(2, VOCAB, (b, s), generator=torch.Generator().manual_seed(seed))


def padding(b: int, s: int, left: bool) -> tuple[Tensor, Tensor]:
    """A mask of rows of s, s-7, s-14, ... real tokens, and their positions, -1 on padding."""
    real = torch.arange(s) < (s - 7 * torch.arange(b))[:, None]
    real = real.flip(1) if left else real
    return real, torch.where(real, real.cumsum(1) - 1, -1)


def ours_of(found: Imported) -> LM:
    """In float64, its tables of angles too."""
    with Doubles():
        model = build_model(found.config).double()
        copy_weights(model.named_parameters(), dict(found.weights), "imported")
    return model.eval()


def in_doubles(theirs: Any) -> Any:
    """The same model of theirs in float64: built anew, since a cast would keep the rounding of its tables."""
    with Doubles():
        out = type(theirs)._from_config(theirs.config, dtype=torch.float64)
        out.set_experts_implementation("eager")  # its grouped kernel has no float64
        out.load_state_dict(theirs.state_dict(), assign=True)  # what is tied here stays so, whatever the config says
        with patch.object(torch, "FloatTensor", torch.DoubleTensor):
            for module in out.modules():
                if "Sinusoidal" in type(module).__name__ and hasattr(module, "create_weight"):
                    module.weight.data = module.create_weight().double()
    return out.double().eval()


def decoder_logits(theirs: Any, ours: LM, ids: Tensor, real: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """At real tokens, (n, v)."""
    first = FIRST.get(theirs.config.model_type, 0)
    inputs = {"attention_mask": real.long(), "position_ids": positions.clamp_min(0) + first}
    accepted = inspect.signature(theirs.forward).parameters
    expected = theirs(ids, **{key: value for key, value in inputs.items() if key in accepted}).logits
    return ours(Batch(ids, positions=positions))[real], expected[real]


def seq2seq_logits(theirs: Any, ours: LM, ids: Tensor, real: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """The ids are the source; the decoder gets others, without padding."""
    inner = tokens(len(ids), 23, seed=77)
    expected = theirs(input_ids=ids, attention_mask=real.long(), decoder_input_ids=inner).logits
    return ours(Batch(inner, source_tokens=ids, source_positions=positions)).flatten(0, 1), expected.flatten(0, 1)


@torch.no_grad()
def logits_agree(theirs: Any, ours: LM, lefts: tuple[bool, ...] = (False, False, True), spread: float = 1.0) -> None:
    """Three batches: without padding, padded on the right, padded on the left.  spread: of the logits at least."""
    theirs = in_doubles(theirs)
    compared = seq2seq_logits if ours.cfg.kind == "encoder_decoder" else decoder_logits
    for seed, left in enumerate(lefts):
        ids = tokens(3, LENGTH, seed)
        real, positions = padding(3, LENGTH, left)
        if seed == 0:
            real, positions = torch.ones_like(real), torch.arange(LENGTH).expand(3, -1)
        with Doubles():
            found, expected = compared(theirs, ours, ids, real, positions)
        assert expected.std() >= spread, f"blind: logits of std {expected.std():.2f}"
        same(found, expected)


@torch.no_grad()
def greedy_agrees(theirs: Any, ours: LM, n: int = 50) -> None:
    """Ours decodes with its cache, and finds what is likeliest in theirs without one; and theirs begins alike with its own cache, or, where
    an expert takes so many of the tokens that are read at once, is alike to the end."""
    theirs = in_doubles(theirs)
    prompt, both = tokens(1, 9, seed=5), ours.cfg.kind == "encoder_decoder"
    steps = 6 if getattr(ours.cfg.ffn, "capacity", None) is None else n
    options = {"max_new_tokens": steps, "do_sample": False, "use_cache": True}
    for name in ("eos_token_id", "forced_bos_token_id", "forced_eos_token_id"):
        setattr(theirs.generation_config, name, None)
    with Doubles():
        begun = theirs.generate(prompt, **options)[:, 0 if both else 9 :]
        [found] = generate(ours, prompt.tolist(), SamplingConfig(max_tokens=n, temperature=0.0))
        row = torch.tensor([[int(begun[0, 0]), *found[:-1]]] if both else [[*prompt[0].tolist(), *found[:-1]]])
        read = {"input_ids": prompt, "decoder_input_ids": row} if both else {"input_ids": row}
        likeliest = theirs(**read).logits[0, 0 if both else 8 :].argmax(-1).tolist()
    assert len(found) == n and (found == likeliest or steps == n)
    assert begun[0, both:].tolist() == found[:steps]


@torch.no_grad()
def verify(
    theirs: Any,
    folder: Path,
    greedy: bool = True,
    lefts: tuple[bool, ...] = (False, False, True),
    embed_gain: float = 2.0,
    loads_as: str | None = None,
) -> Imported:
    """All that a family promises; returns what was imported.  loads_as: transformers' class, where it is another family's."""
    theirs = theirs.eval()
    redraw(theirs, embed_gain)
    theirs.save_pretrained(folder / "theirs")
    found = read_hf(folder / "theirs")
    ours = ours_of(found)
    logits_agree(theirs, ours, lefts)

    family = family_for(found.config, found.family.name)
    assert all(key in family.known_keys() or without_effect(key) for key in family.hf(found.config))
    write_hf(folder / "exported", family, found.config, found.weights, None)
    auto = getattr(transformers, family.auto)
    loaded, report = auto.from_pretrained(folder / "exported", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"], report
    assert type(loaded).__name__ == (loads_as or family.architecture) == type(theirs).__name__
    logits_agree(loaded.eval(), ours, lefts)

    again = read_hf(folder / "exported")
    assert resolved(again.config) == resolved(found.config)
    assert again.weights.keys() == found.weights.keys()
    assert all(torch.equal(again.weights[name], tensor) for name, tensor in found.weights.items())
    if greedy:
        greedy_agrees(theirs, ours)
    return found


def old_spelling_agrees(family: Family, config: Any, old: Tree) -> None:
    """A config.json of transformers 4 gives the options of what transformers 5 makes of it, class defaults included."""
    new = config(**deepcopy(old)).to_dict()
    assert "rope_scaling" not in new and "rope_parameters" in new
    told, again = ({family.renamed.get(key, key): value for key, value in hf.items()} for hf in (old, new))
    assert resolved(family.config(told)) == resolved(family.config(again))
