"""A step's time on many GPUs, on paper: what each computes against what each moves, for strategy=fsdp with equal work per GPU.

    python tools/weak_scaling.py            # the tables of docs/scaling.md
    python tools/weak_scaling.py here       # the same model of a step against one and two processes of this machine

Of each block the weights are gathered in the forward and again in the backward, and its gradients are scattered as sums; all of that
goes on beside the block's computation, so that of the two the longer one counts. A ring of n ranks moves (n - 1) / n of a tensor through
each rank and waits n - 1 times for a message. What spreads between ranks (clocks, heat, stragglers) is one factor for each doubling.
"""

import json
import math
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from lm.cli.compose.compose import compose
from lm.cost.count import count
from lm.cost.memory import Setting, memory
from lm.nn.model_config import model_config
from lm.nn.transformer import LM, build_model
from lm.ops.recompute import Recompute
from lm.units import si, table

sys.path.insert(0, str(Path(__file__).parents[1]))

from tools.options import asked, refuse

GIB = 1 << 30


@dataclass(frozen=True)
class Machine:
    """What one rank has, in units a second."""

    flops: float  # of matrix products, the peak
    share: float  # of it that a step reaches on one node
    inside: float  # bytes through each rank of one node
    across: float  # bytes through each rank of several nodes; a node's adapters work side by side
    node: int = 8
    message_s: float = 7e-6  # a rank's wait for its neighbour in a ring
    spread: float = 0.007  # part of the speed that each doubling behind one node costs

    def collective_s(self, n_bytes: float, ranks: int) -> float:
        """Seconds of an all-gather, or a reduce-scatter, of a tensor of so many bytes."""
        rate = self.inside if ranks <= self.node else self.across
        return (ranks - 1) / ranks * n_bytes / rate + (ranks - 1) * self.message_s


@dataclass(frozen=True)
class Work:
    """What each rank does in a step."""

    model: LM
    rows: int
    seq_len: int
    bytes_gathered: int = 4  # of a weight: float32, as strategy=fsdp gathers it
    bytes_scattered: int = 4  # of a gradient

    def step_s(self, machine: Machine, ranks: int) -> float:
        """Seconds of a step of so many ranks."""
        tokens, blocks = self.rows * self.seq_len, [sum(p.numel() for p in unit.parameters()) for unit in self.model.units()]
        counts = count(self.model.cfg, self.seq_len)
        compute = tokens * counts.train_flops_per_token / (machine.flops * machine.share)
        compute /= (1 - machine.spread) ** max(0, math.log2(ranks / machine.node))
        parts = [*blocks, counts.parameters - sum(blocks)]  # the last one: embedding and head, gathered before anything begins
        gather, scatter = ([machine.collective_s(n * size, ranks) for n in parts] for size in (self.bytes_gathered, self.bytes_scattered))
        shares = [compute * n / sum(parts) for n in parts]
        forward = sum(max(share / 3, move) for share, move in zip(shares, gather, strict=True))
        backward = sum(max(share * 2 / 3, move + out) for share, move, out in zip(shares, gather, scatter, strict=True))
        exposed = gather[-1] + scatter[-1] if ranks > 1 else 0.0
        return forward + backward + exposed

    def speed(self, machine: Machine, ranks: int) -> float:
        """Tokens a second of each rank."""
        return self.rows * self.seq_len / self.step_s(machine, ranks)

    def held(self, ranks: int) -> float:
        """GiB on each rank, every block's input kept alone."""
        setting = Setting(1, self.seq_len, self.seq_len, "bf16-mixed", stage=3, world=ranks, recompute=Recompute("block"))
        return memory(self.model, setting).total / GIB


H100 = Machine(flops=989e12, share=0.42, inside=370e9, across=340e9)
"""H100 SXM: 989 TFLOP/s in bf16, NVLink of 450 GB/s each way, eight adapters of 400 Gb/s a node; collectives reach about 0.8 of both."""
PUBLISHED = (  # torchtitan, benchmarks/llama3_h100_202412_torchtitan.md: Llama 3.1 8B, 2 rows of 8,192; tokens/s of a GPU with 8 and 128
    ("FSDP2, bf16", 5762, 5605),
    ("FSDP2, bf16, compiled", 6667, 6514),
)


def preset(name: str, seq_len: int, *overrides: str) -> LM:
    """A shape, without its numbers."""
    tree = compose([f"model={name}", f"model.max_seq_len={seq_len}", *overrides]).tree["model"]
    return build_model(model_config(tree), device="meta")


def against_published() -> str:
    """The model, told the speed of one node, against the published speed of sixteen."""
    llama, rows = preset("llama3_8b", 8192), [("torchtitan", "8 GPUs", "128 GPUs", "ratio", "predicted ratio")]
    work = Work(llama, 2, 8192, bytes_gathered=2)
    for name, few, many in PUBLISHED:
        flops = count(llama.cfg, 8192).train_flops_per_token
        told = Machine(H100.flops, few * flops / H100.flops, H100.inside, H100.across)
        ratio = work.speed(told, 128) / work.speed(told, 8)
        rows.append((name, f"{few:,}", f"{many:,}", f"{many / few:.3f}", f"{ratio:.3f}"))
    return table(rows, "")


def plan() -> str:
    """Tokens a second of each GPU, and the part of one node's that is."""
    rows = [["model", "rows", "ranks", "GiB", "gathered as float32", "as bf16"]]
    for name, n_rows, seq_len in (("llama3_2_1b", 4, 8192), ("llama3_8b", 2, 8192), ("llama3_70b", 2, 8192)):
        model = preset(name, seq_len)
        for ranks in (8, 64, 512, 4096):
            works = [Work(model, n_rows, seq_len, size) for size in (4, 2)]
            least = [work.speed(H100, 8) for work in works]
            told = [f"{work.speed(H100, ranks):,.0f} ({work.speed(H100, ranks) / one:.2f})" for work, one in zip(works, least, strict=True)]
            rows.append([name, f"{n_rows} x {seq_len:,}", f"{ranks:,}", f"{works[0].held(ranks):,.0f}", *told])
    return table(rows, "")


def here() -> str:
    """A small model on one process and, by fsdp, on two of this machine, each with one core, against the model above."""
    seconds = {ranks: _measured(ranks) for ranks in (1, 2)}
    work, rate = _small(), json.loads(_ranks("rate", 2))
    flops = count(work.model.cfg, work.seq_len).train_flops_per_token * work.rows * work.seq_len / seconds[1]
    machine = Machine(flops, 1.0, rate["bytes_s"], rate["bytes_s"], node=2, message_s=rate["message_s"])
    beside = work.step_s(machine, 2)
    in_turn = seconds[1] + 3 * machine.collective_s(4 * count(work.model.cfg, work.seq_len).parameters, 2)
    told = f"{beside:.3f} s predicted where what is moved is moved beside the products, {in_turn:.3f} s in turn with them"
    return f"step of 1: {seconds[1]:.3f} s, of 2: {seconds[2]:.3f} s measured, {told}, at {si(rate['bytes_s'])}B/s"


def _small() -> Work:
    return Work(preset("tiny", 256, "model.vocab_size=4096"), 4, 256)


def _measured(ranks: int) -> float:
    return float(_ranks("step", ranks))


def _ranks(what: str, ranks: int) -> str:
    """What rank 0 of so many processes prints."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--standalone", __file__, what]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE, text=True).stdout.strip().splitlines()[-1]


def rank(what: str) -> None:
    """One of several processes: the time of a step, or the rate of gloo."""
    dist.init_process_group("gloo")
    found = _step_s() if what == "step" else json.dumps(_rate())
    if dist.get_rank() == 0:
        print(found)
    dist.destroy_process_group()


def _step_s(rounds: int = 12) -> float:
    from torch.distributed.fsdp import fully_shard

    work = _small()
    model = build_model(work.model.cfg)
    if dist.get_world_size() > 1:
        for unit in [*model.units(), model]:
            fully_shard(unit)
    x = torch.randint(work.model.vocab_size, (work.rows, work.seq_len))
    laps = []
    for _ in range(rounds):
        dist.barrier()
        start = time.perf_counter()
        model.zero_grad()
        model(x).logsumexp(-1).mean().backward()
        laps.append(time.perf_counter() - start)
    return statistics.median(laps[2:])


def _rate() -> dict[str, float]:
    """Bytes a second of an all-gather of 64 MiB, and the wait of one of 2 numbers."""
    laps = {}
    for n in (1, 1 << 23):
        mine, whole = torch.zeros(n), torch.zeros(2 * n)
        laps[n] = statistics.median(_lap(mine, whole) for _ in range(12))
    return {"bytes_s": 0.5 * 8 * (1 << 23) / laps[1 << 23], "message_s": laps[1]}


def _lap(mine: torch.Tensor, whole: torch.Tensor) -> float:
    dist.barrier()
    start = time.perf_counter()
    dist.all_gather_into_tensor(whole, mine)
    return time.perf_counter() - start


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["step" | "rate" as what]:
            rank(what)
        case ["here"]:
            print(here())
        case ["here", more, *_]:
            refuse(f"{more}: nothing stands behind here. Leave it out.")
        case [_, *_] as given:
            asked(given, __doc__, ["here"])
        case _:
            print(against_published(), plan(), sep="\n\n")
