"""Prompts to be answered by the model itself, beside the answers of the data."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from lm.data.kinds import ChatRecord, GKDConfig, GRPOConfig, PromptRecord, TextConfig
from lm.data.layout.mixed import MixedRows
from lm.data.loader import Steps
from lm.data.mixture import Mixture, Share
from lm.data.rewards.text import EndedReward, ExactReward
from lm.data.rows.base import Rows
from lm.data.rows.build import build_rows
from lm.data.sizes import Sizes
from lm.data.store.prepare import Prepared
from lm.data.tokenizer.tokenizer import Tokenizer
from lm.errors import ConfigError
from lm.generation.rollouts import Rollout, Sampler, questions_of
from lm.nn.model_config import ModelConfig

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
    for question in questions_of(batch):
        prompt, reference = decode(question.prompt), decode(question.reference)
        assert prompt.startswith("User:\nhello\n\nAssistant:\nhi") and prompt.endswith("\n\nAssistant:\n")
        assert reference == prompt.removesuffix("\n\nAssistant:\n").rpartition("which")[2].replace(" ", "number ", 1)
        assert question.reference[-1] == chats.tokenizer.eos
    assert questions_of(rows.batch(rows.widest(3)))[0].prompt == max((question.prompt for question in questions_of(batch)), key=len)


def test_several_steps_in_a_row_may_read_the_same_prompts(chats: Prepared, decoder: ModelConfig) -> None:
    """Of a mixture too, and none is left out."""
    data = TextConfig(files="x", seq_len=96, record=ChatRecord())
    once, thrice = (build_rows(GRPOConfig(max_tokens=16, updates=n), data, chats.train, chats.tokenizer, decoder) for n in (1, 3))
    mixed = [MixedRows({"a": rows, "b": rows}, 0, Mixture(0, [Share(len(rows), None)] * 2, {0: [0.3, 0.7]})) for rows in (once, thrice)]
    for single, again in ((once, thrice), mixed):
        one, three = (Steps(each, 5, Sizes(8), 8, 0, world=1, train_rows=None, widest_first=False) for each in (single, again))
        read = [[question.prompt for question in questions_of(three[step][0])] for step in range(9)]
        assert (
            read == [[question.prompt for question in questions_of(one[step][0])] for step in (0, 0, 0, 1, 1, 1, 2, 2, 2)]
            and read[0] != read[3]
        )


def test_prompts_without_room_for_an_answer_are_refused(chats: Prepared, decoder: ModelConfig) -> None:
    longest = max(len(question.prompt) for question in questions_of(rows_of(chats, decoder).batch(np.arange(20))))
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
        for each in questions_of((of := rows_of(found, decoder)).batch(np.arange(len(of)))):
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


@pytest.mark.parametrize("opening", ["", "<think>\n\n</think>\n\n", "final<|bos|>"])
def test_a_reward_compares_with_the_datas_answer_and_not_with_what_the_template_writes_before_it(
    prepare_text: Prepare, decoder: ModelConfig, tmp_path: Path, opening: str
) -> None:
    """Qwen3's empty thoughts, and gpt-oss's channel. Seen to fail: the reference 7 was '<think>\\n\\n</think>\\n\\n7', or 'final7'."""
    says = f"{{% if m.role == 'assistant' and loop.last %}}{opening}{{% endif %}}{{{{ m.content }}}}"
    ask = "{% if add_generation_prompt %}assistant\n{% endif %}"
    template = f"{{% for m in messages %}}{{{{ m.role }}}}\n{says}{{{{ eos_token }}}}{{% endfor %}}{ask}"
    (tmp_path / "own.jinja").write_text(template)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"prompt": f"{n}?", "solution": n, "tests": [n]}) + "\n" for n in range(60)))
    for fields, of in (("solution", "{}"), (["solution", "tests"], '{{"solution": {0}, "tests": [{0}]}}')):
        record = PromptRecord(answer=fields, template=str(tmp_path / "own.jinja"))
        found = prepare_text(tmp_path / "a.jsonl", record=record, val_frac=0.3)
        tokenizer = found.tokenizer
        tokenizer.chat_template = template
        sampler = Sampler(tokenizer, GRPOConfig(), in_step=False)
        rows = rows_of(found, decoder)
        questions = questions_of(rows.batch(np.arange(len(rows))))
        said = [tokenizer.encode(of.format(tokenizer.decode(one.prompt).split("\n")[1].split("?")[0])) for one in questions]
        begun = [i for part in template_parts(tokenizer, opening) for i in part]
        plain = sampler.answers([Rollout(one, ids, []) for one, ids in zip(questions, said, strict=True)], torch.device("cpu"))
        opened = sampler.answers([Rollout(one, begun + ids, []) for one, ids in zip(questions, said, strict=True)], torch.device("cpu"))
        assert [answer.reference.strip() for answer in plain] == [answer.text for answer in plain]
        assert {ExactReward().score(answer) for answer in (*plain, *opened)} == {1.0}
        wrong = sampler.answers([Rollout(one, said[0], []) for one in questions[1:]], torch.device("cpu"))
        assert {ExactReward().score(answer) for answer in wrong} == {0.0}


def template_parts(tokenizer: Tokenizer, text: str) -> list[list[int]]:
    return [[part] if isinstance(part, int) else tokenizer.encode(part) for part in tokenizer.split_specials(text)]


def test_an_answer_that_a_row_cuts_is_told(prepare_text: Prepare, decoder: ModelConfig, tmp_path: Path) -> None:
    """Seen to fail: rewards got half of the JSON of a long reference without a word."""
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"prompt": f"{n}?", "tests": [n] * n}) + "\n" for n in range(60)))
    found = prepare_text(tmp_path / "a.jsonl", record=PromptRecord(answer="tests"), val_frac=0.3)
    rows, lengths = rows_of(found, decoder), np.diff(found.train.starts, append=found.train.n_tokens)
    assert rows.describe() == f"train: {(lengths > 97).sum()} reference answers cut at data.seq_len=96, for rewards too"
    assert rows_of(found, decoder, seq_len=400).describe() == ""
