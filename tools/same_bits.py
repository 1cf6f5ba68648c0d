"""Runs short trainings at two states of the code on one machine, and compares weights, metrics and samples bit for bit.

    python tools/same_bits.py before=378c01c after=HEAD [only=dense,moe] [jobs=1]

before, after: a commit, or the folder of a checkout. Both are copied, so that either may go on changing. Exit code 1 where something
differs. Nothing is stored, since bits differ between processors. Only the command line and the files of a run are used, so the modules
may lie anywhere; what has been renamed since stands in OPTIONS and NAMES, one line each.
"""

import io
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from tools.options import options, refuse

ROOT = Path(__file__).parents[1]
STDLIB = Path(sysconfig.get_paths()["stdlib"])
NEEDED = ("lm", "conf", "recipes")
T = TypeVar("T")

OPTIONS = {  # as it is spelled below -> as a tree spells it that does not know that
    "model.mtp": "model.ahead",
    "objective=dpo": "objective=preference",
    "objective.scheduled_sampling": "objective.own_tokens",
}
NAMES = {"ahead.": "mtp."}  # in the names of tensors and metrics: old -> new
MACHINE = {"tokens_per_second", "step_s", "data_s", "draw_s", "judge_s", "memory_gib", "mfu_pct", "save_s"}  # metrics that may differ

# A tensor's initial weights are drawn by its name, so a renamed one would start elsewhere: both trees draw it by its new name.
DRAWN_IN, DRAWN = "lm/nn/init.py", "generator(seed, full)"

TEXT, OTHER = f"{STDLIB}/asyncio/*.py", f"{STDLIB}/email/*.py"
COMMON = (
    *("seed=1", "trainer.device=cpu", "trainer.precision=fp32", "trainer.max_steps=4", "trainer.val_every=2", "trainer.log_every=1"),
    *("trainer.sample_tokens=8", "trainer.sample_prompts=['def close(self):']", "checkpoint.every=2", "schedule.warmup_steps=1"),
    *("optim=adamw", "data.seq_len=64", "data.global_batch=8", "data.val_rows=8", "run.dir=runs", "data.cache_dir=cache"),
)
SMALL = ("model.d_model=64", "model.n_layers=2", "model.attention.n_heads=2", "model.init.out_scale=null", "model.dropout=0.1")
BPE = (*SMALL, f"data.files={TEXT}", "data=text", "tokenizer=bpe", "tokenizer.vocab_size=512", "tokenizer.pattern=own")
BYTES = (*SMALL, f"data.files={TEXT}", "data=text", "tokenizer=bytes")
LONG = ("data.seq_len=2048", "data.global_batch=2")
UNGENTLE = ("optim=muon", "optim.lr=0.02", "schedule=wsd")  # what runs from a checkpoint began with before they were gentle
PAIRS = (*SMALL, "data=stdlib_docstrings", "data.seq_len=256", "tokenizer=bytes")
EXPERTS = ("model.ffn.n_experts=4", "model.ffn.expert.hidden=32")
MIX = f"data.sources=[{{name:a,data:{{kind:text,files:'{TEXT}'}},weight:3.0}},{{name:b,data:{{kind:text,files:'{OTHER}'}},weight:1.0}}]"
TRAININGS: dict[str, tuple[str, ...]] = {
    "dense": ("model=nano", "model.max_seq_len=2048", *BPE, "model.dropout=0"),
    "moe": ("model=moe_tiny", *BYTES, *EXPERTS, "model.attention.n_kv_heads=1"),
    "mla": ("model=deepseek_tiny", *BYTES, *EXPERTS, "model.ffn.dense.hidden=96", "model.ffn.router.n_groups=2",
            "model.ffn.router.top_groups=1", "model.mtp.weight=0.5"),
    "encoder_decoder": ("model=t5_tiny", *PAIRS, "objective=seq2seq", "objective.target_len=48", "objective.scheduled_sampling=0.5"),
    "encoder": ("model=bert_tiny", *BPE, "objective=mlm", "trainer.sample_prompts=[]"),
    "dpo": ("data=stdlib_preferences", *LONG, "objective=dpo", *UNGENTLE),
    "sft": ("data=stdlib_chat", *LONG, "objective=sft", *UNGENTLE),
    "mixture": ("model=nano", *SMALL, "data=mix", MIX, "tokenizer=bytes"),
    "muon_ema": ("model=nano", *BYTES, "optim=muon", "trainer.ema_decay=0.9"),
    "accumulation": ("model=nano", *BYTES, "trainer.micro_batch=2"),
    "ddp": ("model=nano", *BYTES, "strategy=ddp", "launch.devices=2", "trainer.micro_batch=2"),
    "zero2": ("model=nano", *BYTES, "strategy=zero2", "launch.devices=2", "trainer.micro_batch=2"),
}  # fmt: skip
PARENT = {"dpo": "dense", "sft": "dense"}  # whose model and tokenizer the training starts from


class Tree:
    """A copy of the code in `folder`/code, and what it has trained in `folder`/runs."""

    def __init__(self, source: str, folder: Path) -> None:
        self.folder, self.code = folder, folder / "code"
        if Path(source).is_dir():
            for name in NEEDED:
                shutil.copytree(Path(source) / name, self.code / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            _export(source, self.code)
        if (drawn_in := self.code / DRAWN_IN).exists():
            renamed = "full" + "".join(f".replace({old!r}, {new!r})" for old, new in NAMES.items())
            text = drawn_in.read_text(encoding="utf-8")
            drawn_in.write_text(text.replace(DRAWN, DRAWN.replace("full", renamed)), encoding="utf-8")
        self._older = {new: old for new, old in OPTIONS.items() if self.lm("explain", new).returncode}

    def lm(self, *args: str) -> "subprocess.CompletedProcess[str]":
        """`lm ARGS` of this tree."""
        path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))  # DeepSpeed looks for ninja there
        environment = os.environ | {"PYTHONPATH": str(self.code), "OMP_NUM_THREADS": "1", "PATH": path}
        return subprocess.run([sys.executable, "-m", "lm", *args], cwd=self.folder, env=environment, capture_output=True, text=True)

    def train(self, name: str) -> float:
        """Seconds that the training took. RuntimeError with the last line of what it said where it failed."""
        begun = time.monotonic()
        done = self.lm("train", *self.overrides(name))
        if done.returncode:
            said = done.stderr.strip().splitlines() or ["it said nothing"]
            raise RuntimeError(f"{self.folder.name} ended with exit code {done.returncode}: {said[-1]}")
        return time.monotonic() - begun

    def overrides(self, name: str) -> list[str]:
        """Those of a training in this tree's spelling; of a key that is given twice, the last."""
        parent = [f"init_from=runs/{PARENT[name]}"] if name in PARENT else []
        given = {arg.partition("=")[0]: arg for arg in (*COMMON, *TRAININGS[name], *parent, f"run.name={name}")}
        return [self._spelled(arg) for arg in given.values()]

    def _spelled(self, arg: str) -> str:
        return next((old + arg.removeprefix(new) for new, old in self._older.items() if arg.startswith(new)), arg)


def _export(commit: str, folder: Path) -> None:
    done = subprocess.run(["git", "-C", str(ROOT), "archive", commit, *NEEDED], capture_output=True)
    if done.returncode:
        raise SystemExit(f"same_bits: {commit!r} is neither a folder nor a commit ({done.stderr.decode().strip()}). Name one of them.")
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(folder, filter="data")


@dataclass(frozen=True)
class Agreement:
    """Of two folders' tensors or lines: how many there are, and a sentence for each that differs."""

    total: int
    differing: list[str]

    def __str__(self) -> str:
        return f"{self.total - len(self.differing)}/{self.total}"


def compare(before: Path, after: Path) -> list[Agreement]:
    """Tensors, metrics and samples of two runs. RuntimeError where one has none that could be compared."""
    return [
        _agree(_tensors(before), _tensors(after), _changed_bits),
        _agree(_metrics(before), _metrics(after), _changed_keys),
        _agree(_samples(before), _samples(after), lambda x, y: f"{x!r} before and {y!r} after" if x != y else ""),
    ]


def _agree(before: Mapping[str, T], after: Mapping[str, T], difference: Callable[[T, T], str]) -> Agreement:
    names, told = {**before, **after}, []
    for name in names:
        if name not in before or name not in after:
            told.append(f"{name}: only {'after' if name in after else 'before'}")
        elif what := difference(before[name], after[name]):
            told.append(f"{name}: {what}")
    return Agreement(len(names), told)


def _tensors(run: Path) -> dict[str, Tensor]:
    found = {name: tensor for path in sorted((run / "model").glob("*.safetensors")) for name, tensor in load_file(path).items()}
    if not found:
        raise RuntimeError(f"{run.name}/model holds no tensors")
    return {_renamed(name): tensor for name, tensor in found.items()}


def _metrics(run: Path) -> dict[str, dict[str, Any]]:
    """Without what depends on the machine."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    kept = [{_renamed(key): value for key, value in record.items() if key not in MACHINE} for record in records]
    return {f"metrics.jsonl:{number}": record for number, record in enumerate(kept, 1)}


def _samples(run: Path) -> dict[str, str]:
    path = run / "samples.md"
    lines = path.read_text(encoding="utf-8").split("\n") if path.exists() else []  # an encoder writes none
    return {f"samples.md:{number}": line for number, line in enumerate(lines, 1)}


def _renamed(name: str) -> str:
    for old, new in NAMES.items():
        name = name.replace(old, new)
    return name


def _changed_bits(before: Tensor, after: Tensor) -> str:
    """By bits: -0 is not 0, and a NaN is itself."""
    if (before.dtype, before.shape) != (after.dtype, after.shape):
        return f"{before.dtype} {tuple(before.shape)} before and {after.dtype} {tuple(after.shape)} after"
    bits = [tensor.flatten().view(torch.uint8).view(tensor.numel(), -1) for tensor in (before, after)]
    changed = int((bits[0] != bits[1]).any(-1).sum())
    largest = (before.double() - after.double()).abs().max().item()
    return f"{changed:,} of {before.numel():,} values differ, by {largest:.3g} at most" if changed else ""


def _changed_keys(before: dict[str, Any], after: dict[str, Any]) -> str:
    pairs = {key: (value, after.get(key, "none")) for key, value in before.items()}  # later code may tell more
    return ", ".join(f"{key} {x} before and {y} after" for key, (x, y) in pairs.items() if x != y)


def run(names: Sequence[str], before: Tree, after: Tree, jobs: int) -> int:
    """How many are equal; a line a training, as soon as it and those before it are done."""
    started: dict[str, Future[list[float]]] = {}

    def both(name: str) -> list[float]:
        if name in PARENT:
            started[PARENT[name]].result()  # it was started before, so that this waits for no one who waits
        return [tree.train(name) for tree in (before, after)]

    print(f"{'training':<16}{'tensors':>12}{'metrics':>12}{'samples':>12}{'before':>12}{'after':>12}", flush=True)
    with ThreadPoolExecutor(jobs) as pool:
        for name in names:
            started[name] = pool.submit(both, name)
        return sum(_report(name, training, before, after) for name, training in started.items())


def _report(name: str, training: "Future[list[float]]", before: Tree, after: Tree) -> bool:
    try:
        seconds = training.result()
        found = compare(*(tree.folder / "runs" / name for tree in (before, after)))
    except RuntimeError as error:
        print(f"{name:<16}could not be compared: {error}", flush=True)
        return False
    print(f"{name:<16}" + "".join(f"{part!s:>12}" for part in found) + "".join(f"{s:>10.1f} s" for s in seconds), flush=True)
    different = [part.differing for part in found if part.differing]
    for first, *others in different:
        print(f"    {first}" + f" (and {len(others)} more)" * bool(others), flush=True)
    return not different


def chosen(only: str) -> list[str]:
    """These trainings and their parents, in the order of TRAININGS."""
    given = set(only.split(","))
    if strangers := sorted(given - set(TRAININGS)):
        raise SystemExit(f"same_bits: only={','.join(strangers)} was given. Choose among {', '.join(TRAININGS)}.")
    return [name for name in TRAININGS if name in given | {PARENT[child] for child in given if child in PARENT}]


def main(args: list[str]) -> int:
    given = options(args, __doc__, {"before": "", "after": "", "only": ",".join(TRAININGS), "jobs": 1})
    sources = [given["before"], given["after"]]
    if not all(sources):
        refuse("before, after: both are needed, each a commit or a folder. Write before=COMMIT after=HEAD.")
    names, jobs = chosen(given["only"]), given["jobs"]
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        before, after = (Tree(source, Path(folder) / side) for source, side in zip(sources, ("before", "after"), strict=True))
        equal = run(names, before, after, jobs)
    print(f"{equal} of {len(names)} trainings are equal bit for bit; {time.monotonic() - begun:.0f} s in all")
    return 0 if equal == len(names) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
