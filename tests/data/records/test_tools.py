"""Chats with tools: what may be called, the calls and their answers, as records have them and as templates write them."""

import json
from pathlib import Path
from typing import Any

import pytest

from lm.data.kinds import BytesConfig, ChatRecord, PreferenceRecord
from lm.data.records.base import LEARNED
from lm.data.records.fields import BadRecord
from lm.data.tokenizer.chat import ChatTemplate
from lm.data.tokenizer.templates import template_source
from lm.data.tokenizer.tokenizer import Tokenizer
from lm.errors import ConfigError
from tests.data.tokenizer.test_chat import CHATML, UNMARKED, shown, source

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL: dict[str, Any] = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "<|im_end|>"}}}
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1 + 2?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "3", "tool_call_id": "c1", "name": "add"},
    {"role": "assistant", "content": "3."},
]
RECORD = {"messages": MESSAGES, "tools": [TOOL]}
CALLED = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "<|im_end|>"}}\n</tool_call><|im_end|>'


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return BytesConfig().build(extra=CHATML)


def written(tokenizer: Tokenizer, record: dict[str, Any], template: str | None = None) -> list[tuple[str, bool]]:
    text, where = (template, "here") if template else template_source("chatml", tokenizer)
    return shown(tokenizer, ChatTemplate(text, where, tokenizer).runs(ChatRecord(messages="messages").turns(record, "here")))


def test_calls_are_learned_and_tools_and_their_answers_are_read(tokenizer: Tokenizer) -> None:
    """Seen to fail with the calls dropped."""
    (opening, call, answer, said, end) = written(tokenizer, RECORD)
    assert opening[0].startswith("<|bos|><|im_start|>system\nBe brief.\n\nTools:\n<tools>\n" + json.dumps(TOOL) + "\n</tools>\n")
    assert opening[0].endswith("<|im_end|>\n<|im_start|>user\n1 + 2?<|im_end|>\n<|im_start|>assistant\n") and not opening[1]
    assert call == (CALLED, True)
    assert answer == ("\n<|im_start|>tool\n3<|im_end|>\n<|im_start|>assistant\n", False)
    assert said == ("3.<|im_end|>", True) and end == ("\n", False)
    runs = ChatTemplate(source("chatml"), "here", tokenizer).runs(ChatRecord(messages="messages").turns(RECORD, "here"))
    assert [part for part in runs[1].parts if isinstance(part, int)] == [tokenizer.special(["<|im_end|>"])]  # not the one that it spells


@pytest.mark.slow
def test_the_forms_of_one_record_are_one(tokenizer: Tokenizer) -> None:
    """Arguments as OpenAI has them, a call by its name alone, and lists as JSON."""
    function = CALL["function"]
    as_text = {**CALL, "function": {**function, "arguments": json.dumps(function["arguments"])}}
    for calls in ([as_text], [function], json.dumps([CALL]), json.dumps([as_text])):
        messages = [*MESSAGES[:2], {**MESSAGES[2], "tool_calls": calls, "content": ""}, *MESSAGES[3:]]
        for tools in ([TOOL], json.dumps([TOOL])):
            assert written(tokenizer, {"messages": messages, "tools": tools}) == written(tokenizer, RECORD)
    plain = [{**message, "tool_calls": None} for message in MESSAGES if message["content"]]
    for tools in (None, [], "", "[]"):
        assert written(tokenizer, {"messages": plain, "tools": tools}) == written(tokenizer, {"messages": plain})


def test_ids_and_masks_are_those_of_transformers(tokenizer: Tokenizer, tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    tokenizer.save(tmp_path)
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"), bos_token="<|bos|>", eos_token="<|eos|>")
    theirs.chat_template = source("chatml")
    harmless = {**CALL, "function": {"name": "add", "arguments": {"a": 1}}}  # theirs reads what a message spells
    messages = [*MESSAGES[:2], {**MESSAGES[2], "content": "", "tool_calls": [harmless, harmless]}, *MESSAGES[3:]]
    found = theirs.apply_chat_template(messages, tools=[TOOL], return_dict=True, return_assistant_tokens_mask=True)
    turns = ChatRecord(messages="messages").turns({"messages": messages, "tools": [TOOL]}, "here")
    ids, mask = [], []
    for run in ChatTemplate(source("chatml"), "here", tokenizer).runs(turns):
        tokens = [i for part in run.parts for i in ([part] if isinstance(part, int) else tokenizer.encode(part))]
        ids += tokens
        mask += [int(run.learned)] * len(tokens)
    assert ids == found["input_ids"] and mask == found["assistant_masks"]


def test_a_template_that_writes_no_tools_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(
        ConfigError, match=r"^here: the chat template writes no tools, and a record has some\. Leave them out, or use a template"
    ):
        written(tokenizer, RECORD, UNMARKED)
    with pytest.raises(ConfigError, match=r"writes no tool_calls"):
        written(tokenizer, {"messages": MESSAGES}, UNMARKED)


def test_tools_stand_beside_a_prompt_and_its_completion_too(tokenizer: Tokenizer) -> None:
    """Seen to fail: they were left out where the messages are in two fields."""
    record = {"prompt": MESSAGES[:2], "completion": MESSAGES[2:], "tools": [TOOL]}
    own, _ = ChatRecord().recognised(record, "here")
    assert own.turns(record, "here") == ChatRecord(messages="messages").turns(RECORD, "here")


def test_calls_of_sharegpt_are_those_of_openai(tokenizer: Tokenizer) -> None:
    """Seen to fail: function_call was refused as no role."""
    function = CALL["function"]
    called, seen = {"from": "function_call", "value": json.dumps(function)}, {"from": "observation", "value": "3"}
    begun = [{"from": "system", "value": "Be brief."}, {"from": "human", "value": "1 + 2?"}]
    said = {"conversations": [*begun, called, seen, {"from": "gpt", "value": "3."}], "tools": json.dumps([TOOL])}
    record, _ = ChatRecord().recognised(said, "here")
    runs = ChatTemplate(source("chatml"), "here", tokenizer).runs(record.turns(said, "here"))
    assert shown(tokenizer, runs) == written(tokenizer, RECORD)
    two = record.turns({"conversations": [begun[1], {**called, "value": json.dumps([function, function])}]}, "here")[-1]
    assert json.loads(two.also) == {"tool_calls": [{"type": "function", "function": function}] * 2}
    unseen = record.turns({"conversations": [begun[1], seen, {"from": "gpt", "value": "3."}]}, "here")
    assert [turn.role for turn in unseen] == ["user", "observation", "assistant"]
    own = record.replace(template="mine.jinja").turns(said, "here")  # which may write these roles
    assert [turn.role for turn in own] == ["tools", "system", "user", "function_call", "observation", "assistant"]
    for bad in ("add(1)", "3", "[]", '{"arguments": {}}', None):
        with pytest.raises(BadRecord, match=r"^here: message 2: a function_call holds .*, not the JSON of an object with name"):
            record.turns({"conversations": [begun[1], {**called, "value": bad}]}, "here")


def test_an_empty_system_prompt_is_none(tokenizer: Tokenizer) -> None:
    chat = [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Hello."}]
    empty = {"messages": [{"role": "system", "content": ""}, *chat]}
    assert written(tokenizer, empty) == written(tokenizer, {"messages": chat})


def test_a_preference_may_be_for_a_call_of_a_tool(tokenizer: Tokenizer) -> None:
    """Or for another one. Seen to fail: it was refused, as if compared answers were texts alone."""
    other = {**MESSAGES[2], "tool_calls": [{**CALL, "function": {"name": "add", "arguments": {}}}]}
    record = {"prompt": MESSAGES[:2], "chosen": [MESSAGES[2]], "rejected": [other], "tools": [TOOL]}
    template = ChatTemplate(source("chatml"), "here", tokenizer)
    for values in (record, {**record, "prompt": None, "chosen": MESSAGES[:3], "rejected": [*MESSAGES[:2], other]}):
        sides = PreferenceRecord().runs(PreferenceRecord().turns(values, "here"), template)
        read = [shown(tokenizer, [run._replace(learned=kind % 2 == LEARNED) for run, kind in side]) for side in sides]
        assert read[0] == written(tokenizer, {"messages": MESSAGES[:3], "tools": [TOOL]})
        assert read[1] == written(tokenizer, {"messages": [*MESSAGES[:2], other], "tools": [TOOL]})


def test_what_is_no_call_and_no_tool_is_a_bad_record() -> None:
    def read(record: dict[str, Any]) -> None:
        ChatRecord(messages="messages").turns(record, "a.jsonl:1")

    for tools in (3, "add", {"name": "add"}, ["add"]):
        with pytest.raises(BadRecord, match=r"^a.jsonl:1: field 'tools' holds .*, not a list of objects"):
            read({"messages": MESSAGES, "tools": tools})
    for calls in (3, "add", {"name": "add"}, ["add"]):
        with pytest.raises(BadRecord, match=r"^a.jsonl:1: message 1: field 'tool_calls' holds .*, not a list of objects"):
            read({"messages": [{**MESSAGES[2], "tool_calls": calls}]})
    record = {name: [MESSAGES[1], {**MESSAGES[4], "weight": weight}] for name, weight in (("chosen", 1), ("rejected", 0))}
    with pytest.raises(BadRecord, match=r"^a.jsonl:1: field 'rejected' ends with a message of weight 0"):
        PreferenceRecord().turns(record, "a.jsonl:1")
    with pytest.raises(BadRecord, match="does not end with the assistant's message"):
        PreferenceRecord().turns({"chosen": [{"role": "system", "content": ""}], "rejected": "no"}, "a.jsonl:1")


def test_a_role_that_no_model_knows_is_refused_unless_a_template_of_ones_own_writes_it() -> None:
    chat = {"messages": [{"role": "user", "content": "Hi?"}, {"role": "assistent", "content": "Hello."}]}
    for record in (ChatRecord(messages="messages"), ChatRecord(messages="messages", template="chatml")):
        with pytest.raises(BadRecord, match=r"a\.jsonl:1: message 2: .assistent. is no role that models know \(system, "):
            record.turns(chat, "a.jsonl:1")
    said = {"messages": [{"role": "critic", "content": "No."}, *({"from": by, "value": by} for by in ("human", "gpt"))]}
    turns = ChatRecord(messages="messages", template="mine.jinja").turns(said, "a.jsonl:1")
    assert [turn.role for turn in turns] == ["critic", "user", "assistant"]


THINKING = (
    "{% for m in messages %}<{{ m.role }}>{% if m.reasoning_content %}[{{ m.reasoning_content }}]{% endif %}{{ m.content }}{% endfor %}"
)


def test_thoughts_beside_the_content_are_learned_or_refused(tokenizer: Tokenizer) -> None:
    """Seen to fail: they were left out, so that a model of the template learned to answer without thoughts."""
    template = THINKING + "{% if add_generation_prompt %}<assistant>{% endif %}"
    user, answer = {"role": "user", "content": "1 + 2?"}, {"role": "assistant", "content": "3.", "reasoning_content": "one, two, three"}
    said = [("<user>1 + 2?<assistant>", False), ("[one, two, three]3.", True)]
    assert written(tokenizer, {"messages": [user, answer]}, template) == said
    assert written(tokenizer, {"messages": [user, {**answer, "reasoning_content": ""}]}, template)[1] == ("3.", True)
    for name in ("reasoning_content", "reasoning", "thinking"):
        with pytest.raises(ConfigError, match=rf"^here: the chat template writes no {name}, and a record has some"):
            written(tokenizer, {"messages": [user, {"role": "assistant", "content": "3.", name: "hm"}]}, UNMARKED)
    pair = {"chosen": [user, answer], "rejected": [user, {"role": "assistant", "content": "4."}]}
    runs = PreferenceRecord().runs(PreferenceRecord().turns(pair, "here"), ChatTemplate(template, "here", tokenizer))
    assert ["".join(map(str, run.parts)) for side in runs for run, kind in side if kind % 2] == ["[one, two, three]3.", "4."]


@pytest.mark.parametrize("given", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("read", ["reasoning_content", "thinking"])
def test_thoughts_are_written_whatever_field_they_are_in(tokenizer: Tokenizer, tmp_path: Path, given: str, read: str) -> None:
    """As by transformers. Seen to fail: thoughts in `reasoning_content` were refused with gpt-oss's template, which reads `thinking`."""
    from transformers import PreTrainedTokenizerFast

    template = THINKING.replace("reasoning_content", read) + "{% if add_generation_prompt %}<assistant>{% endif %}"
    messages = [{"role": "user", "content": "1 + 2?"}, {"role": "assistant", "content": "3.", given: "one, two, three"}]
    tokenizer.save(tmp_path)
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"), bos_token="<|bos|>", eos_token="<|eos|>")
    found = written(tokenizer, {"messages": messages}, template)
    assert found[1] == ("[one, two, three]3.", True)
    assert "".join(text for text, _ in found) == theirs.apply_chat_template(messages, chat_template=template, tokenize=False)
    both = [messages[0], messages[1] | {read: "these"}]
    assert written(tokenizer, {"messages": both}, template)[1] == ("[these]3.", True)
    asked = ChatTemplate(template, "here", tokenizer).asking(messages, {})
    assert "[one, two, three]3." in "".join(map(str, asked))
