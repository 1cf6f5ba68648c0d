"""Matrices that ranks hold in slices = whole ones, in float64. As a program, this file is one of the ranks."""

import os
import sys
from copy import deepcopy
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, distributed

from lm.errors import ConfigError
from lm.nn.model_config import model_config
from lm.nn.transformer import LM
from lm.ops.ranks.tensor_parallel import Divisible, TensorParallel
from lm.schema import Tree, from_tree
from lm.testing.models import BASE, VOCAB, Doubles, random_model
from lm.training.config import TrainConfig
from lm.training.run import train_rank
from lm.training.strategies.tensor import cut_weights
from tests.training.conftest import Configure, Launch, ranks, read
from tests.training.launch import processes
from tests.training.launch.test_context import MOE, ROUNDING, losses, whole_rows
from tests.training.steps import MOE as SHARED
from tests.training.steps import SGD, config

HEADS: Tree = {"kind": "gqa", "n_heads": 8, "n_kv_heads": 4, "head_dim": 6}
EXPERTS: Tree = {**SHARED["ffn"]}
MODELS: dict[str, Tree] = {
    "biases, a norm of each head": {
        "attention": HEADS | {"qkv_bias": True, "out_bias": True, "qk_norm": "head"},
        "ffn": {"kind": "mlp", "hidden": 24, "bias": True, "activation": "xielu"},
    },
    "windows, sinks, a gate of each head": {
        "attention": HEADS | {"window": 5, "global_every": 2, "gpt_oss_sinks": True, "out_gate": "head"}
    },
    "a gate of each element, values of the first layer": {"attention": HEADS | {"out_gate": "element", "value_residual": True}},
    "heads of layers apart, values of keys": {
        "attention": HEADS
        | {"window": 5, "global_every": 2, "value_norm": True}
        | {"global_heads": {"n_heads": 4, "n_kv_heads": 4, "head_dim": 10, "values": "keys"}},
    },
    "vectors of layers": {"embed": {"per_layer": {"channels": 8}}, "attention": HEADS, "n_layers": 2},
    "keys of an earlier layer, a last one that is wide": {
        "attention": HEADS | {"shared_layers": 1, "qk_norm": "head"},
        "ffn": {"kind": "mlp", "hidden": 24, "last": {"n": 1, "hidden": 40}},
    },
    "first tokens behind a window": {"attention": HEADS | {"window": 5, "keep_first": 2}},
    "chunks, and heads that forget": {"attention": HEADS | {"window": 5, "chunked": True, "forget": True}},
    "side by side, not gated": {"attention": HEADS, "block": {"kind": "parallel"}, "ffn": {"kind": "mlp", "hidden": 20, "gated": False}},
    "a head of its own, an odd vocabulary": {
        "attention": HEADS,
        "vocab_size": VOCAB + 1,
        "head": {"tied": False, "bias": True, "scale": 0.7, "softcap": 9.0, "transform": "gelu"},
    },
    "experts": {"attention": HEADS, "ffn": MOE},
    "experts in a loop, biases, a shared one": {
        "attention": HEADS,
        "ffn": EXPERTS | {"reference": True, "expert": {"kind": "mlp", "hidden": 24, "bias": True, "gated": False}, "shared_gate": True},
    },
    "learned positions, both sides": {"attention": HEADS, "kind": "encoder", "position": {"kind": "learned"}},
}


def process(names: list[str]) -> None:
    """What each rank does: the whole alone, and its slices with the others; and whole rows without a gradient."""
    distributed.init_process_group("gloo")
    torch.set_default_dtype(torch.float64)
    n, rank = distributed.get_world_size(), distributed.get_rank()
    for name, differs in ((name, MODELS[name]) for name in names or MODELS):
        for packed in (False, True):
            model, batch = random_model(model_config(BASE | differs)).double().train(), whole_rows(packed)
            divided, columns = deepcopy(model), TensorParallel(distributed.group.WORLD, rank, n)
            for module in divided.modules():
                if isinstance(module, Divisible):
                    columns.divide(module)
            divided.tie()
            cut, mine = dict(cut_weights(divided)), partial(slice_of, columns)
            assert len({key for key, _ in divided.named_parameters()} & cut.keys()) >= 4 * len(model.blocks)
            expected, found = losses(model, batch), losses(divided, batch.sharded(columns))
            for key, sums in found[1].items():
                if key not in cut:
                    distributed.all_reduce(sums)
            distributed.all_reduce(found[0])
            compared = {"sums": (found[0], expected[0]), "logits": (logits(divided, batch.tokens), logits(model, batch.tokens))}
            for key, grad in expected[1].items():
                compared[key] = (found[1][key], mine(grad, cut[key]) if key in cut else grad)
            for key, (ours, theirs) in compared.items():
                error, size = float((ours - theirs).abs().max()), float(theirs.abs().max())
                assert error <= ROUNDING * size, f"{name}, packed {packed}: {key} is {error / size:.1g} off"
                assert size > 0, f"{name}: {key} is nothing"


def slice_of(columns: TensorParallel, whole: Tensor, dim: int) -> Tensor:
    """This rank's of a weight that is cut."""
    return whole.movedim(dim, 0)[columns.part(whole.shape[dim])].movedim(0, dim)


def logits(model: LM, tokens: Tensor) -> Tensor:
    with torch.no_grad(), Doubles():
        found: Tensor = model(tokens)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "names"),
    [
        (2, ["biases, a norm of each head", "a head of its own, an odd vocabulary", "experts"]),
        *(pytest.param(n, [], marks=pytest.mark.slow) for n in (2, 4)),
    ],
)
def test_slices_of_matrices_have_the_losses_and_gradients_of_whole_ones(world: int, names: list[str], server: Path, tmp_path: Path) -> None:
    """Over kinds of heads, gates, biases, positions, documents, heads and experts.  names: of some; none: all."""
    processes.launch(server, [__name__, *names], tmp_path, 240, world)


@pytest.mark.slow
def test_a_fine_tune_in_slices_of_matrices_validates_and_continues_as_one_process(
    configure: Configure, launch: Launch, tmp_path: Path
) -> None:
    """Of 5 rows in batches of 2, before the first step and behind the last. With a rate of nothing the weights are the parent's."""
    shared = ["trainer.micro_batch=2", "trainer.max_steps=4", "trainer.sample_prompts=[return, if]", "model.dropout=0"]
    train_rank(configure(*shared, "optim=adamw", "optim.lr=0.01", "run.name=parent"))
    still = [*shared, "optim=sgd", "optim.lr=1e-30", "data.val_rows=5"]
    launch(configure(*still, *ranks("fsdp", 4, tensor=2)).replace(init_from=str(tmp_path / "parent")))
    train_rank(configure(*still, "run.name=alone").replace(init_from=str(tmp_path / "parent")))
    found, alone = ([line for line in read(tmp_path / name / "metrics.jsonl") if "val_loss" in line] for name in ("run", "alone"))
    assert [line["step"] for line in found] == [line["step"] for line in alone] == [0, 4]
    for ours, theirs in zip(found, alone, strict=True):
        for key in ("val_loss", "val_bits_per_byte"):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-6)
    written = [(tmp_path / name / "samples.md").read_text() for name in ("run", "alone")]
    assert written[0] == written[1] and "return" in written[0]


REFUSED: list[tuple[Tree, str]] = [
    ({"strategy": {"kind": "ddp"}}, r"launch\.tensor=2: strategy=ddp knows whole matrices only\. Use strategy=fsdp\."),
    ({"strategy": {"kind": "fsdp", "shard": 2}, "launch": {"devices": 4, "tensor": 4}}, r"strategy\.shard=2 is not a multiple of it"),
    ({"optim": {"kind": "muon", "row_beta2": 0.9}}, r"optim\.row_beta2=0\.9 works on whole matrices"),
    ({"trainer": {"max_steps": 4, "compile": True}}, r"trainer\.compile has not been tried"),
    ({"adapter": {"kind": "lora"}, "init_from": "runs/a"}, "adapter=lora is trained beside whole matrices"),
    ({"objective": {"kind": "causal", "scheduled_sampling": 0.1}}, r"launch\.tensor=2: objective\.scheduled_sampling takes inputs"),
    ({"launch": {"devices": 4, "tensor": 2, "context": 2}}, r"context=2 and tensor=2 both cut the rows\. Set one of them to 1\."),
    ({"launch": {"devices": 3, "tensor": 2}}, "tensor=2 ranks hold a row, and devices .* is not a multiple"),
]
UNDIVIDED: list[tuple[Tree, str]] = [
    ({"attention": HEADS | {"n_kv_heads": 1}}, r"model\.attention\.n_kv_heads=1 is not a multiple of it, .* Choose a divisor\."),
    ({"attention": HEADS | {"n_heads": 9, "n_kv_heads": 3}}, r"model\.attention\.n_heads=9 is not a multiple of it"),
    ({"attention": HEADS | {"qk_norm": "full"}}, r"model\.attention\.qk_norm=full is of all heads"),
    (
        {"attention": {"kind": "mla", "n_heads": 4, "kv_rank": 8, "nope_dim": 8, "rope_dim": 4, "v_dim": 6}},
        "attention=mla has matrices that no rank can hold a slice of",
    ),
    ({"attention": HEADS | {"indexer": {"n_heads": 2, "head_dim": 16, "top_k": 3}}}, r"model\.attention\.indexer chooses among whole rows"),
    ({"ffn": {"kind": "mlp", "hidden": 63}}, r"model\.ffn\.hidden=63 is not a multiple of it, .* Choose one, such as 64\."),
    ({"ffn": EXPERTS | {"n_experts": 5}}, r"model\.ffn\.n_experts=5 is not a multiple of it, and each rank has as many\. Choose one\."),
    ({"ffn": EXPERTS | {"shared_hidden": 9}}, r"model\.ffn\.shared_hidden=9 is not a multiple of it, .* Choose one, such as 10\."),
]


@pytest.mark.parametrize(("differs", "said"), [*REFUSED, *(({"model": model}, said) for model, said in UNDIVIDED)])
def test_what_cannot_be_held_in_slices_is_refused(differs: Tree, said: str) -> None:
    tree = config(SGD, rows=12, model={"attention": HEADS} | differs.get("model", {})).tree()
    tree |= {"strategy": {"kind": "fsdp"}, "launch": {"devices": 2, "tensor": 2}}
    with pytest.raises(ConfigError, match=said):
        from_tree(TrainConfig, tree | {key: value for key, value in differs.items() if key != "model"})


if __name__ == "__main__":
    process(sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort at a regular end
