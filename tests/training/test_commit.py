"""Which code a run was made with."""

import os
import subprocess
from pathlib import Path

import pytest

import lm
from lm.training.commit import commit


def git(folder: Path, *args: str) -> str:
    who = ("-c", "user.name=x", "-c", "user.email=x@example.org")
    return subprocess.run(["git", *who, *args], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


def test_the_commit_is_that_of_the_code_or_else_of_the_folder_with_a_mark_where_files_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First the code lies in no checkout, then in one of its own."""
    package, work = tmp_path / "site" / "lm", tmp_path / "work"
    for folder in (package, work):
        folder.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    monkeypatch.setattr(lm, "__file__", str(package / "__init__.py"))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    monkeypatch.chdir(work)
    assert commit() is None
    (work / "a").write_text("a")
    for args in (("init",), ("add", "."), ("commit", "-q", "-m", "a")):
        git(work, *args)
    assert commit() == git(work, "rev-parse", "HEAD")[:12]
    (work / "a").write_text("b")
    assert commit() == git(work, "rev-parse", "HEAD")[:12] + "+"
    for args in (("init",), ("add", "lm"), ("commit", "-m", "lm")):
        git(package.parent, *args)
    assert commit() == git(package, "rev-parse", "HEAD")[:12]
    monkeypatch.setenv("PATH", "")
    assert commit() is None


def test_a_changed_file_whose_name_is_no_text_here_counts_as_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With core.quotePath=false, as is usual where names are not ASCII, git tells the bytes of a name as they are."""
    monkeypatch.setattr(lm, "__file__", str(tmp_path / "__init__.py"))
    monkeypatch.chdir(tmp_path)
    named = tmp_path / os.fsdecode(b"\xe9t\xe9")
    try:
        named.write_text("a", encoding="utf-8")
    except OSError:
        pytest.skip("this file system takes names in UTF-8 alone")
    for args in (("init",), ("config", "core.quotePath", "false"), ("add", "."), ("commit", "-q", "-m", "a")):
        git(tmp_path, *args)
    named.write_text("b", encoding="utf-8")
    assert commit() == git(tmp_path, "rev-parse", "HEAD")[:12] + "+"
