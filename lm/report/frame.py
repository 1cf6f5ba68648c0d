"""The page that every report stands in: one self-contained file, light or dark as the screen is, narrow or wide."""

from pathlib import Path
from typing import Any

_HERE = Path(__file__).parent


def render(template: Path, **values: Any) -> str:
    """Returns the HTML of a template that extends frame.html.j2. What is filled in is escaped, unless it is marked as safe there."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    places = FileSystemLoader([template.parent, _HERE])
    page = Environment(loader=places, autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True)
    return page.get_template(template.name).render(**values)
