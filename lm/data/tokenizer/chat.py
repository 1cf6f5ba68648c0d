"""Chats as tokens: a chat template writes them as text, in which the assistant's answers are learned."""

import json
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import dropwhile
from typing import Any, NamedTuple

from lm.data.sources.base import ASSISTANT, THOUGHTS, TOOLS, Turn
from lm.data.tokenizer.rendering import CLOSE, OPEN
from lm.data.tokenizer.sandbox import Template
from lm.data.tokenizer.templates import for_tools
from lm.data.tokenizer.tokenizer import Tokenizer
from lm.errors import ConfigError
from lm.schema import Tree

_BREAK = "\ufdd2"  # inserted into special tokens that a message spells, so that they stay text
_HERE = "\ufdd3"  # stands where an answer is, or goes on
_GENERATION = re.compile(r"{%[-+]?\s*generation\b")
_HELD = str.maketrans(dict.fromkeys((OPEN, CLOSE, _BREAK), "\ufffd"))


class Run(NamedTuple):
    """A stretch of a chat that is all learned, or all not: texts, and ids of special tokens that the template wrote."""

    parts: list[int | str]
    learned: bool


class ChatTemplate:
    """Turns messages into runs. Only special tokens that the template writes become special: those that a message spells stay text.

    `{% generation %}` in the template marks what is learned; without it, what each assistant's message adds to the text is learned.
    """

    def __init__(self, source: str, where: str, tokenizer: Tokenizer) -> None:
        self._template = Template(source, where)
        self._marks = _GENERATION.search(source) is not None
        self._source, self._where, self._tokenizer = source, where, tokenizer
        self._names = {"bos_token": tokenizer.specials.bos or "", "eos_token": tokenizer.specials.eos or ""}

    @cached_property
    def with_tools(self) -> "ChatTemplate":
        """The template of chats with tools: of a tokenizer's several tool_use, as in transformers, and else this one."""
        own = for_tools(self._source, self._tokenizer.templates)
        return self if own is None else ChatTemplate(own, self._where, self._tokenizer)

    def runs(self, turns: Sequence[Turn]) -> list[Run]:
        """Returns the non-empty runs of a chat. Raises ConfigError where turns have tools or tool calls that the template never writes."""
        if _has_tools(turns) and self.with_tools is not self:
            return self.with_tools.runs(turns)
        messages, names = self._named(turns)
        texts: Iterable[tuple[str, bool]] = self._marked(messages, names) if self._marks else self._compared(messages, names)
        return [Run(self._split(text), learned) for text, learned in texts if text]

    def question(self, turns: Sequence[Turn], goes_on: bool = False) -> list[int | str]:
        """Returns texts and special ids of a chat up to the beginning of the assistant's next answer.  goes_on: up to the end of what the
        last message, the assistant's, says, as transformers' continue_final_message. Raises ConfigError where it is not the assistant's."""
        own = self.with_tools if _has_tools(turns) else self
        return own._asked(*own._named(turns), goes_on)

    def whole(self, turns: Sequence[Turn]) -> list[int | str]:
        """Returns texts and special ids of a chat as it stands."""
        own = self.with_tools if _has_tools(turns) else self
        return own._asked(*own._named(turns), goes_on=False, ask=False)

    def asking(self, messages: Sequence[Tree], names: Tree, goes_on: bool = False) -> list[int | str]:
        """Returns the same as `question`, of messages with further fields.  names: other variables for the template, such as tools."""
        own = self.with_tools if TOOLS in names else self
        return own._asked(self._held(_with_arguments([own._renamed(message) for message in messages])), self._held(names), goes_on)

    def mentions(self, name: str) -> bool:
        """Returns whether this name occurs in the template's source."""
        return re.search(rf"\b{name}\b", self._source) is not None

    @cached_property
    def thought_fields(self) -> list[str]:
        """The fields of thoughts that the template reads: m.thinking, m['thinking'] or 'thinking' in m."""
        return [name for name in THOUGHTS if re.search(rf"\.{name}\b|([\"']){name}\1", self._source)]

    def closing(self) -> list[int | str]:
        """Returns what the template writes after an answer, from the special token on that ends it; [] where it writes none."""
        text = self._text([{"role": "user", "content": _HERE}, {"role": ASSISTANT, "content": _HERE}], {})
        behind = text.rpartition(_HERE)[2].replace(CLOSE, "")
        return [*dropwhile(lambda part: isinstance(part, str), self._split(behind))]

    def replying(self, role: str) -> Callable[[str], list[int | str]]:
        """Returns what tells, for a reply of this role, all that the template writes between an answer and the next one, from the special
        token on that ends the answer, if one does: some trim a reply, others write it as JSON. Raises ConfigError where it writes none."""
        probed = self._replied(role, _HERE)
        if probed.count(_HERE) != 3:
            raise ConfigError(f"{self._where}: the chat template does not write a reply of the role {role}. Use another.")
        first, *others = self._split(probed.split(_HERE)[2]) or [""]
        before = first if others and isinstance(first, str) else ""
        return lambda reply: self._split(self._replied(role, self._plain(reply)).split(_HERE, 2)[2].removeprefix(before))

    def _replied(self, role: str, reply: str) -> str:
        said = [("user", _HERE), (ASSISTANT, _HERE), (role, reply)]
        text = self._text([{"role": each, "content": content} for each, content in said], {}, ask=True)
        return text.replace(OPEN, "").replace(CLOSE, "")

    def opening(self) -> list[int | str]:
        """Returns what the template writes between the request for an answer and one without thoughts: Qwen3's empty ones; or []."""
        user = {"role": "user", "content": _HERE}
        asked, answered = self._text([user], {}, ask=True), self._text([user, {"role": ASSISTANT, "content": _HERE}], {})
        before = answered.rpartition(_HERE)[0].replace(OPEN, "")
        return self._split(before.removeprefix(asked)) if before.startswith(asked) else []

    def _asked(self, messages: Sequence[Tree], names: Tree, goes_on: bool, ask: bool = True) -> list[int | str]:
        text = self._begun(messages, names) if goes_on else self._text(messages, names, ask)
        return self._split(text.replace(OPEN, "").replace(CLOSE, ""))

    def _begun(self, messages: Sequence[Tree], names: Tree) -> str:
        """Returns the text up to the end of the last message's content, whose blanks are cut off where the template does so."""
        *before, last = messages
        if last["role"] != ASSISTANT or last.get("tool_calls"):
            raise ConfigError("continue_final_message: the last message is no text of the assistant. End with one, or leave this out.")
        found, here, behind = self._text([*before, {**last, "content": f"{last['content']}{_HERE} "}], names).rpartition(_HERE)
        if not here:
            raise ConfigError(f"continue_final_message: the chat template of {self._where} leaves the last message out. Leave this out.")
        return found if behind.startswith(" ") else found.rstrip()

    def _marked(self, messages: list[Tree], names: Tree) -> Iterator[tuple[str, bool]]:
        for number, part in enumerate(self._text(messages, names).split(OPEN)):
            learned, _, rest = part.partition(CLOSE) if number else ("", "", part)
            yield learned, True
            yield rest, False

    def _compared(self, messages: list[Tree], names: Tree) -> list[tuple[str, bool]]:
        """Returns (text, learned). An answer is the text rendered with it minus the text rendered to ask for it (add_generation_prompt)."""
        done, found = "", list[tuple[str, bool]]()
        for number, message in enumerate(messages):
            if message["role"] != ASSISTANT:
                continue
            if number == 0 and not self._opens(messages, names):
                continue
            asked, answered = self._text(messages[:number], names, ask=True), self._text(messages[: number + 1], names)
            if found and not asked.startswith(done):
                end, both = self._last_end(found[-1][0]), (done, self._text(messages[:number], names))
                if all(text.endswith(end) and asked.startswith(text.removesuffix(end)) for text in both):
                    done, found[-1] = done.removesuffix(end), (found[-1][0].removesuffix(end), True)
            if not asked.startswith(done) or not answered.startswith(asked):
                return self._replaced(messages, names)
            found += [(asked[len(done) :], False), (answered[len(asked) :], True)]
            done = answered
        return found

    def _replaced(self, messages: list[Tree], names: Tree) -> list[tuple[str, bool]]:
        """Returns the same for a template that writes an answer otherwise once messages follow, as Qwen3's does: of the whole chat's text
        what another answer in its place would change, from the request for an answer to the special token behind it."""
        answers = [number for number, message in enumerate(messages) if message["role"] == ASSISTANT]
        messages = messages[: answers[-1] + 1]
        whole, asking = self._text(messages, names), self._text(messages[:-1], names, ask=True)
        request = asking.removeprefix(self._text(messages[:-1], names))
        around = [self._around(messages, number, names) for number in answers]
        ends = bool(self._first_end(around[-1][1]))  # else a special token behind an answer begins the next message, as GLM's <|user|> does
        done, found = 0, list[tuple[str, bool]]()
        for number, (before, behind) in zip(answers, around, strict=True):
            same, end, last = _alike(whole, before), len(whole) - len(behind), number == answers[-1]
            thoughts = [whole.rfind(messages[number][name].strip(), done, same) for name in THOUGHTS if messages[number].get(name)]
            upto = min((at for at in thoughts if at >= 0), default=same)  # gpt-oss's thoughts are a message of their own
            asked = whole.rfind(request, done, upto) if request else -1
            start = same if asked < 0 else asked + len(request)
            told = asked >= 0 or (same == len(before) and not _misplaced(messages[number], whole[done:start], whole[start:end], last))
            if not last and messages[number + 1]["role"] == "tool":  # Gemma 4's writes what a tool returns into the answer that called it
                told = told and end <= _alike(whole, self._around(messages, number + 1, names)[0])
            if not (told and whole.endswith(behind) and done <= start <= end):
                raise ConfigError(
                    f"{self._where}: the chat template rewrites message {number + 1} or those around it, so what is learned cannot be told."
                    " Put {% generation %} around the assistant's part of it."
                )
            end = len(whole) if last else end + len(self._first_end(behind) if ends else "")
            found += [(whole[done:start], False), (whole[start:end], True)]
            done = end
        return found

    def _around(self, messages: list[Tree], number: int, names: Tree) -> tuple[str, str]:
        """Returns the text before and behind _HERE, where a message says that and calls no tools; or where it calls one with that, from
        the next special token on (gpt-oss's fails where a tool returns what was not called); what no text has where neither can be."""
        message = messages[number]
        said = {**{name: value for name, value in message.items() if name != "tool_calls"}, "content": _HERE}
        calls = [{**call, "function": {**call.get("function", call), "arguments": {_HERE: ""}}} for call in message.get("tool_calls", [])]
        for other in (said, {**message, "tool_calls": calls[:1]}) if calls else (said,):
            with suppress(ConfigError):
                before, here, behind = self._text([*messages[:number], other, *messages[number + 1 :]], names).partition(_HERE)
                first = self._tokenizer.split_specials(behind)[0] if other is not said and behind else ""
                return before, (behind.removeprefix(first) if isinstance(first, str) else behind) if here else _HERE
        return _HERE, _HERE

    def _first_end(self, behind: str) -> str:
        """Returns the special token, and blanks before it, with which a text begins; '' where it begins with something else."""
        first, *others = [*self._tokenizer.split_specials(behind), "."]
        blank, special = (first, others[0]) if isinstance(first, str) and not first.strip() and others else ("", first)
        return f"{blank}{self._tokenizer.special_names[special]}" if isinstance(special, int) else ""

    def _opens(self, messages: list[Tree], names: Tree) -> bool:
        """Returns whether a first message of the assistant can be asked for; where not, and an answer follows, it is given. Qwen2.5's
        template, for one, reads the role of the first message, and fails where there is none."""
        if not any(message["role"] == ASSISTANT for message in messages[1:]):
            return True  # nothing else is learned
        with suppress(ConfigError):
            return self._text(messages[:1], names).startswith(self._text([], names, ask=True))
        return False

    def _last_end(self, answer: str) -> str:
        """Returns the last special token of an answer and the text behind it: what Phi-3's template writes after the last message alone."""
        parts = self._tokenizer.split_specials(answer)
        first = max((number for number, part in enumerate(parts) if isinstance(part, int)), default=len(parts))
        return "".join(self._tokenizer.special_names[part] if isinstance(part, int) else part for part in parts[first:])

    def _text(self, messages: Sequence[Tree], names: Tree, ask: bool = False) -> str:
        return self._template.render(messages, {**self._names, **names, "add_generation_prompt": ask})

    def _named(self, turns: Sequence[Turn]) -> tuple[list[Tree], Tree]:
        """Returns the messages, and the other variables by name, as the template gets them."""
        names: Tree = {turn.role: json.loads(turn.text) for turn in turns if turn.role == TOOLS}
        also = [self._renamed(json.loads(turn.also or "{}")) for turn in turns]
        for name in (*names, *(name for of in also for name in of if name in ("tool_calls", *THOUGHTS))):
            if not (name in self.thought_fields if name in THOUGHTS else self.mentions(name)):
                such = "" if name in THOUGHTS else ", such as data.record.template=chatml"
                remedy = f"Leave them out, or use a template that does{such}."
                raise ConfigError(f"{self._where}: the chat template writes no {name}, and a record has some. {remedy}")
        messages = [{"role": turn.role, "content": turn.text, **of} for turn, of in zip(turns, also, strict=True) if turn.role != TOOLS]
        return self._held(_with_arguments(messages)), self._held(names)

    def _renamed(self, message: Tree) -> Tree:
        """Returns the message with its thoughts in the fields that the template reads, if any, as transformers 5 gives them."""
        thoughts = [message[name] for name in (*self.thought_fields, *THOUGHTS) if message.get(name)]
        if not thoughts or not self.thought_fields:
            return message
        return {key: held for key, held in message.items() if key not in THOUGHTS} | dict.fromkeys(self.thought_fields, thoughts[0])

    def _held(self, value: Any) -> Any:
        """Returns the value with the special tokens in all of its texts broken up, so that they stay text."""
        if isinstance(value, dict):
            return {self._plain(key): self._held(each) for key, each in value.items()}
        if isinstance(value, list):
            return [self._held(each) for each in value]
        return self._plain(value) if isinstance(value, str) else value

    def _plain(self, text: str) -> str:
        """Returns the text with every special token in it broken up."""
        parts = self._tokenizer.split_specials(text.translate(_HELD))
        names = [self._tokenizer.special_names[part] if isinstance(part, int) else part for part in parts]
        return "".join(name[:1] + _BREAK + name[1:] if isinstance(part, int) else name for name, part in zip(names, parts, strict=True))

    def _split(self, text: str) -> list[int | str]:
        parts = self._tokenizer.split_specials(text)
        return [part.replace(_BREAK, "") if isinstance(part, str) else part for part in parts]


def _has_tools(turns: Sequence[Turn]) -> bool:
    return any(turn.role == TOOLS for turn in turns)


def _alike(text: str, other: str) -> int:
    """Returns how many characters two texts begin with."""
    return bisect_left(range(min(len(text), len(other))), True, key=lambda at: text[: at + 1] != other[: at + 1])


def _misplaced(message: Tree, given: str, learned: str, last: bool) -> bool:
    """Returns whether an answer's thoughts are before what is learned of it, as behind Qwen3.5's empty ones, or the last answer is not all
    of that: R1's template cuts thoughts off."""
    thoughts = [message[name].strip() for name in THOUGHTS if message.get(name)]
    return any(thought in given for thought in thoughts) or (last and message["content"].strip() not in learned)


def _with_arguments(messages: Sequence[Tree]) -> list[Tree]:
    """Returns the messages with tool-call arguments as objects, which templates expect; OpenAI's format has them as JSON texts."""
    return [
        {**message, "tool_calls": [_read(call) for call in message["tool_calls"]]} if message.get("tool_calls") else message
        for message in messages
    ]


def _read(call: Any) -> Any:
    if not isinstance(call, dict):
        return call
    found = {key: _read(value) if key == "function" else value for key, value in call.items()}
    with suppress(ValueError):
        found |= {"arguments": json.loads(found["arguments"])} if isinstance(found.get("arguments"), str) else {}
    return found
