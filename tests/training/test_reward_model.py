"""objective=reward: a number at the end of an answer, more of better ones; and objective=grpo by it."""

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import lm
from lm.cli.compose.compose import compose_config
from lm.cli.main import main
from lm.data.rewards.base import Answer
from lm.data.rows.policy import GRPOConfig
from lm.data.rows.reading import Reading
from lm.data.rows.reward import RewardModelConfig
from lm.data.tokenizer.around import closing_of
from lm.errors import ConfigError
from lm.generation import teacher
from lm.generation.rollouts import Question, Rollout, Sampler
from lm.losses.rewards import bradley_terry
from lm.nn.batch import IGNORED
from lm.training.config import TrainConfig
from lm.training.run import train_rank
from tests.training.conftest import Configure, in_each_way, read, results, settled

GOOD, BAD = ["sea", "lake", "pond", "dew", "mist", "rain"], ["fire", "ember", "flame", "spark", "ash", "smoke"]
Made = Callable[..., TrainConfig]


@pytest.fixture
def of_pairs(tiny: list[str], tmp_path: Path) -> Made:
    """The config of a reward model that is to like words of water."""
    draw = random.Random(0)
    said = [(" ".join(draw.choices(GOOD, k=draw.randint(1, 4))), " ".join(draw.choices(BAD, k=draw.randint(1, 4)))) for _ in range(200)]
    lines = [{"prompt": f"say {i % 9}", "chosen": good, "rejected": bad} for i, (good, bad) in enumerate(said)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    def run(*more: str) -> TrainConfig:
        own = ("data=preferences", f"data.files={tmp_path / 'pairs.jsonl'}", "data.val_frac=0.2", "objective=reward", "data.seq_len=64")
        kept = [each for each in tiny if not (any("init_from" in one for one in more) and each.startswith(("model", "tokenizer")))]
        return compose_config(settled(*kept, *own, *more))

    return run


@pytest.mark.slow
def test_it_learns_what_is_better_and_is_measured_as_it_is_used(of_pairs: Made, tmp_path: Path) -> None:
    """By the paper's loss of the numbers that lm.classify tells of whole texts, each alone."""
    cfg = of_pairs(
        "optim=adamw", "optim.lr=0.01", "trainer.max_steps=20", "trainer.val_every=20", "model.dropout=0", "objective.centre=0.01"
    )
    summary, folder = train_rank(cfg), tmp_path / "run"
    model, tokenizer = lm.load(folder)
    assert model.cfg.head.labels == ["reward"] and model.head.weight.shape == (1, 32) and model.head.bias is None
    [batch] = lm.batches(cfg).validation(micro_batch=100)
    assert batch.labels is not None and batch.positions is not None
    texts = [tokens[at >= 0].tolist() for tokens, at in zip(batch.tokens, batch.positions, strict=True)]
    assert all(label[len(text) - 1] == 0 and (label != IGNORED).sum() == 1 for label, text in zip(batch.labels, texts, strict=True))
    with torch.no_grad():
        told = torch.stack([model(torch.tensor([text]))[0, -1, 0] for text in texts])
    margin = told[0::2] - told[1::2]
    assert summary["val_bits_per_byte"] is None, "labels are no text"
    last = read(folder / "metrics.jsonl")[-1]
    assert summary["val_loss"] == pytest.approx(-F.logsigmoid(margin).mean().item(), rel=1e-5)
    assert last["val_accuracy"] == pytest.approx((margin > 0).float().mean().item()) and last["val_accuracy"] > 0.9
    assert last["val_chosen_reward"] - last["val_rejected_reward"] == pytest.approx(last["val_margin"], abs=1e-4)
    [alone] = lm.classify(model, tokenizer, ["say 3 lake dew"])
    with torch.no_grad():
        assert alone["reward"] == pytest.approx(
            model(torch.from_numpy(Reading(model.cfg, tokenizer, 64).text("say 3 lake dew").ids)[None])[0, -1, 0].item(), abs=1e-5
        )
    again = lm.evaluate(folder)
    assert {key: again[key] for key in ("val_loss", "val_margin", "val_error")} == pytest.approx(
        {key: last[key] for key in ("val_loss", "val_margin", "val_error")}, rel=1e-5
    )


@pytest.mark.slow
def test_chats_are_judged_as_training_reads_them(of_pairs: Made, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """In all forms in which a line of a file may have them, from the command line and from Python."""
    given = ("data.record.template=chatml", "tokenizer=bpe", "tokenizer.vocab_size=300", "tokenizer.specials=[<|im_start|>,<|im_end|>]")
    cfg = of_pairs(*given, "trainer.max_steps=3", "model.dropout=0")
    train_rank(cfg)
    run, (model, tokenizer) = f"from={tmp_path / 'run'}", lm.load(tmp_path / "run")
    [batch] = lm.batches(cfg).validation(micro_batch=100)
    assert batch.labels is not None and batch.positions is not None
    with torch.no_grad():
        expected = [
            model(tokens[None, : int((at >= 0).sum())])[0, -1, 0].item() for tokens, at in zip(batch.tokens, batch.positions, strict=True)
        ]
    pairs = [json.loads(line) for line in (tmp_path / "pairs.jsonl").read_text().splitlines()]
    chats = {
        field: [[{"role": "user", "content": line["prompt"]}, {"role": "assistant", "content": line[field]}] for line in pairs]
        for field in ("chosen", "rejected")
    }
    found = {field: [one["reward"] for one in lm.classify(model, tokenizer, chats[field])] for field in chats}
    for each in expected:
        assert min(abs(each - other) for field in found for other in found[field]) < 1e-5
    forms: list[tuple[list[str], list[Any], list[float]]] = [
        (["field=chosen"], pairs, found["chosen"]),
        (["field=rejected"], pairs, found["rejected"]),
        (["field=of.a"], [{"of": {"a": chat}} for chat in chats["rejected"]], found["rejected"]),
        ([], [{"messages": chat} for chat in chats["chosen"]], found["chosen"]),
        ([], [{"prompt": line["prompt"], "completion": line["rejected"], "label": False} for line in pairs], found["rejected"]),
        ([], [{"prompt": chat[:1], "completion": chat[1:]} for chat in chats["chosen"]], found["chosen"]),
    ]
    for fields, lines, rewards in forms:
        (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        assert not main(["classify", run, f"texts={tmp_path / 'in.jsonl'}", f"out={tmp_path / 'out.jsonl'}", "overwrite=true", *fields])
        told = [json.loads(line)["predicted"]["reward"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
        assert told == pytest.approx(rewards, abs=2e-6)
    capsys.readouterr()
    assert not main(["classify", run, "chat=true", f"text={pairs[0]['prompt']}", f"text_pair={pairs[0]['chosen']}", "format=json"])
    [alone] = json.loads(capsys.readouterr().out)
    assert alone["reward"] == pytest.approx(found["chosen"][0], abs=2e-6)
    row, start = batch.tokens[0].tolist(), tokenizer.special(["<|im_start|>"])
    assert start is not None and row[1] == start  # behind bos
    asked = row[: row.index(start, 2)]  # the user's message alone
    said = tokenizer.decode(asked).partition("\n")[2].partition("<")[0].strip()
    with torch.no_grad():
        of_it = model(torch.tensor([asked]))[0, -1, 0].item()
    assert lm.classify(model, tokenizer, [[{"role": "user", "content": said}]]) == [{"reward": pytest.approx(of_it, abs=1e-5)}]
    with pytest.raises(ConfigError, match=r"number 2 of 2 is a chat of \d+ tokens, and the model reads 64\. Shorten it"):
        lm.classify(model, tokenizer, ["plain", [{"role": "user", "content": "say 3 " * 40}]])


def test_the_loss_is_that_of_the_paper() -> None:
    rewards = torch.tensor([1.0, 0.5, -2.0, -2.0, 0.0, 3.0], requires_grad=True)
    better, other = rewards[0::2], rewards[1::2]
    expected = -torch.log(1 / (1 + torch.exp(other - better))).sum() + 0.1 * ((better + other) ** 2).sum()
    sums = bradley_terry(rewards, 0.1)
    torch.testing.assert_close(torch.autograd.grad(sums.total, rewards)[0], torch.autograd.grad(expected, rewards)[0])
    assert sums.total.item() == pytest.approx(expected.item())
    assert {name: pair.tolist() for name, pair in sums.metrics.items()} == {
        "chosen_reward": [-1.0, 3], "rejected_reward": [1.5, 3], "margin": [-2.5, 3], "accuracy": [1.5, 3], "error": [1.5, 3],
    }  # fmt: skip


@pytest.mark.slow
def test_a_resumed_reward_model_is_the_one_that_was_left_alone(of_pairs: Made, goes_on_to_the_bit: Callable[[TrainConfig], None]) -> None:
    goes_on_to_the_bit(of_pairs())


@pytest.mark.slow
@in_each_way
def test_ranks_and_micro_batches_learn_as_one(of_pairs: Made, learns_as_one: Callable[..., None], where: list[str]) -> None:
    learns_as_one(of_pairs, *where)


@pytest.fixture
def parent(configure: Configure, tmp_path: Path) -> Path:
    train_rank(configure("run.name=parent", "trainer.max_steps=3", "data.seq_len=64"))
    return tmp_path / "parent"


@pytest.fixture
def judge(of_pairs: Made, parent: Path, tmp_path: Path) -> Path:
    train_rank(of_pairs(f"init_from={parent}", "run.name=judge", "trainer.max_steps=3"))
    return tmp_path / "judge"


@pytest.fixture
def by_judge(of_pairs: Made, parent: Path, tmp_path: Path) -> Made:
    """The config of a run that learns from a reward model's numbers."""
    (tmp_path / "asked.jsonl").write_text("".join(json.dumps({"prompt": f"say {i}"}) + "\n" for i in range(40)))

    def run(*more: str) -> TrainConfig:
        own = ("data=prompts", f"data.files={tmp_path / 'asked.jsonl'}", "objective=grpo")
        return of_pairs(f"init_from={parent}", *own, "objective.n_answers=3", "objective.max_tokens=6", "model.dropout=0", *more)

    return run


@pytest.mark.slow
def test_answers_are_judged_by_a_reward_model(
    by_judge: Made, judge: Path, killed: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it tells of the whole text, alone; a resumed run is judged alike, and by no other model."""
    seen, calls = list[tuple[list[int], float | None]](), list[list[float | None]]()
    real = Sampler.answers

    def heard(self: Sampler, rollouts: Sequence[Rollout], device: torch.device) -> list[Answer]:
        found = real(self, rollouts, device)
        seen.extend(([*each.question.prompt, *each.tokens], answer.learned) for each, answer in zip(rollouts, found, strict=True))
        calls.append([answer.learned for answer in found])
        return found

    loads = list[str]()
    load = teacher.load
    monkeypatch.setattr(teacher, "load", lambda path, device: (loads.append(path), load(path, device))[1])
    monkeypatch.setattr(Sampler, "answers", heard)
    cfg = by_judge(f"objective.reward_model={judge}")
    train_rank(cfg.replace(run=cfg.run.replace(name="alone")))
    assert len([each for each in read(tmp_path / "alone" / "metrics.jsonl") if "val_loss" in each]) > 2 >= len(loads)
    model, _ = lm.load(judge)
    with torch.no_grad():
        expected = [model(torch.tensor([ids]))[0, -1, 0].item() for ids, _ in seen]
    assert len(seen) > 40 and [said for _, said in seen] == pytest.approx(expected, abs=1e-5)
    line = next(each for each in read(tmp_path / "alone" / "metrics.jsonl") if "reward" in each)
    of_steps = [call for call in calls if len(call) == cfg.data.global_batch * 3]
    assert line["reward"] == pytest.approx(sum(map(float, of_steps[0])) / len(of_steps[0]), abs=1e-5)
    killed(cfg)
    train_rank(cfg)
    assert results(tmp_path / "run") == results(tmp_path / "alone")


@pytest.mark.slow
def test_an_answer_is_judged_where_the_reward_model_learned_to(of_pairs: Made) -> None:
    """ChatML breaks the line behind the end of an answer, at which the model draws no more.  Seen to fail without what stands there."""
    given = ("data.record.template=chatml", "tokenizer=bpe", "tokenizer.vocab_size=300", "tokenizer.specials=[<|im_start|>,<|im_end|>]")
    batches = lm.batches(of_pairs(*given))
    tokenizer, [batch] = batches.tokenizer, batches.validation(micro_batch=100)
    assert batch.labels is not None and len(closing_of(tokenizer)) == 2
    sampler = Sampler(tokenizer, GRPOConfig.model_validate({"reward_model": "judge"}), in_step=False)
    for row, label in zip(batch.tokens.tolist(), batch.labels, strict=True):
        text = row[: int((label == 0).nonzero()) + 1]
        assert tokenizer.special_names[text[-2]] == "<|im_end|>"
        assert sampler.whole(Rollout(Question(text[:9], []), text[9:-1], [])) == text
        assert sampler.whole(Rollout(Question(text[:9], []), text[9:-2], [])) == text[:-2]  # cut at max_tokens


@pytest.mark.slow
def test_there_is_a_place_for_the_last_token_of_an_answer(by_judge: Made, tmp_path: Path) -> None:
    """Only the reward model reads it, which may have no more places than data.seq_len.  Seen to fail with the room of other rewards."""
    judged = f"objective.reward_model={tmp_path}"
    lm.batches(by_judge("data.seq_len=32", judged))  # 26 tokens of the longest prompt, and 6 of an answer
    lm.batches(by_judge("data.seq_len=31", "objective.rewards={ended:{}}"))
    with pytest.raises(ConfigError, match=r"leave no room for objective\.max_tokens=6"):
        lm.batches(by_judge("data.seq_len=31", judged))


def test_a_reward_model_goes_on_with_its_own_head(of_pairs: Made) -> None:
    """Whatever its number is called: LABEL_0 in transformers.  Seen to fail with a new head by the name of ours."""
    model = of_pairs().model
    named = model.replace(head=model.head.telling(["LABEL_0"], bias=False))
    assert RewardModelConfig().headed(named) == named != RewardModelConfig().headed(model)


def test_what_is_no_reward_model_is_refused(by_judge: Made, parent: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"objective.reward_model=.*parent: it is no reward model, which tells a number .*objective=reward"
    ):
        train_rank(by_judge(f"objective.reward_model={parent}"))
    with pytest.raises(ConfigError, match=r"learned is what a reward model says, and there is none\. Set objective\.reward_model"):
        by_judge("objective.rewards={learned:{}}")
    with pytest.raises(ConfigError, match="reward_model has no effect without its reward"):
        by_judge("objective.reward_model=x", "objective.rewards={ended:{}}")


@pytest.mark.slow
def test_an_evaluation_tells_rewards_of_a_reward_model_that_is_there(by_judge: Made, judge: Path, parent: Path) -> None:
    cfg, said = by_judge(f"objective.reward_model={judge}"), list[str]()
    found = [
        lm.evaluate(parent, cfg.data, cfg.objective.replace(reward_model=str(path)), parent=parent, log=said.append)
        for path in (judge, "gone")
    ]
    assert found[1] == {name: value for name, value in found[0].items() if not name.startswith(("val_reward", "val_answer", "val_ended"))}
    assert "val_reward" in found[0]
    assert "objective.reward_model=gone: there is no such model, so rewards are not told." in said
    with pytest.raises(ConfigError, match=r"parent: it is no reward model"):
        lm.evaluate(parent, cfg.data, cfg.objective.replace(reward_model=str(parent)), parent=parent)


@pytest.mark.slow
def test_an_evaluation_names_models_that_were_made_anew_since_the_run(
    by_judge: Made, of_pairs: Made, judge: Path, parent: Path, configure: Configure, tmp_path: Path
) -> None:
    """A resumed run refuses them.  A loss that needs no parent does not ask for one."""
    train_rank(by_judge("run.name=liked", "trainer.max_steps=3", f"objective.reward_model={judge}"))
    train_rank(of_pairs(f"init_from={parent}", "objective=dpo", "run.name=preferred", "trainer.max_steps=3"))
    said = list[str]()

    def told() -> list[str]:
        said.clear()
        for name in ("liked", "preferred"):
            lm.evaluate(tmp_path / name, log=said.append)
        return [line for line in said if line.startswith(("init_from", "objective"))]

    assert not told()
    for name, other in (
        ("judge", of_pairs(f"init_from={parent}", "run.name=other", "trainer.max_steps=3")),
        ("parent", configure("run.name=other", "trainer.max_steps=3", "data.seq_len=64", "seed=3")),
    ):
        train_rank(other)
        (tmp_path / name).rename(tmp_path / f"{name}_before")
        (tmp_path / "other").rename(tmp_path / name)
    anew = "another model by now than the run has used, so these figures are not those that the run told."
    assert told() == [f"objective.reward_model={judge}: {anew}", f"init_from={parent}: {anew}"]
    cfg = by_judge(f"objective.reward_model={judge}")
    lm.evaluate(tmp_path / "parent_before", cfg.data, cfg.objective, log=said.append)
    assert not [line for line in said if "is not told" in line]
    pairs = of_pairs(f"init_from={parent}", "objective=dpo")
    lm.evaluate(tmp_path / "parent_before", pairs.data, pairs.objective, log=said.append)
    assert "init_from=None: none is given, and objective=dpo compares with one; its loss is not told." in said
