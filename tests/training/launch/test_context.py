"""Rows that ranks hold in slices = whole rows, in float64. As a program, this file is one of the ranks."""

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, distributed

from lm.errors import ConfigError
from lm.losses.tokens import causal_reader
from lm.nn.batch import IGNORED, Batch
from lm.nn.model_config import model_config
from lm.nn.transformer import LM
from lm.schema import Tree, from_tree
from lm.testing.models import BASE, Doubles, random_model, tokens
from lm.training.config import TrainConfig
from lm.training.launch.config import LaunchConfig
from lm.training.launch.ranks import row_sharding_of
from tests.training.launch.processes import launch
from tests.training.steps import ENCODER_DECODER, SGD, config

ROWS, LENGTH = 3, 21  # the last slices are padded
ROUNDING = 1e-13  # of the largest number; float64 has 2e-16
MOE: Tree = {
    "kind": "moe", "n_experts": 4, "top_k": 2, "expert": {"kind": "mlp", "hidden": 24}, "balance_loss": 0.3, "router_z_loss": 0.2,
}  # fmt: skip
MODELS: dict[str, Tree] = {
    "one head of keys": {"attention": {"kind": "gqa", "n_heads": 4, "n_kv_heads": 1, "qk_norm": "full", "out_gate": "element"}},
    "two heads of keys, windows, sinks": {
        "attention": {"kind": "gqa", "n_heads": 4, "n_kv_heads": 2, "window": 5, "global_every": 2, "gpt_oss_sinks": True}
    },
    "six heads over three, soft-cap": {"attention": {"kind": "gqa", "n_heads": 12, "n_kv_heads": 3, "head_dim": 8, "softcap": 5.0}},
    "heads of layers apart": {
        "attention": {"kind": "gqa", "n_heads": 8, "n_kv_heads": 2, "window": 5, "global_every": 2, "value_norm": True}
        | {"global_heads": {"n_heads": 4, "n_kv_heads": 1, "head_dim": 10, "values": "keys"}},
    },
    "vectors of layers": {"embed": {"per_layer": {"channels": 8}}, "n_layers": 2},
    "keys of an earlier layer": {"attention": {"kind": "gqa", "n_heads": 4, "n_kv_heads": 2, "shared_layers": 1, "qk_norm": "head"}},
    "first tokens": {"attention": {"kind": "gqa", "n_heads": 4, "n_kv_heads": 2, "window": 4, "keep_first": 2}},
    "chunks": {"attention": {"kind": "gqa", "n_heads": 4, "n_kv_heads": 2, "window": 4, "chunked": True}},
    "differences": {"attention": {"kind": "differential", "n_heads": 8, "n_kv_heads": 2}},
    "latents": {"attention": {"kind": "mla", "n_heads": 4, "kv_rank": 8, "nope_dim": 8, "rope_dim": 4, "v_dim": 6}},
    "learned positions": {"position": {"kind": "learned"}},
    "sinusoidal positions": {"position": {"kind": "sinusoidal"}},
    "experts": {"ffn": MOE},
    "both sides": {"kind": "encoder", "embed": {"segments": 2}},
}


def whole_rows(packed: bool) -> Batch:
    """Documents end within slices, and one row in padding; labels are not equally many in the slices."""
    labels = tokens(ROWS, LENGTH, seed=2)
    labels[0, 5:9], labels[2, :13] = IGNORED, IGNORED
    batch = Batch(tokens(ROWS, LENGTH), labels, step_tokens=int((labels != IGNORED).sum()))
    if not packed:
        return batch
    at = torch.arange(LENGTH).expand(ROWS, -1)
    documents, positions = (at >= 9).int(), torch.where(at >= 9, at - 9, at)
    documents[1, -7:], positions[1, -7:] = -1, -1
    return replace(batch, documents=documents, positions=positions, prefix=positions % 9 < 3)


def losses(model: LM, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """What is minimised, the likelihood alone, the label tokens of the step and what is told of answers; and the gradients."""
    model.zero_grad()
    assert batch.labels is not None
    with Doubles():
        sums = model(batch, read=causal_reader(batch.labels, label_smoothing=0.1, z_loss=0.01, chunk=7, answers=batch.labels))
        sums.total.backward()
    found = torch.stack([sums.total.detach(), sums.nll, torch.tensor(float(batch.step_tokens)), *torch.cat([*sums.metrics.values()])])
    return found, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def process(names: list[str]) -> None:
    """What each rank does: the whole alone, and its slice with the others."""
    distributed.init_process_group("gloo")
    torch.set_default_dtype(torch.float64)
    n = distributed.get_world_size()
    slices = row_sharding_of(LaunchConfig(devices=n, context=n))
    assert slices is not None
    for name, differs in ((name, MODELS[name]) for name in names or MODELS):
        for packed in (False, True):
            model, batch = random_model(model_config(BASE | differs)).double().train(), whole_rows(packed)
            if model.cfg.embed.segments:
                batch = replace(batch, segments=(batch.tokens > 30).long())
            mine = batch.sharded(slices)
            assert mine.tokens.shape == (ROWS, -(-LENGTH // n)), mine.tokens.shape
            expected, found = losses(model, batch), losses(model, mine)
            for sums in (found[0], *found[1].values()):
                distributed.all_reduce(sums)
            compared = {"sums": (found[0], expected[0])} | {key: (found[1][key], grad) for key, grad in expected[1].items()}
            for key, (ours, theirs) in compared.items():
                error, size = float((ours - theirs).abs().max()), float(theirs.abs().max())
                assert error <= ROUNDING * size, f"{name}, packed {packed}: {key} is {error / size:.1g} off"
                assert size > 0, f"{name}: {key} is nothing"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "names"),
    [(2, ["six heads over three, soft-cap", "latents", "experts"]), *(pytest.param(n, [], marks=pytest.mark.slow) for n in (2, 4))],
)
def test_slices_of_rows_have_the_losses_and_gradients_of_whole_rows(world: int, names: list[str], server: Path, tmp_path: Path) -> None:
    """Over kinds of heads, positions, documents and experts.  names: of some; none: all."""
    launch(server, [__name__, *names], tmp_path, 240, world)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({"ffn": MOE | {"capacity": 4}}, "ffn.capacity counts the tokens of a whole row that come before. Leave"),
        ({"ffn": MOE | {"capacity_factor": 1.5}}, "ffn.capacity counts the tokens of a whole row"),
        (ENCODER_DECODER, "model.kind=encoder_decoder reads a source beside its row, .* Use a decoder."),
    ],
)
def test_models_that_need_whole_rows_are_refused(model: Tree, said: str) -> None:
    tree = config(SGD, model=model).tree()
    with pytest.raises(ConfigError, match=f"launch.context=2: {said}"):
        from_tree(TrainConfig, {**tree, "strategy": {"kind": "ddp"}, "launch": {"devices": 2, "context": 2}})


if __name__ == "__main__":
    process(sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort at a regular end
