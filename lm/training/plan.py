"""`lm train plan=true`: what a run will take, from its config alone. No data is read, nothing is built, nothing trains."""

from collections.abc import Callable
from dataclasses import replace

import torch

from lm.adapters.float8 import multiply_in_float8
from lm.cost.count import Counts, count
from lm.cost.memory import Memory, gathered, memory
from lm.nn.model_config import ModelConfig, model_config
from lm.nn.transformer import build_model
from lm.storage.adapted import merged_bytes
from lm.storage.model_folder import read_config, resolve_model
from lm.training.budget import GPU, known_gpu
from lm.training.config import TrainConfig, TrainSetup
from lm.training.weights.freeze import on_meta
from lm.training.weights.initial import given_tokenizer, require_fit, require_teacher
from lm.units import binary, counted, duration, si


def plan(cfg: TrainConfig, say: Callable[[str], None]) -> None:
    """Prints the run's size, time, memory and advice by `say`. Raises ConfigError where a tokenizer file cannot be read, nothing fits
    trainer.float8, or the optimizer's options are for weights that are not trained; CheckpointError where init_from does not fit the
    model, ConfigError where a teacher does not."""
    model = _filled(cfg)
    if cfg.init_from is not None:
        require_fit(build_model(model, device="meta"), cfg)
    require_teacher(cfg, given_tokenizer(cfg))
    counts, built = counts_of(cfg, model), on_meta(cfg, model)
    cfg.optim.traits(built)
    float8 = multiply_in_float8(built) if cfg.trainer.float8 else None
    gpu, how = _gpu(cfg), cfg.setting()
    how = how if cfg.budget.gpu is None else replace(how, device="cuda")
    step_s = None if gpu is None else _step_s(cfg, counts, gpu[1])
    steps = steps_of(cfg, step_s)
    say(f"plan: {_size(cfg, counts, steps)}")
    if (n_tokens := cfg.tokenizer.size(cfg.objective.specials())) and (idle := idle_rows(model.vocab_size or 0, n_tokens)):
        say(f"plan: {idle}")
    say(f"plan: {_time(cfg, counts, steps, step_s, gpu)}")
    needed = replace(memory(built, how), frozen=frozen_bytes(cfg, model))
    say(f"plan: {_room(cfg, needed)}")
    if (beyond := _beyond(cfg, needed, gpu)) is not None:
        say(f"plan: {beyond}")
    if float8 is not None:
        say(f"plan: {float8}; the time and the room above are those of bfloat16")
    if cfg.init_from is None:
        say(f"plan: {_advice(cfg, counts, steps)}")


def idle_rows(vocab_size: int, n_tokens: int) -> str | None:
    """Returns the line on an embedding with many more rows than there are tokens, as a preset for another tokenizer has; else None."""
    if vocab_size <= 1.25 * n_tokens + 64:
        return None
    return f"model.vocab_size={vocab_size}, and the tokenizer has {n_tokens:,} tokens: no step uses the other rows. null takes as many"


def steps_of(cfg: TrainConfig, step_s: float | None) -> int:
    """Returns how many steps the run takes at `step_s` seconds each, within trainer.max_minutes."""
    if cfg.trainer.max_minutes is None or step_s is None:
        return cfg.trainer.max_steps
    return min(cfg.trainer.max_steps, round(cfg.trainer.max_minutes * 60 / step_s))


def seconds_of(cfg: TrainConfig, steps: int, step_s: float) -> float:
    """Returns the seconds of so many steps, of which one of data.global_batch rows takes `step_s`."""
    return step_s * cfg.tokens(steps) / cfg.step_tokens


def cost(cfg: TrainConfig, seconds: float) -> str:
    """Returns the cost of so many seconds on all ranks, as text; '' where no price is given."""
    price, hours = cfg.budget.price, seconds / 3600 * cfg.launch.world
    return "" if price is None else f", {si(hours)} GPU-hours at {price:g}: {hours * price:,.2f}"


def estimate(cfg: TrainConfig, model: ModelConfig) -> Memory:
    """Returns the memory of one rank, by formula.  model: with its sizes filled in."""
    return replace(memory(on_meta(cfg, model), cfg.setting()), frozen=frozen_bytes(cfg, model))


def counts_of(cfg: TrainConfig, model: ModelConfig) -> Counts:
    """Returns the model's counts, with a forward of each model that the loss compares with among those of a training step, and without
    blocks that a training leaves out."""
    own, seq_len = count(model, cfg.data.seq_len), cfg.data.seq_len
    if model.drafts() and not cfg.objective.trains_mtp:
        own = replace(own, train_flops_per_token=count(model.replace(mtp=None), seq_len).train_flops_per_token)
    beside = sum(count(each, seq_len).forward_flops_per_token for each, _ in (*_start(cfg, model), *_teacher(cfg)))
    return replace(own, train_flops_per_token=own.train_flops_per_token + beside)


def _start(cfg: TrainSetup, model: ModelConfig) -> list[tuple[ModelConfig, int]]:
    """Returns the model that the loss compares with as it was at the start, and the bytes of each of its numbers; or nothing."""
    if not cfg.objective.runs_parent():
        return []
    if not isinstance(cfg, TrainConfig) or cfg.init_from is None:
        return [(model, 4)]
    itself = cfg.adapter is not None and cfg.adapter.keeps_parent()
    number = 2 if cfg.trainer.precision == "bf16-true" else merged_bytes(resolve_model(cfg.init_from))
    return [(model, 0 if itself else number)]


def _teacher(cfg: TrainSetup) -> list[tuple[ModelConfig, int]]:
    """Returns the teacher or reward model and the bytes of each of its numbers, or nothing."""
    if (further := cfg.objective.learns_from()) is None:
        return []
    _, folder = further
    source = resolve_model(folder)
    return [(model_config(read_config(source)["model"]), merged_bytes(source))]


def frozen_bytes(cfg: TrainSetup, model: ModelConfig) -> int:
    """Returns the bytes of the models that the loss compares with, in the dtype of their folders, of which every rank holds all, or slices
    where it holds slices of the model, and of a teacher's logits of one chunk and their softmax in float32."""
    how, taught = cfg.setting(), _teacher(cfg)
    said = sum(min(how.chunk, how.micro_batch * how.seq_len) * each.head.size(each.vocab_size or 0) * 8 for each, _ in taught)
    ranks = cfg.launch.world if cfg.strategy.slices_weights else 1
    beside = [(*each, 1 if cfg.adapter is not None else ranks) for each in _start(cfg, model)] + [(*each, ranks) for each in taught]
    return said + sum(_held(each, n) * size for each, size, n in beside)


def _held(model: ModelConfig, ranks: int) -> int:
    """Returns how many numbers each of so many ranks holds of a frozen model that they share."""
    built = build_model(model, device="meta")
    return -(-sum(p.numel() for p in built.parameters()) // ranks) + (gathered(built) if ranks > 1 else 0)


def step_law(n: int, tokens: int) -> tuple[float, float]:
    """Returns the step law's (peak rate, tokens per step) for n parameters without embeddings and a run of `tokens` tokens:
    1.79 n^-0.713 tokens^0.307 and 0.58 tokens^0.571 (Li et al. 2025, arXiv:2503.04715)."""
    return 1.79 * n**-0.713 * tokens**0.307, 0.58 * tokens**0.571


def _filled(cfg: TrainConfig) -> ModelConfig:
    """Returns the model config with its sizes filled in as training does. A tokenizer still to be trained counts with its largest size."""
    n_tokens = cfg.model.vocab_size or cfg.tokenizer.size(cfg.objective.specials()) or cfg.tokenizer.build().vocab_size
    return cfg.sized_model(n_tokens)


def _step_s(cfg: TrainConfig, counts: Counts, gpu: GPU) -> float:
    """Returns the seconds of one optimizer step of data.global_batch rows at budget.mfu."""
    return cfg.step_tokens * counts.train_flops_per_token / (gpu.flops * cfg.budget.mfu * cfg.launch.world)


def _gpu(cfg: TrainConfig) -> tuple[str, GPU] | None:
    """Returns the GPU's name and what is known of it; None where nothing is."""
    here = cfg.trainer.device != "cpu" and torch.cuda.is_available()
    name = cfg.budget.gpu or (torch.cuda.get_device_name() if here else "")
    gpu = known_gpu(name)
    return None if gpu is None else (name, gpu)


def _size(cfg: TrainConfig, counts: Counts, steps: int) -> str:
    """Returns the line on parameters and tokens. Compute-optimal: about 20 tokens a parameter (Hoffmann et al. 2022, arXiv:2203.15556)."""
    tokens = cfg.tokens(steps)
    active = f" ({counts.active:,} for one token)" if counts.active != counts.parameters else ""
    read = f"{tokens:,} tokens in {counted(steps, 'step')} are {tokens / counts.parameters:.3g} a parameter (Chinchilla: 20)"
    return f"{counts.parameters:,} parameters{active}; {read}"


def _time(cfg: TrainConfig, counts: Counts, steps: int, step_s: float | None, gpu: tuple[str, GPU] | None) -> str:
    flops = f"{si(cfg.tokens(steps) * counts.train_flops_per_token)}FLOPs"
    if gpu is None or step_s is None:
        return f"{flops}; budget.gpu=H100, say, tells in what time"
    where = f"on {cfg.launch.world} x {gpu[0]} at {cfg.budget.mfu:.0%} of {si(gpu[1].flops)}FLOP/s"
    seconds = seconds_of(cfg, steps, step_s)
    return f"{flops} take {duration(seconds)} {where}{cost(cfg, seconds)}; validations and saves come on top"


def _room(cfg: TrainConfig, found: Memory) -> str:
    parts = found.parts()
    aside = f", and {binary(parts.pop('optimizer'))} of optimizer in {cfg.strategy.beside}" if cfg.strategy.offload else ""
    told = ", ".join(f"{name} {binary(size)}" for name, size in parts.items())
    each = "" if cfg.launch.world == 1 else f" each of {cfg.launch.world} ranks'"
    return f"by formula{each} tensors take {binary(sum(parts.values()))} ({told}){aside}"


def _beyond(cfg: TrainConfig, found: Memory, gpu: tuple[str, GPU] | None) -> str | None:
    """Returns the line on a step that the GPU cannot hold; None where it can, or where its memory is not known."""
    needed = found.on_device(cfg.strategy.offload)
    if gpu is None or needed <= gpu[1].memory_gib << 30:
        return None
    less = "a smaller trainer.micro_batch, trainer.recompute=block, or strategy=fsdp on more of them"
    return f"that is more than the {gpu[1].memory_gib} GiB of one {gpu[0]} ({binary(needed)}): {less} takes less"


def _advice(cfg: TrainConfig, counts: Counts, steps: int) -> str:
    lr, batch = step_law(counts.non_embedding, cfg.tokens(steps))
    law = f"a peak rate of {lr:.2g} and {si(batch)} tokens a step are the step law's (arXiv:2503.04715), of dense models under AdamW"
    return f"{law}; here optim={cfg.optim.kind} has {cfg.optim.lr:.2g}, and a step {si(cfg.step_tokens)}"
