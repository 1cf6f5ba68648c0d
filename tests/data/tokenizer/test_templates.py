"""A tokenizer with several chat templates, as of Command R and Hermes 3, whose tool_use writes chats with tools."""

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from lm.data.kinds import BytesConfig, ChatRecord, TextConfig
from lm.data.sources.base import Turn
from lm.data.store.prepare import token_folder
from lm.data.tokenizer.chat import ChatTemplate
from lm.data.tokenizer.fitting import grown
from lm.data.tokenizer.tokenizer import Tokenizer, load_tokenizer
from lm.generation.text import chat_template, ids_of
from lm.hf.gguf.vocabulary import vocabulary

PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
TEMPLATES = {"default": PLAIN, "tool_use": "{{ tools | tojson }}" + PLAIN, "rag": "documents: " + PLAIN}
TOOLS = [{"name": "add"}]


@pytest.fixture(params=["files", "list"])
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    """One as transformers saves it now, or as it did."""
    folder = tmp_path / "theirs"
    BytesConfig().build().save(folder)
    theirs = AutoTokenizer.from_pretrained(folder)
    theirs.chat_template = TEMPLATES
    theirs.save_pretrained(folder, save_jinja_files=request.param == "files")
    assert (folder / "additional_chat_templates").is_dir() == (request.param == "files")
    return load_tokenizer(folder, foreign=True)


def test_all_are_kept_and_exported(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Seen to fail: all but the default one were lost."""
    grown(tokenizer, ["<|new|>"]).save(tmp_path / "ours")
    assert AutoTokenizer.from_pretrained(tmp_path / "ours").chat_template == load_tokenizer(tmp_path / "ours").templates == TEMPLATES
    found = vocabulary(tokenizer, tokenizer.vocab_size)
    assert found["tokenizer.chat_template"] == PLAIN and sorted(found["tokenizer.chat_templates"]) == ["rag", "tool_use"]
    assert found["tokenizer.chat_template.tool_use"] == TEMPLATES["tool_use"]


def test_a_chat_with_tools_is_written_by_its_own_as_in_transformers(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path / "ours")
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path / "ours"), chat_template(tokenizer)
    messages = [{"role": "user", "content": "1 + 2?"}, {"role": "assistant", "content": "3"}]
    turns = [Turn(message["role"], message["content"]) for message in messages]
    for tools in (TOOLS, None):
        given = [Turn("tools", json.dumps(tools)), *turns] if tools else turns
        want = theirs.apply_chat_template(messages, tools=tools, return_dict=False)
        assert ids_of(tokenizer, [part for run in ours.runs(given) for part in run.parts]) == want
        names = {"tools": tools} if tools else {}
        assert ids_of(tokenizer, ours.question(given)) == ids_of(tokenizer, ours.asking(messages, names)) == want
    assert ours.with_tools.mentions("tools") and not ours.mentions("tools")
    assert ChatTemplate(TEMPLATES["rag"], "here", tokenizer).with_tools.mentions("messages")


def test_another_one_takes_the_place_of_all_and_the_tokens_are_others(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("{}\n")
    cfg = TextConfig(files=str(tmp_path / "a.jsonl"), record=ChatRecord())
    source = cfg.open(tmp_path)
    before = token_folder(cfg, source, tokenizer, tmp_path)
    tokenizer.templates = {name: of for name, of in tokenizer.templates.items() if name != "tool_use"}
    assert token_folder(cfg, source, tokenizer, tmp_path) != before
    tokenizer.chat_template = PLAIN
    assert "rag" in tokenizer.templates
    tokenizer.chat_template = TEMPLATES["rag"]
    assert tokenizer.templates == {"default": TEMPLATES["rag"]}
