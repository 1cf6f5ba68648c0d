"""python -m tests.training.launched CONFIG WORKER ERROR: `launch` of a config.yaml, whose error goes to a file."""

import sys
from pathlib import Path

import yaml

from lm.errors import LmError
from lm.schema import from_tree
from lm.training.config import TrainConfig
from lm.training.launch import launcher

if __name__ == "__main__":
    config, launcher.WORKER, told = sys.argv[1:]
    try:
        launcher.launch(from_tree(TrainConfig, yaml.safe_load(Path(config).read_text(encoding="utf-8"))))
    except LmError as error:
        Path(told).write_text(str(error), encoding="utf-8")
        sys.exit(error.exit_code)
