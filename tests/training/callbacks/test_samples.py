"""What samples.md shows of a run on chats: answers, each to a question that the model reads as in training."""

import json
from pathlib import Path

import pytest

from lm.cli.compose.compose import compose_config
from lm.generation.fill import fill
from lm.generation.generate import generate
from lm.generation.load import load
from lm.training.run import train_rank
from tests.training.conftest import Configure

Chats = list[list[dict[str, str]]]
CHAT = ("data=chat", "data.record.template=chatml", "data.seq_len=96", "model.max_seq_len=96", "objective=sft", "trainer.sample_tokens=8")


@pytest.fixture
def chats(tmp_path: Path) -> Chats:
    turns = [("user", "Which one is doubled here, {n}?"), ("assistant", "{n}."), ("user", "And now?"), ("assistant", "It is {n}.")]
    found = [[{"role": role, "content": text.format(n=n)} for role, text in turns] for n in range(60)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in found))
    return found


def blocks(run: Path, step: int) -> list[str]:
    return (run / "samples.md").read_text().rpartition(f"## step {step}")[2].split("```\n")[1::2]


def answer(run: Path, question: str) -> str:
    model, tokenizer = load(run, device="cpu")
    return generate(model, tokenizer, question, chat=True, max_tokens=8, temperature=0.8, top_p=0.95, seed=0)


def test_held_out_questions_are_answered(configure: Configure, tmp_path: Path, chats: Chats) -> None:
    """Seen to fail: the first 16 tokens of a chat were gone on with, without its special tokens, in the midst of the question."""
    files = f"data.files={tmp_path / 'chats.jsonl'}"
    train_rank(configure(*CHAT, files, "trainer.sample_prompts=held_out", "trainer.max_steps=4"))
    found = blocks(tmp_path / "run", 4)
    assert len(found) == 4
    for shown, told in zip(found[::2], found[1::2], strict=True):
        question = next(chat[0]["content"] for chat in chats if chat[0]["content"] in shown)
        assert shown == f"user\n{question}\nassistant\n\n" and told == f"{answer(tmp_path / 'run', question)}\n"


@pytest.mark.slow
def test_a_prompt_is_a_users_message(configure: Configure, tmp_path: Path, chats: Chats) -> None:
    train_rank(configure(*CHAT, f"data.files={tmp_path / 'chats.jsonl'}", "trainer.sample_prompts=['And 7?']", "trainer.max_steps=4"))
    assert blocks(tmp_path / "run", 4) == ["user\nAnd 7?\nassistant\n\n", f"{answer(tmp_path / 'run', 'And 7?')}\n"]


@pytest.mark.slow
def test_texts_beside_chats_are_gone_on_with(configure: Configure, tiny: list[str], tmp_path: Path, chats: Chats) -> None:
    """And prompts are texts, as the run reads some."""
    [text] = [each.partition("=")[2] for each in tiny if each.startswith("data.files=")]
    own = [each for each in tiny if not each.startswith(("data=", "data.files=", "trainer.sample_prompts"))]
    said = f"{{name:chats,data:{{kind:text,files:{tmp_path}/chats.jsonl,record:{{kind:chat,template:chatml}}}}}}"
    mixed = [*own, "data=mix", f"data.sources=[{{name:text,data:{{kind:text,files:{text}}}}},{said}]", *CHAT[2:], "trainer.max_steps=4"]
    train_rank(compose_config([*dict.fromkeys(mixed), "trainer.sample_prompts=held_out"]))
    found = blocks(tmp_path / "run", 4)
    assert len(found) == 5 and found[0].startswith("user\nWhich one") and not found[-1].startswith("user")
    train_rank(compose_config([*dict.fromkeys(mixed), "trainer.sample_prompts=['def ']", "run.name=other"]))
    [shown] = blocks(tmp_path / "other", 4)
    assert shown.startswith("def ")


def test_a_question_longer_than_a_row_is_not_asked(configure: Configure, tmp_path: Path) -> None:
    for name, n_long in (("train", 0), ("held", 2)):
        asked = [f"{n:02d}, {'and so on ' * 9 * (n < n_long)}?" for n in range(60)]
        chats = [[{"role": "user", "content": each}, {"role": "assistant", "content": "No."}] for each in asked]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    files = (f"data.files={tmp_path / 'train.jsonl'}", f"data.val_files={tmp_path / 'held.jsonl'}")
    data = ("data=chat", "data.record.template=chatml", "data.seq_len=64", "objective=sft", "data.max_contamination=1")
    train_rank(configure(*data, *files, "trainer.sample_prompts=held_out", "trainer.sample_tokens=4", "trainer.max_steps=4"))
    told = (tmp_path / "run" / "samples.md").read_text()
    assert "user\n02, ?\n" in told and "user\n03, ?\n" in told and "and so on" not in told


def test_a_model_of_masked_diffusion_writes_behind_the_prompts(configure: Configure, tmp_path: Path) -> None:
    """As many tokens as the row has room for, the same ones as the finished model."""
    how = ("model=llada_tiny", "model.d_model=32", "model.n_layers=1", "model.attention.n_heads=2", "objective=diffusion")
    train_rank(configure(*how, "trainer.sample_prompts=['one and ','two ']", "trainer.sample_tokens=500", "trainer.max_steps=4"))
    model, tokenizer = load(tmp_path / "run", device="cpu")
    room = model.max_seq_len - len(tokenizer.prefix) - len("one and ")
    wanted = fill(model, tokenizer, ["one and ", "two "], max_tokens=room, temperature=0.8, top_p=0.95)
    assert blocks(tmp_path / "run", 4) == [f"{text}\n" for text in wanted] and all(map(str.startswith, wanted, ("one and ", "two ")))
