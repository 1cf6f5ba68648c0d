"""From a model folder to a server that listens, and back."""

import errno
import ipaddress
import os
import signal
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType

import uvicorn

from lm.data.tokenizer.tokenizer import Tokenizer
from lm.errors import ConfigError, Interrupted, ResourceError
from lm.generation.engine import Engine
from lm.generation.writer import Writer
from lm.nn.transformer import LM
from lm.serving.app import Door, Service, build
from lm.serving.asked import Reader
from lm.serving.config import ServeConfig
from lm.serving.metrics import Metrics
from lm.serving.patience import patient
from lm.serving.worker import Worker

_FOREIGN = {errno.EADDRNOTAVAIL, errno.EINVAL}  # of another machine; of this one, but without the link that it is on, as fe80::1


def listening(cfg: ServeConfig) -> socket.socket:
    """Returns a socket at the address. Raises ResourceError where another program has it, ConfigError where there is none."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(cfg.host, cfg.port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"host: {cfg.host!r} is no address of this machine ({error}). Write 127.0.0.1 or 0.0.0.0.") from None
    listener = socket.socket(family, kind)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(128)
    except OSError as error:
        listener.close()
        if error.errno in _FOREIGN:
            raise ConfigError(f"host: {cfg.host!r} is no address of this machine ({error.strerror}). Write 127.0.0.1 or 0.0.0.0.") from None
        rule = "Give another, or port=0 for a free one"
        raise ResourceError(f"port: {cfg.port} on {cfg.host} cannot be had ({error.strerror}). {rule}.") from None
    return listener


def key_of(cfg: ServeConfig, environment: Mapping[str, str]) -> str | None:
    """Returns the key that requests must bring, None where they need none. Raises ConfigError where the environment variable cfg.key_env is
    not set, or empty."""
    if cfg.key_env is None:
        return None
    if not environment.get(cfg.key_env):
        raise ConfigError(f"key_env: the environment variable {cfg.key_env} is empty or not set. Put the key there.")
    return environment[cfg.key_env]


def name_of(folder: Path) -> str:
    """Returns NAME for runs/NAME/model, or else the folder's own name."""
    return folder.resolve().parent.name if folder.name == "model" else folder.resolve().name


class Server(uvicorn.Server):
    """Takes requests until a signal comes; running requests then have `drain_s` seconds to end, and new ones are answered 503."""

    def __init__(self, model: LM, tokenizer: Tokenizer, name: str, cfg: ServeConfig) -> None:
        """Raises ConfigError for a model that neither continues texts nor makes vectors of them, and as `key_of`."""
        metrics = Metrics()
        reader = Reader(writer := Writer(model, tokenizer), name, cfg)
        self._worker = Worker(Engine(model, writer.vocabulary, cfg.rows, cfg.prefill_chunk), cfg.queue, metrics)
        door = Door(_hosts(cfg.host), key_of(cfg, os.environ), cfg.body_kib << 10)
        app = build(Service(reader, self._worker, door, metrics), door)
        http = patient(cfg.patience_s)
        quiet = uvicorn.Config(app, http=http, log_config=None, log_level="critical", access_log=False, server_header=False)
        quiet.timeout_graceful_shutdown = cfg.drain_s
        super().__init__(quiet)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Overrides uvicorn's handler of SIGINT and SIGTERM: new requests are refused from now on."""
        self._worker.draining = True
        super().handle_exit(sig, frame)

    def serve_at(self, listener: socket.socket) -> None:
        """Serves on this socket until a signal stops it. Raises Interrupted after SIGTERM, KeyboardInterrupt after SIGINT."""
        before = signal.signal(signal.SIGTERM, _terminated)  # uvicorn raises its signals anew when all is done
        try:
            self.run(sockets=[listener])
        finally:
            signal.signal(signal.SIGTERM, before)


def _terminated(number: int, frame: FrameType | None) -> None:
    raise Interrupted("lm serve: ended by SIGTERM, after what was in hand. Start it again to serve on.", number)


def _hosts(host: str) -> set[str] | None:
    """Returns the names by which requests may call a server that only this machine reaches; None where other machines reach it, whose names
    for it are not known here."""
    with suppress(ValueError):  # a name
        host = "localhost" if ipaddress.ip_address(host).is_loopback else host
    return {"localhost", "127.0.0.1", "::1"} if host == "localhost" else None
