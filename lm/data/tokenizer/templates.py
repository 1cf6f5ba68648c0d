"""The chat templates of a tokenizer: its default one, and those with a name of their own, such as tool_use of chats with tools."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm.data.tokenizer.config import TEMPLATES
from lm.errors import CheckpointError, ConfigError
from lm.spelling import did_you_mean
from lm.storage.reading import read_text

if TYPE_CHECKING:
    from lm.data.tokenizer.tokenizer import Tokenizer

_BUILT_IN = Path(__file__).with_name("chat_templates")
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


def template_source(template: str | None, tokenizer: "Tokenizer") -> tuple[str, str]:
    """Returns the source text of the template that data.record.template names, and a name for it in errors."""
    if template is None and tokenizer.chat_template is not None:
        return tokenizer.chat_template, "tokenizer"
    name = template or "plain"
    file = _BUILT_IN / f"{name}.jinja" if name in TEMPLATES else Path(os.path.expanduser(name))
    if not os.path.lexists(file):
        raise ConfigError(f"data.record.template: {name} is no file, and no template has that name. {did_you_mean(name, TEMPLATES)}")
    try:
        return read_text(file, most_mib=4), f"data.record.template={name}"
    except CheckpointError as error:
        raise ConfigError(f"data.record.template: {file} cannot be read ({error}). Give {', '.join(TEMPLATES)} or a jinja file.") from None
