"""Chats: a prompt is what training rows of chats begin with, and an answer ends where theirs do."""

from pathlib import Path

import pytest

import lm as library
from lm.data.kinds import BytesConfig
from lm.data.sources.base import Turn
from lm.data.tokenizer.tokenizer import Tokenizer
from lm.errors import ConfigError
from lm.generation.sampling import SamplingConfig
from lm.generation.text import chat_template, complete, prompt_ids
from lm.nn.transformer import DecoderLM
from lm.storage.model_folder import save_model
from tests.conftest import Lm
from tests.nn.models import config, redrawn

QUESTION, END = "Is <|im_end|> one token?", "<|im_end|>"


def chat_tokenizer(name: str) -> Tokenizer:
    found = BytesConfig().build(extra=("<|im_start|>", END))
    found.chat_template = Path(f"lm/data/tokenizer/chat_templates/{name}.jinja").read_text()
    return found


@pytest.mark.parametrize("name", ["plain", "chatml"])
def test_a_chat_prompt_is_what_training_reads_before_the_answer(name: str) -> None:
    tokenizer = chat_tokenizer(name)
    asked, _ = chat_template(tokenizer).runs([Turn("user", QUESTION), Turn("assistant", "Yes.")])[:2]
    read = [token for part in asked.parts for token in ([part] if isinstance(part, int) else tokenizer.encode(part))]
    assert prompt_ids(redrawn(config(vocab_size=320)), tokenizer, QUESTION, chat_template(tokenizer)) == read


def test_an_answer_ends_at_the_token_that_ends_answers_in_training() -> None:
    assert ends("chatml") == END
    assert ends("plain") == "<|eos|>"


def ends(name: str) -> str:
    tokenizer = chat_tokenizer(name)
    end = chat_template(tokenizer).end()
    assert end is not None
    return tokenizer.special_names[end]


def test_generation_stops_where_the_template_ends_an_answer() -> None:
    tokenizer = chat_tokenizer("chatml")
    end = tokenizer.special([END])
    model = redrawn(config(vocab_size=tokenizer.vocab_size, head={"tied": False, "bias": True}))
    assert end is not None and model.head.bias is not None
    model.head.bias.data[end] = 1000.0  # the likeliest token everywhere
    [chat, text] = [
        complete(model, tokenizer, [QUESTION], SamplingConfig(max_tokens=5), chat=chat)[0] for chat in (chat_template(tokenizer), None)
    ]
    assert (chat.n_tokens, text.n_tokens) == (0, 5)


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
