"""client.py SOCKET ARGS: `lm ARGS`, or `python -m MODULE ARGS` where they begin so, by the process of tests/server.py.

With this one's input, output, environment, folder and signals.
"""

import json
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import TextIO


def ask(server: str, args: Sequence[str], env: Mapping[str, str], folder: str, outputs: Sequence[int]) -> tuple[int, TextIO]:
    """The process of `python ARGS`, and where the line with its exit code will come.  outputs: stdin, stdout and stderr."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(server)
    socket.send_fds(connection, [b"."], list(outputs))
    answers = connection.makefile("rw", encoding="utf-8")
    connection.close()  # `answers` keeps it open
    print(json.dumps({"args": list(args), "env": dict(env), "cwd": folder}), file=answers, flush=True)
    return int(answers.readline()), answers


def main(server: str, *args: str) -> None:
    env = {name: value for name, value in os.environ.items() if name != "LM_PARENT"}  # the process is a child of the server
    pid, answers = ask(server, args if args[:1] == ("-m",) else ["-m", "lm", *args], env, os.getcwd(), (0, 1, 2))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda number, frame: os.kill(pid, number))
    code = int(answers.readline())
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


if __name__ == "__main__":
    main(*sys.argv[1:])
