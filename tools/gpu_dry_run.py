"""What runs on a GPU, run without one as far as that goes: no tensor beside its device, no host that waits, no dtype that a kernel lacks.

    python tools/gpu_dry_run.py [only=pretrain/tiny,model=llama3_8b]

`on meta`: a whole step in bf16 (loss, gradients, AdamW, verdict), and a prompt with tokens behind it, the last by the step that a CUDA
graph records, on the meta device, where whatever asks for a number raises. `on cuda`: the same forwards with tensors of a GPU that is not
there (FakeTensorMode), through the branches that only CUDA takes, under autocast. That wants a build of torch with CUDA, not a GPU;
autograd wants a GPU's streams, so gradients are tried on meta alone. Recipes read batches of their own data; presets of conf/model have
their published sizes. What waits on purpose, once in many
steps (a line of metrics, a validation, a checkpoint), is not run: it asks for numbers in order to tell them.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from lm.cli.compose import catalog
from lm.cli.compose.compose import compose
from lm.data.rows.build import build_splits
from lm.data.store.prepare import Prepared, prepare
from lm.errors import LmError
from lm.generation.weights.replayed import Replayed
from lm.losses.tokens import causal_reader
from lm.nn.batch import Batch
from lm.nn.head import last_position
from lm.nn.model_config import ModelConfig
from lm.nn.transformer import LM, EncoderConfig, EncoderDecoderConfig, build_model
from lm.ops import entropy
from lm.ops.attention import flex
from lm.schema import Tree
from lm.training.config import TrainConfig
from lm.training.numerics import StepJudge
from lm.training.objectives.base import build_objective
from lm.training.optim.adamw import AdamWConfig
from lm.training.optim.base import begin_state
from lm.training.optim.traits import traits_of

sys.path.insert(0, str(Path(__file__).parents[1]))

from tools.options import options

ROWS, LENGTH, CAPABILITY = 2, 256, (9, 0)
CUDA = torch.device("cuda", 0)
OK = "yes"
Loss = Callable[[LM, Batch], Tensor]


def subjects(only: set[str]) -> Iterator[tuple[str, LM, Loss, Batch]]:
    """Every recipe that trains from nothing, and every preset: a model on meta, its loss and a batch."""
    for name in (name for name in names() if not only or name in only):
        yield name, *(preset(name) if name.startswith("model=") else recipe(name))


def names() -> list[str]:
    """What there is to be tried."""
    known = catalog.groups()
    recipes = [name for name in known["recipes"] if not name.startswith("finetune/")]
    return [*recipes, *(f"model={option}" for option in known["model"])]


def recipe(name: str) -> tuple[LM, Loss, Batch]:
    """With the first rows of its data; those of the standard library where its own need a download."""
    try:
        cfg, data = prepared([f"recipes={name}"])
    except LmError:
        cfg, data = prepared([f"recipes={name}", "data=stdlib", "tokenizer=bytes"])
    sizes: Tree = {
        "vocab_size": cfg.model.vocab_size or data.tokenizer.vocab_size,
        "max_seq_len": cfg.model.max_seq_len or cfg.data.seq_len,
    }
    if isinstance(cfg.model, EncoderDecoderConfig):
        sizes["start_token"] = data.tokenizer.start
    model = build_model(cfg.model.replace(**sizes), device="meta")
    rows, objective = build_splits(cfg.objective, cfg.data, data, model.cfg, 0).train, build_objective(cfg)
    return model, lambda model, batch: objective(model, batch, 0, 0).total, rows.batch(np.arange(ROWS))


def prepared(overrides: list[str]) -> tuple[TrainConfig, Prepared]:
    """A run and its tokens. Raises LmError where these need what is not here."""
    cfg = compose([*overrides, "run.name=dry"]).config()
    return cfg, prepare(cfg.data, cfg.tokenizer, log=lambda text: None, specials=cfg.objective.specials())


def preset(name: str) -> tuple[LM, Loss, Batch]:
    """With rows of zeros."""
    cfg = fitting(name).model
    cfg = cfg.replace(vocab_size=cfg.vocab_size or 50304, max_seq_len=cfg.max_seq_len or 1024)
    ids = torch.zeros(ROWS, LENGTH, dtype=torch.int64)
    source = ids if isinstance(cfg, EncoderDecoderConfig) else None
    loss: Loss = lambda model, batch: model(batch, read=causal_reader(batch.tokens)).total  # noqa: E731
    return build_model(cfg, device="meta"), loss, Batch(ids, source_tokens=source)


def fitting(name: str) -> TrainConfig:
    """Returns the run of the default recipe with this model and the first objective that trains its kind."""
    for objective in (["objective=causal"], ["objective=mlm"], ["objective=seq2seq", "data=stdlib_docstrings"]):
        try:
            return compose(["recipes=pretrain/tiny", name, *objective, "run.name=dry"]).config()
        except LmError as error:
            last = error
    raise last


def step(model: LM, loss: Loss, batch: Batch) -> None:
    """Loss, gradients, AdamW and its verdict, on meta."""
    named = [*model.train().named_parameters()]
    loss(model, batch.to(torch.device("meta"))).backward()
    optimizer, judge = AdamWConfig().build(named, traits_of(model, [], 1.0)), StepJudge(1)
    begin_state(optimizer)
    judge.to(torch.device("meta"))
    number = torch.nn.utils.get_total_norm([p.grad for _, p in named if p.grad is not None])
    optimizer.found_inf = judge.judge(number, number, number)  # type: ignore[attr-defined]
    optimizer.step()
    judge.count(0)


@torch.inference_mode()
def decode(model: LM, batch: Batch) -> None:
    """A prompt and a token; one more as ever, and one by the step that a GPU records."""
    cache, model.fast_path = model.eval().new_cache(ROWS, batch.tokens.shape[1]), Replayed(model, lambda run: run)
    source = {name: getattr(batch, f"source_{name}") for name in ("tokens", "positions", "documents")}
    read = Batch(batch.tokens[:, :-3], **{f"source_{name}": value for name, value in source.items()})
    for tokens in (read, *[Batch(batch.tokens[:, :1], padded=False)] * 3):
        model(tokens, read=last_position, cache=cache)
    assert cache.recorded is not None and cache.recorded[1] is not None


def outcome(run: Callable[[], object]) -> str:
    """`yes`, or what stopped it."""
    try:
        run()
    except Exception as error:  # whatever it is: the table is for it
        return f"{type(error).__name__}: {str(error).splitlines()[0][:100] if str(error) else ''}"
    return OK


@contextmanager
def pretended() -> Iterator[None]:
    """What asks for the GPU's kind gets one that has every kernel; FlexAttention and the loss are not compiled, which would want the GPU
    itself."""
    with ExitStack() as stack:
        for where, name, value in (
            (torch.cuda, "is_bf16_supported", lambda including_emulation=True: True),
            (torch.cuda, "get_device_capability", lambda device=None: CAPABILITY),
            *((nn.init, name, lambda tensor, *_, **__: tensor) for name in ("kaiming_uniform_", "uniform_", "normal_")),  # a GPU's numbers
            (flex, "compiled_flex", lambda: flex.Flex(flex_attention, create_block_mask)),
            (entropy, "_compiled", lambda: entropy.entropy_),
        ):
            stack.callback(setattr, where, name, getattr(where, name))
            setattr(where, name, value)
        yield


def there(batch: Batch) -> Batch:
    """The batch in shapes and types, on the device that tensors are made on."""
    found: Tree = {field.name: getattr(batch, field.name) for field in fields(batch)}
    made: Tree = {name: torch.empty_like(x, device=CUDA) for name, x in found.items() if isinstance(x, Tensor)}
    return replace(batch, **made)


def on_fake_cuda(cfg: ModelConfig, run: Callable[[LM], object]) -> str:
    """The same model of tensors that say they are on a GPU. Autocast as torch switches it on, which asks for a GPU first."""

    def inside() -> None:
        with pretended(), FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
            with CUDA:
                model = cast(LM, cfg.build()).requires_grad_(False)
            run(model)

    torch.set_autocast_dtype("cuda", torch.bfloat16)
    torch.set_autocast_enabled("cuda", True)
    try:
        return outcome(inside)
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.clear_autocast_cache()


def cells(model: LM, loss: Loss, batch: Batch) -> list[str]:
    """A line of the table behind its name."""
    narrow, meta, cfg = model.to(torch.bfloat16), batch.to(torch.device("meta")), model.cfg
    decodes = not isinstance(cfg, EncoderConfig)
    found = [outcome(lambda: step(narrow, loss, meta)), outcome(lambda: decode(narrow, meta)) if decodes else ""]
    if torch.version.cuda is not None:
        found.append(on_fake_cuda(cfg, lambda model: loss(model.train(), there(batch))))
        found.append(on_fake_cuda(cfg, lambda model: decode(model, there(batch))) if decodes else "")
    return found


def main(args: list[str]) -> int:
    only, failed = {*options(args, __doc__, {"only": list[str]()}, {"only": names()})["only"]}, False
    print("| | step on meta | decode on meta | loss on cuda | decode on cuda |\n|---|---|---|---|---|", flush=True)
    for name, model, loss, batch in subjects(only):
        found = cells(model, loss, batch)
        failed = failed or any(cell not in (OK, "") for cell in found)
        print(f"| {name} | {' | '.join(found)} |", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
