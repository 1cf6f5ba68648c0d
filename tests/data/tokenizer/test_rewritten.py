"""Templates that write an answer otherwise once messages follow: what stands around an answer is no part of it."""

import pytest

from lm.data.kinds import BytesConfig
from lm.data.sources.base import Turn
from lm.data.tokenizer.chat import ChatTemplate
from lm.data.tokenizer.tokenizer import Tokenizer
from lm.errors import ConfigError
from tests.data.tokenizer.test_chat import shown

THINK = "{% if m.role == 'assistant' and loop.last %}<think>{{ m.reasoning_content }}</think>{% endif %}"
ENDS = "{% for m in messages %}<|{{ m.role }}|>" + THINK + "{{ m.content }}<|end|>{% endfor %}"
ASKS = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
TWO = [Turn("user", "Hi?"), Turn("assistant", "Hello."), Turn("user", "Bye"), Turn("assistant", "See you.")]
THOUGHT = [*TWO[:-1], Turn("assistant", "See you.", '{"reasoning_content": "Hm"}')]
CALLED = [
    Turn("user", "Hi?"), Turn("assistant", "So:", '{"tool_calls": [{"function": {"name": "f"}}]}'), Turn("tool", "It is 2."), *TWO[1:]
]  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return BytesConfig().build(extra=["<|user|>", "<|assistant|>", "<|tool|>", "<|end|>"])


def learned(tokenizer: Tokenizer, template: str, turns: list[Turn]) -> list[str]:
    return [text for text, learned in shown(tokenizer, ChatTemplate(template, "here", tokenizer).runs(turns)) if learned]


def test_the_token_that_begins_the_next_message_does_not_end_an_answer(tokenizer: Tokenizer) -> None:
    """As GLM's <|user|>. Seen to fail: it was learned, where the last answer had thoughts."""
    assert learned(tokenizer, ENDS + ASKS, THOUGHT) == ["Hello.<|end|>", "<think>Hm</think>See you.<|end|>"]
    assert learned(tokenizer, ENDS.replace("<|end|>", "") + ASKS, THOUGHT) == ["Hello.", "<think>Hm</think>See you."]


def test_thoughts_that_stand_before_an_answer_are_not_given(tokenizer: Tokenizer) -> None:
    """As Qwen3.5's template that asks for an answer without thoughts. Seen to fail: the answer alone was learned."""
    asks = ASKS.replace("<|assistant|>", "<|assistant|><think></think>")
    assert learned(tokenizer, ENDS + asks, TWO) == ["Hello.<|end|>", "See you.<|end|>"]
    with pytest.raises(ConfigError, match="rewrites message 4 or those around it"):
        learned(tokenizer, ENDS + asks, THOUGHT)


def test_what_a_tool_returns_is_not_learned(tokenizer: Tokenizer) -> None:
    """As Gemma 4's template writes it, into the answer that calls. Seen to fail: it was a part of that answer."""
    calls = "{% if m.tool_calls %}<call>{{ m.tool_calls | tojson }}</call>{% endif %}<|end|>"
    behind = ENDS.replace("<|end|>", calls) + ASKS
    called = 'So:<call>[{"function": {"name": "f"}}]</call><|end|>'
    assert learned(tokenizer, behind, CALLED) == [called, "Hello.<|end|>", "<think></think>See you.<|end|>"]
    returns = "</call>{{ messages[loop.index:] | map(attribute='content') | first }}"
    within = behind.replace("</call>", returns).replace("<|{{", "{% if m.role != 'tool' %}<|{{").replace("<|end|>", "<|end|>{% endif %}")
    with pytest.raises(ConfigError, match="rewrites message 2 or those around it"):
        learned(tokenizer, within, CALLED)


def test_a_template_that_fails_at_a_result_without_a_call_is_not_to_be_mended(tokenizer: Tokenizer) -> None:
    """As gpt-oss's. Seen to fail: 'the chat template fails (no call). Mend it, or the messages', of messages that it writes."""
    strict = "{% for m in messages if m.role == 'tool' and not messages[1].tool_calls %}{{ raise_exception('no call') }}{% endfor %}"
    with pytest.raises(ConfigError, match="rewrites message 2 or those around it"):
        learned(tokenizer, strict + ENDS + ASKS, CALLED)


OSS = (
    "{% for m in messages %}"
    "{% if m.role == 'tool' and not messages[loop.index0 - 1].tool_calls %}{{ raise_exception('no call') }}{% endif %}"
    "{% if m.thinking and loop.last %}<|assistant|>{{ m.thinking }}<|end|>{% endif %}<|{{ m.role }}|>"
    "{% if m.tool_calls %}to={{ m.tool_calls[0].function.name }} {{ m.tool_calls[0].function.arguments | tojson }}<|tool|>"
    "{% else %}{{ m.content }}<|end|>{% endif %}{% endfor %}"
)


def test_thoughts_that_are_a_message_of_their_own_are_learned(tokenizer: Tokenizer) -> None:
    """As gpt-oss's template writes them. Seen to fail: they were given, where an answer was before."""
    assert learned(tokenizer, OSS + ASKS, [TWO[0], *both_thought()]) == ["Hello.<|end|>", "Hm<|end|><|assistant|>See you.<|end|>"]


def test_a_call_that_only_its_result_may_follow_is_learned(tokenizer: Tokenizer) -> None:
    """As gpt-oss's. Seen to fail: with a question behind the answer it was refused."""
    call = '{"tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]}'
    turns = [TWO[0], Turn("assistant", "", call), Turn("tool", "2"), *both_thought()]
    assert learned(tokenizer, OSS + ASKS, turns) == ['to=f {"a": 1}<|tool|>', "Hello.<|end|>", "Hm<|end|><|assistant|>See you.<|end|>"]


def both_thought() -> list[Turn]:
    """Answers with thoughts, of which the template leaves out the first ones once messages follow."""
    return [TWO[1]._replace(also='{"reasoning_content": "Oh"}'), *THOUGHT[2:]]
