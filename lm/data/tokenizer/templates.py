"""The chat templates of a tokenizer: its default one, and those with a name of their own, such as tool_use of chats with tools."""

import os
from pathlib import Path
from typing import Any

from lm.storage.reading import read_text

DEFAULT = "default"


def read_templates(folder: Path, given: Any) -> dict[str, str]:
    """Returns the chat templates by name, as transformers finds them: in files of their own, or else in tokenizer_config.json.

    given: what chat_template is there: a text, or a list of objects with name and template. Raises CheckpointError.
    """
    files = {file.stem: file for file in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if os.path.lexists(default := folder / "chat_template.jinja"):
        files[DEFAULT] = default
    if files:
        return {name: read_text(file) for name, file in files.items()}
    listed = given if isinstance(given, list) else [{"name": DEFAULT, "template": given}]
    named = ((each.get("name"), each.get("template")) for each in listed if isinstance(each, dict))
    return {name: template for name, template in named if isinstance(name, str) and isinstance(template, str)}


def for_tools(source: str | None, templates: dict[str, str]) -> str | None:
    """Returns the template of chats with tools, where `source` is that of chats without; None where there is no other one."""
    return templates.get("tool_use") if source == templates.get(DEFAULT) else None


def written(templates: dict[str, str]) -> str | list[dict[str, str]] | None:
    """Returns the same as chat_template of tokenizer_config.json; None where there are none."""
    if templates.keys() - {DEFAULT}:
        return [{"name": name, "template": template} for name, template in templates.items()]
    return templates.get(DEFAULT)
