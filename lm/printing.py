"""The one door to the terminal, to stdout and to stderr.

What a name, a config or a model brings along cannot steer a terminal or start a line of its own: control characters, marks that turn
the direction of text, lone surrogates and what the stream's encoding lacks come out as escapes such as \\x1b. A stream that is closed ends
the printing, one that is full loses lines, and nothing else; `answer` and `raw` alone fail with it, since what they print is what the
command is for. A dumb terminal (TERM=dumb) gets plain lines, and NO_COLOR (https://no-color.org) turns styles off.
"""

import contextlib
import errno
import io
import logging
import os
import re
import sys
import time
import traceback
from dataclasses import dataclass, field
from typing import TextIO

_FOR_NOW = (errno.ENOSPC, errno.EDQUOT, errno.EAGAIN)  # a disk that others fill, a pipe that does not wait for a slow reader
_SILENT_S = 30.0  # off a terminal, so long without a line
_UNSEEN = re.compile(  # C0 but tab and newline, DEL, C1, marks of direction, invisible ones, surrogates, tags; not the joiners of emoji
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]"
)
_STYLES = {
    "bold": "\x1b[1m",
    "underlined": "\x1b[4m",
    "green": "\x1b[32m",
    "yellow": "\x1b[33m",
    "blue": "\x1b[38;5;75m",
    "sand": "\x1b[38;5;180m",
}
_END, _CLEAR = "\x1b[0m", "\r\x1b[K"


@dataclass
class _Last:
    """What was printed last."""

    at: float = field(default_factory=time.monotonic)
    status: bool = False  # a line that the next one replaces stands on the terminal


_last = _Last()
_full: dict[int, int] = {}  # of streams that take nothing for now: the descriptor, and a copy of it from before


def plain(text: str) -> str:
    """Returns a text of several lines in which nothing steers a terminal."""
    return _UNSEEN.sub(_escaped, text)


def one_line(text: str) -> str:
    """Returns the same with line ends and tabs escaped too: for what stands within a sentence or a table."""
    return re.sub("[\t\n]", _escaped, plain(text))


def say(line: str, style: str = "") -> None:
    """Prints a line of what a run tells on stdout; style: words of _STYLES, where that is a terminal."""
    _try(sys.stdout, _styled(one_line(line), style, sys.stdout) + "\n")


def note(line: str) -> None:
    """Prints a line on stderr: progress, a hint, or the sentence of an error."""
    _try(sys.stderr, one_line(line) + "\n")


def trace() -> None:
    """Prints the traceback of the exception that is being handled on stderr."""
    _try(sys.stderr, plain(traceback.format_exc()))


def status(line: str) -> None:
    """Prints a line of progress on stderr, which the next line replaces where that is a terminal."""
    if not moves():
        note(line)
        return
    _try(sys.stderr, one_line(line)[: _columns(sys.stderr) - 1])
    _last.status = True


def answer(text: str, end: str = "\n") -> None:
    """Prints what the command is for on stdout, on one or several lines. Raises OSError where it cannot be written."""
    _write(sys.stdout, plain(text) + end)


def answer_spans(*spans: tuple[str, str]) -> None:
    """Prints one line of (text, style) as `answer` does."""
    _write(sys.stdout, "".join(_styled(one_line(text), style, sys.stdout) for text, style in spans) + "\n")


def raw(text: str) -> None:
    """Prints as `answer` does on a terminal; to a pipe or a file go the characters themselves, as UTF-8 whatever the locale says."""
    if on_terminal(sys.stdout) or not isinstance(sys.stdout, io.TextIOWrapper):
        answer(text, end="")
        return
    _again(sys.stdout)
    sys.stdout.flush()
    sys.stdout.buffer.write(text.encode("utf-8", "backslashreplace"))
    sys.stdout.buffer.flush()


def on_terminal(stream: TextIO | None) -> bool:
    """Whether a person sees it at once."""
    try:
        return stream is not None and stream.isatty()
    except ValueError:  # closed
        return False


def moves() -> bool:
    """Whether a status replaces the one before."""
    return on_terminal(sys.stderr) and not _dumb()


def width() -> int | None:
    """Returns the columns of the terminal that stdout is; None where it is none, and lines may have any length."""
    return _columns(sys.stdout) if on_terminal(sys.stdout) else None


def silent_s() -> float:
    """Returns the seconds since something was printed."""
    return time.monotonic() - _last.at


def due(elapsed: float) -> bool:
    """Whether a status of what goes on for so many seconds should be printed: on a terminal always, elsewhere after a silence."""
    return moves() or min(silent_s(), elapsed) > _SILENT_S


def open_door() -> None:
    """Makes stdin, stdout and stderr safe to use for a whole process: one that was closed at its start leads nowhere, since the next file
    to be opened, a checkpoint say, would take its number and get what is printed. Warnings go through the door as well."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free: this one
        if number and getattr(sys, name) is None:
            setattr(sys, name, open(number, "w", encoding="utf-8", closefd=False))  # noqa: SIM115
    log = logging.getLogger("lm")
    if not log.handlers:
        log.addHandler(_Notes())
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # where the home folder is read-only it says in two lines where its cache is


def shut_door() -> None:
    """Writes what is still held back. Python does so again at its end, and must not fail there: that would be exit code 120."""
    for stream in (sys.stdout, sys.stderr):
        _try(stream, "")


def drop_answers() -> None:
    """Gives up on stdout, with what it still holds back."""
    _silence(sys.stdout)


class _Notes(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        note(self.format(record))


def _try(stream: TextIO | None, text: str) -> None:
    """Prints, unless the stream fails. A stream that takes nothing for now is led nowhere, and tried again with the next line."""
    try:
        _write(stream, text)
    except (OSError, ValueError) as error:
        _silence(stream, isinstance(error, OSError) and error.errno in _FOR_NOW)


def _write(stream: TextIO | None, text: str) -> None:
    if stream is None:
        return
    _again(stream)
    _last.at = time.monotonic()
    if _last.status and text:
        _last.status = False
        _try(sys.stderr, _CLEAR)
    encoding = stream.encoding or "utf-8"
    stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
    stream.flush()


def _silence(stream: TextIO | None, for_now: bool = False) -> None:
    """Sends a stream that takes nothing to /dev/null, with what it still holds back.  for_now: keeps a copy, to try again."""
    if stream is None:
        return
    with contextlib.suppress(OSError, ValueError), open(os.devnull, "w") as nowhere:
        number = stream.fileno()
        if for_now:
            _full[number] = os.dup(number)
        os.dup2(nowhere.fileno(), number)
        stream.flush()


def _again(stream: TextIO) -> None:
    """Leads a stream that took nothing for a while where it led before."""
    with contextlib.suppress(OSError, ValueError):  # it has no descriptor
        if _full and (kept := _full.pop(stream.fileno(), None)) is not None:
            os.dup2(kept, stream.fileno())
            os.close(kept)


def _styled(text: str, style: str, stream: TextIO | None) -> str:
    if not style or not on_terminal(stream) or _dumb() or os.environ.get("NO_COLOR"):
        return text
    return "".join(_STYLES[word] for word in style.split()) + text + _END


def _dumb() -> bool:
    """Whether the terminal knows no escapes, so that they would stand in the text."""
    return os.environ.get("TERM") == "dumb"


def _columns(stream: TextIO) -> int:
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError):
        return 80


def _escaped(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode("ascii")
