"""Reads plain, gzip and zstd files alike, with errors that name the file."""

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

import zstandard

from lm.data.sources.fingerprint import HashedFile
from lm.errors import ConfigError

PACKED = (".gz", ".zst")
_CHUNK = 1 << 17
_WINDOW = 1 << 31  # bytes of memory at the most that unpacking may take: as much as zstd --long=31 needs


@contextmanager
def unpacked(path: Path, raw: HashedFile) -> Iterator[IO[bytes]]:
    """Yields a stream of a file's unpacked content, which reads the stored file to its end, so that all of it is hashed."""
    try:
        with raw:
            yield _content(path, raw)
    except (EOFError, zlib.error, gzip.BadGzipFile, zstandard.ZstdError) as error:
        raise ConfigError(f"{path}: the file is truncated or damaged ({error}). Pack or fetch it again.") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}). Make it readable or leave it out.") from None


def _content(path: Path, raw: HashedFile) -> IO[bytes]:
    match path.suffix.lower():
        case ".gz":
            return cast(IO[bytes], gzip.GzipFile(fileobj=cast(IO[bytes], raw)))
        case ".zst":
            return io.BufferedReader(_Zstd(raw), _CHUNK)
        case _:
            return io.BufferedReader(raw, _CHUNK)


class _Zstd(io.RawIOBase):
    """Unpacks zstd frames; unlike the library's own reader it raises EOFError where the last frame is cut short."""

    def __init__(self, packed: io.RawIOBase) -> None:
        self._packed = packed
        self._frame = _unpacker().decompressobj()
        self._begun = False
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready and (data := self._packed.read(_CHUNK)):
            self._ready = memoryview(b"".join(self._frames(data)))
        if not self._ready and self._begun:
            raise EOFError("the last zstd frame has no end")
        n = min(len(buffer), len(self._ready))
        buffer[:n] = self._ready[:n]
        self._ready = self._ready[n:]
        return n

    def _frames(self, data: bytes) -> Iterator[bytes]:
        while data:
            self._begun = True
            yield self._frame.decompress(data)
            data = self._frame.unused_data if self._frame.eof else b""
            if self._frame.eof:
                self._frame, self._begun = _unpacker().decompressobj(), False


def _unpacker() -> zstandard.ZstdDecompressor:
    return zstandard.ZstdDecompressor(max_window_size=_WINDOW)
