"""`lm import from=FOLDER out=FOLDER`: a Hugging Face model becomes a model folder."""

from collections.abc import Sequence

from pydantic import Field

from lm.cli.compose.arguments import parse_literal, take_from
from lm.cli.views.text import listing, say
from lm.schema import Config

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
    from lm.hf.io.export import import_model

    found = import_model(source, cfg.out, tokenizer=cfg.tokenizer, max_seq_len=cfg.max_seq_len, revision=cfg.revision, say=say)
    print(f"{found.folder}: {found.kind}, {found.n_parameters / 1e6:,.1f} M parameters. Try it: lm generate from={cfg.out} prompt=...")
    return 0


def help_text(args: Sequence[str]) -> str:
    """Usage and options."""
    return f"{_USAGE}\n  from  text [none, must be set]  Folder with config.json, or owner/name on the hub.\n{listing(ImportConfig)}"
