"""Several processes = one: the same module on the same rows under every strategy, on CPU with gloo. SGD shows what AdamW hides: a gradient
of the wrong scale. As a program, this file is one of the processes."""

import importlib.util
import json
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lm.generation.decode import eval_mode
from lm.losses.likelihoods import row_likelihoods
from lm.losses.tokens import causal_reader
from lm.nn.batch import Batch
from lm.nn.transformer import build_model
from lm.schema import Tree, from_tree
from lm.training.config import TrainConfig
from lm.training.module import TrainModule
from lm.training.optim import muon
from tests.training.launch.processes import launch
from tests.training.steps import ADAMW, ENCODER_DECODER, MOE, SGD, UNCLIPPED, Record, batches, config, train_steps, with_sources

ROWS, STEPS = 12, 20
MOMENTUM = UNCLIPPED | {"momentum": 0.5}
SLOW_ADAMW = ADAMW | {"lr": 3e-3}  # larger steps amplify the rounding of small gradients
SLOWEST_ADAMW = ADAMW | {"lr": 1e-3}  # at 3e-3 micro-batches alone change the gradient norm of a loop by 4e-5 on a CPU without AVX-512
MUON: Tree = {"kind": "muon", "lr": 1e-2, "adam_lr": 1e-3, "embed_lr": 3e-3, "weight_decay": 0.1, "clip": 0.5}
POISONED_STEP = 2
FEW_LABELS = 9  # whose logits exist at once; how often as many are read differs between ranks


@dataclass(frozen=True)
class Job:
    """What both the two processes and the one train."""

    optim: dict[str, Any]
    accumulation: int
    poisoned: bool = False
    model: Tree | None = None
    options: Tree = field(default_factory=dict)  # of train_steps
    trainer: Tree = field(default_factory=dict)  # options
    adapter: Tree | None = None
    objective: Tree | None = None
    context: int = 1  # ranks that hold a row
    tensor: int = 1  # ranks that hold a matrix
    strategy: Tree = field(default_factory=dict)  # options
    evaluated: bool = False  # before every step
    rounded: bool = False  # in bf16, where gradients are rounded in other places: losses and weights are close, norms are not

    def config(self) -> TrainConfig:
        found = config(self.optim, rows=ROWS, steps=STEPS, model=self.model)
        found = found.replace(trainer=found.trainer.replace(**self.trainer))
        if self.objective is not None:
            pairs = {"kind": "stdlib_docstrings", "record": {"kind": "preference"}, "seq_len": 16, "global_batch": ROWS}
            found = found.replace(objective=self.objective, data=pairs)
        return found if self.adapter is None else found.replace(adapter=self.adapter, init_from="drawn as the others")

    def run(self, cfg: TrainConfig, rank: int, world: int) -> tuple[Record, dict[str, torch.Tensor]]:
        n = cfg.launch.ranks_per_row
        rows = batches(rank=rank // n, world=world // n, rows=ROWS, steps=STEPS, accumulation=self.accumulation)
        rows = with_sources(rows) if (self.model or {}).get("kind") == "encoder_decoder" else rows
        kind = Evaluated if self.evaluated else Poisoned if self.poisoned and world > 1 else TrainModule
        steps = POISONED_STEP if self.poisoned and world == 1 else STEPS
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(muon, "fast_dtype", lambda device: torch.float32)  # bf16 would hide what differs
            patch.setattr(row_likelihoods, "__defaults__", (FEW_LABELS, None))
            return train_steps(cfg, rows, cfg.strategy.build(cfg), kind, steps, self.accumulation, devices=world, **self.options)


BF16: Tree = {"precision": "bf16-mixed"}
AGAIN: Tree = {"recompute": "block"}
EVERY_OTHER = AGAIN | {"recompute_every": 2}
PRODUCTS: Tree = {"recompute": "selective"}
SHARED: Tree = {"kind": "gqa", "n_heads": 2, "n_kv_heads": 1, "value_residual": True}
JOBS = {
    "sgd, clipped": Job(SGD, 2),
    "sgd, unclipped": Job(UNCLIPPED, 3),
    "sgd with momentum": Job(MOMENTUM, 2),
    "adamw, clipped": Job(SLOW_ADAMW, 3),
    "adamw, unclipped": Job(SLOW_ADAMW | {"clip": None}, 1),
    "experts, sgd": Job(SGD | {"lr": 0.1}, 2, model=MOE),
    "experts, completep": Job(SLOW_ADAMW, 3, model=MOE | {"parametrization": {"kind": "completep", "base_width": 16, "base_depth": 1}}),
    "encoder-decoder, sgd": Job(SGD, 2, model=ENCODER_DECODER),
    "encoder-decoder, adamw": Job(SLOW_ADAMW, 3, model=ENCODER_DECODER),
    "encoder-decoder, experts, sgd": Job(SGD | {"lr": 0.1}, 2, model=MOE | ENCODER_DECODER),
    "encoder-decoder, shared values": Job(SLOW_ADAMW, 2, model=ENCODER_DECODER | {"attention": SHARED}),
    "learned places": Job(SLOW_ADAMW, 2, model={"position": {"kind": "learned"}, "embed": {"segments": 2, "norm": True}}),
    "a head of its own": Job(SLOW_ADAMW, 2, model={"head": {"tied": False, "bias": True, "transform": "gelu"}}, evaluated=True),
    "an adapter, DoRA": Job(SLOW_ADAMW, 2, adapter={"kind": "lora", "rank": 4, "dora": True}),
    "experts, an adapter": Job(SLOW_ADAMW, 2, model=MOE, adapter={"kind": "lora", "rank": 4}, trainer=EVERY_OTHER),
    "experts, an adapter, bf16": Job(SLOW_ADAMW, 2, model=MOE, adapter={"kind": "lora", "rank": 4}, options=BF16, rounded=True),
    "pairs": Job(SLOW_ADAMW, 3, objective={"kind": "simpo"}),
    "pairs, a head of its own": Job(SLOW_ADAMW, 3, model={"head": {"tied": False, "bias": True}}, objective={"kind": "simpo"}),
    "poisoned": Job(SLOW_ADAMW, 2, poisoned=True),
    "all blocks again": Job(SLOW_ADAMW, 2, trainer=AGAIN),
    "experts, every other block again": Job(SGD | {"lr": 0.1}, 2, model=MOE, trainer=EVERY_OTHER),
    "encoder-decoder, all blocks again": Job(SLOW_ADAMW, 3, model=ENCODER_DECODER, trainer=AGAIN),
    "muon": Job(MUON, 2),
    "experts, muon": Job(MUON, 2, model=MOE),
    "experts, bf16": Job(SLOW_ADAMW, 2, model=MOE, options=BF16, rounded=True),
    "encoder-decoder, bf16": Job(SLOW_ADAMW, 2, model=ENCODER_DECODER, options=BF16, rounded=True),
}
HYPER: Tree = {"residual": {"kind": "hyper", "streams": 2, "sinkhorn": 3}}
TABLES: Tree = {"kind": "gqa", "n_heads": 2, "n_kv_heads": 1, "value_embedding": {"every": 2, "at": 0}}
SMEARED: Tree = {"embed": {"norm": True, "smear": {"channels": 5}, "ngrams": {"rows": 61, "sizes": [2, 3]}}}
LOOP: Tree = {"residual": {"kind": "loop", "times": 3}}
APART: Tree = {
    "attention": {"kind": "gqa", "n_heads": 4, "n_kv_heads": 2, "window": 5, "global_every": 2, "value_norm": True}
    | {"global_heads": {"n_kv_heads": 1, "head_dim": 12, "values": "keys"}},
    "embed": {"per_layer": {"channels": 4}}, "block": {"kind": "sequential", "stream_gain": True},
}  # fmt: skip
EARLIER: Tree = {
    "attention": {"kind": "gqa", "n_heads": 2, "n_kv_heads": 1, "shared_layers": 1}, "embed": {"per_layer": {"channels": 4}},
    "ffn": {"kind": "mlp", "hidden": 40, "last": {"n": 1, "hidden": 56}},
}  # fmt: skip
CHOSEN: Tree = {"attention": {"kind": "gqa", "n_heads": 2, "indexer": {"n_heads": 4, "head_dim": 16, "top_k": 5, "every": 2}}}
KEPT = {
    "products kept": Job(SLOW_ADAMW, 2, trainer=PRODUCTS),
    "experts, an adapter, products kept": Job(SLOW_ADAMW, 2, model=MOE, adapter={"kind": "lora", "rank": 4}, trainer=PRODUCTS),
    "encoder-decoder, products kept, bf16": Job(SLOW_ADAMW, 2, model=ENCODER_DECODER, options=BF16, trainer=PRODUCTS, rounded=True),
    "several streams, products kept": Job(SLOW_ADAMW, 2, model=HYPER, trainer=PRODUCTS),
    "halves, experts, products kept": Job(SGD | {"lr": 0.1}, 2, model=MOE, trainer=PRODUCTS, context=2),
}
WAYS = {
    "several streams, all blocks again": Job(SLOW_ADAMW, 3, model=HYPER, trainer=AGAIN),
    "several streams, encoder-decoder": Job(SGD, 2, model=ENCODER_DECODER | HYPER),
    "several streams, bf16": Job(SLOW_ADAMW, 2, model=HYPER, options=BF16, rounded=True),
    "x0": Job(SLOW_ADAMW, 2, model={"residual": {"kind": "x0"}}),
    "unet, encoder-decoder": Job(SLOW_ADAMW, 2, model=ENCODER_DECODER | {"residual": {"kind": "unet"}}),
    "dense": Job(SLOW_ADAMW, 2, model={"residual": {"kind": "dense"}}),
    "loop, all blocks again": Job(SLOWEST_ADAMW, 3, model=LOOP, trainer=AGAIN),
    "loop, experts": Job(SGD | {"lr": 0.1}, 2, model=MOE | LOOP),
    "values of tokens, all blocks again": Job(SLOW_ADAMW, 3, model={"attention": TABLES}, trainer=AGAIN),
    "values of tokens, encoder-decoder, muon": Job(MUON, 2, model=ENCODER_DECODER | {"attention": TABLES}),
    "neighbours mixed": Job(SLOW_ADAMW, 3, model=SMEARED),
    "neighbours mixed, encoder-decoder, bf16": Job(SLOW_ADAMW, 2, model=ENCODER_DECODER | SMEARED, options=BF16, rounded=True),
    "layers apart, muon": Job(MUON, 2, model=APART),
    "keys of an earlier layer, all blocks again": Job(SLOW_ADAMW, 3, model=EARLIER, trainer=AGAIN),
    "loop, encoder-decoder": Job(SGD | {"lr": 0.1}, 2, model=ENCODER_DECODER | LOOP),
    "keys that an earlier layer chose, all blocks again": Job(SLOW_ADAMW, 3, model=CHOSEN, trainer=AGAIN),
    "chosen keys, an adapter": Job(SLOW_ADAMW, 2, model=CHOSEN, adapter={"kind": "lora", "rank": 4}),
}
WAYS_OF_SLICES = {
    "several streams, halves": Job(SLOW_ADAMW, 2, model=HYPER, context=2),
    "loop, halves": Job(SLOWEST_ADAMW, 2, model=LOOP, context=2),
    "values of tokens, halves": Job(SLOW_ADAMW, 2, model={"attention": TABLES}, context=2),
    "keys of an earlier layer, halves": Job(SLOW_ADAMW, 2, model=EARLIER, trainer=PRODUCTS, context=2),
    "dense, halves": Job(SLOW_ADAMW, 2, model={"residual": {"kind": "dense"}}, context=2),
}
FEW = ("experts, muon", "encoder-decoder, shared values", "poisoned")  # of make test
MATRICES = ("muon", "experts, muon", "sgd, clipped")
COMPILED = {
    "compiled": Job(SLOW_ADAMW, 2, options={"compile": True}),
    "compiled, an adapter": Job(SLOW_ADAMW, 2, options={"compile": True}, adapter={"kind": "lora", "rank": 4}),
    "compiled, all blocks again": Job(SGD, 2, options={"compile": True}, trainer=AGAIN),
    "compiled, products kept": Job(SGD, 2, options={"compile": True}, trainer=PRODUCTS),
    "compiled, experts, halves": Job(SGD, 2, model=MOE, options={"compile": True}, context=2),
}
FOUR_HEADS: Tree = {"attention": {"kind": "gqa", "n_heads": 4, "n_kv_heads": 1, "qkv_bias": True}}
HALVES = {
    "halves": Job(SGD, 2, context=2),
    "halves, experts, adamw": Job(SLOW_ADAMW, 3, model=MOE, context=2),
    "halves, experts, every other block again": Job(SGD | {"lr": 0.1}, 2, model=MOE, trainer=EVERY_OTHER, context=2),
    "halves, an adapter": Job(SLOW_ADAMW, 2, adapter={"kind": "lora", "rank": 4}, context=2),
    "halves, experts, bf16": Job(SLOW_ADAMW, 2, model=MOE, options=BF16, rounded=True, context=2),
    "halves, poisoned": Job(SLOW_ADAMW, 2, poisoned=True, context=2),
}
QUARTERS = {
    "quarters": Job(SGD, 3, model=FOUR_HEADS, context=4),
    "quarters, experts, adamw": Job(SLOW_ADAMW, 2, model=FOUR_HEADS | MOE, context=4),
}
COPIES = {  # of four ranks, or of six
    "copies, sgd": Job(SGD, 3, strategy={"shard": 2}),
    "copies, experts, muon": Job(MUON, 3, model=MOE, strategy={"shard": 2}),
    "copies, poisoned": Job(SLOW_ADAMW, 1, poisoned=True, strategy={"shard": 2}),
    "copies, an adapter, all blocks again": Job(SLOW_ADAMW, 3, adapter={"kind": "lora", "rank": 4}, trainer=AGAIN, strategy={"shard": 2}),
    "copies, experts, products kept": Job(SGD | {"lr": 0.1}, 3, model=MOE, trainer=PRODUCTS, strategy={"shard": 2}),
    "copies, experts, halves": Job(SLOW_ADAMW, 3, model=MOE, context=2, strategy={"shard": 2}),
    "copies, compiled": Job(SGD, 3, options={"compile": True}, strategy={"shard": 2}),
}
UNEVEN_COPIES = {
    f"{name}, uneven": replace(COPIES[name], accumulation=2, strategy={"shard": 3}) for name in ("copies, sgd", "copies, experts, muon")
}
SMALL: Tree = {"reduce_bucket_size": 500}  # elements; an embedding has 1,952
BUCKETS = {
    "buckets": Job(SLOW_ADAMW, 2, strategy=SMALL | {"allgather_bucket_size": 300}),
    "buckets, experts, bf16": Job(SLOW_ADAMW, 2, model=MOE, options=BF16, rounded=True, strategy=SMALL | {"allgather_bucket_size": 300}),
}
GROUPS: Tree = SMALL | {"prefetch_bucket_size": 100, "sub_group_size": 1000}
BUCKETS_OF_WEIGHTS = {
    "buckets of weights, sgd": Job(SGD, 2, strategy=GROUPS),
    "buckets of weights, experts": Job(SLOW_ADAMW, 2, model=MOE, strategy=GROUPS),
    "buckets of weights, poisoned": Job(SLOW_ADAMW, 2, poisoned=True, strategy=GROUPS),
}
NEAR = {  # of four ranks; a router's bias is written behind the step
    "near, experts": Job(SLOW_ADAMW, 3, model=MOE, strategy={"hpz_partition_size": 2}),
    "near, an adapter, all blocks again": Job(
        SLOW_ADAMW, 3, adapter={"kind": "lora", "rank": 4}, trainer=AGAIN, strategy={"hpz_partition_size": 2}
    ),
}
WIDER: Tree = {"attention": {"kind": "gqa", "n_heads": 8, "n_kv_heads": 4, "head_dim": 8, "qkv_bias": True, "qk_norm": "head"}}
WAYS_OF_MATRICES = {
    "several streams, matrices": Job(SLOW_ADAMW, 2, model=WIDER | HYPER, tensor=2),
    "x0, matrices": Job(SLOW_ADAMW, 2, model=WIDER | {"residual": {"kind": "x0"}}, tensor=2),
}
BIASES: Tree = {
    "attention": {**WIDER["attention"], "out_bias": True}, "ffn": {"kind": "mlp", "hidden": 40, "bias": True},
    "head": {"tied": False, "bias": True},
}  # fmt: skip
MATRICES_CUT = {
    "matrices, sgd": Job(SGD, 2, model=WIDER, tensor=2),
    "matrices, adamw": Job(SLOW_ADAMW, 3, model=BIASES, tensor=2),
    "matrices, momentum, every other block again": Job(MOMENTUM, 2, model=WIDER, trainer=EVERY_OTHER, tensor=2),
    "matrices, products kept": Job(MOMENTUM, 2, model=WIDER, trainer=PRODUCTS, tensor=2),
    "matrices, bf16": Job(SLOW_ADAMW, 2, model=BIASES, options=BF16, rounded=True, tensor=2),
    "matrices, experts": Job(SLOW_ADAMW, 3, model=WIDER | MOE, tensor=2),
    "matrices, experts, bf16": Job(SLOW_ADAMW, 2, model=WIDER | MOE, options=BF16, rounded=True, tensor=2),
    "matrices, experts, every other block again": Job(SGD | {"lr": 0.1}, 2, model=WIDER | MOE, trainer=EVERY_OTHER, tensor=2),
    "matrices, experts, products kept": Job(MOMENTUM, 2, model=WIDER | MOE, trainer=PRODUCTS, tensor=2),
    "matrices, muon": Job(MUON, 2, model=BIASES, tensor=2),
    "matrices, experts, muon": Job(MUON, 2, model=WIDER | MOE, tensor=2),
    "matrices, poisoned": Job(SLOW_ADAMW, 2, model=WIDER, poisoned=True, tensor=2),
}
MATRICES_CUT_IN_FOUR = {
    "matrices, experts, four": Job(SLOW_ADAMW, 2, model=WIDER | MOE, tensor=4),
    "matrices, experts, copies": Job(MOMENTUM, 2, model=WIDER | MOE, tensor=2, strategy={"shard": 2}),
    "matrices, experts, muon, four": Job(MUON, 2, model=WIDER | MOE, tensor=2),
    "matrices, experts, muon, copies": Job(MUON, 2, model=WIDER | MOE, tensor=2, strategy={"shard": 2}),
    "matrices, four": Job(SLOW_ADAMW, 2, model=BIASES, tensor=4),
    "matrices, copies": Job(SLOW_ADAMW, 2, model=WIDER, tensor=2, strategy={"shard": 2}),
}
ALL = (
    JOBS
    | KEPT
    | WAYS
    | WAYS_OF_SLICES
    | WAYS_OF_MATRICES
    | COMPILED
    | HALVES
    | QUARTERS
    | COPIES
    | UNEVEN_COPIES
    | MATRICES_CUT
    | MATRICES_CUT_IN_FOUR
    | BUCKETS
    | BUCKETS_OF_WEIGHTS
    | NEAR
)
ZERO = ["zero1", "zero2", "zero3", "zero2_offload", "zero3_offload"]
REFUSING = ZERO[2:]  # what works on matrices


class Poisoned(TrainModule):
    """One rank's loss is not a number in one step."""

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * float("nan") if self.step == POISONED_STEP and self.global_rank == 1 else loss


class Evaluated(TrainModule):
    """Evaluates before each step, in chunks of which ranks have different numbers."""

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        assert batch.labels is not None
        if self.micro == 0:
            with eval_mode(self.model):
                self.model(batch, read=causal_reader(batch.labels, chunk=7))
        return super().training_step(batch, batch_idx)


def spread(job: Job, kind: str, world: int) -> TrainConfig:
    """Under ZeRO-3 even the smallest weights are split."""
    options = job.strategy | ({"persistence_threshold": 0} if kind.startswith("zero3") else {})
    launched = {"devices": world, "context": job.context, "tensor": job.tensor}
    return from_tree(TrainConfig, {**job.config().tree(), "strategy": {"kind": kind, **options}, "launch": launched})


def process(kind: str, out: Path, names: list[str]) -> None:
    """What each of the launched processes does; rank 0 writes."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for name in names:
        job = ALL[name]
        if job.optim is MUON and kind in REFUSING:
            continue
        record, weights = job.run(spread(job, kind, world), rank, world)
        if rank == 0:
            (out / f"{name}.json").write_text(json.dumps(record))
            save_file(weights, out / f"{name}.safetensors")
    torch.distributed.barrier()


@cache
def alone(name: str) -> tuple[Record, dict[str, torch.Tensor]]:
    """What one process makes of this job, not compiled, with nothing computed again."""
    job = replace(ALL[name], options={key: value for key, value in ALL[name].options.items() if key != "compile"}, trainer={})
    return job.run(job.config(), 0, 1)


@pytest.mark.parametrize(
    ("kind", "names", "world"),
    [
        pytest.param("fsdp", FEW, 2, id="fsdp, few"),
        # DeepSpeed compiles its shared-memory collectives at the first start
        *(pytest.param(kind, JOBS, 2, marks=pytest.mark.slow, id=kind) for kind in ("fsdp", "ddp", *ZERO)),
        *(pytest.param(kind, WAYS | WAYS_OF_SLICES, 2, marks=pytest.mark.slow, id=f"{kind}, ways") for kind in ("ddp", *ZERO)),
        pytest.param("fsdp", WAYS | WAYS_OF_SLICES | WAYS_OF_MATRICES, 2, marks=pytest.mark.slow, id="fsdp, ways"),
        *(pytest.param(kind, KEPT, 2, marks=pytest.mark.slow, id=f"{kind}, products kept") for kind in ("fsdp", "ddp", *ZERO)),
        # no width is a multiple of 3, and of 4 experts one rank holds none
        *(pytest.param(kind, MATRICES, 3, marks=pytest.mark.slow, id=f"{kind}, three") for kind in ("fsdp", "zero1", "zero2")),
        *(pytest.param(kind, HALVES, 2, marks=pytest.mark.slow, id=f"{kind}, rows in halves") for kind in ("ddp", "fsdp", *ZERO)),
        *(
            pytest.param(kind, HALVES | QUARTERS, 4, marks=pytest.mark.slow, id=f"{kind}, rows in slices, four")
            for kind in ("ddp", "fsdp", "zero2")
        ),
        pytest.param("fsdp", COPIES, 4, marks=pytest.mark.slow, id="fsdp, copies, four"),
        pytest.param("fsdp", UNEVEN_COPIES, 6, marks=pytest.mark.slow, id="fsdp, copies, six"),
        pytest.param("fsdp", MATRICES_CUT, 2, marks=pytest.mark.slow, id="fsdp, matrices in slices"),
        pytest.param("fsdp", MATRICES_CUT | MATRICES_CUT_IN_FOUR, 4, marks=pytest.mark.slow, id="fsdp, matrices in slices, four"),
        *(pytest.param(kind, BUCKETS, 2, marks=pytest.mark.slow, id=f"{kind}, buckets") for kind in ("zero1", "zero2", "zero2_offload")),
        *(pytest.param(kind, BUCKETS_OF_WEIGHTS, 2, marks=pytest.mark.slow, id=f"{kind}, buckets") for kind in ("zero3", "zero3_offload")),
        # DeepSpeed makes the groups of a process once
        *(
            pytest.param(kind, [name], 4, marks=pytest.mark.slow, id=f"{kind}, {name}, four")
            for kind, name in product(("zero3", "zero3_offload"), NEAR)
        ),
        # a compiler runs; ZeRO-3 refuses to compile
        *(pytest.param(kind, COMPILED, 2, marks=pytest.mark.slow, id=f"{kind}, compiled") for kind in ("ddp", "fsdp", "zero1", "zero2")),
    ],
)
def test_several_processes_train_as_one(kind: str, names: Iterable[str], world: int, server: Path, tmp_path: Path) -> None:
    """And where one rank's gradient is not finite, every rank leaves the weights as the steps before it made them."""
    if kind.startswith("zero") and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed: pip install 'slotlm[deepspeed]'")
    launch(server, [__name__, kind, str(tmp_path), *names], tmp_path, 600, world)
    for name in names:
        if ALL[name].optim is MUON and kind in REFUSING:
            continue
        job = ALL[name]
        found = json.loads((tmp_path / f"{name}.json").read_text())
        record, weights = alone(name)
        taken = POISONED_STEP if job.poisoned else STEPS
        assert found["bad_step"] == [-1.0] * taken + [float(taken)] * (STEPS - taken), name
        close, near = (5e-3, 5e-2) if job.rounded else (1e-5, 5e-5)  # Adam divides what rounding left of a small gradient by as little
        for key, more in [("loss", 1)] if job.rounded else [("loss", 1), ("grad_norm", 5)]:
            assert found[key][:taken] == pytest.approx(record[key], rel=more * close), (name, key)
        after = {key: weight.float() for key, weight in load_file(tmp_path / f"{name}.safetensors").items()}  # DeepSpeed's bf16 copies
        torch.testing.assert_close(after, weights, rtol=near, atol=near, msg=name)
        for key, before in build_model(job.config().model, seed=1).named_parameters():
            assert job.adapter is None or job.rounded or torch.equal(weights[key], before), key
        moved = [p for key, p in weights.items() if key.endswith("lora_b")]
        moved = moved or [weights["embed.weight"] - build_model(job.config().model, seed=1).embed.weight]
        assert all(p.abs().max() > 1e-3 for p in moved)


if __name__ == "__main__":
    process(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
    os._exit(0)  # gloo's threads may abort at a regular end
