"""`python -m lm.training.worker config.yaml`: trains a frozen config, as a single process or, under torchrun, as one of its ranks.

No overrides or presets are composed here, so every process of a run has the same config.
"""

import os
import signal
import sys
from contextlib import nullcontext
from pathlib import Path

from lm import plugins, printing
from lm.errors import CheckpointError, ConfigError, Interrupted, LmError, internal
from lm.progress import progress
from lm.schema import from_tree
from lm.storage.formats import with_todays_keys
from lm.storage.reading import read_yaml
from lm.training.config import TrainConfig
from lm.training.launch import outcome
from lm.training.launch.ranks import PeerLost, Ranks, has_timed_out, is_lost_peer
from lm.training.run import train_rank


def main(args: list[str]) -> int:
    """Returns exit code 0 or the error's; the last line on stderr gives the reason, with the rank where there are several.

    Under torchrun a run that was stopped by a signal and saved exits 0: torchrun would restart it after any other code.
    """
    printing.open_door()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # which ends it without a traceback, until the run handles signals
    ranks = Ranks()
    try:
        ranks = Ranks.from_environment()
        outcome.begins(ranks.rank)
        with progress("train") if ranks.first else nullcontext():
            plugins.load()
            _train_from_file(args, os.environ.get(outcome.COMMAND))
    except LmError as error:
        outcome.ends(ranks.rank, error)
        if outcome.FOLDER not in os.environ:
            for line in error.lines[:-1]:
                printing.note(line)
            printing.note(f"rank {ranks.rank}: {error}" if ranks.world > 1 else error.sentence)
        stopped_and_saved = isinstance(error, Interrupted) and "TORCHELASTIC_RUN_ID" in os.environ
        return 0 if stopped_and_saved else error.exit_code
    outcome.ends(ranks.rank, None)
    return 0


def _train_from_file(args: list[str], command: str | None) -> None:
    if len(args) != 1:
        raise ConfigError(f"worker: {len(args)} arguments were given, and one config.yaml is needed. Give the path of one.")
    cfg = _read(Path(args[0]))
    try:
        train_rank(cfg, command)
    except Exception as error:
        if cfg.traceback:
            printing.trace()
        if isinstance(error, LmError):
            raise
        if is_lost_peer(error):
            said = " ".join(str(error).split())[:200]
            if has_timed_out(error):
                fault = f"another rank did not answer within launch.timeout_s={cfg.launch.timeout_s} ({said})"
                raise PeerLost(f"train: {fault}. Look at its machine, and train again to go on from the last checkpoint.") from error
            raise PeerLost(f"train: another rank has ended ({said}). Its own error says why.") from error
        raise internal(error) from error


def _read(path: Path) -> TrainConfig:
    try:
        return from_tree(TrainConfig, with_todays_keys(read_yaml(path)), str(path))
    except CheckpointError as error:
        raise ConfigError(error.sentence) from None


if __name__ == "__main__":
    code = main(sys.argv[1:])
    printing.shut_door()
    os._exit(code)  # threads of a broken process group may never end
