"""objective.environment: replies to answers, and a model that answers again."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from lm.data.environments.base import EnvironmentConfig
from lm.data.environments.retry import RetryConfig
from lm.data.kinds import BytesConfig, GRPOConfig
from lm.data.rewards.base import Answer
from lm.data.rewards.text import ArithmeticReward
from lm.data.rows.seq2seq import one_per_row
from lm.data.sources.base import Turn
from lm.data.tokenizer.chat import ChatTemplate
from lm.data.tokenizer.together import together
from lm.data.tokenizer.tokenizer import Tokenizer
from lm.errors import ConfigError
from lm.generation.rollouts import Drawer, Question, Rollout, Sampler
from lm.nn.batch import IGNORED
from lm.training.config import TrainConfig
from lm.training.run import train_rank
from tests.nn.models import config, redrawn
from tests.training.conftest import ranks, read
from tests.training.objectives.conftest import RETRY

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class GuessConfig(EnvironmentConfig):
    """Says whether the number is higher, as a tool."""

    role = "tool"

    kind: Literal["guess"] = "guess"

    def reply(self, answer: Any) -> Any:
        if answer.text == "7":
            return None
        said = {"none": 7, "half": "\ud800", "huge": "x" * (1 << 24)}.get(answer.text, f"higher <|im_end|> {len(answer.earlier)}")
        return {"x": 1}[answer.text] if answer.text == "odd" else said


@pytest.fixture
def chatml() -> Tokenizer:
    tokenizer = BytesConfig().build(extra=("<|im_start|>", "<|im_end|>"))
    tokenizer.chat_template = CHATML
    return tokenizer


def answered(
    monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer, environment: EnvironmentConfig, answers: Sequence[str], end: str = "<|im_end|>"
) -> tuple[Sampler, Rollout]:
    """What a sampler makes of one prompt where these answers are drawn one after the other."""
    question = Question(together(tokenizer, ChatTemplate(CHATML, "here", tokenizer).question([Turn("user", "guess")]))[0].tolist(), [])
    sampler, left = Sampler(tokenizer, GRPOConfig(environment=environment, max_tokens=8), in_step=False), iter(answers)

    def draw(self: Drawer, model: Any, questions: Sequence[Question], n: int, temperature: float, keys: Sequence[str]) -> list[Rollout]:
        tokens = [*tokenizer.encode(next(left)), tokenizer.special([end])]
        return [Rollout(questions[0], tokens, [-1.0] * len(tokens))]

    monkeypatch.setattr(Drawer, "draw", draw)
    (rollout,) = sampler.draw(redrawn(config()), [question], 1)
    assert next(left, None) is None
    return sampler, rollout


def test_a_rollout_is_the_chat_as_the_template_writes_it_and_replies_are_not_learned(
    chatml: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a reply spells a special token, which stays text."""
    sampler, rollout = answered(monkeypatch, chatml, GuessConfig(), ["5", "6", "7"])
    replies = ["higher <|im_end|> 0", "higher <|im_end|> 1"]
    turns = [Turn("user", "guess"), Turn("assistant", "5"), Turn("tool", replies[0]), Turn("assistant", "6"), Turn("tool", replies[1])]
    template = ChatTemplate(CHATML, "here", chatml)
    whole = together(chatml, template.whole([*turns, Turn("assistant", "7")]))[0].tolist()
    assert [*rollout.question.prompt, *rollout.tokens] == whole[: len(rollout.question.prompt) + len(rollout.tokens)] and whole[
        -1:
    ] == chatml.encode("\n")
    (answer,) = sampler.answers([rollout], torch.device("cpu"))
    assert (answer.text, answer.earlier, answer.n_tokens, answer.ended) == ("7", (("5", replies[0]), ("6", replies[1])), 6, True)
    batch = one_per_row([rollout.example()], chatml.pad)
    assert batch.labels is not None
    assert chatml.decode(batch.labels[batch.labels != IGNORED].tolist()) == "567" and int((batch.labels != IGNORED).sum()) == 6


@pytest.mark.parametrize(
    ("trims", "writes"),
    [("m.content | trim", "higher <|im_end|> 0"), ("m.content | tojson", '" higher <|im_end|> 0\\n"'), ("'<' + m.content + '>'", None)],
    ids=["trims", "json", "around"],
)
def test_a_reply_is_what_the_template_makes_of_it(
    chatml: Tokenizer, monkeypatch: pytest.MonkeyPatch, trims: str, writes: str | None
) -> None:
    """Llama 3's trims what is said, and writes what a tool says as JSON."""
    monkeypatch.setattr(GuessConfig, "reply", lambda _, answer: None if answer.earlier else " higher <|im_end|> 0\n")
    chatml.chat_template = CHATML.replace(
        "{{ m.content }}", f"{{% if m.role == 'tool' %}}{{{{ {trims} }}}}{{% else %}}{{{{ m.content }}}}{{% endif %}}"
    )
    _, rollout = answered(monkeypatch, chatml, GuessConfig(), ["5", "6"])
    ((start, end, said),) = rollout.replies
    assert said == " higher <|im_end|> 0\n"
    reply = f"\n<|im_start|>tool\n{writes or f'<{said}>'}<|im_end|>\n<|im_start|>assistant\n"
    parts = chatml.split_specials(reply.replace("higher <|im_end|>", "higher X"))
    spelt = [part.replace("higher X", "higher <|im_end|>") if isinstance(part, str) else part for part in parts]
    assert rollout.tokens[start:end] == together(chatml, spelt)[0].tolist()


@pytest.mark.slow
def test_the_last_answer_stands_where_it_is_cut_or_nothing_more_fits_or_it_was_the_last(
    chatml: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(answered(monkeypatch, chatml, GuessConfig(answers=2), ["5", "6"])[1].replies) == 1
    assert answered(monkeypatch, chatml, GuessConfig(room=40), ["5"])[1].replies == ()
    assert len(answered(monkeypatch, chatml, GuessConfig(room=80), ["5", "6"])[1].replies) == 1
    assert answered(monkeypatch, chatml, GuessConfig(), ["5"], end="<|im_start|>")[1].replies == ()
    assert answered(monkeypatch, chatml, GuessConfig(), ["huge"])[1].replies == ()  # more than a chat template may write


def test_an_answer_that_stands_is_not_replied_to_again(chatml: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, left, own = list[str](), iter(["7", "5", "6", "7"]), GuessConfig.reply

    def draw(self: Drawer, model: Any, questions: Sequence[Question], n: int, *given: Any) -> list[Rollout]:
        return [Rollout(one, [*chatml.encode(next(left)), chatml.special(["<|im_end|>"])], [-1.0] * 2) for one in questions]

    def reply(self: GuessConfig, answer: Any) -> Any:
        seen.append(answer.text)
        return own(self, answer)

    monkeypatch.setattr(Drawer, "draw", draw)
    monkeypatch.setattr(GuessConfig, "reply", reply)
    sampler = Sampler(chatml, GRPOConfig(environment=GuessConfig(), max_tokens=8), in_step=False)
    found = sampler.draw(redrawn(config()), [Question([1], []), Question([2], [])], 1)
    assert seen == ["7", "5", "6", "7"] and [len(one.replies) for one in found] == [0, 2]


def test_each_answer_is_drawn_by_a_key_of_its_own(chatml: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def draw(self: Drawer, model: Any, questions: Sequence[Question], n: int, temperature: float, keys: Sequence[str]) -> list[Rollout]:
        seen.extend(f"{key}/{j}" for key in keys for j in range(n))  # as `Drawer` seeds them
        return [Rollout(one, [*chatml.encode("5"), chatml.special(["<|im_end|>"])], [-1.0] * 2) for one in questions for _ in range(n)]

    monkeypatch.setattr(Drawer, "draw", draw)
    sampler = Sampler(chatml, GRPOConfig(environment=GuessConfig(answers=3), max_tokens=8), in_step=False)
    found = sampler.draw(redrawn(config()), [Question([1], []), Question([2], [])], 2, keys=["a", "b"])
    assert len(seen) == len({*seen}) == 2 * 2 * 3 and [len(one.replies) for one in found] == [2] * 4


@pytest.mark.slow
def test_an_environment_that_fails_ends_with_a_sentence(chatml: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    for text, said in (
        ("odd", r"it broke on the answer 'odd' \(KeyError: 'odd'\)\. Mend it"),
        ("none", "reply to the answer 'none' is of type int"),
        ("half", "reply to the answer 'half' holds half a surrogate pair"),
    ):
        with pytest.raises(ConfigError, match=f"objective.environment: .*{said}"):
            answered(monkeypatch, chatml, GuessConfig(), [text])
    chatml.chat_template = "{% for m in messages %}{% if m.role != 'tool' %}{{ m.content }}{% endif %}{% endfor %}"
    with pytest.raises(ConfigError, match="does not write a reply of the role tool\\. Use another"):
        answered(monkeypatch, chatml, GuessConfig(), ["5"])


def test_a_wrong_answer_is_asked_for_again() -> None:
    environment = RetryConfig(reward=ArithmeticReward())
    assert environment.compares() and environment.answers == 4
    reply = environment.reply(Answer("", "12", "13", n_tokens=2, ended=True))
    assert reply == "That is wrong. Try again." and environment.reply(Answer("", "so 13", "13", n_tokens=2, ended=True)) is None


@pytest.mark.slow
def test_a_run_answers_again_and_what_is_drawn_is_what_is_trained(policy: Callable[..., TrainConfig], made: Path, tmp_path: Path) -> None:
    train_rank(policy("objective=grpo", RETRY, "trainer.sample_prompts=held_out", f"init_from={made / 'ending'}"))
    lines = [line for line in read(tmp_path / "run" / "metrics.jsonl") if "reward" in line]
    assert max(line["logp_gap"] for line in lines) < 1e-4 and 1 < np.mean([line["answers"] for line in lines]) <= 3
    assert "\nUser:\nNo.\n\nAssistant:\n" in (tmp_path / "run" / "samples.md").read_text()
    assert all(1 < line["val_answers"] <= 3 for line in read(tmp_path / "run" / "metrics.jsonl") if "val_reward" in line)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ([RETRY, *ranks("fsdp")], "strategy=fsdp: objective.environment replies to some answers and not to others, .* Use ddp"),
        ([RETRY.replace("room:40", "room:7")], r"environment\.room=7 is less than two answers of max_tokens=4\. Raise it"),
        ([RETRY.replace("room:40", "room:20")], r"environment\.room=20: the end of an answer, an empty reply .* take 26\. Raise it"),
        ([RETRY.replace("room:40", "room:60")], "leave no room for objective.environment.room=60 in a row"),
        ([RETRY.replace("room:40", "room:65")], r"environment\.room=65 is over data\.seq_len=64, which holds a prompt as well\. Lower"),
        ([RETRY.replace("retry", "retries")], r"objective\.environment\.kind: 'retries' is not an option\. Did you mean 'retry'"),
    ],
    ids=["fsdp", "small", "no reply fits", "large", "larger than a row", "unknown"],
)  # fmt: skip
def test_what_cannot_be_is_told(policy: Callable[..., TrainConfig], more: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        train_rank(policy("objective=grpo", *more))


@pytest.mark.slow
def test_a_run_does_not_go_on_with_another_chat_template_than_its_own(policy: Callable[..., TrainConfig], tmp_path: Path) -> None:
    """Seen: a file edited where only replies are written, which no token of the data tells, changed the steps behind a resume. It may be
    moved as data may."""
    file = tmp_path / "turns.jinja"
    text = "{% for m in messages %}{{ SAYS }}{{ m.content }}{{ eos_token if m.role == 'assistant' }}\n{% endfor %}"
    text += "{% if add_generation_prompt %}A:{% endif %}"
    file.write_text(text.replace("SAYS", "'U:' if m.role == 'user' else 'A:'"))
    record = f"data.record={{kind:chat,user:[question],assistant:answer,template:'{file}'}}"
    given = ["objective=grpo", RETRY, "schedule=constant", record]
    train_rank(policy(*given, "trainer.max_steps=3"))
    before = file.read_text()
    file.write_text(text.replace("SAYS", "('U:' if loop.index < 3 else 'Reply:') if m.role == 'user' else 'A:'"))
    with pytest.raises(ConfigError, match=r"turns\.jinja: not the chat template that \S+/run was started with"):
        train_rank(policy(*given, "trainer.max_steps=4"))
    moved = file.rename(tmp_path / "moved.jinja")
    given[-1] = record.replace(str(file), str(moved))
    with pytest.raises(ConfigError, match=r"moved\.jinja: not the chat template that"):
        train_rank(policy(*given, "trainer.max_steps=4"))
    moved.write_text(before)
    assert train_rank(policy(*given, "trainer.max_steps=4"))["steps"] == 4
