"""Prepares data in parts, as tasks of a Ray cluster: a part whose worker dies is restarted, and resumes from its last state."""

import os
import socket
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

from lm import plugins
from lm.data.kinds import Corpus
from lm.data.store.cache import Log
from lm.data.store.distributed import merge, part_folder, prepare_part, whole
from lm.data.store.shared import fetched
from lm.errors import ConfigError, LmError, ResourceError
from lm.schema import Tree, from_tree

_ANSWER_S = 10
_RETRIES = 3  # restarts of a part whose worker or machine dies


def prepare_on_ray(corpus: Corpus, parts: int, cpus: int, *, log: Log) -> Path:
    """Prepares a source and returns its folder, equal to what one machine would have made. Uses the cluster of RAY_ADDRESS, or a local one.

    cpus: cores per part. All machines share the cache folder, or data.remote, and see data files and current folder under the same names.
    Raises the first error of a part; ResourceError where workers keep dying, after which the same call resumes.
    """
    specials = corpus.objective.specials()
    folder = whole(corpus.data, corpus.tokenizer, log, specials)[0]  # the tokenizer is made before any part waits for it
    remote = corpus.data.remote
    if not fetched(folder, log, remote):
        missing = [part for part in range(1, parts + 1) if not fetched(part_folder(folder, part, parts), log, remote)]
        if missing:
            _make(corpus, missing, parts, cpus, log)
    return merge(corpus.data, corpus.tokenizer, parts, log=log, specials=specials)


def _make(corpus: Corpus, missing: list[int], parts: int, cpus: int, log: Log) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray = _ray()
    with redirect_stdout(StringIO()):  # Ray reports dead workers on stdout, amid the command's own output
        _hand_out(ray, corpus, missing, parts, cpus, log)


def _hand_out(ray: Any, corpus: Corpus, missing: list[int], parts: int, cpus: int, log: Log) -> None:
    _require_answer(os.environ.get("RAY_ADDRESS", ""))
    ray.init(log_to_driver=False, logging_level="ERROR")
    try:
        _require_cores(ray, cpus)
        task = ray.remote(num_cpus=cpus, max_retries=_RETRIES)(_part)
        given = (corpus.tree(), os.getcwd(), os.environ.get(plugins.VARIABLE, ""), cpus)
        waiting = {task.remote(*given, part, parts): part for part in missing}
        while waiting:
            [done], _ = ray.wait([*waiting])
            part = waiting.pop(done)
            _require_made(ray, done, part, parts)
            log(f"part {part} of {parts} is there; {len(waiting)} to come")
    finally:
        ray.shutdown()


def _require_answer(address: str) -> None:
    """Raises ResourceError where nothing listens at the address; Ray itself would wait very long."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdecimal():  # no host:port, such as auto
        return
    try:
        socket.create_connection((host, int(port)), _ANSWER_S).close()
    except OSError as error:
        raise ResourceError(f"RAY_ADDRESS={address}: no cluster answers there ({error}). Start it, or unset RAY_ADDRESS.") from None


def _require_cores(ray: Any, cpus: int) -> None:
    """Raises ResourceError where no machine has `cpus` cores; Ray would wait for one forever."""
    most = int(max(node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]))
    if cpus > most:
        raise ResourceError(f"cpus={cpus}: no machine of the cluster has so many cores, and the largest has {most}. Lower cpus.")


def _part(corpus: Tree, cwd: str, files: str, cpus: int, part: int, parts: int) -> tuple[int, str]:
    """Prepares one part, in a worker. Returns the (exit code, sentence) of its error, or (0, '')."""
    os.environ["RAYON_NUM_THREADS"] = str(cpus)
    os.environ[plugins.VARIABLE] = files
    try:
        os.chdir(cwd)
        plugins.load()
        cfg = from_tree(Corpus, corpus)
        prepare_part(cfg.data, cfg.tokenizer, part, parts, log=lambda line: None, specials=cfg.objective.specials())
    except LmError as error:
        return error.exit_code, error.sentence
    return 0, ""


def _require_made(ray: Any, done: Any, part: int, parts: int) -> None:
    try:
        code, sentence = ray.get(done)
    except ray.exceptions.RayTaskError:  # a fault of our own
        raise
    except ray.exceptions.RayError as error:
        said = " ".join(str(error).split())[:200]
        raise ResourceError(f"part {part} of {parts}: no worker has finished it ({said}). The same command goes on from there.") from None
    if code:
        raise next(kind for kind in (ConfigError, ResourceError, LmError) if kind.exit_code == code or kind is LmError)(sentence)


def _ray() -> Any:
    try:
        import ray
    except ImportError:
        raise ConfigError("engine=ray: parts are handed out by the package ray. Run: pip install 'slotlm[ray]'") from None
    return ray
