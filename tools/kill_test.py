"""Kills a small run with SIGKILL again and again, starts it by the same command until it ends, and compares it with a run left alone.

python tools/kill_test.py --kills 20 [--fork] [--seed 0] [key=value ...]      overrides as for `lm train`

A third of the kills is inside a save, at every failpoint in turn, the others come after a random step and a random delay. The last two are
between the last checkpoint and the model, and inside the save of the model. Prints one JSON object; exit code 0 where all is equal.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

POINTS = ("weights", "prune", "manifest", "rename", "optimizer", "made", "renamed")
COMPARED = ("step", "tokens", "loss", "val_loss", "val_bits_per_byte", "grad_norm", "lr", "event")
STEPS, EVERY = 60, 5
TINY = (
    *("model=nano", "model.d_model=32", "model.n_layers=2", "model.attention.n_heads=2", "model.ffn.hidden=64", "model.dropout=0.1"),
    *("tokenizer=bytes", "data=text", "data.seq_len=32", "data.global_batch=8", f"trainer.max_steps={STEPS}", "trainer.log_every=1"),
    *("trainer.val_every=10", f"checkpoint.every={EVERY}", "checkpoint.keep_last=1", "schedule.warmup_steps=5", "trainer.sample_tokens=8"),
)
Start = Callable[[Sequence[str], Mapping[str, str]], int]  # arguments of lm, environment -> pid


def spawn(args: Sequence[str], env: Mapping[str, str]) -> int:
    """The real command in a process of its own."""
    process = subprocess.Popen([sys.executable, "-m", "lm", *args], env={**os.environ, **env}, stdout=subprocess.DEVNULL)
    return process.pid


def fork(args: Sequence[str], env: Mapping[str, str]) -> int:
    """The same without the seconds of importing, from a parent that has imported everything and run nothing."""
    import lightning  # noqa: F401

    import lm.report.curves
    import lm.training.run  # noqa: F401
    from lm.cli.main import main

    if pid := os.fork():
        return pid
    os.environ.update(env)
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    os._exit(main(args))


def write_text(path: Path) -> None:
    """About 9 kB, so that 60 steps see a second epoch."""
    draw = random.Random(0)
    words = "def return import class self value for in while if else none model data token print read"
    path.write_text("\n".join(" ".join(draw.choices(words.split(), k=8)) for _ in range(220)), encoding="utf-8")


class Victim:
    """The run that gets killed."""

    def __init__(self, folder: Path, args: Sequence[str], start: Start, seed: int) -> None:
        self.folder, self.args, self.start = folder, args, start
        self.random = random.Random(seed)
        self.kills: Counter[str] = Counter()
        self.starts = 0

    def die(self, kind: str, reach: range) -> None:
        """One start and one kill: at the failpoint `kind`, or at a time after some step of `reach`."""
        self.starts += 1
        at_failpoint = kind != "time"
        pid = self.start(self.args, {"LM_FAILPOINT": f"{kind}:kill"} if at_failpoint else {})
        if not at_failpoint:
            self._kill_after(pid, self.random.choice(reach))
        status = os.waitpid(pid, 0)[1]
        if os.WIFSIGNALED(status):
            torn = not at_failpoint and any((self.folder / "checkpoints").glob(".*"))
            self.kills["time, inside a save" if torn else kind] += 1
        elif status:
            raise SystemExit(f"kill_test: a start ended with exit code {os.waitstatus_to_exitcode(status)}; the run is in {self.folder}.")

    def _kill_after(self, pid: int, step: int) -> None:
        metrics = self.folder / "metrics.jsonl"
        before = self._stamp(metrics)
        while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            if self._stamp(metrics) != before and _last_step(metrics) >= step:
                time.sleep(self.random.uniform(0, 0.02))
                os.kill(pid, signal.SIGKILL)
                return
            time.sleep(0.0005)

    def _stamp(self, path: Path) -> tuple[int, int] | None:
        """Changes with the first truncation or line of a new start, until which the file still tells of the last one."""
        return (path.stat().st_ino, path.stat().st_mtime_ns) if path.exists() else None

    def saved(self) -> int:
        """The newest checkpoint's step."""
        return max((int(path.name.removeprefix("step-")) for path in (self.folder / "checkpoints").glob("step-*")), default=0)

    def finish(self) -> None:
        self.starts += 1
        code = os.waitstatus_to_exitcode(os.waitpid(self.start(self.args, {}), 0)[1])
        if code:
            raise SystemExit(f"kill_test: a start ended with exit code {code}; the run is in {self.folder}.")


def _last_step(metrics: Path) -> int:
    lines = metrics.read_text(encoding="utf-8").splitlines() if metrics.exists() else []
    try:
        return int(json.loads(lines[-1])["step"]) if lines else 0
    except ValueError:
        return 0  # read while it was written


def kill_all(victim: Victim, kills: int) -> None:
    """At a pace that spreads the kills over the run."""
    kinds = ["time" if number % 3 else POINTS[number // 3 % len(POINTS)] for number in range(kills - 3)]
    victim.random.shuffle(kinds)
    for number, kind in enumerate(kinds):
        saved = victim.saved()
        ahead = saved >= (STEPS - 5 * EVERY) * number / kills
        victim.die(kind, range(saved + 1, saved + (EVERY if ahead else 3 * EVERY)))
    victim.die("time", range(STEPS - EVERY + 1, STEPS - 2))
    while victim.saved() < STEPS:
        victim.die("renamed", range(0))
    victim.die("manifest", range(0))


def compare(whole: Path, killed: Path) -> dict[str, bool]:
    """What must be equal."""

    def lines(folder: Path) -> list[dict[str, Any]]:
        records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        return [{key: record[key] for key in COMPARED if key in record} for record in records]

    def same(name: str) -> bool:
        return (whole / name).read_bytes() == (killed / name).read_bytes()

    found = {name: same(name) for name in ("model/model.safetensors", "model/config.json", "samples.md")}
    stray = [path for folder in (killed, killed / "checkpoints") for path in folder.glob(".*")]
    return {**found, "metrics.jsonl": lines(whole) == lines(killed), "no stray file": not stray}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="at least 4")
    parser.add_argument("--fork", action="store_true", help="fork from an imported parent instead of starting Python anew each time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    if options.kills < 4:
        parser.error(f"--kills {options.kills}: at least 4 are needed")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_text(folder / "text.txt")
        given = {override.partition("=")[0] for override in options.overrides}
        common = [
            *(each for each in TINY if each.partition("=")[0] not in given),
            f"run.dir={folder}",
            f"data.files={folder / 'text.txt'}",
            f"data.cache_dir={folder / 'cache'}",
        ]
        args = ["train", *common, "trainer.sample_prompts=['def ']", *options.overrides]
        start = fork if options.fork else spawn
        whole = Victim(folder / "killed", [*args, "run.name=killed"], start, options.seed)
        whole.finish()
        (folder / "killed").rename(folder / "whole")
        victim = Victim(folder / "killed", [*args, "run.name=killed"], start, options.seed)
        kill_all(victim, options.kills)
        victim.finish()
        equal = compare(folder / "whole", folder / "killed")
    in_save = sum(count for kind, count in victim.kills.items() if kind != "time")
    report = {
        "kills": victim.kills.total(), "inside a save": in_save, "between steps": victim.kills["time"], "by place": dict(victim.kills),
        "starts": victim.starts, "equal": equal, "seconds": round(time.monotonic() - started, 1),
    }  # fmt: skip
    print(json.dumps(report, indent=1))
    return 0 if all(equal.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
