"""Speed, measured side by side.

    python tools/bench.py models            # our decoder against whichever of litgpt, transformers and x-transformers is installed
    python tools/bench.py models shape=gpt2 # GPT-2's block against transformers' and one out of torch's own parts
    python tools/bench.py models shape=mixtral size=50m  # 8 experts, top-2, against others' and our dense model of equal active parameters
    python tools/bench.py models modes=fp32,bf16,compiled rounds=5 steps=4 threads=1 clock=cpu
    python tools/bench.py sft               # chats packed into rows of 1,024 tokens against one a row, padded
    python tools/bench.py loop              # the default recipe through `lm train` against a bare loop over the same batches

Machines are shared and noisy: contestants take turns of a few steps, each of models in a process of its own, and the ratio is the
median of per-round ratios. The mode compiled is in bf16; fp32-compiled is the other. With clock=cpu the time is the process's own on the
processor, which others on the machine change least; on one thread it is what the step costs. With begin=together all compile side by
side, which saves minutes of a rented GPU. By default glibc returns large freed blocks to the system, and each step faults their memory in
anew; with memory=kept it keeps them in every contestant, as `lm train` makes it do.
"""

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from datetime import date
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._inductor.utils import fresh_cache

from lm.data.loader import train_loader
from lm.data.order import rows_at
from lm.data.rows.base import Rows
from lm.data.rows.build import build_rows
from lm.data.rows.causal import CausalRows
from lm.data.sizes import Sizes
from lm.data.store.prepare import prepare
from lm.losses.tokens import causal_reader
from lm.nn.batch import IGNORED
from lm.nn.transformer import build_model
from lm.training.config import TrainConfig
from lm.training.optim.base import begin_state, set_lr
from lm.training.optim.traits import traits_of

sys.path.insert(0, str(Path(__file__).parents[1]))

from tools.contestants import SHAPES, SIZES, LossOf, Size
from tools.options import asked, options

MODES = ("fp32", "bf16", "compiled", "fp32-compiled")
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
KEPT = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str((1 << 31) - 1)}


def stepper(model: nn.Module, loss_of: LossOf, mode: str, size: Size) -> Callable[[], None]:
    """One step function for all: forward, loss, backward, clip, AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    parameters = list(model.parameters())
    if "compiled" in mode:
        model.compile()
    device = parameters[0].device
    source = torch.Generator().manual_seed(0)
    data = torch.randint(0, size.vocab, (16, size.rows, size.length + 1), generator=source).to(device)
    count = 0

    def step() -> None:
        nonlocal count
        rows = data[count % len(data)]
        count += 1
        with torch.autocast(device.type, torch.bfloat16, enabled="fp32" not in mode):
            loss = loss_of(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def timed(step: Callable[[], None], steps: int, clock: Callable[[], float]) -> float:
    """Steps per second."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    begun = clock()
    for _ in range(steps):
        step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return steps / (clock() - begun)


class Turns:
    """A contestant in a process of its own, which takes a few steps when it is told to."""

    def __init__(self, shape: str, name: str, size: str, mode: str, threads: int, clock: str) -> None:
        command = [sys.executable, __file__, "contestant", shape, name, size, mode, str(threads), clock]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    @cached_property
    def told(self) -> dict[str, Any]:
        """Its parameters in millions and the seconds until its third step is over, which is waited for. Or why it is not there."""
        return self._line()

    def tokens_per_second(self, steps: int) -> float:
        assert self.process.stdin is not None
        print(steps, file=self.process.stdin, flush=True)
        return float(self._line()["tokens_per_second"])

    def end(self) -> None:
        self.process.communicate()

    def _line(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        told: dict[str, Any] = json.loads(self.process.stdout.readline())
        return told


def take_turns(shape: str, name: str, size: str, mode: str, threads: str, clock: str) -> None:
    """The child's side of `Turns`."""
    torch.set_num_threads(int(threads))
    torch.manual_seed(0)
    try:
        model, loss_of = SHAPES[shape][name](SIZES[size])
    except ModuleNotFoundError as missing:
        print(json.dumps({"missing": str(missing)}), flush=True)
        return
    model.to("cuda" if torch.cuda.is_available() else "cpu").train()
    step, begun = stepper(model, loss_of, mode, SIZES[size]), time.perf_counter()
    with fresh_cache() if "compiled" in mode else nullcontext():
        timed(step, 3, CLOCKS[clock])
    seconds = round(time.perf_counter() - begun, 1)
    print(json.dumps({"million_parameters": round(sum(p.numel() for p in model.parameters()) / 1e6, 2), "seconds": seconds}), flush=True)
    for line in sys.stdin:
        speed = timed(step, int(line), CLOCKS[clock]) * SIZES[size].rows * SIZES[size].length
        print(json.dumps({"tokens_per_second": speed}), flush=True)


def compare(shape: str, size: str, mode: str, rounds: int, steps: int, threads: int, clock: str, together: bool) -> dict[str, Any]:
    """Tokens/s of each that is installed, and the ratio of the first one, slotlm, to the others."""
    turns, begun = {}, {}
    for name in SHAPES[shape]:
        begun[name] = Turns(shape, name, size, mode, threads, clock)
        if not together:
            begun[name].told  # noqa: B018  # a contestant compiles alone
    for name, one in begun.items():
        print(f"{mode} {shape} {size} {name}: {one.told}", flush=True)
        if "missing" in one.told:
            one.end()
        else:
            turns[name] = one
    speeds: dict[str, list[float]] = {name: [] for name in turns}
    for turn in range(rounds):
        for name in list(turns) if turn % 2 == 0 else list(reversed(turns)):
            speeds[name].append(turns[name].tokens_per_second(steps))
    for one in turns.values():
        one.end()
    middle = {name: round(statistics.median(values)) for name, values in speeds.items()}
    others = [name for name in speeds if name != "slotlm"]
    ratios = {name: round(statistics.median(a / b for a, b in zip(speeds["slotlm"], speeds[name], strict=True)), 3) for name in others}
    print(f"  tokens/s {middle}\n  slotlm / other {ratios}", flush=True)
    seconds = {name: one.told["seconds"] for name, one in turns.items()}
    return {"mode": mode, "size": size, "tokens_per_second": middle, "ratio": ratios, "seconds_until_third_step": seconds}


def compare_sft(rounds: int, steps: int) -> dict[str, Any]:
    """Label tokens/s of the nano model on stdlib_chat: 4 packed rows of 1,024 tokens a step, or 16 chats each in a row of its own."""
    from lm.cli.compose.compose import compose

    config = compose(["model=nano", "tokenizer.vocab_size=2048", "data=stdlib_chat", "objective=sft", "data.seq_len=1024"]).config()
    data = prepare(config.data, config.tokenizer, log=lambda text: None)
    model = build_model(config.model.replace(vocab_size=2048, max_seq_len=1024), seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def labels_per_second(rows: Rows, size: int, first: int) -> float:
        begun, labels = time.perf_counter(), 0
        for step in range(first, first + steps):
            batch = rows.batch(rows_at(0, Sizes(size).places(step), len(rows)))
            assert batch.labels is not None
            labels += int((batch.labels != IGNORED).sum())
            model(batch, read=causal_reader(batch.labels)).total.backward()
            optimizer.step()
            optimizer.zero_grad()
        return labels / (time.perf_counter() - begun)

    sizes, speeds = {"fit": 4, "none": 16}, dict[str, list[float]](fit=[], none=[])
    rows = {how: build_rows(config.objective, config.data.replace(packing=how), data.train, data.tokenizer, model.cfg) for how in sizes}
    for turn in range(rounds + 1):
        for how in sorted(sizes, reverse=bool(turn % 2)):
            speeds[how].append(labels_per_second(rows[how], sizes[how], turn * steps))
    packed, padded = speeds["fit"][1:], speeds["none"][1:]  # the first round warms up
    ratio = statistics.median(a / b for a, b in zip(packed, padded, strict=True))
    return {"packed": round(statistics.median(packed)), "padded": round(statistics.median(padded)), "ratio": round(ratio, 3)}


def compare_loop(rounds: int, steps: int) -> dict[str, Any]:
    """Tokens/s of `train()` on the default recipe, without validation and saving, against a bare loop with the same pieces."""
    from lm.cli.compose.compose import compose_config
    from lm.storage.run_folder import Metrics
    from lm.training.run import train_rank

    through, bare = [], []
    for turn in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            overrides = [f"run.dir={folder}", "run.name=bench", f"trainer.max_steps={steps}", "trainer.val_every=100000", "data.val_rows=8"]
            config = compose_config([*overrides, "schedule.warmup_steps=1", "trainer.sample_prompts=[]", "checkpoint.every=100000"])
            if turn % 2:
                bare.append(bare_loop(config, steps))
            train_rank(config)
            lines = [line for line in Metrics(Path(folder) / "bench" / "metrics.jsonl").read() if "loss" in line and line["step"] > 1]
            through.append(sum(line["tokens_per_second"] for line in lines) / len(lines))
            if not turn % 2:
                bare.append(bare_loop(config, steps))
    ratio = statistics.median(a / b for a, b in zip(through, bare, strict=True))
    return {"lm_train": round(statistics.median(through)), "bare_loop": round(statistics.median(bare)), "ratio": round(ratio, 3)}


def bare_loop(config: TrainConfig, steps: int) -> float:
    """The step function alone: forward, loss, backward, clip, optimizer, on the batches of the run."""
    data = prepare(config.data, config.tokenizer, log=lambda text: None)
    rows = CausalRows(data.train, data.tokenizer, config.data.seq_len, config.data.mask_documents)
    loader = train_loader(
        rows, seed=config.seeds.data, sizes=config.data.sizes, micro_batch=config.trainer.micro_batch, rank=0, world=1,
        start_step=0, max_steps=steps, workers=0,
    )  # fmt: skip
    model = build_model(config.model.sized(data.tokenizer.vocab_size, config.data.seq_len), seed=config.seeds.init)
    optimizer = config.optim.build([*model.named_parameters()], traits_of(model))
    begin_state(optimizer)
    batches, begun = list(loader), 0.0
    for number, batch in enumerate(batches):
        if number == 1:
            begun = time.perf_counter()
        assert batch.labels is not None
        loss = model(batch, read=causal_reader(batch.labels)).total / batch.step_tokens
        loss.backward()
        torch.nn.utils.clip_grad_norm_(list(model.parameters()), config.optim.clip or 1e9)
        set_lr(optimizer, config.schedule.factor(number, steps))
        optimizer.step()
        optimizer.zero_grad()
    return (steps - 1) * config.data.global_batch * config.data.seq_len / (time.perf_counter() - begun)


def machine() -> dict[str, Any]:
    try:
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent
        ).stdout.strip()
    except OSError:
        commit = ""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    return {"date": date.today().isoformat(), "commit": commit, "device": device, "torch": torch.__version__}


def main(args: list[str]) -> int:
    if args[:1] == ["contestant"]:
        take_turns(*args[1:])
        return 0
    what, threads = asked(args, __doc__, ("models", "sft", "loop")), {"threads": torch.get_num_threads()}
    results: Any
    if what == "models":
        listed = {"shape": ["llama", "gpt2"], "size": ["14m"], "modes": ["fp32", "bf16", "compiled"]}
        defaults = {**listed, **threads, "rounds": 5, "steps": 3, "clock": "wall", "begin": "apart", "memory": "freed"}
        known: dict[str, Iterable[str]] = {
            "shape": SHAPES, "size": SIZES, "modes": MODES, "clock": CLOCKS, "begin": ("apart", "together"), "memory": ("freed", "kept"),
        }  # fmt: skip
        given = options(args[1:], __doc__, defaults, known)
        torch.set_num_threads(given["threads"])
        os.environ.update(KEPT if given["memory"] == "kept" else {})
        how = *(given[key] for key in ("rounds", "steps", "threads", "clock")), given["begin"] == "together"
        each = product(given["shape"], given["size"], given["modes"])
        results = [{"shape": shape} | compare(shape, size, mode, *how) for shape, size, mode in each]
    else:
        rounds, steps = {"sft": (5, 8), "loop": (4, 41)}[what]
        given = options(args[1:], __doc__, {"rounds": rounds, "steps": steps, **threads})
        torch.set_num_threads(given["threads"])
        results = (compare_sft if what == "sft" else compare_loop)(given["rounds"], given["steps"])
    print(json.dumps(machine() | {"results": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
