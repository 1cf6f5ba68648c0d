"""The commands of the pages, and how each block says that it is tested: by a comment on the line before its fence.

(nothing)                       it is run as it stands, in the page's order, in one folder a page
<!-- test: debug=fast -->       the same, every training shrunk to a few steps in the folder that it has on the page
<!-- test: prints this -->      a console block, whose output is compared
<!-- test: composed, WHY -->    trainings that want other machines or files: their configs are composed and checked
<!-- test: not run, WHY -->     checked by the parser of the shell, or of Python, alone
"""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lm.cli.compose.compose import compose_config
from lm.cli.main import main

ROOT = Path(__file__).parents[2]
PAGES = sorted([*(ROOT / "docs").glob("*.md"), *ROOT.glob("*.md")])
FENCE = re.compile(
    r"(?:^<!-- test: (?P<how>.*?) -->\n)?^```(?P<language>bash|python|console)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)
WAYS = ("", "debug=fast", "prints this", "composed", "not run")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page. way: one of WAYS; why: behind the comma."""

    language: str
    way: str
    why: str
    text: str

    @property
    def trainings(self) -> Iterator[list[str]]:
        """The overrides of each `lm train`."""
        for line in self.text.splitlines():
            if found := re.search(r"\blm train\b(.*)", line.split(" #")[0]):
                yield shlex.split(found[1])


def blocks(page: Path) -> list[Block]:
    """In their order."""
    found = []
    for match in FENCE.finditer(page.read_text(encoding="utf-8")):
        way, _, why = (match["how"] or "").partition(", ")
        assert way in WAYS and (bool(why) == (way in ("composed", "not run"))), f"{page.name}: <!-- test: {match['how']} -->"
        found.append(Block(match["language"], way, why, match["text"]))
    return found


def run(block: Block, folder: Path) -> None:
    """Raises AssertionError where a command fails, or does not print what the page shows. The current folder is `folder`."""
    if block.way == "not run" and block.language == "python":
        compile(block.text, "page", "exec")
    elif block.way == "not run":
        shell(f"bash -n <<'END'\n{block.text}\nEND", folder)
    elif block.way == "composed":
        require_composed(block)
    elif block.language == "python":
        exec(compile(block.text, "page", "exec"), {"__name__": "page"})
    elif block.language == "console":
        command, _, shown = block.text.removeprefix("$ ").partition("\n")
        assert shell(command, folder) == shown
    elif "$" in block.text or "<<" in block.text:
        shell(f"set -e\n{block.text}", folder, RANK="0", WORLD_SIZE="2")  # as an executor of several tasks sets them
    else:
        for line in block.text.splitlines():
            _line(shrunk(line) if block.way else line, folder)


def require_composed(block: Block) -> None:
    """Every training of the block has a valid config."""
    trainings = list(block.trainings)
    assert len(trainings) == len(block.text.splitlines())
    for args in trainings:
        assert main(["train", *args, "--cfg", "job"]) == 0, args


def shrunk(line: str) -> str:
    """The line with its training cut to a few steps, under the name that the whole one has."""
    before, train, rest = line.split(" #")[0].partition("lm train")
    if not train:
        return line
    args = shlex.split(rest)
    named = "-m" in args or "--cfg" in args or any(arg.startswith("run.name=") for arg in args)
    name = "" if named else f" run.name={compose_config(args).run.name}"
    return f"{before}{train} debug=fast{rest.rstrip()}{name}"


def _line(line: str, folder: Path) -> None:
    """A plain call of `lm` in this process, which spares an interpreter's start; anything else by the shell. A target of make is only
    planned: the tests are one."""
    plain = line.startswith("lm ") and not set("|;&<>*`") & set(line)
    if line.startswith("make "):
        shell(f"make --dry-run -C {ROOT} {line.removeprefix('make ')}", folder)
    elif not plain:
        shell(line, folder)
    elif line.strip():
        assert main(shlex.split(line, comments=True)[1:]) == 0, line


def shell(command: str, folder: Path, **more: str) -> str:
    """What it prints. `lm` is this checkout's."""
    path = f"{folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    own = {"PATH": path, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, env={**os.environ, **own, **more}, capture_output=True, text=True, timeout=600
    )
    expected = (0, 124) if command.startswith("timeout ") else (0,)  # 124: the time was up, which is what the line is for
    assert done.returncode in expected, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout
