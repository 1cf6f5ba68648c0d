"""What makes cached tokens anew: the meaning of the code that turns sources into tokens, and nothing else; and whose they are."""

import ast
import os
import shutil
from pathlib import Path

import pytest

from lm.data.kinds import BytesConfig, TextConfig
from lm.data.store import cache
from lm.data.store.prepare import prepare
from lm.errors import ResourceError
from tests.conftest import unprivileged

DATA = Path(cache.__file__).parents[1]


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The rooms of lm/data, to be changed."""
    shutil.copytree(DATA, tmp_path / "data", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(cache, "__file__", str(tmp_path / "data" / "store" / "cache.py"))
    return tmp_path / "data"


def change(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))


def test_comments_docstrings_and_layout_are_no_change_of_the_code(copied: Path) -> None:
    """Seen to fail with the bytes of the files hashed instead of their meaning."""
    before = cache.code_version()
    for file in [found for room in cache.ROOMS for found in (copied / room).glob("*.py")]:
        tree = ast.parse(file.read_text())
        file.write_text(f"# another comment\n{ast.unparse(tree)}\n")
    change(copied / "store" / "shards.py", "Appends one split's documents", "Another docstring")
    assert cache.code_version() == before


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("sources/base.py", "1 << 16", "1 << 15"),
        ("records/pair.py", "GIVEN, counted=False", "LEARNED, counted=False"),
        ("tokenizer/splits.py", "(?i:'s|'t", "(?i:'t|'s"),
        ("store/squeezed.py", "zlib.compressobj(9)", "zlib.compressobj(8)"),
        ("order.py", "found >= n", "found > n"),
    ],
)
def test_code_that_makes_tokens_counts(copied: Path, file: str, old: str, new: str) -> None:
    before = cache.code_version()
    change(copied / file, old, new)
    assert cache.code_version() != before


def test_what_is_done_with_tokens_does_not_count(copied: Path) -> None:
    before = cache.code_version()
    others = [file for file in copied.rglob("*.py") if file.relative_to(copied).parts[0].removesuffix(".py") not in cache.ROOMS]
    assert {"rows", "layout", "loader.py", "mixture.py", "config.py"} <= {file.relative_to(copied).parts[0] for file in others}
    for file in others:
        file.write_text("changed = True\n")
    assert cache.code_version() == before


def test_what_makes_tokens_imports_nothing_else_of_the_data_room() -> None:
    """Else a change over there would change tokens, and old ones be read."""
    light = {"lm.data.config"}  # options that decide no tokens
    faults = []
    for file in [found for room in cache.ROOMS for found in (DATA / room).glob("*.py")]:
        for node in ast.walk(ast.parse(file.read_text())):
            name = node.module if isinstance(node, ast.ImportFrom) and node.module else ""
            if name.startswith("lm.data.") and name not in light and name.split(".")[2] not in cache.ROOMS:
                faults.append(f"{file.name}:{node.lineno} {name}")
    assert not faults


@pytest.mark.parametrize("kept", ["hashes", "tokens", "tokens/*"])
def test_of_a_cache_that_another_user_has_made_for_himself_the_message_names_what_is_closed(public: Path, kept: str) -> None:
    """Seen to fail: closed hashes of files were told as data.files that cannot be read; closed tokens were named without their key."""
    (public / "a.txt").write_text("one text\n" * 200)
    cfg = TextConfig(files=str(public / "a.txt"), cache_dir=str(public / "cache"))
    made = prepare(cfg, BytesConfig(), log=lambda line: None)
    private = next(path for path in (public / "cache").glob(kept) if path.is_dir())
    private.chmod(0o700 if os.geteuid() == 0 else 0)
    (public / "cache").chmod(0o755)
    with unprivileged():
        if kept == "hashes":  # they are only a help
            assert prepare(cfg, BytesConfig(), log=lambda line: None).train.n_tokens == made.train.n_tokens
        else:
            with pytest.raises(ResourceError, match=rf"^data\.cache_dir: {private} cannot be read \(Permission denied\)\. Let its owner"):
                prepare(cfg, BytesConfig(), log=lambda line: None)
    private.chmod(0o755)
