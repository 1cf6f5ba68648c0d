"""What holds for every run and every optimizer, whatever fills its slots."""

import json
import math
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from lm.cli.compose.compose import compose
from lm.data.kinds import DataConfig, ObjectiveConfig
from lm.nn.model_config import model_config
from lm.nn.transformer import build_model
from lm.schema import Slot, Tree, from_tree
from lm.storage.atomic import remove
from lm.storage.checkpoint import step_folder
from lm.storage.run_folder import RunFolder
from lm.testing.invariants import a_batch
from lm.testing.models import BASE, slot_of
from lm.training.config import TrainConfig
from lm.training.optim.base import OptimConfig, Skippable, begin_state
from lm.training.optim.traits import traits_of

RUN = (
    *("model=nano", "tokenizer=bytes", "data=text", "data.seq_len=32", "data.global_batch=4", "data.val_rows=4"),
    *("data.max_contamination=1.0", "optim=adamw", "schedule=constant", "schedule.warmup_steps=2", "trainer.max_steps=6"),
    *("trainer.micro_batch=2", "trainer.val_every=3", "trainer.log_every=1", "trainer.device=cpu", "trainer.sample_prompts=[]"),
    *("checkpoint.every=3", "run.name=run"),
)
"""A run of half a second."""
_TIMING = ("_s", "_per_second", "memory_gib")  # endings of numbers that no two runs share


def check(config: Slot, where: Tree) -> None:
    """Puts a kind of any slot through a run, and an optimizer through its steps.  where: as `check_kind` takes it."""
    if isinstance(config, OptimConfig):
        check_optimizer(config)
    with TemporaryDirectory() as folder:
        check_run(small_run(config, where, Path(folder)))


def check_optimizer(cfg: OptimConfig) -> None:
    """A step that is called off changes nothing, another one moves every weight, and all state is there before the first."""
    model = build_model(model_config(BASE), seed=0)
    named = list(model.named_parameters())
    optimizer: Any = cfg.build(named, traits_of(model))
    begin_state(optimizer)
    assert {name for group in optimizer.param_groups for name in group["names"]} == dict(named).keys(), "a weight is in no group"
    kinds = [sorted(optimizer.state[p]) for _, p in named]
    if isinstance(optimizer, Skippable):  # as on a GPU, where to read the flag would wait
        optimizer._flag_is_here = lambda: optimizer.found_inf is None  # type: ignore[method-assign]
    model(a_batch(model)).square().mean().backward()
    held = [tensor for _, p in named for tensor in (p.detach(), *optimizer.state[p].values())]
    for off in (True, False):
        before = [tensor.clone() for tensor in held]
        optimizer.found_inf = torch.tensor(float(off))
        optimizer.step()
        moved = [not now.equal(then) for now, then in zip(held, before, strict=True)]
        assert not (off and any(moved)), "a step with found_inf=1 changes weights or state. Write with _write"
    assert all(moved[:: 1 + len(kinds[0])]) or len({*map(len, kinds)}) > 1, "a step leaves a weight as it was"
    assert kinds == [sorted(optimizer.state[p]) for _, p in named], "a step makes state that initial_state does not know"


def check_run(cfg: TrainConfig) -> None:
    """Trains a few steps, and once more from the first checkpoint, as after a kill: the same weights and numbers, all of them finite."""
    from lm.training.run import train_rank

    found, run = [], RunFolder(cfg.run.folder)
    for _ in range(2):
        with redirect_stdout(StringIO()):
            train_rank(cfg)
        lines = [{key: v for key, v in line.items() if not key.endswith(_TIMING)} for line in run.metrics.read()]
        broken = [key for line in lines for key, v in line.items() if v is None or (isinstance(v, float) and not math.isfinite(v))]
        assert lines and not broken, f"a run has numbers that are not finite: {broken}"
        found.append((lines, (run.model / "model.safetensors").read_bytes()))
        run.remove_summary()
        remove(run.model)
        remove(step_folder(run.checkpoints, cfg.trainer.max_steps))
    (lines, weights), (again, weights_again) = found
    assert lines == again, "a run that was resumed writes other numbers than one that was left alone"
    assert weights == weights_again, "a run that was resumed has other weights than one that was left alone"


def small_run(config: Slot, where: Tree, folder: Path) -> TrainConfig:
    """A run with this kind, on text of which each line is also a pair, a chat and a preference; where only the text is read, half of it is
    one document, so that there are batches whose rows all lie within one, which come without `documents` and `positions`."""
    text = folder / "text.jsonl"
    texts = [f"number {n} comes before number {n + 1}" for n in range(300)]
    fields = [dict.fromkeys(("text", "source", "target", "prompt", "chosen"), t) | {"rejected": t[::-1]} for t in texts]
    chats = [{"messages": [{"role": "user", "content": t}, {"role": "assistant", "content": t[::-1]}]} for t in texts]
    text.write_text("".join(json.dumps(record | chat) + "\n" for record, chat in zip(fields, chats, strict=True)), encoding="utf-8")
    shape = config.shapes[0] if isinstance(config, ObjectiveConfig) else "text"
    if shape == "text":
        with text.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"text": "; ".join(texts)}) + "\n")
    base = compose([*RUN, f"run.dir={folder}", f"data.files={text}", f"data.cache_dir={folder / 'cache'}"]).config()
    slot, tree = slot_of(TrainConfig, config), base.tree()
    tree["model"] = BASE | {"vocab_size": None, "max_seq_len": None}
    if isinstance(config, ObjectiveConfig):
        tree["model"]["kind"] = config.models[0]
        tree["data"] |= {"record": {"kind": shape} if shape != "text" else None}
        tree["tokenizer"] = {"kind": "bpe", "vocab_size": 300} if config.specials() or shape == "chat" else tree["tokenizer"]
    if isinstance(config, DataConfig):
        tree["data"] = {key: value for key, value in tree["data"].items() if key in DataConfig.model_fields}
        tree["data"] |= {key: value for key, value in config.tree().items() if key not in DataConfig.model_fields}
    elif slot is not None:
        tree[slot] = {config.kind: config.tree()} if slot in ("callbacks", "metrics") else config.tree()
    if slot == "schedule":
        tree[slot]["warmup_steps"] = min(tree[slot]["warmup_steps"], 2)  # a recipe's may be longer than this run
    for section, values in where.items():
        tree[section] = tree[section] | values if isinstance(values, dict) else values
    return from_tree(TrainConfig, tree)
