"""Builds the LightningModule of a run, and checks and reports the memory that it needs."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lm import heap
from lm.adapters.adapter import hold_bases
from lm.data.store.prepare import Prepared
from lm.errors import CheckpointError, ConfigError, ResourceError
from lm.nn.device_memory import out_of_memory, require_memory
from lm.nn.materialize import Fill, materialized
from lm.nn.model_config import ModelConfig
from lm.nn.transformer import EncoderDecoderConfig, build_model
from lm.storage.checkpoint import CheckpointReader
from lm.training.config import TrainConfig
from lm.training.launch.ranks import device_kind
from lm.training.module import TrainModule
from lm.training.plan import estimate
from lm.training.weights.initial import beside, copied, drawn, empty, require_teacher


def build_module(cfg: TrainConfig, data: Prepared, reader: CheckpointReader | None) -> TrainModule:
    """Returns the module with initialized weights, or with its model on the meta device where the strategy fills it part by part."""
    strategy = cfg.strategy.build(cfg)
    fill, model_cfg = _fill(cfg, data, reader), _model_config(cfg, data)
    require_teacher(cfg, data.tokenizer)
    device = device_kind(cfg.trainer.device, cfg.launch.devices)
    require_memory(estimate(cfg, model_cfg).on_device(cfg.strategy.offload), device, "a step, by formula,")
    model = build_model(model_cfg, device="meta" if strategy.meta or cfg.adapter is not None else "cpu")
    model.asked_as = cfg.objective.asked_as
    if cfg.adapter is not None:
        cfg.adapter.apply(model)
    if cfg.trainer.precision == "bf16-true":
        model = model.to(torch.bfloat16)  # Lightning would, but only after weights are read: what is then saved unchanged keeps its dtype
    if not strategy.meta and cfg.adapter is not None:
        with heap.returned():  # each part takes more memory before it is int8
            for part in materialized(model, model.units(), torch.device("cpu"), fill):
                hold_bases(part)
    elif not strategy.meta:
        fill(model, {name for name, _ in model.named_parameters()})
    return TrainModule(cfg, model, strategy, fill if strategy.meta else empty, reader)  # `fill` keeps the parent's weights in memory


def _fill(cfg: TrainConfig, data: Prepared, reader: CheckpointReader | None) -> Fill:
    own = empty if reader is not None else drawn(cfg.seeds.init)
    if cfg.init_from is None or (reader is not None and cfg.adapter is None):
        return own
    base = copied(cfg, data.tokenizer)
    return base if cfg.adapter is None else beside(base, own)


def _model_config(run: TrainConfig, data: Prepared) -> ModelConfig:
    """Returns the model config with vocab_size and max_seq_len filled in. Raises CheckpointError or ConfigError where vocab_size is below
    the tokenizer's."""
    size = data.tokenizer.vocab_size
    cfg = run.sized_model(size)
    fits = cfg.vocab_size is not None and cfg.vocab_size >= size
    if not fits and run.init_from is not None:
        raise CheckpointError(
            f"{run.init_from}: the embedding has {cfg.vocab_size} rows, fewer than the tokenizer's {size} tokens."
            " Use the tokenizer that it was trained with."
        )
    if not fits:
        raise ConfigError(f"model.vocab_size={cfg.vocab_size} is below the tokenizer's {size} tokens. Set it to null, or at least {size}.")
    if isinstance(cfg, EncoderDecoderConfig) and cfg.start_token is None:
        return cfg.replace(start_token=data.tokenizer.start)
    return cfg


@contextmanager
def memory_errors(cfg: TrainConfig) -> Iterator[None]:
    """Turns the out-of-memory errors of torch, numpy and the system into a ResourceError."""
    try:
        yield
    except (MemoryError, RuntimeError, OSError) as error:
        if not out_of_memory(error):
            raise
        reason = str(error).splitlines()[0][:120] if str(error) else "MemoryError"
        raise ResourceError(
            f"train: out of memory with trainer.micro_batch={cfg.trainer.micro_batch} and data.seq_len={cfg.data.seq_len} ({reason})."
            " Lower one of them, or the model's size; earlier checkpoints are kept."
        ) from error
