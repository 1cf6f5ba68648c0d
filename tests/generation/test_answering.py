"""`lm generate prompts=FILE out=FILE`: answers of many prompts, on which a kill leaves no mark."""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import lm as library
from lm.data.kinds import BytesConfig
from lm.errors import ConfigError
from lm.generation import answering, loop
from lm.generation.writer import Writer
from lm.nn.transformer import DecoderLM
from lm.storage.model_folder import save_model
from tests.conftest import Lm, started

PROMPTS = [{"prompt": f"def f{i % 7 * 37}(", "id": i} for i in range(50)]


def lines(path: Path, each: list[Any]) -> Path:
    path.write_text("".join(f"{json.dumps(one)}\n" for one in each))
    return path


def read(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def args(model_folder: Path, tmp_path: Path) -> list[str]:
    return ["generate", f"from={model_folder}", f"prompts={lines(tmp_path / 'prompts.jsonl', PROMPTS)}", "out=a.jsonl", "max_tokens=8"]


@pytest.mark.parametrize("options", [{"n": 3}, {"beams": 2, "n": 2}, {"logprobs": 1, "stop": "e"}], ids=str)
def test_every_line_comes_back_with_the_answers_that_all_prompts_have_at_once(
    lm: Lm, args: list[str], model_folder: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    """The same prompts in several batches too: their i-th samples differ."""
    code, out, err = lm(*args, *(f"{key}={value}" for key, value in options.items()))
    assert (code, out) == (0, "") and err.startswith("a.jsonl: 50 prompts answered, 50 now, ")
    model, tokenizer = library.load(model_folder, device="cpu")
    told = library.complete(model, tokenizer, [str(each["prompt"]) for each in PROMPTS], max_tokens=8, **options)
    found = read(tmp_path / "a.jsonl")
    assert [{key: value for key, value in each.items() if key != "answers"} for each in found] == PROMPTS
    assert [answer["tokens"] for each in found for answer in each["answers"]] == [each.tokens for each in told]
    assert [answer["text"] for each in found for answer in each["answers"]] == [each.text for each in told]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_start_that_was_ended_is_gone_on_with(lm: Lm, args: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the answers of rows that joined others while earlier ones went on. Half a line is cut off; asked otherwise it is refused by the
    name of the option, or begun anew."""
    args[4:] = ["max_tokens=30", "stop=x", "stop=e", "stop=1"]
    assert lm(*args)[0] == 0
    whole = (tmp_path / "a.jsonl").read_bytes()
    code, _, err = lm(*args)
    assert code == 2 and "out=a.jsonl: it exists already. Add overwrite=true" in err

    drawn: list[Any] = []
    real = Writer._completion

    def interrupted(*given: Any) -> Any:
        if len(drawn) == 40:
            raise KeyboardInterrupt
        drawn.append(real(*given))
        return drawn[-1]

    monkeypatch.setattr(Writer, "_completion", interrupted)
    args[3] = "out=b.jsonl"
    code, _, err = lm(*args)
    assert code == 130 and "b.jsonl: what is answered is kept, and the same command goes on" in err
    n = (tmp_path / ".b.jsonl.part").read_text().count("\n") - 1
    numbers = [int(line.split()[0]) for line in (tmp_path / ".b.jsonl.part").read_text().splitlines()[1:]]
    assert not (tmp_path / "b.jsonl").exists() and n == 40
    assert numbers != sorted(numbers, key=lambda i: (-len(str(PROMPTS[i]["prompt"])), i))
    with (tmp_path / ".b.jsonl.part").open("a") as file:
        file.write('{"prompt": "def f0(", "ans')
    monkeypatch.setattr(Writer, "_completion", real)
    code, _, err = lm(*args, "temperature=0.5", "seed=2")
    assert code == 2 and f"out=b.jsonl: {n} answers are there of a start that asked otherwise (temperature, seed). Ask as it did" in err
    code, _, err = lm(*args)
    assert code == 0 and f"50 prompts answered, {50 - n} now" in err
    assert (tmp_path / "b.jsonl").read_bytes() == whole
    (tmp_path / ".b.jsonl.part").write_text("{damaged\n")
    code, _, err = lm(*args, "overwrite=true", "temperature=0")
    assert code == 0 and "50 now" in err and (tmp_path / "b.jsonl").read_bytes() != whole


def test_prompts_of_one_length_are_decoded_together(lm: Lm, args: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen to fail: of 640 prompts every tenth was long, and all were answered in the time of long ones. In a call from Python too."""
    asked = [{"prompt": "def main" * (5 if i % 8 == 7 else 1)} for i in range(64)]
    wide: list[list[int]] = []
    real = loop.prefill
    monkeypatch.setattr(loop, "prefill", lambda model, rows, *of: wide.append([len(row.begin) for row in rows]) or real(model, rows, *of))
    lines(tmp_path / "prompts.jsonl", asked)
    assert lm(*args)[0] == 0
    found = read(tmp_path / "a.jsonl")
    assert [{"prompt": each["prompt"]} for each in found] == asked
    assert [sorted(batch) for batch in wide] == [[9] * 24 + [41] * 8, [9] * 32]
    model, tokenizer = library.load(args[1].removeprefix("from="), device="cpu")
    told = library.complete(model, tokenizer, [each["prompt"] for each in asked], max_tokens=8)
    assert wide[:2] == wide[2:] and [each["answers"][0]["tokens"] for each in found] == [each.tokens for each in told]


@pytest.mark.slow
def test_a_killed_process_loses_no_answers_and_a_second_one_waits_its_turn(args: list[str], tmp_path: Path, lm: Lm) -> None:
    assert lm(*args)[0] == 0
    whole, part = (tmp_path / "a.jsonl").read_bytes(), tmp_path / ".b.jsonl.part"
    args[3] = "out=b.jsonl"
    slow = "import time; from lm.generation.writer import Writer as w; real, calls = w._completion, []\n"
    slow += "w._completion = lambda *x: (calls.append(1), time.sleep(30 * (len(calls) > 40)), real(*x))[2]\n"
    with started([sys.executable, "-c", f"{slow}from lm.cli.main import main; main({args!r})"], cwd=tmp_path) as process:
        end = time.monotonic() + 60
        while not part.exists() or part.read_bytes().count(b"\n") < 31:
            assert time.monotonic() < end and process.poll() is None, process.communicate()[1]
            time.sleep(0.05)
        code, _, err = lm(*args)
        assert code == 5 and "out=b.jsonl: another process is writing it. Stop that one" in err
        os.kill(process.pid, signal.SIGKILL)
    assert lm(*args)[0] == 0 and (tmp_path / "b.jsonl").read_bytes() == whole


def test_a_first_line_without_its_end_is_written_anew(lm: Lm, args: list[str], tmp_path: Path) -> None:
    """As a full disk may leave it: what decides the answers, and no line break. Answers would go on in the same line."""
    assert lm(*args)[0] == 0
    with (tmp_path / "a.jsonl").open("rb") as file, pytest.MonkeyPatch.context() as patch:
        whole = file.read()
        patch.setattr("lm.generation.lines._publish", lambda *_: 1 / 0)
        assert lm(*args[:3], "out=b.jsonl", *args[4:])[0] == 1
    part = tmp_path / ".b.jsonl.part"
    part.write_bytes(part.read_bytes().split(b"\n")[0])
    assert lm(*args[:3], "out=b.jsonl", *args[4:])[0] == 0 and (tmp_path / "b.jsonl").read_bytes() == whole


def chat_model(folder: Path, model: DecoderLM, template: str) -> None:
    asking = BytesConfig().build()
    asking.chat_template = (Path(library.__file__).with_name("data") / f"tokenizer/chat_templates/{template}.jinja").read_text()
    save_model(folder, model.cfg.tree(), dict(model.named_parameters()), asking.save, {})


def test_tools_and_their_calls_are_asked_as_in_training(lm: Lm, tmp_path: Path, model: DecoderLM) -> None:
    """Seen to fail: they were left out, and content in parts was refused. A template that writes none is refused, by the line."""
    chat_model(tmp_path / "chat", model, "chatml")
    call = {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]}]
    messages += [{"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "2"}]
    chat = {"messages": messages, "tools": [{"type": "function", "function": {"name": "f"}}]}
    seen: list[list[int]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(answering, "room", lambda model, ids, cfg: seen.append(ids))
        lm("generate", "from=chat", f"prompts={lines(tmp_path / 'c.jsonl', [chat])}", "out=a.jsonl")
    text = BytesConfig().build().decode([i for i in seen[0] if i < 256])
    assert '<tools>\n{"type": "function", "function": {"name": "f"}}' in text and "user\nHi" in text
    assert '<tool_call>\n{"name": "f", "arguments": {"a": 1}}' in text

    chat_model(tmp_path / "plain", model, "plain")
    code, _, err = lm("generate", "from=plain", "prompts=c.jsonl", "out=a.jsonl")
    assert code == 2 and "c.jsonl, line 1: tokenizer: the chat template writes no tools, and a record has some. Leave them out" in err


def test_messages_are_asked_in_the_chat_template(lm: Lm, tmp_path: Path, model: DecoderLM) -> None:
    """Prompts go on, and a note tells how they are asked."""
    chat_model(tmp_path / "chat", model, "plain")
    chats = [{"messages": [{"role": "user", "content": text}]} for text in ("Hi", "No")]
    args = ["generate", "from=chat", f"prompts={lines(tmp_path / 'c.jsonl', chats)}", "max_tokens=6"]
    code, _, err = lm(*args, "out=a.jsonl")
    assert code == 0, err
    loaded, tokenizer = library.load(tmp_path / "chat", device="cpu")
    alone = [library.generate(loaded, tokenizer, text, chat=True, max_tokens=6) for text in ("Hi", "No")]
    assert [each["answers"][0]["text"] for each in read(tmp_path / "a.jsonl")] == alone
    assert "chat=true" not in err
    prompts = lines(tmp_path / "p.jsonl", [{"prompt": "Hi"}, {"prompt": "No"}])
    args = ["generate", "from=chat", f"prompts={prompts}", "max_tokens=6"]
    assert lm(*args, "out=b.jsonl")[2].startswith("prompt: continued as it stands. chat=true asks it as a user's message")
    assert lm(*args, "out=d.jsonl", "chat=true")[0] == 0
    assert [each["answers"][0]["text"] for each in read(tmp_path / "d.jsonl")] == alone


@pytest.mark.slow
def test_a_message_of_the_assistant_at_the_end_is_gone_on_with_where_that_is_asked(lm: Lm, tmp_path: Path, model: DecoderLM) -> None:
    chat_model(tmp_path / "chat", model, "plain")
    ask = {"role": "user", "content": "Hi"}
    ascii_alone = "logit_bias=" + json.dumps({str(i): -100 for i in range(128, 259)})
    args = ["generate", "from=chat", "temperature=0", ascii_alone]
    assert lm(*args, f"prompts={lines(tmp_path / 'a.jsonl', [{'messages': [ask]}])}", "out=a.out", "max_tokens=9")[0] == 0
    whole = read(tmp_path / "a.out")[0]["answers"][0]["text"]
    begun = lines(tmp_path / "b.jsonl", [{"messages": [ask, {"role": "assistant", "content": whole[:4]}]}])
    assert lm(*args, f"prompts={begun}", "out=b.out", "max_tokens=5", "continue_final_message=true")[0] == 0
    assert read(tmp_path / "b.out")[0]["answers"][0]["text"] == whole[4:]
    loaded, tokenizer = library.load("chat")
    options: dict[str, Any] = {"temperature": 0, "logit_bias": dict.fromkeys(range(128, 259), -100.0)}
    assert library.generate(loaded, tokenizer, [ask], max_tokens=9, **options) == whole
    chat = [ask, {"role": "assistant", "content": whole[:4]}]
    goes_on = {"continue_final_message": True, "max_tokens": 5, **options}
    assert library.generate(loaded, tokenizer, [chat, chat], **goes_on) == [whole[4:]] * 2
    assert library.generate(loaded, tokenizer, chat, n=1, **goes_on) == [whole[4:]]
    for prompt, said in (("Hi", "it is of the messages"), ([ask], "is no text of the assistant")):
        with pytest.raises(ConfigError, match=f"continue_final_message: .*{said}"):
            library.generate(loaded, tokenizer, prompt, **goes_on)
    for wrong, said in (
        ([ask, "Hi"], "prompt: field 'messages' holds"),
        ([[ask], "Hi"], "is no text and no chat"),
        ([[ask], [{"role": "user"}]], "prompt 1: message 1: field"),
        ([1], "is no text and no chat"),
    ):
        with pytest.raises(ConfigError, match=said):
            library.generate(loaded, tokenizer, wrong)  # anything may be given
    code, _, err = lm(*args, "prompts=a.jsonl", "out=c.out", "continue_final_message=true")
    assert code == 2 and "a.jsonl, line 1: continue_final_message: the last message is no text of the assistant. End with one" in err
    for given in (["prompt=a"], [f"prompts={lines(tmp_path / 'c.jsonl', [{'prompt': 'a'}])}", "out=c.out"]):
        code, _, err = lm(*args, *given, "continue_final_message=true")
        assert code == 2 and "continue_final_message=true: it is of prompts=FILE with messages." in err


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("{", "line 2: it is not JSON"),
        ("[1]", "line 2: it is no object with either prompt or messages. Fix the line."),
        ('{"prompt": "a", "messages": []}', "line 2: it is no object with either prompt or messages."),
        ('{"prompt": 1}', "line 2: prompt is no string."),
        ('{"prompt": "a", "answers": 1}', "line 2: it has the field answers already, which is written here. Rename it."),
        ('{"messages": [{"role": "usr", "content": "a"}]}', 'line 2: message 1: "usr" is no role that models know (system,'),
        ('{"messages": [{"role": "user"}]}', "line 2: message 1: field 'content' is missing; the fields are role. Fix the line."),
        ('{"messages": [], "id": 1}', "line 2: field 'messages' holds [], not a list of messages. Fix the line."),
        ('{"messages": [{"role": "user", "content": "\\ud800"}]}', "line 2: message 1: field 'content' holds half a surrogate"),
        ('{"prompt": "a", "prompt": "b"}', "line 2: it is not JSON ('prompt' is given twice). Fix the line."),
        ('{"prompt": "a", "id": NaN}', "line 2: it is not JSON (NaN is not a finite number). Fix the line."),
        ('{"messages": [{"role": "user", "content": "a"}]}', "line 2: it asks otherwise than line 1."),
        (json.dumps({"prompt": "a" * 49}), "line 2: prompt: 50 tokens are more than model.max_seq_len=48"),
        (json.dumps({"prompt": "\ud800"}), "line 2: prompt: character 0 ('\\ud800') is not valid Unicode"),
    ],
)
def test_a_line_that_cannot_be_asked_is_named(lm: Lm, model_folder: Path, tmp_path: Path, given: str, said: str) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n' + given + "\n")
    code, out, err = lm("generate", f"from={model_folder}", "prompts=p.jsonl", "out=new/a.jsonl")
    assert (code, out) == (2, "") and f"p.jsonl, {said}" in err and err.count("\n") == 1
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["prompts=none.jsonl", "out=a"], "prompts=none.jsonl: there is no such file."),
        (["prompts=empty.jsonl", "out=a"], "empty.jsonl: it holds no prompt."),
        (["prompts=p.jsonl"], "prompts: the answers need a file. Write out=FILE."),
        (["prompt=a", "out=a"], "out, overwrite: they are of prompts=FILE, which is not set."),
        (["prompts=p.jsonl", "out=a", "prompt=a"], "prompt, suffix, format: prompts=FILE has them, and a format of its own."),
        (["prompts=p.jsonl", "out=runs"], "out=runs: it exists already. Choose another name."),
        (["prompts=p.jsonl", "out=a", "chat=true"], "chat=true: the model's tokenizer has no chat template."),
        (["prompts=m.jsonl", "out=a", "chat=false"], "chat=false: messages are asked in a chat template."),
        (["prompts=m.jsonl", "out=a"], "messages: the model's tokenizer has no chat template. Write prompts, or use a model fine-tuned on"),
        (["prompts=runs", "out=a"], "prompts=runs: this is no regular file. Name one of JSON lines."),
        (["prompts=pipe", "out=a"], "prompts=pipe: this is no regular file."),
        (
            ["prompts=p.jsonl", "out=a.CSV"],
            "out=a.CSV: it would hold JSON lines, and .CSV is the ending of another format. Let it end in .jsonl.",
        ),
        (["prompts=p.jsonl", "out=p.jsonl", "overwrite=true"], "out=p.jsonl: it is the file that is read, which would be gone."),
        (["prompts=p.jsonl", "out=link", "overwrite=true"], "out=link: it is the file that is read"),
    ],
)
def test_files_that_cannot_be_are_refused(lm: Lm, model_folder: Path, tmp_path: Path, given: list[str], said: str) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    lines(tmp_path / "p.jsonl", PROMPTS[:1])
    lines(tmp_path / "m.jsonl", [{"messages": [{"role": "user", "content": "a"}]}])
    (tmp_path / "link").symlink_to("p.jsonl")
    os.mkfifo(tmp_path / "pipe")
    code, out, err = lm("generate", f"from={model_folder}", *given)
    assert (code, out) == (2, "") and said in err
    assert read(tmp_path / "p.jsonl") == PROMPTS[:1]


def test_what_else_is_in_a_line_comes_back_as_it_was(lm: Lm, model_folder: Path, tmp_path: Path) -> None:
    """Long integers too; text is readable as UTF-8, and half a surrogate pair stays escaped."""
    line = '{"prompt": "é 日本", "id": 123456789012345678901234567890, "of": {"é": "\\ud800"}'
    (tmp_path / "p.jsonl").write_text(f"\ufeff{line}}}\r\n\r\n")
    assert lm("generate", f"from={model_folder}", "prompts=p.jsonl", "out=a.jsonl", "max_tokens=2")[0] == 0
    assert (tmp_path / "a.jsonl").read_text().startswith(f'{line}, "answers": [{{"text": "')
