"""A few optimizer steps of the real TrainModule on fixed rows, without a run folder: losses, norms and weights to compare."""

import warnings
from collections.abc import Container
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import torch
from lightning import Trainer
from torch.utils.data import DataLoader

from lm.losses.embeddings import InParts
from lm.nn.batch import IGNORED, Batch
from lm.nn.materialize import Fill
from lm.nn.model_config import ModelConfig
from lm.nn.transformer import LM, build_model
from lm.schema import Tree, from_tree
from lm.training.callbacks.base import RunCallback
from lm.training.config import TrainConfig
from lm.training.module import TrainModule
from lm.training.state import RunState
from lm.training.strategies.base import Strategy
from lm.training.weights.initial import beside, drawn
from tests.nn import models
from tests.nn.models import redrawn

STEPS, ACCUMULATION, ROWS, LENGTH, VOCAB = 4, 2, 8, 16, 61
SGD: dict[str, Any] = {"kind": "sgd", "lr": 0.5, "clip": 1.0}
UNCLIPPED: dict[str, Any] = {"kind": "sgd", "lr": 0.1, "clip": None}
ADAMW: dict[str, Any] = {"kind": "adamw", "lr": 1e-2, "clip": 0.5}
Record = dict[str, list[float]]


MOE: Tree = {  # two layers of experts behind a dense one
    "n_layers": 3,
    "ffn": {
        "kind": "moe", "n_experts": 4, "top_k": 2, "expert": {"kind": "mlp", "hidden": 24}, "n_shared": 1,
        "router": {"kind": "sigmoid", "bias_rate": 0.02},
        "balance_loss": 0.02, "router_z_loss": 0.01, "dense": {"kind": "mlp", "hidden": 40}, "first_dense": 1,
    }
}  # fmt: skip
ENCODER_DECODER: Tree = {"kind": "encoder_decoder", "start_token": 0}


def config(
    optim: Tree, length: int = LENGTH, rows: int = ROWS, steps: int = STEPS, model: Tree | None = None, **attention: Any
) -> TrainConfig:
    """model: what differs from a dense decoder with grouped queries and a tied head."""
    base = {
        "kind": "decoder", "vocab_size": VOCAB, "max_seq_len": length, "d_model": 32, "n_layers": 2,
        "norm": {"kind": "rms"}, "position": {"kind": "rope"},
        "attention": {"kind": "gqa", "n_heads": 2, "n_kv_heads": 1, "qkv_bias": True, "qk_norm": "head"} | attention,
        "ffn": {"kind": "mlp", "hidden": 40},
    } | (model or {})  # fmt: skip
    pairs = base["kind"] == "encoder_decoder"
    tree = {
        "run": {"name": "steps"}, "model": base, "tokenizer": {"kind": "bytes"}, "optim": optim,
        "objective": {"kind": "seq2seq" if pairs else "causal", "chunk": 7},
        "data": {"kind": "stdlib_docstrings" if pairs else "stdlib", "global_batch": rows, "seq_len": length},
        "schedule": {"kind": "linear", "warmup_steps": 1}, "trainer": {"max_steps": steps},
    }  # fmt: skip
    return from_tree(TrainConfig, tree)


def batches(
    length: int = LENGTH,
    rank: int = 0,
    world: int = 1,
    documents: bool = False,
    rows: int = ROWS,
    steps: int = STEPS,
    accumulation: int = ACCUMULATION,
) -> list[Batch]:
    """This rank's micro-batches. Row i has i + 2 label tokens, so ranks and micro-batches weigh differently."""
    source = torch.Generator().manual_seed(3)
    places = torch.arange(length).expand(rows // world // accumulation, -1)
    half = length // 2
    packed = {"positions": places % half, "documents": (places >= half).int()} if documents else {}
    found = []
    for _ in range(steps):
        tokens = torch.randint(0, VOCAB, (rows, length), generator=source)
        labels = tokens.roll(-1, 1).masked_fill(torch.arange(length) >= torch.arange(rows)[:, None] + 2, IGNORED)
        mine = slice(rank * rows // world, (rank + 1) * rows // world)
        n = int((labels[mine] != IGNORED).sum())
        parts = zip(tokens[mine].chunk(accumulation), labels[mine].chunk(accumulation), strict=True)
        found += [Batch(t, y, **packed, step_tokens=n) for t, y in parts]
    return found


def with_sources(rows: list[Batch]) -> list[Batch]:
    """For an encoder-decoder: each row read backwards, with one token more than it has labels."""
    found = []
    for batch in rows:
        assert batch.labels is not None
        places, n = torch.arange(batch.tokens.shape[1]), (batch.labels != IGNORED).sum(-1, keepdim=True)
        found.append(replace(batch, source_tokens=batch.tokens.flip(1), source_positions=torch.where(places <= n, places, -1)))
    return found


class Recorder(RunCallback):
    """Losses, norms and verdicts of every step."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.record: Record = {"loss": [], "grad_norm": [], "bad_step": []}

    def step_end(self, module: TrainModule) -> None:
        if module.device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")  # reading the figures waits
        bad = module.verdicts.bad_steps(0)[-1] if module.verdicts.refused else -1
        for name, value in (("loss", module.loss()), ("grad_norm", module.grad_norm), ("bad_step", bad)):
            self.record[name].append(float(value))
        module.trainer.should_stop = module.step == self.steps


def alike(cfg: ModelConfig) -> Fill:
    """As drawn without an adapter, whose matrices do not know that they write to the residual stream."""
    drawn_so = dict(build_model(cfg, seed=1).named_parameters())  # now: within an engine's context it would be cut

    @torch.no_grad()
    def fill(model: LM, names: Container[str]) -> None:
        for name, p in model.named_parameters():
            if name in names:
                p.copy_(drawn_so[name])

    return fill


def train_steps(
    cfg: TrainConfig,
    rows: list[Batch],
    strategy: Strategy | None = None,
    kind: type[TrainModule] = TrainModule,
    steps: int = STEPS,
    accumulation: int = ACCUMULATION,
    **options: Any,
) -> tuple[Record, dict[str, torch.Tensor]]:
    """Losses and norms of every step, and the weights after the last, whole.

    options: Lightning's, and `compile`.
    """
    torch.manual_seed(0)
    strategy = strategy or Strategy()
    model = build_model(cfg.model, device="meta") if strategy.meta else build_model(cfg.model, seed=1)
    fill = drawn(1)
    if cfg.adapter is not None:
        fill = beside(alike(cfg.model), fill)
        cfg.adapter.apply(model)
        if not strategy.meta:
            fill(model, [name for name, _ in model.named_parameters()])
    model.recomputes(cfg.trainer.recomputes())
    if options.pop("compile", False):
        model.compile()
    module, recorder = kind(cfg, model, strategy, fill, None), Recorder(steps)
    module.run = cast(RunState, SimpleNamespace(max_steps=cfg.trainer.max_steps))
    quiet = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary", "use_distributed_sampler"), False
    )
    given: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "strategy": strategy.lightning(), **quiet, **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loader: Any = DataLoader(rows, batch_size=None, collate_fn=lambda batch: batch)  # type: ignore[arg-type]
        Trainer(max_epochs=1, accumulate_grad_batches=accumulation, callbacks=[recorder], **given).fit(module, loader)
    if cfg.launch.tensor > 1:
        return recorder.record, gathered(strategy, model)
    return recorder.record, {name: strategy.whole(p).to("cpu", copy=True) for name, p in model.named_parameters()}


def gathered(strategy: Strategy, model: LM) -> dict[str, torch.Tensor]:
    """The weights, whole, of the pieces of all ranks, which must agree where they hold the same."""
    found: dict[str, torch.Tensor] = {}
    each: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(each, [*strategy.weights(model)])
    for piece in (piece for pieces in each for piece in pieces):
        at = tuple(slice(start, start + n) for start, n in zip(piece.offset, piece.tensor.shape, strict=True))
        part = found.setdefault(piece.name, torch.full(piece.shape, float("nan")))[at]
        assert torch.equal(part, piece.tensor) or part.isnan().all(), piece.name
        part.copy_(piece.tensor.detach())
    return found


def held_and_read_again(device: str) -> list[torch.Tensor]:
    """The embedding's gradients of vectors of texts that are read in parts, with dropout: held for the backward, and read again in it."""
    torch.manual_seed(0)
    net = redrawn(models.config(dropout=0.5)).to(device)
    batch = Batch(torch.randint(5, 20, (8, 6)), None, torch.arange(6).repeat(8, 1), lengths=[6] * 8).to(device)
    found = []
    for again in (False, True):
        torch.manual_seed(1)
        net.zero_grad()
        InParts(4, again)(net, batch)[0][:, 0].sum().backward()
        assert net.embed.weight.grad is not None
        found.append(net.embed.weight.grad.clone())
    return found
