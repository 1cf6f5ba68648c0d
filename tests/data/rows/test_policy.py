"""Prompts to be answered by the model itself, beside the answers of the data."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lm.data.kinds import ChatRecord, GKDConfig, GRPOConfig, PromptRecord, TextConfig
from lm.data.rewards.text import EndedReward
from lm.data.rows.base import Rows
from lm.data.rows.build import build_rows
from lm.data.store.prepare import Prepared
from lm.errors import ConfigError
from lm.generation.rollouts import asked_of
from lm.nn.stack import ModelConfig

Prepare = Callable[..., Prepared]


def rows_of(found: Prepared, decoder: ModelConfig, max_tokens: int = 16, seq_len: int = 96) -> Rows:
    data = TextConfig(files="x", seq_len=seq_len, record=ChatRecord())
    return build_rows(GRPOConfig(max_tokens=max_tokens), data, found.train, found.tokenizer, decoder)


@pytest.fixture
def chats(prepare_text: Prepare, tmp_path: Path) -> Prepared:
    turns = [[("user", "hello"), ("assistant", "hi"), ("user", f"which {n}"), ("assistant", f"number {n}")] for n in range(60)]
    lines = [json.dumps({"messages": [{"role": role, "content": text} for role, text in chat]}) for chat in turns]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    return prepare_text(tmp_path / "a.jsonl", record=ChatRecord(), val_frac=0.3)


def test_a_row_is_a_chat_up_to_its_last_answer(chats: Prepared, decoder: ModelConfig) -> None:
    rows, decode = rows_of(chats, decoder), chats.tokenizer.decode
    batch = rows.batch(np.arange(len(rows)))
    assert len(rows) == batch.step_tokens == len(batch.tokens) > 30
    for asked in asked_of(batch):
        prompt, reference = decode(asked.prompt), decode(asked.reference)
        assert prompt.startswith("User:\nhello\n\nAssistant:\nhi") and prompt.endswith("\n\nAssistant:\n")
        assert reference == prompt.removesuffix("\n\nAssistant:\n").rpartition("which")[2].replace(" ", "number ", 1)
        assert asked.reference[-1] == chats.tokenizer.eos
    assert asked_of(rows.batch(rows.widest(3)))[0].prompt == max((asked.prompt for asked in asked_of(batch)), key=len)


def test_prompts_without_room_for_an_answer_are_refused(chats: Prepared, decoder: ModelConfig) -> None:
    longest = max(len(asked.prompt) for asked in asked_of(rows_of(chats, decoder).batch(np.arange(20))))
    assert len(rows_of(chats, decoder, max_tokens=97 - longest)) == chats.train.n_documents
    with pytest.raises(ConfigError, match=r"prompts of the train split leave no room for objective\.max_tokens=\d+ in a row"):
        rows_of(chats, decoder, max_tokens=98 - longest)


def test_a_prompt_needs_no_answer_but_for_rewards_that_compare(prepare_text: Prepare, decoder: ModelConfig, tmp_path: Path) -> None:
    """Of messages too, where earlier answers are given. Seen to fail: a chat without an answer had nothing to learn."""
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
    rows = [{"messages": [*asked, {"role": "user", "content": f"which {n}"}], "solution": f"number {n}"} for n in range(60)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for answer in (None, "solution"):
        found = prepare_text(tmp_path / "a.jsonl", record=PromptRecord(answer=answer), val_frac=0.3)
        for each in asked_of((of := rows_of(found, decoder)).batch(np.arange(len(of)))):
            prompt, reference = found.tokenizer.decode(each.prompt), found.tokenizer.decode(each.reference)
            assert prompt.startswith("System:\nBe brief.\n\nUser:\n?\n\nAssistant:\n!") and prompt.endswith("\n\nAssistant:\n")
            last = prompt.removesuffix("\n\nAssistant:\n").rpartition("User:\n")[2]
            assert reference == (last if answer is None else last.replace("which", "number"))
    with pytest.raises(ValueError, match=r"objective\.rewards\.exact compares with the data's answer, and data\.record\.answer names none"):
        GRPOConfig().require_fit("decoder", TextConfig(files="x", record=PromptRecord()))
    GRPOConfig().require_fit("decoder", TextConfig(files="x", record=PromptRecord(answer="solution")))
    GRPOConfig(rewards={"ended": EndedReward()}).require_fit("decoder", TextConfig(files="x", record=PromptRecord()))


def test_a_prompt_needs_no_answer_but_to_learn_from_it_beside_the_models_own() -> None:
    data, named = (TextConfig(files="x", record=PromptRecord(answer=answer)) for answer in (None, "solution"))
    with pytest.raises(
        ValueError, match=r"objective\.on_policy=0\.5 learns from the data's answers too, and data\.record\.answer names none"
    ):
        GKDConfig(teacher="x", on_policy=0.5).require_fit("decoder", data)
    GKDConfig(teacher="x").require_fit("decoder", data)
    GKDConfig(teacher="x", on_policy=0.5).require_fit("decoder", named)
    with pytest.raises(ValueError, match=r"objective=gkd trains model\.kind=decoder, but model\.kind is encoder"):
        GKDConfig(teacher="x").require_fit("encoder", named)
