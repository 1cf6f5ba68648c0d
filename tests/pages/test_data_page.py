"""docs/data.md: its commands work as they stand, in its order; its links and options exist."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lm.data.kinds import DataConfig

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```bash\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
SBATCH = """#!/bin/bash
# Runs the wrapped line at once, for each number of --array.
for arg; do case "$arg" in --array=*) array=${arg#--array=};; esac; last=$arg; done
for n in $(seq ${array%-*} ${array#*-}); do SLURM_ARRAY_TASK_ID=$n bash -c "$last" >&2 || exit 1; done
[ -n "$array" ] || bash -c "$last" >&2
echo 7
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data_page")
    (folder / "notes").mkdir()
    for number in range(4):
        records = [{"text": f"Note {n} of file {number}. " * (n % 7 + 2)} for n in range(80)]
        (folder / "notes" / f"{number}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "bin").mkdir()
    (folder / "bin" / "sbatch").write_text(SBATCH)
    (folder / "bin" / "sbatch").chmod(0o755)
    (folder / "bin" / "lm").write_text(f'#!/bin/bash\nexec {sys.executable} -m lm "$@"\n')
    (folder / "bin" / "lm").chmod(0o755)
    return folder


def shell(command: str, folder: Path, **more: str) -> subprocess.CompletedProcess[str]:
    own = {"HOME": str(folder), "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, shell=True, cwd=folder, env={**os.environ, **own, **more}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done


@pytest.mark.parametrize("command", BLOCKS[0].splitlines())
def test_the_pages_command_works(command: str, folder: Path) -> None:
    assert shell(command, folder).stdout.strip()


def test_the_pages_array_makes_what_one_machine_makes(folder: Path) -> None:
    [whole] = shell(BLOCKS[0].splitlines()[2], folder).stdout.split()
    before = {file.name: file.read_bytes() for file in Path(whole).iterdir() if file.name != "index.json"}
    Path(whole).rename(f"{whole}.kept")
    done = shell(f"set -e\n{BLOCKS[1]}", folder)
    assert [f"part-{n}-of-4" in done.stderr for n in range(1, 5)] == [True] * 4 and done.stderr.split()[-1] == whole
    assert {file.name: file.read_bytes() for file in Path(whole).iterdir() if file.name != "index.json"} == before


def test_tasks_that_count_from_0_make_all_parts(folder: Path) -> None:
    found = [shell(BLOCKS[2], folder, RANK=str(rank), WORLD_SIZE="2").stdout for rank in range(2)]
    assert "part-1-of-2" in found[0] and "part-2-of-2" in found[1]


def test_the_pages_mixture_trains_and_says_what_it_read(folder: Path) -> None:
    shell(BLOCKS[3], folder)
    summary = json.loads((folder / "runs" / "mixed" / "summary.json").read_text())
    assert summary["tokens/notes"] + summary["tokens/code"] == summary["tokens"]
    assert "<td>code</td>" in (folder / "runs" / "mixed" / "report.html").read_text()


def test_every_source_and_packing_is_on_the_page() -> None:
    sources = {path.stem for path in (ROOT / "conf" / "data").glob("*.yaml")}
    assert len(sources) == 18 and [name for name in sources if not re.search(rf"[` ]{name}[` ,]", PAGE)] == []
    kinds = re.findall(r"'(\w+)'", str(DataConfig.model_fields["packing"].annotation))
    assert kinds and all(f"| `{kind}` |" in PAGE for kind in kinds)
    assert "docs/data.md" in (ROOT / "README.md").read_text(encoding="utf-8")
