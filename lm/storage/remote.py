"""Files at a URL of an object store, or of any file system that fsspec knows: fetched and put, whole or not at all."""

import errno
import os
import re
import secrets
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from lm.errors import ConfigError, ResourceError
from lm.storage.atomic import disk_errors, sync

_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_PACKAGES = {"s3": "'slotlm[s3]'", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs", "abfss": "adlfs"}
_ANEW = "Delete its folder, there and below data.cache_dir, and prepare it again."
_SILENT_S = 60  # of a server that sends nothing; a large file may take hours
_SECRET = re.compile(r"\?|://[^/@]*:(?!\d+(/|$))[^@]*@")  # a query such as a signature; user:password@, but not host:80/
_CHECK = "Check the URL, the credentials and the network."


def require_folder(url: str) -> None:
    """Raises ValueError, which tells no secret, where this is not the URL of a folder that is the same one for every process."""
    if _SECRET.search(url):
        raise ValueError("the URL has a password or a query, and would be kept with the run. Credentials belong in the environment.")
    protocol, sign, place = url.partition("://")
    if not sign:
        raise ValueError(f"{url!r} is no URL. Write one such as s3://bucket/folder.")
    if not place.strip("/") or (protocol in ("file", "local") and not place.startswith("/")):
        raise ValueError(f"{url!r} names no folder by its full path. Write one such as s3://bucket/folder or file:///shared/folder.")


def exists(url: str) -> bool:
    """Returns whether there is a file at the URL, a small one, since it is read. Raises ResourceError where the store does not answer."""
    system, path = _system(url)
    try:
        system.cat_file(path)
    except FileNotFoundError:
        return False
    except Exception as error:
        raise ResourceError(f"{url}: cannot be read ({_reason(error)}). {_CHECK}") from None
    return True


def fetch(url: str, file: Path, whole: Callable[[Path], bool]) -> None:
    """Downloads the file at the URL to `file`. One process at a time may do so.  whole: tells whether a copy is as it should be.

    Raises ConfigError where nothing is at the URL, or the copy is not `whole`; ResourceError where the store does not answer, or the disk
    is full.
    """
    system, path = _system(url)
    half = file.with_name(f"{file.name}.half")
    try:
        with disk_errors(file):
            _get(system, path, half, url, file)
            if not whole(half):
                raise ConfigError(f"{url}: the file is damaged, or does not fit those beside it. {_ANEW}")
            sync(half)
            half.rename(file)
    finally:
        half.unlink(missing_ok=True)


def _get(system: Any, path: str, half: Path, url: str, file: Path) -> None:
    try:
        system.get_file(path, str(half))
    except FileNotFoundError:
        raise ConfigError(f"{url}: the file is missing, and its index names it. {_ANEW}") from None
    except Exception as error:  # each store raises its own
        if isinstance(error, OSError) and error.errno in _DISK:
            half.unlink(missing_ok=True)
            with disk_errors(file, system.info(path)["size"] or 0):
                raise
        raise ResourceError(f"{url}: cannot be read ({_reason(error)}). {_CHECK}") from None


def put(file: Path, url: str) -> None:
    """Uploads the file, whole or not at all; does nothing where a file of its size is at the URL already. Raises ResourceError."""
    system, path = _system(url)
    half = f"{path}.{_writer()}.half" if "file" in system.protocol else path  # an object is not there before it is whole
    try:
        with suppress(FileNotFoundError):
            if system.info(path)["size"] == file.stat().st_size:
                return
        system.put_file(str(file), half)
        if half != path:
            system.mv(half, path)
    except Exception as error:
        raise _not_writable(url, error) from None
    finally:
        if half != path:
            with suppress(Exception):
                system.rm_file(half)


def require_writable(url: str) -> None:
    """Raises ResourceError where nothing can be put into this folder, before hours are spent on making it."""
    system, path = _system(f"{url}/.writable")
    try:
        system.pipe_file(path, b"")
    except Exception as error:
        raise _not_writable(url, error) from None
    with suppress(Exception):  # who may write need not be allowed to delete
        system.rm_file(path)


def _writer() -> str:
    """Returns a name that no other writer has, on this machine or another one."""
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"


def _not_writable(url: str, error: Exception) -> ResourceError:
    return ResourceError(f"{url}: cannot be written ({_reason(error)}). {_CHECK}")


def _system(url: str) -> tuple[Any, str]:
    """Returns fsspec's file system for a URL, and the path of the URL in it. Raises ConfigError."""
    from fsspec.core import url_to_fs

    protocol = url.partition("://")[0]
    try:
        system, path = url_to_fs(url, **_options(protocol))
    except ImportError as error:
        package = _PACKAGES.get(protocol, "the package that it names")
        raise ConfigError(f"{url}: a package for {protocol}:// is missing ({_reason(error)}). Run: pip install {package}") from None
    except Exception as error:
        raise ConfigError(f"{url}: it cannot be opened ({_reason(error)}). Write a URL such as s3://bucket/folder.") from None
    return system, path


def _options(protocol: str) -> dict[str, Any]:
    if protocol == "file":
        return {"auto_mkdir": True}
    if protocol in ("http", "https"):
        from aiohttp import ClientTimeout

        return {"client_kwargs": {"timeout": ClientTimeout(total=None, sock_connect=_SILENT_S, sock_read=_SILENT_S)}}
    return {}


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
