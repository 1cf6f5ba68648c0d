"""`lm import from=FOLDER out=FOLDER`: a Hugging Face model becomes a model folder."""

import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import Field

from lm.cli.compose.literal import parse_literal
from lm.cli.compose.source import take_from
from lm.cli.views.describe import listing
from lm.config import Config
from lm.errors import CheckpointError, ConfigError

_USAGE = """\
usage: lm import from=FOLDER_OR_HUB_NAME out=FOLDER [key=value ...]

Reads config.json, safetensors and tokenizer.json; runs no code. The result is what init_from=, lm generate, lm eval and lm export take.
"""


class ImportConfig(Config):
    """What `lm import` takes beside `from`."""

    out: str
    """Folder to write; it must not exist."""
    tokenizer: str | None = None
    """tokenizer.json, or a folder with one. null: the model's own."""
    max_seq_len: int | None = Field(None, ge=1)
    """A shorter context than the model's own. null: its own."""
    revision: str | None = None
    """Commit or tag of a hub model. null: the newest."""


def run(args: Sequence[str]) -> int:
    """One line on stdout, notes on stderr."""
    source, rest = take_from("import", args)
    cfg = parse_literal(ImportConfig, rest)
    out = require_new(cfg.out)
    from lm.data.tokenizer.tokenizer import load_tokenizer
    from lm.generation.text import require_fit
    from lm.hf.io.hub import local_folder
    from lm.hf.io.reading import read_hf
    from lm.storage.model_folder import save_model

    folder = local_folder(source, cfg.revision)
    found = read_hf(folder, cfg.max_seq_len)
    for note in found.notes:
        print(note, file=sys.stderr)
    try:
        tokenizer = load_tokenizer(Path(cfg.tokenizer).expanduser() if cfg.tokenizer else folder, foreign=True)
    except ConfigError as error:
        raise CheckpointError(f"{error} Give another with tokenizer=PATH.") from None
    assert found.config.vocab_size is not None
    require_fit(tokenizer, found.config.vocab_size, str(folder / "tokenizer.json"))
    save_model(out, found.config.tree(), found.weights, tokenizer.save, {"parent": source, "tokenizer_hash": tokenizer.hash})
    size = sum(weight.numel() for weight in found.weights.values())
    print(f"{out}: {found.family.name}, {size / 1e6:,.1f} M parameters. Try it: lm generate from={out} prompt=...")
    return 0


def help_text(args: Sequence[str]) -> str:
    """Usage and options."""
    return f"{_USAGE}\n  from  text [none, must be set]  Folder with config.json, or owner/name on the hub.\n{listing(ImportConfig)}"


def require_new(out: str) -> Path:
    """The path; ConfigError where something is there already."""
    path = Path(out).expanduser()
    if path.exists():
        raise ConfigError(f"out={out}: it exists already, and nothing is overwritten. Choose another folder, or remove it.")
    return path
