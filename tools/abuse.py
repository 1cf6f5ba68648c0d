"""Hostile inputs by class, each carried to its end: whatever is given, `lm` ends in time, with an exit code of its own and one sentence.

python tools/abuse.py [cases=3000] [seed=N] [jobs=2] [only=overrides,files,data,environments]

overrides      options found in the schema: misspelt, of a wrong type, out of range, doubled, for every verb that takes them
files          each file of a run, an export and a recipe: fields lost, mistyped, enormous; bytes flipped, cut, added; no regular file
data           texts and records that are none, under names that are hardly any
environments   locales, descriptors that are closed or full, limits, folders that are gone, variables of a cluster

A case may end with 0, 2, 3, 4 or 5; with 143 where it was right and long, and was asked to stop. Unless it is 0, the last line on stderr
is one printable sentence. Nowhere is there a traceback, an internal error, a control character, a figure of JSON that is no number, or
something half written; a weight that was changed behind the manifest's back is never read. What fails is printed as JSON, with all that
repeats it. The same seed makes the same cases. Exit code 0 where none fails.
"""

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from lm.storage.atomic import TEMPORARY  # noqa: E402
from tests.client import ask  # noqa: E402
from tests.server import serving  # noqa: E402
from tools.abuse_cases import TINY, Case, change, data, environments, files, overrides  # noqa: E402
from tools.options import options  # noqa: E402

UNSEEN, TURNING = ("Cc", "Cs", "Zl", "Zp"), "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"  # what steers a terminal
MOST_CHARS = 2000
LIMIT_S, GRACE_S = 20, 15  # a case that runs on is asked to stop, and then has to
MEMORY_BYTES = 8 << 30  # of address space
SHARES = {"overrides": 0.45, "files": 0.38, "data": 0.12, "environments": 0.05}


def drawn(strategy: st.SearchStrategy[Case], n: int, seed: int) -> list[Case]:
    """The first n cases of a seed."""
    cases: list[Case] = []

    @seeded(seed)
    @settings(max_examples=n, database=None, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(strategy)
    def take(case: Case) -> None:
        cases.append(case)

    take()
    return cases[:n]


def run(case: Case, base: Path, server: Path) -> dict[str, Any] | None:
    """What is wrong with how a case ends, and how to repeat it; None where nothing is."""
    with tempfile.TemporaryDirectory(prefix="abuse-") as place:
        folder, outputs = Path(place) / "at", [Path(place) / "out", Path(place) / "err"]
        shutil.copytree(base, folder)
        if not all(change(folder / name, how, value) for name, how, value in case.changes):
            return None
        begun = time.monotonic()
        code, stopped = (_in_a_shell if case.shell else _forked)(case, folder, outputs, server)
        out, err = (path.read_bytes().decode("utf-8", "backslashreplace") for path in outputs)
        found = wrong(case, code, stopped, out, err, folder)
        how = {"wrong": found, "code": code, "seconds": round(time.monotonic() - begun, 1), "err": err[-600:]}
        return how | asdict(case) if found else None


def _forked(case: Case, folder: Path, outputs: Sequence[Path], server: Path) -> tuple[int, bool]:
    """The exit code, of a process that the server forks, and whether it had to be asked for it."""
    with ExitStack() as stack:
        null = stack.enter_context(open(os.devnull))
        streams = [null, *(stack.enter_context(path.open("w")) for path in outputs)]
        pid, answers = ask(str(server), ["-m", "lm", *case.args], _env(case, folder), str(folder), [stream.fileno() for stream in streams])
    with ThreadPoolExecutor(1) as waiting:
        answer = waiting.submit(lambda: int(answers.readline()))
        return _ended(pid, answer.result)


def _in_a_shell(case: Case, folder: Path, outputs: Sequence[Path], server: Path) -> tuple[int, bool]:
    """The same of a process of its own, with what the shell puts around it."""
    call = ["bash", "-o", "pipefail", "-c", case.shell.format('"$@"'), "lm", sys.executable, "-m", "lm", *case.args]
    with ExitStack() as stack:
        out, err = (stack.enter_context(path.open("w")) for path in outputs)
        null, env = subprocess.DEVNULL, _env(case, folder)
        process = stack.enter_context(
            subprocess.Popen(call, cwd=folder, env=env, stdin=null, stdout=out, stderr=err, start_new_session=True)
        )
        return _ended(process.pid, lambda seconds: process.wait(seconds))


def _env(case: Case, folder: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HOME": str(folder), **case.env}


def _ended(group: int, wait: Callable[[float], int]) -> tuple[int, bool]:
    """The exit code of a process group's leader, and whether SIGTERM was needed; -9 where nothing else helped."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            return wait(LIMIT_S if number == signal.SIGTERM else GRACE_S), number == signal.SIGKILL
        except (TimeoutError, subprocess.TimeoutExpired):
            with suppress(ProcessLookupError):
                os.killpg(group, number)
    return wait(GRACE_S), True


def wrong(case: Case, code: int, stopped: bool, out: str, err: str, folder: Path) -> str:
    """What should not be; empty where all is as it should."""
    last = err.rstrip("\n").rpartition("\n")[2]
    if code not in ((0, 143) if stopped else (0, 2, 3, 4, 5)):
        return f"exit code {code}" + (", after it was asked to stop" if stopped else "")
    if "Traceback (most recent" in err or "internal error" in err:
        return "an error of ours"
    if "2>" not in case.shell and code and not (last.endswith((".", "?", ")")) and " " in last and len(last) < MOST_CHARS):
        return "the last line is no sentence"
    if any(char in TURNING or (unicodedata.category(char) in UNSEEN and char != "\n") for char in err):
        return "a control character"
    if case.refused and code == 0:
        return "a changed weight is read"
    if "format=json" in case.args and code == 0 and ("NaN" in out or "Infinity" in out):
        return "a figure that is no number"
    if half := [str(path.relative_to(folder)) for path in folder.rglob(f"{TEMPORARY}*")]:
        return f"half written: {', '.join(half)}"
    if code not in (0, 143) and (folder / "made").exists():
        return "made, although it failed"
    return ""


def make(base: Path, server: Path) -> None:
    """A text, a run of two steps with its cache, an export, and chats: what the cases spoil."""
    base.mkdir()
    draw = random.Random(0)
    (base / "text.txt").write_text(
        "\n".join(" ".join(draw.choices(["def", "return", "import", "self", "value", "for", "in", "if"], k=8)) for _ in range(60))
    )
    for args in (["train", *TINY], ["export", "from=run", "format=hf", "out=hf", "check=false"]):
        streams = [base.parent / "made.out", base.parent / "made.err"]
        if _forked(Case("made", args), base, streams, server)[0]:
            raise SystemExit(f"abuse: lm {' '.join(args)} failed: {streams[1].read_text()}")


def main() -> int:
    defaults = {"cases": 3000, "seed": random.randrange(10**6), "jobs": 2, "only": [*SHARES]}
    asked = options(sys.argv[1:], __doc__, defaults, {"only": SHARES}, zero=("seed",))
    n, seed, jobs, chosen = (asked[key] for key in defaults)
    print(f"seed={seed}", flush=True)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="abuse-") as place, serving(Path(place)) as server, ThreadPoolExecutor(jobs) as pool:
        base = Path(place) / "base"
        make(base, server)
        strategies = {"overrides": overrides, "files": lambda: files(base), "data": data, "environments": environments}
        shares = {name: SHARES[name] / sum(SHARES[name] for name in chosen) for name in chosen}
        cases = [case for name, share in shares.items() for case in drawn(strategies[name](), round(n * share), seed)]
        random.Random(seed).shuffle(cases)
        failed = Counter[str]()
        for found in pool.map(lambda case: run(case, base, server), cases):
            if found is not None:
                failed[found["group"]] += 1
                print(json.dumps(found, default=repr), flush=True)
    ran = Counter(case.group for case in cases)
    print(json.dumps({"seed": seed, "cases": dict(ran), "failed": dict(failed), "seconds": round(time.monotonic() - begun)}))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
