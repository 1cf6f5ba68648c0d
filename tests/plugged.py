"""plugged.py ANSWERS FILE JOBS: in a process of its own, since a plugin stays: check_kind of the file's kind, then each `lm ...` of JOBS.

ANSWERS gets (exit code, stdout, stderr) of each, the check first. FILE may be empty: no plugin, no check. Jobs of a sweep are forks of
this process, which spares each the imports of an interpreter.
"""

import json
import os
import subprocess
import sys
import traceback
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

from lm import plugins
from lm.cli.main import main
from lm.testing import check_kind
from tests.server import Forked


def checked(file: str, options: str) -> int:
    plugins.load([file])
    [kind] = plugins.loaded()[0].kinds
    check_kind(kind.model_validate(json.loads(options)))
    return 0


def run() -> None:
    popen = subprocess.Popen

    def forked(command: list[str], **options: Any) -> Any:
        return Forked(command[1:], os.environ, cwd=os.getcwd()) if command[0] == sys.executable else popen(command, **options)

    subprocess.Popen = forked  # type: ignore[assignment,misc]
    answers, file, options, jobs = sys.argv[1:]
    found = []
    for job in [None, *json.loads(jobs)] if file else json.loads(jobs):
        out, err = StringIO(), StringIO()
        with redirect_stdout(out), redirect_stderr(err):
            try:
                code = checked(file, options) if job is None else main(job)
            except BaseException:
                code = 1
                traceback.print_exc()
        found.append((code, out.getvalue(), err.getvalue()))
    Path(answers).write_text(json.dumps(found))


if __name__ == "__main__":
    run()
