"""Calls of tools in answers: told as OpenAI's API tells them, whole and in streams, or left as text."""

import json
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import httpx
import pytest

from lm.data.kinds import BytesConfig
from lm.data.tokenizer.chat import ChatTemplate
from lm.schema import Tree
from lm.serving.calls import Marks, Said, marks_of
from tests.data.tokenizer.test_chat import CHATML, UNMARKED, source
from tests.serving.conftest import Serve
from tests.serving.test_answers import CHAT, choices, events

pytest.importorskip("llguidance", reason="the extra grammar makes the tiny model write a call")

MARKS = Marks("<tool_call>", "</tool_call>")
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
ONE, TWO = '<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call>', '<tool_call>{"name": "g"}</tool_call>'


@pytest.fixture(scope="module")
def caller(serve: Serve) -> Iterator[httpx.Client]:
    tokenizer = BytesConfig().build(extra=CHATML)
    tokenizer.chat_template = source("chatml") + "{{ 'Briefly. ' if brief }}{{ messages[-1].reasoning_content }}"
    with serve(spoken=tokenizer) as found:
        yield found


def asked(text: str, **more: Any) -> Tree:
    """A request that the model can answer by this text alone."""
    escaped = "".join(f"\\{char}" if char in r"\.+*?()|[]{}^$" else char for char in text)
    return {"messages": [{"role": "user", "content": "?"}], "tools": TOOLS, "regex": escaped, "max_tokens": 200} | more


def streamed(client: httpx.Client, body: Tree) -> tuple[Tree, str]:
    """The message that the chunks of a stream make, and why it ends."""
    parts = [part for chunk in events(client, CHAT, body) for part in chunk["choices"]]
    text = "".join(part["delta"].get("content", "") for part in parts)
    calls = [call for part in parts for call in part["delta"].get("tool_calls", [])]
    assert [call.pop("index") for call in calls] == list(range(len(calls)))
    assert all(part["finish_reason"] is None for part in parts[:-1])
    return {"role": "assistant", "content": text, "tool_calls": calls}, parts[-1]["finish_reason"]


def functions(message: Tree) -> list[Tree]:
    assert all(call["type"] == "function" and call["id"].startswith("call_") for call in message.get("tool_calls", []))
    return [call["function"] for call in message.get("tool_calls", [])]


HEADERS = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
LLAMA = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{% if m.tool_calls %}{% set c = m.tool_calls[0].function %}"
    """{{ '{"name": "' + c.name + '", "parameters": ' }}{{ c.arguments | tojson }}{{ '}' }}{% else %}{{ m.content }}{% endif %}<|eot_id|>"""
    "{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
MISTRAL = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{% if m.tool_calls %}[TOOL_CALLS] ["
    "{% for c in m.tool_calls %}{{ {'name': c.function.name, 'arguments': c.function.arguments, 'id': c.id} | tojson }}"
    "{{ ', ' if not loop.last }}{% endfor %}]{{ eos_token }}{% elif m.role == 'user' %}[INST] {{ m.content }}[/INST]"
    "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
CALLED = [{"name": "f", "arguments": '{"a": "é"}'}, {"name": "g", "arguments": "{}"}]


@pytest.mark.parametrize(("before", "said"), [("", None), ("I look. \n", "I look.")])
def test_calls_are_told_apart_from_the_text(caller: httpx.Client, before: str, said: str | None) -> None:
    """Seen to fail: they were text, which no agent's client reads as calls."""
    body = asked(f"{before}{ONE}\n{TWO}")
    (choice,) = choices(caller, CHAT, body)
    message = choice["message"]
    assert (message["content"], functions(message), choice["finish_reason"]) == (said, CALLED, "tool_calls")
    found, why = streamed(caller, body)
    assert (found["content"], functions(found), why) == (said or "", CALLED, "tool_calls")
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    answers = [{"role": "tool", "tool_call_id": call["id"], "content": "1"} for call in message["tool_calls"]]
    (after,) = choices(caller, CHAT, asked("Done.") | {"messages": [*body["messages"], message, *answers]})  # an agent's next request
    assert after["message"] == {"role": "assistant", "content": "Done."} and after["finish_reason"] == "stop"


def test_openais_client_tells_the_end_of_each_call_of_a_stream(caller: httpx.Client) -> None:
    """Seen to fail: the last call came in one chunk with why the answer ends, and the client never told that it was whole."""
    openai = pytest.importorskip("openai", reason="the client whose events are looked at")
    body = asked(f"I look.{ONE}{TWO}", seed=0)
    more = {"regex": body.pop("regex")}
    own: Tree = {"extra_body": more, "model": "tiny", "logprobs": True}
    with openai.OpenAI(base_url=f"{caller.base_url}/v1", api_key="none") as client, client.chat.completions.stream(**body, **own) as stream:
        told = [{"name": event.name, "arguments": event.arguments} for event in stream if event.type.endswith("arguments.done")]
        (choice,) = stream.get_final_completion().choices
    assert told == CALLED == [{"name": each.function.name, "arguments": each.function.arguments} for each in choice.message.tool_calls]
    assert choice.message.content == "I look." and choice.finish_reason == "tool_calls"
    (whole,) = choices(caller, CHAT, body | more | {"logprobs": True})
    assert [each.token for each in choice.logprobs.content] == [each["token"] for each in whole["logprobs"]["content"]]


@pytest.mark.parametrize(
    ("text", "more", "why"),
    [
        (ONE, {"tools": None}, "stop"),
        (ONE, {"tool_choice": "none"}, "stop"),
        (ONE, {"max_tokens": 20}, "length"),
        ("So: <tool_call>{'name': 'f'}</tool_call>", {}, "stop"),
        (f"{ONE} and <tool_call>", {}, "stop"),
        ("a <tool> b ", {}, "stop"),
        ('<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}</tool_call>', {}, "stop"),
    ],
)
def test_what_is_no_call_stays_text(caller: httpx.Client, text: str, more: Tree, why: str) -> None:
    """Seen to fail: half a surrogate pair in arguments ended the answer with code 500, and a stream without a word."""
    body = asked(text, **more)
    (choice,) = choices(caller, CHAT, body)
    assert choice["message"] == {"role": "assistant", "content": text.encode()[: body["max_tokens"]].decode()}
    assert choice["finish_reason"] == why
    assert streamed(caller, body) == (choice["message"] | {"tool_calls": []}, why)


@pytest.mark.parametrize("text", ["", " ", "a < b", f"I look. {ONE}", f"{ONE}{TWO} or not", "<tool_call", f"<tool_c{ONE}"])
def test_a_text_is_divided_alike_in_whatever_pieces_it_comes(text: str) -> None:
    def divided(pieces: list[str]) -> tuple[str, list[Tree]]:
        said = Said(MARKS)
        begun = "".join(map(said.push, pieces))
        rest, calls = said.end()
        return begun + rest, functions({"tool_calls": calls})

    whole = divided([text])
    assert whole[1] == [call for call, of in zip(CALLED, (ONE, TWO), strict=True) if of in text]
    assert whole[1] or whole[0] == text
    for size in (1, 2, 3, 7):
        assert divided([text[at:end] for at, end in pairwise([*range(0, len(text), size), len(text)])] or [""]) == whole
    assert Said(None).push(ONE) == ONE


@pytest.mark.parametrize(
    "found", ['"arguments": {"a": NaN}', '"arguments": {"a": 1e999}', '"arguments": "\\ud800"', '"parameters": {"a": 1}']
)
def test_a_call_that_no_client_could_read_or_that_would_lose_its_arguments_is_text(found: str) -> None:
    said, text = Said(MARKS), f'<tool_call>{{"name": "f", {found}}}</tool_call>'
    assert (said.push(text), said.end()) == ("", (text, []))


def test_marks_are_those_that_the_template_writes() -> None:
    tokenizer = BytesConfig().build(extra=(*CHATML, "<tool_call>"))
    assert marks_of(ChatTemplate(source("chatml"), "here", BytesConfig().build(extra=CHATML))) == MARKS
    assert marks_of(ChatTemplate(source("chatml"), "here", tokenizer)) is None  # a special token is no text
    assert marks_of(ChatTemplate(UNMARKED, "here", tokenizer)) is None
    assert marks_of(ChatTemplate(LLAMA, "here", BytesConfig().build(extra=HEADERS))) == Marks("", "", "parameters")
    assert marks_of(ChatTemplate(MISTRAL, "here", BytesConfig().build(extra=("[TOOL_CALLS]",)))) == Marks("", "", listed=True)
    assert marks_of(ChatTemplate(MISTRAL, "here", BytesConfig().build())) is None  # a mark that is text, and none behind


@pytest.mark.parametrize(
    ("field", "text", "calls"),
    [
        ("parameters", '{"name": "f", "parameters": {"a": "é"}}', [("f", '{"a": "é"}')]),
        ("parameters", ' \n{"name": "f", "parameters": {}}\n', [("f", "{}")]),
        (
            "arguments",
            '[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}, "id": "x"}]',
            [("f", '{"a": 1}'), ("g", "{}")],
        ),
        ("arguments", '{"name": "Bob"}', []),
        ("arguments", '[{"name": "f", "arguments": {}}, 1]', []),
        ("arguments", "[]", []),
        ("parameters", '{"name": "f", "parameters": {}} is it', []),
        ("parameters", 'So: {"name": "f", "parameters": {}}', []),
        ("parameters", '{"name": "f", "arguments": {}}', []),
        ("arguments", '{"name": "f", "arguments": "\\ud800"}', []),
        ("arguments", "", []),
        ("arguments", " \n", []),
    ],
)
def test_an_answer_that_is_a_call_alone_is_one(field: str, text: str, calls: list[tuple[str, str]]) -> None:
    """As Llama 3 and Mistral write them. Seen to fail: they stayed text. What is said before anything else is told at once."""
    for size in (1, 3, 1000):
        said = Said(Marks("", "", field))
        begun = "".join(said.push(text[at : at + size]) for at in range(0, len(text), size))
        rest, found = said.end()
        assert [(each["name"], each["arguments"]) for each in functions({"tool_calls": found})] == calls
        assert begun + rest == ("" if calls else text)
        assert (begun == "") == (text.lstrip()[:1] in ("", "{", "["))


@pytest.fixture(scope="module")
def llama(serve: Serve) -> Iterator[httpx.Client]:
    tokenizer = BytesConfig().build(extra=HEADERS)
    tokenizer.chat_template = LLAMA
    with serve(spoken=tokenizer) as found:
        yield found


def test_a_server_of_such_a_model_tells_its_calls(llama: httpx.Client) -> None:
    body = asked('{"name": "f", "parameters": {"a": "é"}}')
    (choice,) = choices(llama, CHAT, body)
    assert (choice["message"]["content"], functions(choice["message"]), choice["finish_reason"]) == (None, CALLED[:1], "tool_calls")
    found, why = streamed(llama, body)
    assert (found["content"], functions(found), why) == ("", CALLED[:1], "tool_calls")
    assert streamed(llama, asked("I do not."))[0]["content"] == "I do not."
    (chosen,) = choices(llama, CHAT, body | {"regex": None, "tools": TWO_TOOLS, "tool_choice": "required", "max_tokens": 500, "seed": 1})
    (called,) = functions(chosen["message"])
    assert called["name"] in ("f", "g") and json.loads(called["arguments"]) in ({"a": "é"}, {"a": 2})


def test_a_request_may_set_variables_of_the_template(caller: httpx.Client) -> None:
    """As vLLM's clients switch Qwen3's thoughts off."""
    body = asked("Yes.")
    plain, brief = (caller.post(CHAT, json=body | {"chat_template_kwargs": {"brief": on}}).json() for on in (False, True))
    assert brief["usage"]["prompt_tokens"] - plain["usage"]["prompt_tokens"] == len("Briefly. ")
    for given, says in (({"enable_thinking": False}, "does not read enable_thinking"), ({"tools": []}, "tools is not for requests to set")):
        answer = caller.post(CHAT, json=body | {"chat_template_kwargs": given})
        assert answer.status_code == 400 and says in answer.json()["error"]["message"]


SCHEMA = {"type": "object", "properties": {"a": {"$ref": "#/$defs/A"}}, "required": ["a"], "additionalProperties": False}
SCHEMA["$defs"] = {"A": {"enum": ["é", 2]}}  # as pydantic writes models within models
TWO_TOOLS = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("f", "g")]


@pytest.mark.slow
@pytest.mark.parametrize("chosen", ["required", {"type": "function", "function": {"name": "g"}}])
def test_a_call_may_be_asked_for(caller: httpx.Client, chosen: Any) -> None:
    """Of arguments by the tool's schema, which a model of random weights would never write. Seen to fail: both were refused, then
    those whose schema has a reference."""
    body: Tree = {"messages": [{"role": "user", "content": "?"}], "tools": TWO_TOOLS, "tool_choice": chosen, "max_tokens": 500, "seed": 1}
    for seed in range(3):
        (choice,) = choices(caller, CHAT, body | {"seed": seed, "logit_bias": {"260": 100}})  # <|im_end|>, as soon as it may come
        (called,) = functions(choice["message"])
        assert called["name"] in ("f", "g") if chosen == "required" else called["name"] == "g"
        assert json.loads(called["arguments"]) in ({"a": "é"}, {"a": 2}) and choice["message"]["content"] is None
        assert choice["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"tools": None}, "there are no tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "h"}}}, "tool_choice: 'h' is none of the tools"),
        ({"tool_choice": {"type": "function"}}, 'tool_choice: {"type": "function"} names no function'),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"regex": "a"}, "tool_choice: another key says too what the answer is"),
        ({"response_format": {"type": "json_object"}}, "tool_choice: another key says too what the answer is"),
        ({"tools": [{"type": "function"}]}, "tools: "),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": "a"}}]}, 'tools: parameters of f are "a"'),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "not": {}}}}]},
            "tools: tool_choice enforces their schemas; ",
        ),
        ({"parallel_tool_calls": False, "tool_choice": "auto"}, "parallel_tool_calls: false holds where tool_choice asks for a call"),
    ],
)
def test_a_call_that_cannot_be_asked_for_is_refused(caller: httpx.Client, more: Tree, says: str) -> None:
    body = {"messages": [{"role": "user", "content": "?"}], "tools": TWO_TOOLS, "tool_choice": "required"} | more
    found = caller.post(CHAT, json={key: value for key, value in body.items() if value is not None})
    assert found.status_code == 400 and says in found.json()["error"]["message"], found.text


@pytest.mark.parametrize("asked_for", ["required", {"type": "function", "function": {"name": "f"}}])
def test_a_single_call_is_what_clients_ask_for_that_want_structured_output(caller: httpx.Client, asked_for: str | Tree) -> None:
    """As LangChain's with_structured_output does, with the function named. Seen to fail: it was refused."""
    empty = {"type": "object", "properties": {}, "additionalProperties": False}
    tools = [{"type": "function", "function": {"name": name, "parameters": empty}} for name in ("f", "g")]
    body = {"messages": [{"role": "user", "content": "?"}], "tools": tools, "tool_choice": asked_for, "max_tokens": 200}
    for seed in range(6):
        (found,) = choices(caller, CHAT, body | {"parallel_tool_calls": False, "seed": seed, "temperature": 2.0})
        assert found["finish_reason"] == "tool_calls" and len(found["message"]["tool_calls"]) == 1
    counts = [
        len(choices(caller, CHAT, body | {"seed": seed, "temperature": 2.0})[0]["message"].get("tool_calls", [])) for seed in range(6)
    ]
    assert (max(counts) > 1) == (asked_for == "required")


def test_a_template_without_marks_cannot_be_asked_for_a_call(client: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": "?"}], "tools": TWO_TOOLS, "tool_choice": "required"}
    assert "how the model's chat template writes calls is not known" in client.post(CHAT, json=body).json()["error"]["message"]


def test_the_grammar_of_calls_is_what_the_template_writes(caller: httpx.Client) -> None:
    """So that a forced call has the tokens of one that the model learned."""
    body = {"messages": [{"role": "user", "content": "?"}], "tools": TOOLS, "tool_choice": "required", "max_tokens": 40, "seed": 3}
    (found,) = choices(caller, CHAT, body)
    assert found["finish_reason"] == "length" and found["message"]["content"].startswith('<tool_call>\n{"name": "f", "arguments": {')


def test_thoughts_of_an_earlier_answer_are_given_to_the_template_or_refused(caller: httpx.Client, client: httpx.Client) -> None:
    """As clients of reasoning models send an answer back. Seen to fail: both fields were no keys."""
    body, answer = asked("Yes."), {"role": "assistant", "content": "No."}
    plain = caller.post(CHAT, json=body | {"messages": [*body["messages"], answer]}).json()["usage"]["prompt_tokens"]
    for name in ("reasoning_content", "reasoning"):
        messages = [*body["messages"], answer | {name: "hm"}]
        assert caller.post(CHAT, json=body | {"messages": messages}).json()["usage"]["prompt_tokens"] == plain + 2
        assert "writes no thoughts" in client.post(CHAT, json={"messages": messages}).json()["error"]["message"]
