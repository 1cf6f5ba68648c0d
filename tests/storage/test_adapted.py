"""Paths that a run names, found from another folder."""

from pathlib import Path

import pytest

from lm.storage.adapted import placed


def test_a_chat_template_is_found_from_another_folder_as_the_data_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen to fail: `lm eval` found a run's chats, and refused the template beside them. `chatml` is no path, whatever lies there."""
    for name in ("chats.jsonl", "mine.jinja", "chatml"):
        (tmp_path / name).touch()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")

    def data(files: str, template: str | None) -> dict[str, object]:
        return {"data": {"files": files, "record": {"kind": "chat", "template": template}}}

    run = tmp_path / "runs" / "x"
    assert placed(data("chats.jsonl", "mine.jinja"), run) == data(str(tmp_path / "chats.jsonl"), str(tmp_path / "mine.jinja"))
    for template in ("chatml", None, "lost.jinja"):
        assert placed(data("chats.jsonl", template), run) == data(str(tmp_path / "chats.jsonl"), template)
    assert placed(data("../chats.jsonl", "../mine.jinja"), run) == data("../chats.jsonl", "../mine.jinja")


def test_a_folder_that_is_a_dataset_is_found_from_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen to fail: `lm eval` looked for the folder on the hub. A name that is not of a hub's data is none of a folder."""
    for name in ("mine", "elsewhere"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    run = tmp_path / "runs" / "x"
    hub = {"data": {"kind": "mix", "sources": [{"name": "mine", "data": {"kind": "hub", "name": "mine"}}]}}
    found = placed(hub, run)["data"]["sources"][0]
    assert found == {"name": "mine", "data": {"kind": "hub", "name": str(tmp_path / "mine")}}
    assert placed({"kind": "hub", "name": "owner/theirs"}, run) == {"kind": "hub", "name": "owner/theirs"}
