"""The output of `lm show`: a model's modules, its counts, and the memory that training it needs."""

from dataclasses import replace

from lm.adapters.adapter import n_weights
from lm.cli.compose.layers import Composition
from lm.cli.views.outline import outline
from lm.cost.count import Counts, count
from lm.cost.memory import Memory, Setting, memory
from lm.data.kinds import DataConfig, TokenizerConfig
from lm.errors import ConfigError
from lm.nn.model_config import ModelConfig
from lm.nn.transformer import LM, EncoderLM
from lm.ops.cache.cache import PerToken
from lm.schema import Config, Tree
from lm.training.config import TrainSetup
from lm.training.plan import frozen_bytes
from lm.training.strategies.config import StrategyConfig
from lm.training.weights.freeze import on_meta, trainable
from lm.units import binary, si, table

_BESIDE = """
These are tensors alone. The column `memory` of a training has more: the peak of the whole process, Python and its
libraries included; with CUDA the peak of what torch has reserved on the GPU."""


class _Tokenized(Config):
    tokenizer: TokenizerConfig


def setup_of(composition: Composition, sections: Tree | None = None) -> TrainSetup:
    """Returns the parts of a training config that decide its size.  sections: replace composed ones. Raises ConfigError."""
    data = {key: value for key, value in composition.tree["data"].items() if key in DataConfig.model_fields}  # whatever its kind
    return composition.part(TrainSetup, data={"kind": "stdlib", **data}, **(sections or {}))


def described(composition: Composition, shown: TrainSetup) -> list[str]:
    """Returns lines with the module tree, the counts and the memory. Raises ConfigError where the parts do not fit each other."""
    cfg, assumed = _filled(composition, shown)
    if shown.data.seq_len > (cfg.max_seq_len or 0):
        said = f"data.seq_len={shown.data.seq_len} is over model.max_seq_len={cfg.max_seq_len}"
        raise ConfigError(f"{said}. Lower one or raise the other.")
    if (refused := shown.why_not()) is not None:
        raise ConfigError(refused)
    model, how = on_meta(shown, cfg), shown.setting()
    figures = table([*assumed, *_figures(model, count(cfg, how.seq_len), how.seq_len), *_trained(model)], "")
    needed = replace(memory(model, how), frozen=frozen_bytes(shown, cfg))
    said = f"{_heading(shown, how)}\n{table(_memory(needed, shown.strategy))}"
    return [table(outline(model), ""), f"\n{figures}", f"\n{said}", _BESIDE]


def _trained(model: LM) -> list[tuple[str, str]]:
    """Returns a row with the number of trained parameters, where some are frozen; else []."""
    n, total = sum(p.numel() for p in trainable(model).values()), n_weights(model)
    still = n + sum(p.numel() for p in model.self_updated().values()) < total
    return [("trained", f"{n:,} of {total:,} parameters, {100 * n / total:.2g} %")] * still


def _filled(composition: Composition, shown: TrainSetup) -> tuple[ModelConfig, list[tuple[str, str]]]:
    """Returns the model config with its sizes filled in, and a row for each size that neither preset nor command line sets."""
    cfg = shown.sized_model(shown.model.vocab_size or _n_tokens(composition, shown))
    assumed = []
    if shown.model.vocab_size is None:
        assumed.append(("vocabulary", f"{cfg.vocab_size:,}, from tokenizer={composition.choices['tokenizer']}, for model.vocab_size=null"))
    if shown.model.max_seq_len is None:
        assumed.append(("positions", f"{cfg.max_seq_len:,}, from data.seq_len, for model.max_seq_len=null"))
    return cfg, assumed


def _n_tokens(composition: Composition, shown: TrainSetup) -> int:
    size = composition.part(_Tokenized).tokenizer.size(shown.objective.specials())
    if size is None:
        raise ConfigError("model.vocab_size: null, and show does not read tokenizer.path. Set model.vocab_size.")
    return size


def _figures(model: LM, counts: Counts, seq_len: int) -> list[tuple[str, str]]:
    active = f"{counts.active:,} for one token, " if counts.active != counts.parameters else ""
    forward, backward = counts.forward_flops_per_token, counts.train_flops_per_token - counts.forward_flops_per_token
    rows = [
        ("parameters", f"{counts.parameters:,}; {active}{counts.non_embedding:,} without embeddings and head"),
        ("FLOPs", f"{si(forward)} forward and {si(backward)} backward per token, in rows of {seq_len:,}"),
    ]
    if (passes := model.cfg.residual.passes()) > 1:
        rows.append(("passes", f"a token goes through the layers {passes} times"))
    windowed = any(isinstance(state, PerToken) and state.window for states in model.states() for state in states)
    cache = f"{counts.cache_bytes_per_token:,} bytes per token in bf16" + (", until a sliding window is full" if windowed else "")
    cache += f", and {counts.cache_bytes_per_row:,} per row" if counts.cache_bytes_per_row else ""
    return rows if isinstance(model, EncoderLM) else [*rows, ("cache", cache)]


def _heading(shown: TrainSetup, how: Setting) -> str:
    ranks = f", on each of {shown.launch.world} ranks with {shown.strategy.kind}" if shown.launch.world > 1 else ""
    return f"memory of the tensors of a step of {how.micro_batch} x {how.seq_len} tokens in {how.precision} with {shown.optim.kind}{ranks}"


def _memory(found: Memory, spread: StrategyConfig) -> list[tuple[str, str]]:
    return [(name, _placed(name, size, spread)) for name, size in [*found.parts().items(), ("total", found.on_device(spread.offload))]]


def _placed(name: str, size: int, spread: StrategyConfig) -> str:
    return f"{binary(size):>12}" + (f"  of {spread.beside}, not in the total" if spread.offload and name == "optimizer" else "")
