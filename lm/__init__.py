"""lm: pretrain, fine-tune, ablate and sample Transformer language models built from named slots.

    import lm

    cfg = lm.config("pretrain/tiny", ["optim.lr=0.01", "trainer.max_steps=100"])
    run = lm.train(cfg)
    model, tokenizer = lm.load(run.model)
    print(lm.generate(model, tokenizer, "def main(", max_tokens=20))
    print(lm.evaluate(run.path)["val_bits_per_byte"])
    print(lm.compare([run.path]))

Each verb of the command line calls the function of its name; all of them raise `lm.errors.LmError` with one sentence.
"""

import os
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

if os.name == "nt":
    raise ImportError("lm: Windows has no locks of files, signals and limits as lm uses them. Run it in WSL2, which is a Linux.")

__version__ = "0.1.0"

_HOMES = {
    "Batch": "lm.nn.batch",
    "build_model": "lm.nn.transformer",
    "DecoderConfig": "lm.nn.transformer",
    "EncoderConfig": "lm.nn.transformer",
    "EncoderDecoderConfig": "lm.nn.transformer",
    "classify": "lm.generation.classify",
    "compare": "lm.report.compare",
    "complete": "lm.generation.generate",
    "embed": "lm.generation.embed",
    "evaluate": "lm.generation.examine",
    "export": "lm.hf.io.export",
    "fill": "lm.generation.fill",
    "generate": "lm.generation.generate",
    "import_model": "lm.hf.io.import_",
    "load": "lm.generation.load",
    "save": "lm.generation.load",
    "train": "lm.training.launch.start",
}

if TYPE_CHECKING:
    from lm.data.batches import Batches
    from lm.generation.classify import classify as classify
    from lm.generation.embed import embed as embed
    from lm.generation.examine import evaluate as evaluate
    from lm.generation.fill import fill as fill
    from lm.generation.generate import complete as complete
    from lm.generation.generate import generate as generate
    from lm.generation.load import load as load
    from lm.generation.load import save as save
    from lm.hf.io.export import export as export
    from lm.hf.io.import_ import import_model as import_model
    from lm.nn.batch import Batch as Batch
    from lm.nn.transformer import DecoderConfig as DecoderConfig
    from lm.nn.transformer import EncoderConfig as EncoderConfig
    from lm.nn.transformer import EncoderDecoderConfig as EncoderDecoderConfig
    from lm.nn.transformer import build_model as build_model
    from lm.report.compare import compare as compare
    from lm.training.config import TrainConfig
    from lm.training.launch.start import train as train

__all__ = sorted([*_HOMES, "__version__", "batches", "config"])


def config(name: str | Sequence[str] | None = None, overrides: Sequence[str] = ()) -> "TrainConfig":
    """Returns the checked config of a training run, as the command line composes it.

    name: a recipe ("pretrain/tiny") or a model preset ("nano"); None: the default recipe; or overrides already. overrides: as `lm train`
    takes them, such as ["model/ffn=geglu", "optim.lr=1e-3", "plugins=my_norm.py"]; of a key given twice the last one counts. What is left
    out of a preset is told on stderr. Raises ConfigError.
    """
    from lm.cli.compose.compose import compose_config
    from lm.errors import ConfigError, expect

    expect("name", name, (str, list, tuple, type(None)), "Give a recipe or a model preset, such as 'nano', or a list of overrides")
    expect("overrides", overrides, (str, list, tuple), "Give a list, such as ['optim.lr=0.01']")
    if isinstance(overrides, str):
        raise ConfigError(f"overrides: {overrides!r} is one text. Give a list, [{overrides!r}].")
    recipe = name if isinstance(name, str) and "=" not in name else None
    given = [name] if isinstance(name, str) else [*(name or ())]
    changes = [*(given if recipe is None else ()), *overrides]
    for text in changes:
        expect("overrides", text, str, "Each is a text, such as 'optim.lr=0.01'")
    return compose_config(changes, recipe)


def batches(cfg: "TrainConfig") -> "Batches":
    """Returns what `lm.train(cfg)` would read, for a loop of one's own: `.steps()`, `.validation()` and the `.tokenizer`."""
    from lm.data.batches import Batches
    from lm.errors import expect
    from lm.training.config import TrainConfig

    expect("cfg", cfg, TrainConfig, "Give what lm.config returned")
    return Batches(cfg.data, cfg.objective, cfg.tokenizer, cfg.model, cfg.seeds.data)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'lm' has no attribute '{name}'")


def __dir__() -> list[str]:
    return list(__all__)
