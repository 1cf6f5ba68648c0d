"""Chats and preferences in their usual forms are told by their fields, and a handful of them is enough to validate on."""

import json
from pathlib import Path
from typing import Any

import pytest

from lm.data.records.base import RecordConfig
from lm.data.records.chat import ChatRecord
from lm.data.records.preference import PreferenceRecord
from lm.data.records.prompt import PromptRecord
from lm.data.records.rated import RatedRecord
from lm.data.sources.base import Turn
from lm.data.sources.files import TextConfig
from lm.data.store.prepare import Prepared, prepare
from lm.data.tokenizer.config import BytesConfig
from lm.errors import ConfigError

Q, A, WORSE = "What is it?", "A lamp.", "No."
ASKED = [Turn("user", Q), Turn("assistant", A)]
USER, BOT, BAD = {"role": "user", "content": Q}, {"role": "assistant", "content": A}, {"role": "assistant", "content": WORSE}
CHATS: dict[str, tuple[dict[str, Any], list[Turn]]] = {
    "OpenAI (messages)": ({"messages": [USER, BOT]}, ASKED),
    "ShareGPT (conversations)": ({"id": "7", "conversations": [{"from": "human", "value": Q}, {"from": "gpt", "value": A}]}, ASKED),
    "Alpaca (instruction, output)": (
        {"instruction": Q, "input": "On the table", "output": A, "text": "all"},
        [Turn("user", f"{Q}\n\nOn the table"), ASKED[1]],
    ),
    "prompt and completion (prompt, completion)": ({"prompt": Q, "completion": A, "messages": None}, ASKED),
    "question and answer (question, answer)": ({"question": Q, "answer": A}, ASKED),
}
ALSO: list[tuple[dict[str, Any], list[Turn]]] = [
    ({"conversations": [USER, BOT]}, ASKED),
    ({"messages": [{"from": "system", "value": "Be brief."}, USER, BOT]}, [Turn("system", "Be brief."), *ASKED]),
    ({"instruction": Q, "output": A}, ASKED),
    ({"instruction": Q, "input": "", "output": A}, ASKED),
    ({"instruction": Q, "input": None, "output": A}, ASKED),
    ({"prompt": [USER], "completion": [BOT]}, ASKED),
]
PAIR = [Turn("user", Q), Turn("chosen", A), Turn("rejected", WORSE)]
PREFERENCES: dict[str, dict[str, Any]] = {
    "texts": {"prompt": Q, "chosen": A, "rejected": WORSE},
    "messages": {"chosen": [USER, BOT], "rejected": [USER, BAD]},
    "messages with the prompt beside them": {"prompt": Q, "chosen": [USER, BOT], "rejected": [USER, BAD]},
    "messages behind a prompt of messages": {"prompt": [USER], "chosen": [BOT], "rejected": [BAD]},
    "messages behind a text": {"question": Q, "chosen": [BOT], "rejected": [BAD]},
    "ShareGPT": {
        "conversations": None,
        "prompt": [{"from": "human", "value": Q}],
        "chosen": A,
        "rejected": [{"from": "gpt", "value": WORSE}],
    },
    "LLaMA-Factory": {
        "conversations": [{"from": "human", "value": Q}],
        "chosen": {"from": "gpt", "value": A},
        "rejected": {"from": "gpt", "value": WORSE},
    },
    "texts of hh-rlhf": {"chosen": f"\n\nHuman: {Q}\n\nAssistant: {A}", "rejected": f"\n\nHuman: {Q}\n\nAssistant: {WORSE}\n"},
    "a prompt of hh-rlhf's form": {"prompt": f"\n\nHuman: {Q}\n\nAssistant:", "chosen": A, "rejected": WORSE},
    "a prompt beside the conversation it is from": {"conversations": [USER, BOT], "prompt": Q, "chosen": A, "rejected": WORSE},
}


SYSTEM = Turn("system", "Be brief.")


@pytest.mark.parametrize("values", [values for values, _ in [*CHATS.values(), *ALSO]])
def test_a_system_prompt_beside_a_chat_is_its_first_message(values: dict[str, Any]) -> None:
    """Seen to fail: it was left out without a word, as of ShareGPT's and Orca's records."""
    bare, own = turns(ChatRecord(), values), {**values, "system": "Be brief."}
    assert turns(ChatRecord(), own) == [SYSTEM, *(turn for turn in bare if turn != SYSTEM)]
    assert turns(ChatRecord(), {**values, "system": " "}) == turns(ChatRecord(), {**values, "system": None}) == bare
    assert turns(ChatRecord(messages="messages"), {**own, "messages": [USER, BOT]}) == ASKED
    pair = {"question": Q, "chosen": A, "rejected": WORSE, "system": "Be brief."}
    assert turns(PreferenceRecord(), pair) == [SYSTEM, *PAIR] and turns(PreferenceRecord(prompt="question"), pair) == PAIR
    assert turns(PreferenceRecord(system="rules"), {**pair, "rules": "Be brief."}) == [SYSTEM, *PAIR]
    with pytest.raises(ConfigError, match=r"^here: field 'rules' is missing; .* Set data.record.system"):
        turns(ChatRecord(system="rules"), own)
    begun = {"system": "Other.", "chosen": [{"role": "system", "content": "Be brief."}, USER, BOT]}
    assert turns(PreferenceRecord(), begun | {"rejected": [*begun["chosen"][:2], BAD]}) == [SYSTEM, *PAIR]


def test_the_history_beside_a_question_is_its_earlier_turns() -> None:
    """As LLaMA-Factory's Alpaca records have it. Seen to fail: it was left out without a word, of preferences too."""
    pairs = [["Hi?", "Hello."], ["And?", "Well."]]
    earlier = [Turn("user", "Hi?"), Turn("assistant", "Hello."), Turn("user", "And?"), Turn("assistant", "Well.")]
    alpaca = {"instruction": Q, "input": "", "output": A}
    for history in (pairs, json.dumps(pairs)):
        assert turns(ChatRecord(), {**alpaca, "history": history, "system": "Be brief."}) == [SYSTEM, *earlier, *ASKED]
        assert turns(ChatRecord(user=["q"], assistant="a", history="h"), {"q": Q, "a": A, "h": history}) == [*earlier, *ASKED]
    assert ChatRecord().recognised({**alpaca, "history": pairs}, "here")[1] == "Alpaca (instruction, output, history)"
    for none in ([], None, "", "[]", "of the lamp"):
        assert turns(ChatRecord(), {**alpaca, "history": none}) == ASKED
    for bad in (["Hi?", "Hello."], [["Hi?"]], [{"role": "user"}]):
        with pytest.raises(ConfigError, match=r"^here: field 'history' holds .*, not a list of pairs of texts\. Fix the record"):
            turns(ChatRecord(), {**alpaca, "history": bad})
    with pytest.raises(ConfigError, match=r"^here: field 'history' holds null, not a string"):
        turns(ChatRecord(), {**alpaca, "history": [["Hi?", None]]})
    pair = {"instruction": Q, "chosen": A, "rejected": WORSE, "history": pairs}
    assert turns(PreferenceRecord(), {**pair, "system": "Be brief."}) == [SYSTEM, *earlier, *PAIR]
    assert PreferenceRecord().recognised(pair, "here")[1] == "instruction, chosen, rejected, history"
    whole = {"chosen": [USER, BOT], "rejected": [USER, BAD], "history": pairs}  # nothing is asked beside these, so they are all of it
    assert (turns(PreferenceRecord(), whole), PreferenceRecord().recognised(whole, "here")[1]) == (PAIR, "chosen, rejected")
    assert turns(PreferenceRecord(), {**pair, "history": "of the lamp"}) == turns(PreferenceRecord(prompt="instruction"), pair) == PAIR
    begun = [{"role": "system", "content": "Be brief."}, USER]  # seen to fail: the system message came behind the earlier turns
    assert turns(PreferenceRecord(), {"prompt": begun, "chosen": A, "rejected": WORSE, "history": pairs}) == [SYSTEM, *earlier, *PAIR]
    assert turns(ChatRecord(), {"prompt": begun, "completion": A, "history": pairs}) == [SYSTEM, *earlier, *ASKED]
    with pytest.raises(ConfigError, match="with or without history"):
        ChatRecord(messages="messages", history="history")


def test_the_input_beside_an_instruction_is_part_of_a_preferences_prompt() -> None:
    """Seen to fail: it was left out without a word."""
    pair = {"instruction": Q, "input": "On the table", "chosen": A, "rejected": WORSE}
    assert turns(PreferenceRecord(), pair)[0] == Turn("user", f"{Q}\n\nOn the table")
    assert PreferenceRecord().recognised(pair, "here")[1] == "instruction, input, chosen, rejected"
    assert turns(PreferenceRecord(), {**pair, "input": " "}) == turns(PreferenceRecord(prompt="instruction"), pair) == PAIR


def test_a_margin_beside_a_preference_is_said_to_be_unread() -> None:
    """TRL's loss of a reward model subtracts it."""
    pair = {"prompt": "a", "chosen": "b", "rejected": "c"}
    said = PreferenceRecord().recognised(pair | {"margin": 0.5}, "here")[1]
    assert said == "prompt, chosen, rejected; margin is not read, so that all pairs count alike"
    assert PreferenceRecord().recognised(pair | {"margin": None}, "here")[1] == "prompt, chosen, rejected"


def test_texts_that_begin_with_the_prompt_are_the_turns_that_they_tell() -> None:
    """As of hh-rlhf, and as TRL's script cuts it. Seen to fail: none of the fields was the prompt."""
    asked = f"\n\nHuman: Hi.\n\nHow are you?\n\nAssistant: Well.\n\nHuman: {Q}\n\nAssistant:"
    values = {"chosen": f"{asked} {A}", "rejected": f"{asked} {WORSE}"}
    assert turns(PreferenceRecord(), values) == [Turn("user", "Hi.\n\nHow are you?"), Turn("assistant", "Well."), *PAIR]
    assert PreferenceRecord().recognised(values, "here")[1] == "chosen, rejected as dialogues of Human and Assistant"
    beside = {"prompt": Q, "chosen": f"\n\nHuman: {Q}", "rejected": WORSE}  # an answer, as strange as it is
    assert turns(PreferenceRecord(), beside)[1] == Turn("chosen", f"\n\nHuman: {Q}")
    for chosen, said in (
        (f"{asked} {A}\n\nHuman: Thanks.", "does not end with the assistant's message"),
        (f"\n\nHuman: Other.\n\nAssistant: {A}", "do not begin with the same messages"),
        (A, "do not begin with the same messages"),
    ):
        with pytest.raises(ConfigError, match=f"^here: .*{said}.*or set data.on_bad_record=skip"):
            turns(PreferenceRecord(), {**values, "chosen": chosen})


def test_answers_that_begin_with_the_assistants_message_go_on_from_the_prompt() -> None:
    """As TRL joins a prompt with answers of several messages. Seen to fail: the prompt was left out without a word."""
    calls = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look", "arguments": {}}}]}
    for between in ([BOT, USER], [calls, {"role": "tool", "content": "lamp"}]):
        values = {"chosen": [*between, BOT], "rejected": [*between, BAD]}
        read = turns(ChatRecord(), {"messages": [USER, *between, BOT]})
        for prompt in ([USER], Q):
            found = turns(PreferenceRecord(), {"prompt": prompt, **values})
            assert found == [*read[:-1], *PAIR[1:]] == turns(PreferenceRecord(prompt="asked"), {"asked": prompt, **values})
    greeted = {"chosen": [BOT, USER, BOT], "rejected": [BOT, USER, BAD]}
    assert turns(PreferenceRecord(), greeted) == [ASKED[1], *PAIR]


def test_a_prompt_is_read_by_its_fields() -> None:
    again = Turn("assistant", Q)
    for values in ({"prompt": Q}, {"question": Q, "answer": A}, {"messages": [USER]}, {"prompt": [USER], "messages": [USER, BOT]}):
        assert turns(PromptRecord(), values) == [ASKED[0], again]
    assert turns(PromptRecord(), {"prompt": Q, "system": "Be brief.", "history": [["Hi?", "Hello."]]}) == [
        *(SYSTEM, Turn("user", "Hi?"), Turn("assistant", "Hello.")),
        *(ASKED[0], again),
    ]
    assert turns(PromptRecord(prompt="q", answer="a"), {"q": Q, "a": A}) == ASKED
    assert PromptRecord(answer="a").recognised({"prompt": Q, "a": A}, "here")[1] == "prompts (prompt, a)"
    both = PromptRecord(answer=["a", "meta.level"])
    assert turns(both, {"prompt": Q, "a": ["é"], "meta": {"level": 2}})[-1].text == '{"a": ["é"], "meta.level": 2}'
    assert both.recognised({"prompt": Q}, "here")[1] == "prompts (prompt, a, meta.level)"
    assert turns(PromptRecord(answer="a"), {"prompt": Q, "a": 7})[-1].text == "7"
    for record, missing in ((both, "field 'meta.level' is missing"), (PromptRecord(answer="a"), "field 'a' holds null, not a string")):
        with pytest.raises(ConfigError, match=rf"^here: {missing}"):
            turns(record, {"prompt": Q, "a": None})
    for values, said in (
        ({"messages": [USER, BOT]}, "the prompt ends with no message that the assistant could answer"),
        ({"prompt": Q, "question": Q}, "prompt and question could each be the prompt"),
        ({"text": Q}, "its fields are text; none of which is a prompt"),
    ):
        with pytest.raises(ConfigError, match=f"^here: .*{said}"):
            turns(PromptRecord(), values)


def test_a_completion_that_its_label_calls_bad_is_not_learned(tmp_path: Path) -> None:
    """As of KTO's data. Seen to fail: it was learned as the good ones are."""
    bad = {"prompt": Q, "completion": WORSE, "label": False}
    with pytest.raises(ConfigError, match=r"^here: its label is false, .* data=rated objective=kto, .* or set data.on_bad_record=skip\.$"):
        turns(ChatRecord(), bad)
    for good in ({"label": True}, {"label": None}, {"label": 0}, {"label": "false"}):
        assert turns(ChatRecord(), {"prompt": Q, "completion": A, **good}) == ASKED
    assert turns(ChatRecord(user=["prompt"], assistant="completion"), bad) == [ASKED[0], Turn("assistant", WORSE)]
    assert turns(ChatRecord(), {"messages": [USER, BOT], "label": False}) == ASKED


def turns(record: RecordConfig, values: dict[str, Any]) -> list[Turn]:
    return record.recognised(values, "here")[0].turns(values, "here")


@pytest.mark.parametrize(("values", "expected"), [*CHATS.values(), *ALSO])
def test_a_chat_is_read_by_its_fields(values: dict[str, Any], expected: list[Turn]) -> None:
    assert turns(ChatRecord(), values) == expected


@pytest.mark.parametrize("values", PREFERENCES.values(), ids=PREFERENCES.keys())
def test_a_preference_is_read_by_its_fields(values: dict[str, Any]) -> None:
    assert turns(PreferenceRecord(), values) == PAIR


@pytest.mark.parametrize(
    ("record", "values", "said"),
    [
        (ChatRecord(), {"foo": Q, "bar": A}, "its fields foo, bar are those of no usual form"),
        (ChatRecord(), {"messages": [USER, BOT], "instruction": Q, "output": A}, "could be read as OpenAI and as Alpaca"),
        (ChatRecord(), {}, r"its fields \(none\) are"),
        (PreferenceRecord(), {"chosen": A, "rejected": WORSE, "x": 1}, "its fields are chosen, rejected, x; none of which is the prompt"),
        (PreferenceRecord(), {"prompt": Q, "question": Q, "chosen": A, "rejected": WORSE}, "prompt and question could each be the prompt"),
        (PreferenceRecord(), {"prompt": Q, "better": A}, "field 'chosen' is missing; the fields are prompt, better"),
    ],
)
def test_a_record_of_no_form_or_of_two_is_refused_with_its_fields(record: RecordConfig, values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=f"^here: .*{said}.* data.record"):
        turns(record, values)


def prepared(folder: Path, rows: list[dict[str, Any]], record: RecordConfig | None = None) -> tuple[Prepared, list[str]]:
    """What becomes of these rows, and what is said."""
    said: list[str] = []
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = TextConfig(files=str(folder / "a.jsonl"), record=record, cache_dir=str(folder / "cache"))
    return prepare(data, BytesConfig(), log=said.append), said


@pytest.mark.parametrize("name", CHATS)
def test_the_form_is_said_once(tmp_path: Path, name: str) -> None:
    values, _ = CHATS[name]
    rows = [{key: f"{n} {value}" if isinstance(value, str) else value for key, value in values.items()} for n in range(4)]
    for n, row in enumerate(rows):
        for field in ("messages", "conversations"):
            if row.get(field):
                row[field] = [
                    {key: f"{n} {said}" if key in ("content", "value") else said for key, said in turn.items()} for turn in row[field]
                ]
    found, said = prepared(tmp_path, rows, ChatRecord())
    unread = {"ShareGPT (conversations)": ["records: not read: id"], "Alpaca (instruction, output)": ["records: not read: text"]}
    assert [line for line in said if line.startswith("records: ")] == [f"records: read as {name}", *unread.get(name, [])]
    assert (found.train.n_documents, found.val.n_documents) == (3, 1)


@pytest.mark.parametrize("n", [2, 8])
@pytest.mark.parametrize("kind", ["chats", "texts"])
def test_of_a_handful_of_records_the_same_one_is_held_out(tmp_path: Path, n: int, kind: str) -> None:
    """Seen to fail before: 0 documents for validation. The order of the rows does not matter."""
    rows = [{"text": f"some text {i}" * 9, "prompt": f"{i}?", "completion": f"{i}!"} for i in range(3, 3 + n)]
    record = ChatRecord() if kind == "chats" else None
    sizes = []
    for order in (rows, rows[::-1]):
        (tmp_path / str(len(sizes))).mkdir()
        found, _ = prepared(tmp_path / str(len(sizes)), order, record)
        assert found.train.n_documents + found.val.n_documents == n and found.val.n_documents >= 1
        sizes.append(found.val.read(0, found.val.n_tokens).tolist())
    assert sorted(sizes[0]) == sorted(sizes[1])


def test_copies_of_one_record_cannot_be_divided(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"0 documents for validation in .*, and 4 for training"):
        prepared(tmp_path, [{"prompt": Q, "completion": A}] * 4, ChatRecord())


def test_fields_that_are_not_read_are_told(tmp_path: Path) -> None:
    """Seen to fail: tools in `functions` and marks such as `trainable` were left out without a word, and the message learned."""
    said_by = [[{**USER, "name": "me"}, {**BOT, "content": f"{n}", "weight": 1, "trainable": False}] for n in range(4)]
    rows = [{"messages": messages, "functions": [{"name": "f"}], "tools": None, "id": 7} for messages in said_by]
    _, said = prepared(tmp_path, rows, ChatRecord())
    assert said[:2] == ["records: read as OpenAI (messages)", "records: not read: functions, id, messages.trainable"]
    pair = {"prompt": Q, "chosen": [USER, BOT], "rejected": [USER, BAD], "system": "", "margin": 1, "score": 2, "source": None}
    for record, values, expected in (
        (PreferenceRecord(), pair, {"score"}),
        (PromptRecord(answer=["a.b", "c"]), {"prompt": Q, "a": {"b": 1}, "c": [{"id": 1}], "d": 0}, {"d"}),
        (RatedRecord(), {"prompt": Q, "completion": A, "label": True, "history": [], "id": "x"}, {"id"}),
        (ChatRecord(messages="of.it"), {"of": {"it": [USER, BOT]}}, set()),
    ):
        assert record.recognised(values, "here")[0].unread(values) == expected
