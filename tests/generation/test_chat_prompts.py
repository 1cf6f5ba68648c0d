"""Chats: a prompt is what training rows of chats begin with, and an answer ends where theirs do."""

import io
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

import lm as library
from lm.data.kinds import BytesConfig
from lm.data.sources.base import Turn
from lm.data.tokenizer.around import closing_of
from lm.data.tokenizer.tokenizer import Tokenizer
from lm.errors import ConfigError
from lm.generation.config import SamplingConfig
from lm.generation.text import chat_template, ends_of
from lm.generation.writer import Writer
from lm.nn.transformer import DecoderLM
from lm.storage.model_folder import save_model
from tests.conftest import Lm, started
from tests.nn.models import config, redrawn

QUESTION, END = "Is <|im_end|> one token?", "<|im_end|>"


def chat_tokenizer(name: str) -> Tokenizer:
    found = BytesConfig().build(extra=("<|im_start|>", END))
    found.chat_template = (Path(library.__file__).with_name("data") / f"tokenizer/chat_templates/{name}.jinja").read_text()
    return found


@pytest.mark.parametrize("name", ["plain", "chatml"])
def test_a_chat_prompt_is_what_training_reads_before_the_answer(name: str) -> None:
    tokenizer = chat_tokenizer(name)
    asked, _ = chat_template(tokenizer).runs([Turn("user", QUESTION), Turn("assistant", "Yes.")])[:2]
    read = [token for part in asked.parts for token in ([part] if isinstance(part, int) else tokenizer.encode(part))]
    assert Writer(redrawn(config(vocab_size=320)), tokenizer).in_chat().ids(QUESTION) == read


def test_an_answer_ends_at_the_token_that_ends_answers_in_training() -> None:
    assert ends("chatml") == END
    assert ends("plain") == "<|eos|>"


def ends(name: str) -> str:
    tokenizer = chat_tokenizer(name)
    return tokenizer.special_names[closing_of(tokenizer)[0]]


def test_generation_stops_where_the_template_ends_an_answer_in_a_chat_or_not() -> None:
    """As transformers' generate() on the export, whose generation_config.json names that token. Seen to fail: a text without chat=true went
    on behind <|im_end|>, which is no text, and so did lm-eval's tasks and /v1/completions."""
    tokenizer = chat_tokenizer("chatml")
    end = tokenizer.special([END])
    model = redrawn(config(vocab_size=tokenizer.vocab_size, head={"tied": False, "bias": True}))
    assert end is not None and model.head.bias is not None
    model.head.bias.data[end] = 1000.0  # the likeliest token everywhere
    writer = Writer(model, tokenizer, SamplingConfig(max_tokens=5))
    for each in (writer, writer.in_chat()):
        assert each.complete([QUESTION])[0].n_tokens == 0
    assert ends_of(tokenizer) == [tokenizer.eos, end]


def test_a_template_that_refuses_a_plain_chat_leaves_the_other_ends() -> None:
    tokenizer = chat_tokenizer("chatml")
    tokenizer.chat_template, tokenizer.further_ends = "{{ raise_exception('no system') }}<|im_end|>", [tokenizer.pad]
    assert ends_of(tokenizer) == [tokenizer.eos, tokenizer.pad]


def test_chat_from_the_command_line_prints_the_answer_alone(lm: Lm, tmp_path: Path, model: DecoderLM) -> None:
    root = tmp_path / "chatty"
    tokenizer = BytesConfig().build()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}?"
    save_model(root, model.cfg.tree(), dict(model.named_parameters()), tokenizer.save, {})
    code, out, _ = lm("generate", "from=chatty", "prompt=hello", "chat=true", "max_tokens=5", "temperature=0")
    assert code == 0 and out == library.generate(model, tokenizer, "hello", max_tokens=5, temperature=0, chat=True) + "\n"


def test_a_model_without_a_chat_template_is_told(model: DecoderLM, tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigError, match="no chat template"):
        library.generate(model, tokenizer, "x", chat=True)


@pytest.fixture
def chat_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "chat" / "model"
    model = redrawn(config(vocab_size=320, max_seq_len=160))
    save_model(folder, model.cfg.tree(), dict(model.named_parameters()), chat_tokenizer("plain").save, {})
    return folder


def talk(lm: Lm, folder: Path, monkeypatch: pytest.MonkeyPatch, lines: list[str], *options: str) -> tuple[list[str], str]:
    """What is answered to lines of a pipe, and noted."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("\n".join(lines).encode())))
    code, out, err = lm("generate", f"from={folder}", "max_tokens=6", "temperature=0", "stop=\n", *options)
    assert code == 0, err
    return out.split("\n")[:-1], err


@pytest.mark.slow
def test_without_a_prompt_a_model_of_chats_converses_and_knows_what_was_said(
    lm: Lm, chat_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = library.load(chat_folder, device="cpu")
    writer = Writer(model, tokenizer, SamplingConfig(max_tokens=6, temperature=0.0, stop="\n")).in_chat()
    turns: list[Turn] = []
    expected = []
    for line in ("Who?", "What is it?"):
        turns.append(Turn("user", line))
        [found] = writer.complete([turns])
        turns.append(Turn("assistant", found.text))
        expected.append(found.text)
    answers, err = talk(lm, chat_folder, monkeypatch, ["Who?", "", "What is it?", "/reset", "Who?", "/exit", "Who?"])
    assert answers == [*expected, expected[0]]
    assert err == "what was said is forgotten.\n"
    assert expected[1] != talk(lm, chat_folder, monkeypatch, ["What is it?"])[0][0]


def test_a_long_conversation_forgets_its_beginning_and_a_message_too_long_is_told(
    lm: Lm, chat_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, err = talk(lm, chat_folder, monkeypatch, ["What is that over there?"] * 8 + ["x" * 200, "Who?"])
    assert len(answers) == 9
    assert err.startswith("prompt: it has ") and "model.max_seq_len=160" in err and err.count("\n") == 1


@pytest.mark.parametrize("option", ["chat=false", "prompt=Who?"])
def test_a_text_is_continued_where_that_is_asked_for(lm: Lm, chat_folder: Path, monkeypatch: pytest.MonkeyPatch, option: str) -> None:
    [line], _ = talk(lm, chat_folder, monkeypatch, ["Who?"], option)
    assert line.startswith("Who?")


@pytest.mark.slow
def test_a_conversation_at_a_terminal_ends_with_control_d(chat_folder: Path) -> None:
    master, terminal = pty.openpty()
    program = "import sys; from lm.cli.main import main; sys.exit(main(sys.argv[1:]))"
    args = [sys.executable, "-c", program, "generate", f"from={chat_folder}", "max_tokens=4"]
    with started(args, stdin=terminal, stdout=subprocess.PIPE) as process:
        os.write(master, b"Who?\n\x04")
        out, err = process.communicate(timeout=120)
    os.close(master)
    assert (process.returncode, err.splitlines()[-1]) == (0, "A conversation: /reset forgets it, /exit or Ctrl-D ends it.")
    assert out.count("> ") == 2
