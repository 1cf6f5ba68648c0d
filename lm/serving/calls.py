"""Calls of tools in a model's answers: how the model's chat template writes them, and how they are found in a text."""

import json
import re
import secrets
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from lm.data.sources.base import ASSISTANT, TOOLS, Turn
from lm.data.tokenizer.chat import ChatTemplate
from lm.errors import ConfigError
from lm.schema import Tree

_TOOL: Tree = {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {"type": "object", "properties": {}}}}
_CALL: Tree = {"name": "look", "arguments": {"at": "it"}}
_FIELDS = ("arguments", "parameters")
_AS_TOJSON = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}  # blanks as chat templates write them
_SPECIAL = "\0"  # stands for a special token


class Marks(NamedTuple):
    """What a chat template writes before and behind the JSON of a call, an object of name and arguments, without blanks around it: of
    Hermes' and Qwen's <tool_call> and </tool_call>. Both are '' where the answer is nothing but that object, as of Llama 3's, or a list
    of such objects, as of Mistral's, which a special token begins that is no text."""

    opening: str
    closing: str
    field: str = "arguments"
    """How the object calls the arguments."""
    listed: bool = False


def marks_of(template: ChatTemplate) -> Marks | None:
    """Returns how the template writes calls; None where it writes none, or otherwise."""
    called = json.dumps({"tool_calls": [{"id": "call00000", "type": "function", "function": _CALL}]})
    turns = [Turn(TOOLS, json.dumps([_TOOL])), Turn("user", "Look."), Turn(ASSISTANT, "", called)]
    with suppress(ConfigError):
        said = _flat(template.whole(turns)).removeprefix(_flat(template.question(turns[:-1])))
        for brace in re.finditer("{", said):
            with suppress(ValueError):
                found, end = json.JSONDecoder().raw_decode(said, brace.start())
                field = next((name for name in _FIELDS if found.get(name) == _CALL["arguments"]), None)
                if field is None or found.get("name") != _CALL["name"]:
                    continue
                before, behind = said[: brace.start()].rpartition(_SPECIAL)[2].split(), said[end:].partition(_SPECIAL)[0].split()
                if (before, behind) in (([], []), (["["], ["]"])):
                    return Marks("", "", field, listed=bool(before))
                if before and behind and len(found) == len(_CALL):
                    return Marks(before[-1], behind[0], field)
    return None


def _flat(parts: Sequence[int | str]) -> str:
    return "".join(part if isinstance(part, str) else _SPECIAL for part in parts)


def grammar_of(marks: Marks, tools: Sequence[Tree], one: str | None, single: bool = False) -> str:
    """Returns the grammar of calls between these marks, one below the other, each with arguments of its tool's schema.  one: a single call,
    of the tool of this name.  single: a single call, of any."""
    wanted = [(name, schema) for name, schema in map(declared, tools) if one in (None, name)]
    more = "" if one or single or not marks.opening else ' ("\\n" call)*'
    rules = [f"start: call{more}", f"call: {' | '.join(f'call{n}' for n in range(len(wanted)))}"]
    for n, (name, schema) in enumerate(wanted):  # each schema is a text of its own, whose references lead within it
        begin, end = (f"{marks.opening}\n", f"\n{marks.closing}") if marks.opening else ("", "")
        before, behind = f'{begin}{{"name": {json.dumps(name, ensure_ascii=False)}, "{marks.field}": ', f"}}{end}"
        rules.append(f"call{n}: {json.dumps(before)} arguments{n} {json.dumps(behind)}")
        rules.append(f"arguments{n}: %json {json.dumps({**schema, 'x-guidance': _AS_TOJSON})}")
    return "\n".join(rules)


def declared(tool: Tree) -> tuple[str, Tree]:
    """Returns a tool's name, and the schema of its arguments. Raises ConfigError where it has no name, or that is no schema."""
    of = tool.get("function", tool)
    if not isinstance(of, dict) or not isinstance(of.get("name"), str):
        raise ConfigError(f'tools: {json.dumps(tool)[:80]} has no name. Write {{"type": "function", "function": {{"name": ...}}}}.')
    schema = of.get("parameters") or {"type": "object"}
    if not isinstance(schema, dict):
        raise ConfigError(f"tools: parameters of {of['name'][:80]} are {json.dumps(schema)[:80]}. Give a JSON schema, an object.")
    return of["name"], schema


class Said:
    """Divides the text of one sample, as it comes, into what it says and the calls of tools in it."""

    def __init__(self, marks: Marks | None) -> None:
        """marks: None: all of the text is said."""
        self._marks, self._held = marks, ""

    def push(self, text: str) -> str:
        """Returns what is said for sure now: nothing from a call on, nor what may begin one, nor blanks before it."""
        if self._marks is None:
            return text
        held, opening = self._held + text, self._marks.opening
        if not opening:  # a call from the very first, or none
            self._held, said = (held, "") if held.lstrip()[:1] in ("", "{", "[") else ("", held)
            self._marks = None if said else self._marks
            return said
        begun = (n for n in range(min(len(opening), len(held)), 0, -1) if opening.startswith(held[-n:]))
        at = held.find(opening) if opening in held else len(held) - next(begun, 0)
        said = held[:at].rstrip()
        self._held = held[len(said) :]
        return said

    def end(self) -> tuple[str, list[Tree]]:
        """Returns the rest of what is said, and the calls as of OpenAI's API; none, and all of the text, where one of them is broken."""
        if self._marks is None or self._marks.opening not in self._held:
            return self._held, []
        if not self._marks.opening:
            calls = _bare_calls(self._held, self._marks.field)
            return ("", calls) if calls else (self._held, [])
        pattern = rf"{re.escape(self._marks.opening)}(.*?){re.escape(self._marks.closing)}"
        rest = re.sub(pattern, "", self._held, flags=re.DOTALL)
        found = [_call(text, self._marks.field) for text in re.findall(pattern, self._held, re.DOTALL)]
        whole = [call for call in found if call is not None]
        if len(whole) < len(found) or self._marks.opening in rest:
            return self._held, []
        return (rest if rest.strip() else ""), whole


def _bare_calls(text: str, field: str) -> list[Tree]:
    """Returns the calls that a text is, one or a list of them, each with its arguments; [] where it is anything else."""
    with suppress(ValueError, RecursionError):
        found = json.loads(text)
        calls = [
            _call_of(each, field) for each in (found if isinstance(found, list) else [found]) if isinstance(each, dict) and field in each
        ]
        whole = [call for call in calls if call is not None]
        return whole if len(whole) == (len(found) if isinstance(found, list) else 1) else []
    return []


def _call(text: str, field: str) -> Tree | None:
    """Returns the call in a text; None where it is not the JSON of an object with a name, and with arguments unless it has nothing else."""
    with suppress(ValueError, RecursionError):
        found = json.loads(text)
        return _call_of(found, field) if isinstance(found, dict) and (field in found or len(found) == 1) else None
    return None


def _call_of(found: Tree, field: str) -> Tree | None:
    """Returns the call as of OpenAI's API; None where it has no name. Raises ValueError for what could not be sent: NaN, infinity, and half
    a surrogate pair, which JSON can spell."""
    if not isinstance(name := found.get("name"), str):
        return None
    given = found.get(field, {})
    arguments = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False, allow_nan=False)
    f"{name}{arguments}".encode()
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": {"name": name, "arguments": arguments}}
