"""Models and adapters of the Hugging Face hub, fetched into its cache: JSON, safetensors and vocabularies, no code and no pickles."""

import os
import re
from pathlib import Path

from lm.errors import CheckpointError, ConfigError
from lm.hf.io.older import BESIDE, OLDER
from lm.hf.io.peft import WEIGHTS as ADAPTER

_PATTERNS = [
    "*.json",
    "README.md",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
    "model*.safetensors",
    ADAPTER,
    *OLDER,
    *BESIDE,
]
_ADDRESS = re.compile(r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/([\w.-]+/[\w.-]+)")


def local_folder(source: str, revision: str | None = None) -> Path:
    """Returns the folder of this name, or else the cached folder of this hub model (owner/name), downloaded if need be. Raises
    CheckpointError where there is neither, ConfigError for a `revision` of a folder."""
    folder = Path(os.path.expanduser(source))
    if folder.is_dir():
        if revision is not None:
            raise ConfigError(f"revision={revision}: {source} is a folder, and only models of the hub have revisions. Leave it out.")
        return folder
    if address := _ADDRESS.match(source):
        raise CheckpointError(f"{source}: a model of the hub is given by its name. Give {address[1]}.")
    if folder.is_file() and folder.suffix != ".gguf":
        raise CheckpointError(f"{source}: this is a file, and a model is a folder. Give the one that it is in, {folder.parent}.")
    if folder.exists() or not re.fullmatch(r"[\w.-]+/[\w.-]+", source):
        gguf = " lm reads safetensors, and no GGUF of llama.cpp: name the model that it was made of." if folder.suffix == ".gguf" else ""
        raise CheckpointError(f"{source}: this is no folder and no name of a hub model (owner/name).{gguf or ' Check the path.'}")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(source, revision=revision, allow_patterns=_PATTERNS))
    except Exception as error:  # the hub's client raises what its transport raises
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(f"{source}: it is no folder, and the hub cannot give it ({reason}). Check the name.") from error
