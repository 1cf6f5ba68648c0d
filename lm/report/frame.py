"""The HTML page of every report: one self-contained file, light or dark, for narrow and wide screens."""

from pathlib import Path
from typing import Any

_HERE = Path(__file__).parent


def render(template: Path, **values: Any) -> str:
    """Returns the HTML of a template that extends frame.html.j2. Values are escaped unless the template marks them as safe."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    places = FileSystemLoader([template.parent, _HERE])
    page = Environment(loader=places, autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True)
    return page.get_template(template.name).render(**values)
