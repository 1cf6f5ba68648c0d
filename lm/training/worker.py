"""`python -m lm.training.worker config.yaml`: train what a frozen config says. No composition, so every process of a run reads the same."""

import sys
from pathlib import Path

import yaml

from lm.config import from_tree
from lm.errors import ConfigError, LmError
from lm.training.config import TrainConfig
from lm.training.run import train


def main(args: list[str]) -> int:
    """Exit code 0 or that of the error; the last line on stderr says why."""
    try:
        if len(args) != 1:
            raise ConfigError(f"worker: {len(args)} arguments were given, and one config.yaml is needed. Give the path of one.")
        train(_read(Path(args[0])))
    except LmError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


def _read(path: Path) -> TrainConfig:
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: cannot be read ({' '.join(str(error).split())}). Give the config.yaml of a run.") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: holds no keys. Give the config.yaml of a run.")
    return from_tree(TrainConfig, tree, str(path))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
