"""What `make docs` adds to the pages of docs/, as hooks of mkdocs: tables made from the code, and checked links into the repository.

A page says `<!-- made: NAME -->` where `MADE[NAME]` goes. It also replaces a line in italics right below the comment, which is for
readers on GitHub. A link to a file of the repository becomes a link to a page that shows the file;
`path.py#name` goes to that name, and a line that is nothing but such a link is followed by the code itself. A file or a name that
is not there is a warning, and the build is strict.
"""

import ast
import inspect
import json
import logging
import os
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pydantic.fields import FieldInfo

import lm
from lm.cli.compose import catalog
from lm.cli.compose.compose import compose
from lm.cli.main import VERBS
from lm.cli.verb import find
from lm.cli.views.text import default_text, sentence, type_text
from lm.cost.count import count
from lm.hf.io import sglang, vllm
from lm.hf.io.family import families
from lm.hf.io.unread import WHY
from lm.nn.model_config import model_config
from lm.schema import Config, variants
from lm.training.config import TrainConfig

log = logging.getLogger("mkdocs.docs")  # below mkdocs' own, whose warnings end a strict build
ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "docs/notebook.ipynb": "notebook.md",
}
"""Files of the repository that are pages too."""
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)(#[\w.-]+)?(?=\))")
ALONE = re.compile(r"^\[[^\]]*\]\(([^)#\s]+\.py)#([\w.]+)\)$", re.MULTILINE)
PLACE = re.compile(r"<!-- made: (\w+) -->(?:\n\*.*\*$)?", re.MULTILINE)
HEADER = re.compile(r"^# (\w+): +(.*)$", re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that lie outside docs/, and one for each file of the repository that some page links to."""
    for path, page in PAGES.items():
        files.append(File.generated(config, page, content=_page(path)))
    linked = {target for file in files.documentation_pages() for target in _linked(file.src_uri, file.content_string)}
    for target in sorted(linked):
        files.append(File.generated(config, f"source/{target}.md", content=_listing(target)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The page with its tables, its excerpts and its links."""
    uri = page.file.src_uri
    if uri.startswith("source/"):
        return markdown
    markdown = PLACE.sub(lambda found: MADE[found[1]](), markdown)
    markdown = ALONE.sub(lambda found: f"{found[0]}\n\n{_excerpt(uri, found[1], found[2])}", markdown)
    return LINK.sub(lambda found: _resolved(uri, found[1], (found[2] or "")[1:]), markdown)


def _page(path: str) -> str:
    """The Markdown of a file; of a notebook its cells, without what they printed."""
    text = (ROOT / path).read_text(encoding="utf-8")
    if not path.endswith(".ipynb"):
        return text
    cells = [("".join(cell["source"]), cell["cell_type"]) for cell in json.loads(text)["cells"]]
    return "\n\n".join(source if kind == "markdown" else f"```python\n{source}\n```" for source, kind in cells)


def _linked(uri: str, markdown: str) -> Iterator[str]:
    """The files of the repository outside docs/ that a page links to."""
    for found in LINK.finditer(markdown):
        target = _repository_path(uri, found[1])
        if not target.startswith("docs/") and target not in PAGES and (ROOT / target).is_file():
            yield target


def _repository_path(uri: str, link: str) -> str:
    """Where a link of the page goes, from the root of the repository."""
    places = {page: path for path, page in PAGES.items()}
    here = PurePosixPath(places.get(uri, f"docs/{uri}")).parent
    return os.path.normpath(here / link)


def _resolved(uri: str, link: str, anchor: str) -> str:
    """The link as mkdocs resolves it; of what does not exist as it was, for mkdocs to complain."""
    target = _repository_path(uri, link)
    if target in PAGES:
        page = PAGES[target]
    elif target.startswith("docs/"):
        page = target.removeprefix("docs/")
    elif (ROOT / target).is_file():
        if anchor:
            _lines(uri, target, anchor)
        page, anchor = f"source/{target}.md", anchor.split(".")[0]
    else:
        return link
    up = "../" * uri.count("/")
    return f"{up}{page}" + (f"#{anchor}" if anchor else "")


def _listing(target: str) -> str:
    """A page that shows a file; of Python, each function and class below a heading that can be linked to."""
    lines = (ROOT / target).read_text(encoding="utf-8").splitlines()
    heads = [(first, name) for name, (first, _) in _definitions(target).items() if "." not in name] if target.endswith(".py") else []
    language = {".py": "python", ".yaml": "yaml", ".yml": "yaml"}.get(Path(target).suffix, "bash")
    parts = ["---\nsearch:\n  exclude: true\n---", f"# {target}"]
    for (first, name), (after, _) in pairwise([(1, ""), *heads, (len(lines) + 1, "")]):
        parts += [f"## {name} {{#{name}}}"] if name else []
        parts += [f'`````{language} linenums="{first}"', *lines[first - 1 : after - 1], "`````"] if after > first else []
    return "\n".join(parts)


def _excerpt(uri: str, link: str, name: str) -> str:
    target = _repository_path(uri, link)
    first, last = _lines(uri, target, name)
    lines = (ROOT / target).read_text(encoding="utf-8").splitlines()[first - 1 : last] if (ROOT / target).is_file() else []
    return "\n".join(["`````python", *textwrap.dedent("\n".join(lines)).splitlines(), "`````"])


def leads_somewhere(file: Path, name: str) -> bool:
    """There is such a file, and if it is code a function or class of this name in it. Headings of pages are checked by mkdocs."""
    return file.exists() and (not name or file.suffix != ".py" or name in _definitions(os.path.relpath(file, ROOT)))


def _lines(uri: str, target: str, name: str) -> tuple[int, int]:
    """The first and the last line of a function, class or method."""
    found = _definitions(target).get(name) if (ROOT / target).is_file() else None
    if found is None:
        log.warning(f"{uri}: {target} has no '{name}'. Link to a name that it defines.")
    return found or (1, 1)


@cache
def _definitions(target: str) -> dict[str, tuple[int, int]]:
    """Name, or Class.name -> first and last line, decorators included."""
    found = {}

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                found[prefix + node.name] = (first, node.end_lineno or first)
            if isinstance(node, ast.ClassDef):
                visit(node.body, f"{node.name}.")

    visit(ast.parse((ROOT / target).read_text(encoding="utf-8")).body, "")
    return found


def _table(heading: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    cells = [heading, ("---",) * len(heading), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in cells)


def recipes() -> str:
    """A table of all recipes, from their headers."""
    rows = []
    for name in catalog.groups()["recipes"]:
        header = dict(HEADER.findall(catalog.file_of("recipes", name).read_text(encoding="utf-8")))
        rows.append((f"`{name}`", catalog.headline("recipes", name), header["Tokens"], header["Expect"]))
    return _table(("recipe", "what", "tokens", "measured"), rows)


def models() -> str:
    """A table of all presets with their parameters, built on the meta device."""
    rows = []
    for preset in catalog.groups()["model"]:
        cfg = model_config(compose([f"model={preset}"]).tree["model"])
        whole = cfg.replace(vocab_size=cfg.vocab_size or 4096, max_seq_len=cfg.max_seq_len or 1024)
        shown = f"{count(whole, 1024).parameters:,}" + ("" if cfg.vocab_size else " with 4,096 tokens")
        rows.append((f"`{preset}`", cfg.kind.replace("_", "-"), shown, catalog.headline("model", preset)))
    return _table(("preset", "stack", "parameters", "what it is"), rows)


def slots() -> str:
    """A table of all groups and their options."""
    rows = [(f"`{group}`", ", ".join(f"`{option}`" for option in options)) for group, options in sorted(catalog.groups().items())]
    return _table(("group", "options"), [row for row in rows if row[0] not in ("`model`", "`recipes`")])


def family_table() -> str:
    """A table of the families of transformers that are read and written, with the servers that have them, and the lines of each one's
    file."""
    rows = []
    for name, family in sorted(families().items()):
        source = Path(inspect.getfile(type(family))).read_text(encoding="utf-8")
        said = (ast.get_docstring(ast.parse(source)) or "").split("\n")[0]
        decodes = family.fixed["kind"] == "decoder"
        serves = (
            "yes" if decodes and name not in absent else "—"
            for absent in ((*vllm.ABSENT, *vllm.UNCHECKED), (*sglang.ABSENT, *vllm.UNCHECKED))
        )
        rows.append((f"`{name}`", f"`{family.architecture}`", *serves, str(source.count("\n")), said))
    return _table(("model_type", "class of transformers", "vLLM", "SGLang", "lines here", "what it is"), rows)


def unread() -> str:
    """A table of models that no family can hold, by the reason."""
    by_reason: dict[str, list[str]] = {}
    for name, why in WHY.items():
        by_reason.setdefault(why, []).append(f"`{name}`")
    return _table(("model_type", "what has no form in `lm`"), [(", ".join(names), why) for why, names in by_reason.items()])


def commands() -> str:
    """What each verb says of itself."""
    found = []
    for verb, line in VERBS.items():
        text = find(verb).help_text([])
        text = text.split("\nrecipes:")[0] if verb == "train" else text  # recipes and options have pages of their own
        found.append(f"### lm {verb}\n\n{line[0].upper()}{line[1:]}.\n\n```text\n{text.strip()}\n```\n")
    return "\n".join(found)


def options() -> str:
    """A table for each section of a run's config and each kind that it may have."""
    plain = {name: field for name, field in TrainConfig.model_fields.items() if not variants(field.annotation)}
    sections = {name: field for name, field in TrainConfig.model_fields.items() if name not in plain}
    parts = [f"## Of the whole run\n\n{_fields(plain)}"]
    for name, field in sections.items():
        parts += [f"## {name}", *_section(name, field, 3)]
    return "\n\n".join(parts)


def _section(path: str, field: FieldInfo, level: int) -> Iterator[str]:
    group = path.replace(".", "/")
    if group in catalog.groups() and group != "model":
        yield f"Group `{group}`: " + ", ".join(f"`{option}`" for option in catalog.groups()[group]) + "."
    for kind, cls in variants(field.annotation).items():
        yield from _kind(path, kind, cls, level)


def _kind(path: str, kind: str, cls: type[Config], level: int) -> Iterator[str]:
    """The options of one kind; what is in all models is told once, with the decoder."""
    if kind:
        yield f"{'#' * level} {path}: {kind}"
    yield " ".join((cls.__doc__ or "").split())
    fields = {name: inner for name, inner in cls.model_fields.items() if name != "kind"}
    if kind in ("encoder", "encoder_decoder"):
        fields = {name: inner for name, inner in fields.items() if name in cls.__annotations__}
    leaves = {name: inner for name, inner in fields.items() if not variants(inner.annotation)}
    if leaves:
        yield _fields(leaves)
    for name, inner in fields.items():
        if name in leaves or _recursive(cls, inner):
            continue
        yield f"{'#' * min(level, 5)} {path}.{name}" + (f" of {kind}" if kind and path != "model" else "")
        yield from _section(f"{path}.{name}", inner, min(level + 1, 6))


def _recursive(cls: type[Config], field: FieldInfo) -> bool:
    return cls in variants(field.annotation).values()


def _fields(found: dict[str, FieldInfo]) -> str:
    rows = [(f"`{name}`", type_text(field), f"`{default_text(field)}`", sentence(field)) for name, field in found.items()]
    return _table(("key", "type", "default", "meaning"), rows)


def functions() -> str:
    """What `import lm` offers, from the docstrings."""
    return "\n\n".join(f"::: lm.{name}" for name in lm.__all__ if not name.startswith("_"))


def plugins() -> str:
    """A table of examples/plugins/, each with the first line of its docstring."""
    files = sorted((ROOT / "examples" / "plugins").glob("*.py"))
    said = [(ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").split("\n")[0] for file in files]
    return _table(("example", "what it adds"), [(f"`examples/plugins/{file.name}`", line) for file, line in zip(files, said, strict=True)])


MADE: dict[str, Callable[[], str]] = {
    "recipes": recipes,
    "models": models,
    "slots": slots,
    "families": family_table,
    "unread": unread,
    "functions": functions,
    "plugins": plugins,
    "commands": commands,
    "options": options,
}
