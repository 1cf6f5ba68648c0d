"""The tests under other releases of torch, each laid over the environment at hand and nothing else changed.

    python tools/torch_matrix.py versions=2.11.0,2.15.0 [tests=tests/ops,tests/nn,tests/training] [folder=FOLDER] [index=URL] [jobs=2]

Each release is installed once with what it asks for into FOLDER/VERSION (gigabytes, where it brings CUDA along; index= names an index with
builds that do not) and comes first on the path of Python. A release that FOLDER has already is taken as it is. Prints a line for each:
what pytest says of the tests that `make test` runs.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tools.options import options, refuse  # noqa: E402


def installed(version: str, folder: Path, index: str) -> Path:
    """Returns the folder of this release."""
    own = folder / version
    if not own.is_dir():
        half = folder / f"{version}.half"
        shutil.rmtree(half, ignore_errors=True)
        more = ["--extra-index-url", index] if index else []
        subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--target", str(half), f"torch=={version}", *more], check=True)
        half.rename(own)
    return own


def told(own: Path, tests: list[str], jobs: str) -> str:
    """Returns the version that Python finds, and the last line of pytest."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(own), str(ROOT)])}
    found = subprocess.run([sys.executable, "-c", "import torch; print(torch.__version__)"], env=env, capture_output=True, text=True)
    if found.returncode:
        return f"cannot be imported: {found.stderr.strip().splitlines()[-1]}"
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", "-n", jobs, "-p", "no:cacheprovider", *tests]
    ran = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
    failed = [line for line in ran.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return "\n  ".join([f"{found.stdout.strip()}: {ran.stdout.strip().splitlines()[-1]}", *failed])


def main(args: list[str]) -> int:
    given = options(args, __doc__, {"versions": list[str](), "tests": ["tests"], "folder": "torches", "index": "", "jobs": 2})
    if not given["versions"]:
        refuse("versions: none was given. Write versions=2.15.0.")
    for version in given["versions"]:
        own = installed(version, Path(given["folder"]).resolve(), given["index"])
        print(told(own, given["tests"], str(given["jobs"])), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
