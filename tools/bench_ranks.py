"""What several processes cost on this machine's CPU, what long rows and wide matrices take in slices, and what saving costs the step loop.

    python tools/bench_ranks.py overhead [steps=60]    # ddp and zero2 on 2 pinned processes against twice a single pinned one
    python tools/bench_ranks.py context [seq_len=4096] # memory and time of one long row whole, and in halves on 2 processes
    python tools/bench_ranks.py tensor [d_model=1024]  # memory and time of wide matrices by fsdp on 2 processes, whole and in halves
    python tools/bench_ranks.py save [d_model=720]     # the stall of a step that saves, synchronous and in the background (50 M parameters)

Each contestant is a run of its own in a temporary folder; speeds are medians over its steps, the first ones left out. Prints JSON.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from lm.nn.model_config import model_config
from lm.schema import Tree, from_tree
from lm.storage.model_folder import read_config
from lm.storage.run_folder import Metrics, RunFolder
from lm.training.config import TrainConfig
from lm.training.plan import estimate

sys.path.insert(0, str(Path(__file__).parents[1]))

from tools.options import asked, options

ROOT = Path(__file__).parents[1]
WARMUP = 5  # steps that are left out


def train(folder: Path, name: str, cores: str, *overrides: str) -> list[Tree]:
    """The training records of one run, on these cores."""
    where = [f"run.dir={folder}", f"run.name={name}", "trainer.device=cpu", "trainer.log_every=1", "trainer.sample_prompts=[]"]
    seldom = ["trainer.val_every=1000000", "data.val_rows=8", "schedule.warmup_steps=1", "optim=adamw"]
    command = ["taskset", "-c", cores, sys.executable, "-m", "lm", "train", *where, *seldom, *overrides]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run(command, cwd=ROOT, env=env, check=True, stdout=sys.stderr)
    return [record for record in Metrics(folder / name / "metrics.jsonl").read() if "step_s" in record and record["step"] > WARMUP]


def overhead(folder: Path, steps: int) -> Tree:
    """Tokens per second, and each strategy's against twice those of one process on one core."""
    shared = [f"trainer.max_steps={steps}", "checkpoint.every=1000000"]
    speed: dict[str, float] = {}
    for kind, cores, devices in (("single", "0", 1), ("ddp", "0,1", 2), ("zero2", "0,1", 2)):
        lines = train(folder, kind, cores, f"strategy={kind}", f"launch.devices={devices}", *shared)
        speed[kind] = statistics.median(line["tokens_per_second"] for line in lines)
    against = {f"{kind} / 2 single": round(speed[kind] / (2 * speed["single"]), 3) for kind in ("ddp", "zero2")}
    return {"tokens_per_second": speed, **against, "zero2 / ddp": round(speed["zero2"] / speed["ddp"], 3)}


def context(folder: Path, seq_len: int) -> Tree:
    """Of a rank its peak memory with the program itself, and what its tensors are by formula; and the seconds of a step."""
    size = ["model.n_layers=8", "model.d_model=256", "model.attention.n_heads=4", "model.attention.n_kv_heads=4", "model.ffn.hidden=704"]
    rows = [f"data.seq_len={seq_len}", "data.global_batch=1", "data.mask_documents=false", "data.max_contamination=1"]
    shared = [*size, *rows, f"trainer.max_steps={WARMUP + 2}", "checkpoint.every=1000000"]
    halves = ["strategy=ddp", "launch.devices=2", "launch.context=2"]
    return {name: _taken(folder, name, *shared, *more) for name, more in {"whole": [], "halves": halves}.items()}


def tensor(folder: Path, d_model: int) -> Tree:
    """The same, of a model whose blocks are large, in 2 rows: each process with a row, with half of both, and with half of the matrices."""
    size = ["model.n_layers=4", f"model.d_model={d_model}", "model.attention.n_heads=16", "model.attention.n_kv_heads=16"]
    rows = [f"model.ffn.hidden={11 * d_model // 4}", "data.seq_len=256", "data.global_batch=2", f"trainer.max_steps={WARMUP + 5}"]
    shared = [*size, *rows, "checkpoint.every=1000000", "strategy=fsdp", "launch.devices=2"]
    kinds = {"a row each": [], "half of both rows": ["launch.context=2"], "half of the matrices": ["launch.tensor=2"]}
    return {name: _taken(folder, name.replace(" ", "-"), *shared, *more) for name, more in kinds.items()}


def _taken(folder: Path, name: str, *overrides: str) -> Tree:
    lines = train(folder, name, "0,1", *overrides)
    cfg = from_tree(TrainConfig, RunFolder(folder / name).config())
    tensors = estimate(cfg, model_config(read_config(folder / name / "model")["model"])).total / 2**30
    step_s = statistics.median(line["step_s"] for line in lines)
    return {"memory_gib": lines[-1]["memory_gib"], "by_formula_gib": round(tensors, 3), "step_s": step_s}


def save(folder: Path, d_model: int) -> Tree:
    """Seconds that the step loop stands still per save, and how much slower the steps behind a save are while it is written."""
    size = ["model.n_layers=8", f"model.d_model={d_model}", "model.attention.n_heads=10", "model.attention.n_kv_heads=10"]
    shared = [*size, "model.ffn.hidden=1792", "data.seq_len=64", "data.global_batch=2", "trainer.max_steps=40"]
    found: dict[str, Tree] = {}
    for name, overrides in (("synchronous", []), ("background", ["checkpoint.background=true"])):
        train(folder, name, "0,1", *shared, "checkpoint.every=10", *overrides)
        lines = {line["step"]: line["step_s"] for line in Metrics(folder / name / "metrics.jsonl").read() if "step_s" in line}
        behind = [lines[step + n] for step in (10, 20, 30) for n in (1, 2, 3)]
        usual = statistics.median(lines[step + n] for step in (10, 20, 30) for n in (6, 7, 8, 9))
        summary = json.loads((folder / name / "summary.json").read_text())
        steps = {"usual_step_s": usual, "slower_s": sum(behind) / 3 - 3 * usual}
        found[name] = {"parameters": summary["parameters"], "stall_s": summary["save_s"], **steps}
    ratio = found["background"]["stall_s"] / found["synchronous"]["stall_s"]
    return {**found, "background / synchronous": round(ratio, 3)}


def main(args: list[str]) -> int:
    verbs: dict[str, Callable[..., Tree]] = {"overhead": overhead, "context": context, "tensor": tensor, "save": save}
    what = asked(args, __doc__, verbs)
    own = {"overhead": {"steps": 60}, "context": {"seq_len": 4096}, "tensor": {"d_model": 1024}, "save": {"d_model": 720}}
    given = options(args[1:], __doc__, own[what])
    with tempfile.TemporaryDirectory() as name:
        print(json.dumps(verbs[what](Path(name), **given), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
