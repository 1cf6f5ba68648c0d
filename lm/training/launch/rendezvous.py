"""Checks the rendezvous address before the machines of a run meet there: torch waits for minutes, and names neither host nor port."""

import errno
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

from lm.errors import ConfigError, ResourceError

_RESOLVE_S, _ANSWER_S = 8.0, 4.0


def require_place(rendezvous: str) -> None:
    """Raises ResourceError where the host of host:port is not known, or another program has the port on this machine."""
    host, _, port = rendezvous.rpartition(":")
    if int(port) > 65535:
        raise ConfigError(f"launch.rendezvous={rendezvous}: a port is at most 65535. Give another one.")
    for family, address in _addresses(host, rendezvous):
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((address, int(port)))
            except PermissionError:
                raise ResourceError(f"launch.rendezvous={rendezvous}: the port needs privileges. Give one above 1023.") from None
            except OSError as error:  # mostly that the address is another machine's
                taken = error.errno == errno.EADDRINUSE
                if taken and not _is_ours(address, int(port)):
                    said = f"launch.rendezvous={rendezvous}: another program listens on this port of this machine"
                    raise ResourceError(f"{said}. Give another port, on all machines.") from None


def _addresses(host: str, rendezvous: str) -> list[tuple[socket.AddressFamily, str]]:
    found: list[tuple[socket.AddressFamily, str]] = []

    def look_up() -> None:
        found.extend((entry[0], str(entry[4][0])) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM))

    _within(_RESOLVE_S, look_up)
    if not found:
        raise ResourceError(
            f"launch.rendezvous={rendezvous}: no address is known of the host {host!r}. Check its name, or give its address."
        )
    return found


def _is_ours(address: str, port: int) -> bool:
    """Whether torch's store of a run already listens there: several commands of a run may be on one machine."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    met: list[TCPStore] = []
    patience = timedelta(seconds=_ANSWER_S / 2)  # for a program that answers, but not as torch does
    _within(_ANSWER_S, lambda: met.append(TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=patience)))
    return bool(met)


def _within(seconds: float, work: Callable[[], None]) -> None:
    """Runs `work` for at most so many seconds, in a thread that may be left behind: neither the system nor torch gives up in time."""

    def run() -> None:
        with suppress(OSError, RuntimeError, UnicodeError):
            work()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
