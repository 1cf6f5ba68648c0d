"""`make findings`: runs the studies that docs/findings.md names, and writes there what each has found.

The page is written by hand but for the blocks between `<!-- study: NAME -->` and `<!-- end -->`. Killed anywhere, the same command goes on;
a study that has ended costs seconds. `python -m tools.findings write` runs nothing.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

from lm.ablation.judging.verdict import cells, sentences
from lm.schema import Tree
from lm.storage.run_folder import RunFolder
from tools.options import asked, refuse

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "findings.md"
BLOCK = re.compile(r"<!-- study: (\S+) -->\n(.*?)<!-- end -->\n", re.DOTALL)


def main() -> None:
    """Exits with the code of the first study that fails, with what ended before it written."""
    if sys.argv[1:] not in ([], ["write"]):
        asked(sys.argv[1:], __doc__, ["write"])
        refuse(f"{sys.argv[2]}: nothing stands behind write. Leave it out.")
    for name, _ in [] if sys.argv[1:] else BLOCK.findall(PAGE.read_text(encoding="utf-8")):
        code = subprocess.run([sys.executable, "-m", "lm", "ablate", f"study={name}", "jobs=2", "threads=1"], check=False).returncode
        write()
        if code:
            sys.exit(code)
    write()


def write() -> None:
    """Fills the blocks of the studies that have ended here; what the others say stays."""
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(BLOCK.sub(lambda found: filled(Path("runs/studies"), found[1], found[2]), text), encoding="utf-8")


def filled(studies: Path, name: str, before: str) -> str:
    """Returns a block: the table of the verdict, what it says in sentences, and where it was measured."""
    folder = studies / name.replace("/", "-")
    try:
        found: Tree = json.loads((folder / "verdict.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return f"<!-- study: {name} -->\n{before}<!-- end -->\n"
    if any(len(row["runs"]) < found["seeds"] for row in found["variants"].values()):
        return f"<!-- study: {name} -->\n{before}<!-- end -->\n"
    head, *rows = cells(found)
    table = "\n".join("| " + " | ".join(row) + " |" for row in [head, ("---",) * len(head), *rows])
    told = "\n".join(f"- {sentence}" for sentence in sentences(found))
    run = RunFolder(folder / f"{found['baseline']}-seed-0").summary()
    sizes = [row["size"]["parameters"] for row in found["variants"].values()]
    parameters = " to ".join(dict.fromkeys(f"{size:,}" for size in (min(sizes), max(sizes))))
    where = f"`lm ablate study={name}`: {parameters} parameters, {run['tokens']:,} tokens a run; {processor()},"
    by = f"torch {run['torch']}, commit {(run['commit'] or 'unknown')[:7]}, {run['finished_at'][:10]}"
    where += f" {run['device'].partition(', ')[2]} a run, {by}."
    return f"<!-- study: {name} -->\n{table}\n\n{told}\n\n{where}\n<!-- end -->\n"


def processor() -> str:
    """Returns what this machine calls its processor."""
    told = Path("/proc/cpuinfo")  # of Linux
    lines = told.read_text(encoding="utf-8").splitlines() if told.exists() else []
    return next((line.split(": ", 1)[1] for line in lines if line.startswith("model name")), "CPU")


if __name__ == "__main__":
    main()
