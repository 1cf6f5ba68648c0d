"""Tokenizers of other programs, also in older files than tokenizer.json, which transformers makes one of."""

import os
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from lm.data.tokenizer.tokenizer import Tokenizer, load_tokenizer
from lm.errors import CheckpointError, ConfigError
from lm.storage.reading import refuse_pointer

OLDER = ("vocab.json", "vocab.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
BESIDE = ("merges.txt",)


def read_foreign(path: Path, say: Callable[[str], None]) -> Tokenizer:
    """Reads a tokenizer.json, that of a folder, or what transformers makes of the older files there. Raises CheckpointError."""
    folder = path.parent if path.name in OLDER else path
    older = next((name for name in OLDER if (folder / name).is_file()), None)
    if older is None and not os.path.lexists(file := path / "tokenizer.json" if path.is_dir() else path):
        raise CheckpointError(f"tokenizer: {file} does not exist. Give one with tokenizer=PATH.")
    try:
        if older is None or (folder / "tokenizer.json").exists():
            return load_tokenizer(folder, foreign=True)
        with TemporaryDirectory() as beside:
            _convert(folder, older, Path(beside))
            say(f"tokenizer.json is missing: transformers made it of {older}")
            return load_tokenizer(Path(beside), foreign=True)
    except ConfigError as error:
        raise CheckpointError(f"{error} Or give another with tokenizer=PATH.") from None


def _convert(folder: Path, older: str, out: Path) -> None:
    refuse_pointer(folder / older)
    try:
        import transformers
    except ModuleNotFoundError:
        raise ConfigError(
            f"tokenizer: {folder} has {older} and no tokenizer.json. Run: pip install 'slotlm[hf]', which makes one."
        ) from None
    transformers.logging.set_verbosity_error()
    try:
        transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False).save_pretrained(out)
    except Exception as error:  # the library raises what its parsers raise
        reason = " ".join(str(error).split())[:200]
        pieces = [*folder.glob("*.model"), *folder.glob("*.spm")]  # which files of Marian and M2M-100 have beside vocab.json
        remedy = "Run: pip install sentencepiece protobuf, where it is SentencePiece's." if pieces else "Restore the file."
        raise ConfigError(f"tokenizer: {folder / older} cannot be read by transformers ({reason}). {remedy}") from None
    if not (out / "tokenizer.json").is_file():
        raise ConfigError(f"tokenizer: transformers makes no tokenizer.json of {folder / older}.")
