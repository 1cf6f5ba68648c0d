"""The process that builds grammars for a trial; grammar_trial.py starts it as a program. It reads and writes one JSON value per line."""

import json
import resource
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path

from llguidance import LLMatcher, LLTokenizer

_SECONDS = 1.0  # CPU time of one grammar
_MEMORY = 512 << 20  # bytes of address space beyond that of the vocabulary
_STACK = 1 << 20  # bytes: the server's threads have more, so that what fits here fits there


def _answer(vocabulary: LLTokenizer, source: str) -> None:
    """Prints a line once a grammar is built. If it takes too much, the system kills the process, and no line comes."""
    signal.setitimer(signal.ITIMER_PROF, _SECONDS)
    matcher = LLMatcher(vocabulary, source, log_level=0)
    if not matcher.is_error():  # which the server tells when it builds the same
        matcher.deep_copy().compute_bitmask()
    signal.setitimer(signal.ITIMER_PROF, 0)
    print(json.dumps({"result": ""}), flush=True)


def main() -> None:
    """Reads the vocabulary from the first line, and a grammar from each further line, until the input ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # sent to the whole group; this process ends when the server closes the pipe
    tokenizer, n_vocab, ends = json.loads(sys.stdin.readline())
    try:
        vocabulary = LLTokenizer(tokenizer, n_vocab=n_vocab, eos_token=ends)
    except ValueError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return
    print(json.dumps({"result": ""}), flush=True)
    with suppress(ValueError, OSError):  # a system without this limit, such as macOS
        most = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + _MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    threading.stack_size(_STACK)
    for line in sys.stdin:
        thread = threading.Thread(target=_answer, args=(vocabulary, json.loads(line)))
        thread.start()
        thread.join()


if __name__ == "__main__":
    main()
