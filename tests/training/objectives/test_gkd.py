"""On-policy distillation: its loss, and runs whose answers are a function of the seed, the step and the row."""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lm.cli.compose.compose import compose_config
from lm.data.kinds import BytesConfig, GKDConfig
from lm.data.layout.examples import Example
from lm.data.rows.seq2seq import one_per_row
from lm.errors import CheckpointError, ConfigError
from lm.generation.rollouts import Drawer, Question, Rollout
from lm.losses.measure import Reference
from lm.nn.batch import Batch
from lm.nn.transformer import LM
from lm.storage.reading import read_json
from lm.training.config import TrainConfig
from lm.training.objectives.gkd import GKD
from lm.training.run import train_rank
from tests.conftest import Lm
from tests.nn.models import EXPERT, config, redrawn
from tests.training.conftest import TINY, Launch, ranks, read, results, settled

SUMS = (
    *("data=arithmetic", "data.digits=1", "data.problems=60", "data.val_frac=0.3", "data.seq_len=64", "data.val_rows=8"),
    *("model.dropout=0", "model.max_seq_len=64"),
)
PROMPTS, ANSWERS = ([1, 2], [3, 4, 5, 6], [7], [8, 9]), ([11], [12, 13, 14], [15, 16], [17, 18, 19, 20, 21])


class Given(Drawer):
    """Answers that nobody has drawn: the prompt said again, and 2 more tokens."""

    def __init__(self, in_step: bool = False) -> None:
        super().__init__(BytesConfig().build(), 4, in_step)
        self._ends, self.asked = {30}, list[list[int]]()

    def draw(self, model: LM, questions: Sequence[Question], n: int, temperature: float = 1.0, keys: Sequence[str] = ()) -> list[Rollout]:
        assert n == 1 and len(keys) == len(questions)
        self.asked = [one.prompt for one in questions]
        return [Rollout(one, self.answer(one.prompt), []) for one in questions]

    def answer(self, prompt: list[int]) -> list[int]:
        return [*prompt, 23, 30 if len(prompt) > 2 else 24]


def batch() -> Batch:
    return one_per_row([Example.of(np.array(p), np.array(a)) for p, a in zip(PROMPTS, ANSWERS, strict=True)], 0)


def kl(of: Tensor, to: Tensor) -> Tensor:
    """KL(of || to) of log-probabilities, a sum over the vocabulary."""
    return F.kl_div(to, of, reduction="none", log_target=True).sum(-1)


def loss_of_the_paper(cfg: GKDConfig, model: LM, teacher: LM, prompt: list[int], answer: list[int]) -> Tensor:
    """Of one answer by itself: Agarwal et al. 2023, section 3, D(p_T || p_S)(y | x), and equation 1."""
    ids, t, beta = torch.tensor([[*prompt, *answer]]), cfg.teacher_temperature, cfg.teacher_beta
    q, p = ((each(Batch(ids))[0, len(prompt) - 1 : -1] / t).log_softmax(-1) for each in (model, teacher))
    mixed = (beta * p.exp() + (1 - beta) * q.exp()).log()
    by = {0.0: kl(p, q), 1.0: kl(q, p)}
    return t * t * by.get(beta, beta * kl(p, mixed) + (1 - beta) * kl(q, mixed)).mean()


@pytest.mark.parametrize(("beta", "t", "on_policy"), [(1.0, 1.0, 1.0), (1.0, 2.0, 0.5), (0.5, 1.0, 0.5), (0.1, 3.0, 0.0), (0.0, 1.0, 1.0)])
def test_the_gradient_is_that_of_the_paper(beta: float, t: float, on_policy: float) -> None:
    """Seen to fail with a sum over all tokens, with the data's answers alone, and with those of other rows."""
    cfg = GKDConfig(teacher="there", teacher_beta=beta, teacher_temperature=t, on_policy=on_policy, chunk=5)
    model, teacher, sampler = redrawn(config(), 0), redrawn(config(), 1).requires_grad_(False), Given()
    sums = GKD(cfg, sampler, Reference(lambda: teacher), 0, 0)(model, batch(), step=11, first_row=8)
    found = torch.autograd.grad(sums.total, [*model.parameters()])
    own = [prompt in sampler.asked for prompt in PROMPTS]
    assert sum(own) == {0.0: 0, 0.5: 2, 1.0: 4}[on_policy]
    answers = [sampler.answer(prompt) if drawn else data for prompt, data, drawn in zip(PROMPTS, ANSWERS, own, strict=True)]
    total = sum(loss_of_the_paper(cfg, model, teacher, *both) for both in zip(PROMPTS, answers, strict=True))
    assert isinstance(total, Tensor)
    torch.testing.assert_close(sums.total, total, rtol=3e-5, atol=0.0)
    for mine, wanted in zip(found, torch.autograd.grad(total, [*model.parameters()]), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=0.0, atol=2e-5 * wanted.abs().max().item() + 1e-7)
    drawn = [len(prompt) for prompt in sampler.asked]
    assert sums.metrics["teacher_kl"].tolist() == pytest.approx([total.item(), 4], rel=3e-5)
    assert sums.metrics["answer_tokens"].tolist() == [sum(drawn) + 2 * len(drawn), len(drawn)]
    assert sums.metrics["ended"].tolist() == [sum(n > 2 for n in drawn), len(drawn)]


def test_which_answers_are_the_models_own_depends_on_the_step_and_the_row_alone() -> None:
    """Where ranks share each forward, all draw for all rows, and it comes to the same. Seen to fail with rows of a micro-batch."""
    cfg, model, teacher = GKDConfig(teacher="there", on_policy=0.3), redrawn(config(), 0), redrawn(config(), 1).requires_grad_(False)
    parts = [one_per_row([Example.of(np.array(p), np.array(a))], 0) for p, a in zip(PROMPTS, ANSWERS, strict=True)]
    chosen = np.zeros((50, 4))
    for step in range(50):
        for whole in (Given(), Given(in_step=True)):
            objective = GKD(cfg, whole, Reference(lambda: teacher), 0, 0)
            answers, drawn = objective._answers(model, batch(), step, 4)
            assert len(whole.asked) == 4 if whole.in_step else [one.question.prompt for one in drawn] == whole.asked
            each = [objective._answers(model, part, step, 4 + i) for i, part in enumerate(parts)]
            assert answers == [answer for found, _ in each for answer in found] and drawn == [one for _, found in each for one in found]
        chosen[step] = [prompt in [one.question.prompt for one in drawn] for prompt in PROMPTS]
    assert 0.2 < chosen.mean() < 0.4 and (chosen.mean(0) > 0).all() and len({*map(tuple, chosen)}) > 8


def test_a_model_that_answers_as_its_teacher_has_nothing_to_learn() -> None:
    """In a step of which no answer is its own, too."""
    tokenizer, told = BytesConfig().build(), []
    model, teacher = (redrawn(config(vocab_size=tokenizer.vocab_size), 0) for _ in range(2))
    for on_policy in (0.0, 0.5, 1.0):
        cfg, sampler = GKDConfig(teacher="there", on_policy=on_policy), Drawer(tokenizer, 6, in_step=False)
        objective = GKD(cfg, sampler, Reference(lambda: teacher.requires_grad_(False)), tokenizer.pad, 0)
        sums = objective(model, batch(), step=11, first_row=8)
        told.append(sums.metrics["answer_tokens"].tolist())
        assert sums.total.detach().abs() < 1e-4 and sums.nll > 1
        assert max(grad.abs().max() for grad in torch.autograd.grad(sums.total, [*model.parameters()])) < 1e-4
    assert told[0] == [0, 0] and [n for _, n in told] == [0, 2, 4] and 4 <= told[2][0] <= 24


def test_experts_of_each_answer_are_balanced_once() -> None:
    """As answers count, however long they are. Seen to fail: once for each token, which the divergence is divided by."""
    sparse = redrawn(config(ffn={"kind": "moe", "n_experts": 4, "top_k": 2, "expert": EXPERT, "balance_loss": 0.3}), 0).train()
    teacher = redrawn(sparse.cfg, 0).requires_grad_(False)
    cfg = GKDConfig(teacher="there", on_policy=0.0)
    sums = GKD(cfg, Given(), Reference(lambda: teacher), 0, 0)(sparse, batch(), 0, 0)
    aux: Tensor = sparse(batch(), read=lambda hidden, head, ctx: torch.stack(list(ctx.reported.losses["router_loss"].values())).sum())
    assert aux > 0 and sums.loads is not None
    torch.testing.assert_close(sums.total, aux, rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run `parent` that has seen a few sums, `other` as it, and `teacher`, which is wider and has seen more."""
    folder = tmp_path_factory.mktemp("made")
    given = [*[item for item in TINY if not item.startswith("data=")], *SUMS, "objective=sft", "optim.lr=1e-2", f"run.dir={folder}"]
    given.append(f"data.cache_dir={folder / 'c'}")
    train_rank(compose_config(settled(*given, "trainer.max_steps=6", "run.name=parent")))
    train_rank(compose_config(settled(*given, "trainer.max_steps=6", "run.name=other", "seed=2")))
    train_rank(compose_config(settled(*given, "trainer.max_steps=40", "run.name=teacher", "model.d_model=48", "seed=1")))
    return folder


@pytest.fixture
def taught(made: Path, tmp_path: Path) -> Callable[..., TrainConfig]:
    """A run of a few steps from the parent, half of whose answers are its own."""
    own = [item for item in TINY if not item.startswith(("model", "tokenizer", "data="))]
    given = [*own, *[item for item in SUMS if not item.startswith("model")], f"init_from={made / 'parent'}", "optim=adamw", "optim.lr=1e-2"]
    given += ["objective=gkd", f"objective.teacher={made / 'teacher'}", "objective.max_tokens=4", "objective.on_policy=0.5"]
    given += [f"run.dir={tmp_path}", f"data.cache_dir={made / 'c'}", "trainer.max_steps=6", "trainer.val_every=3"]
    return lambda *more: compose_config(settled(*given, *more))


def told(run: Path) -> list[tuple[str, float]]:
    """What is told of answers, in order; that none is a model's own is nothing."""
    names = ("loss", "teacher_kl", "ended", "answer_tokens", "grad_norm", "val_loss")
    return [(key, value or 0.0) for line in read(run / "metrics.jsonl") for key, value in sorted(line.items()) if key in names]


@pytest.mark.slow
def test_a_run_comes_closer_to_its_teacher(taught: Callable[..., TrainConfig], tmp_path: Path) -> None:
    """All at once: its metrics, and a teacher whose hash is kept."""
    summary = train_rank(taught("objective.on_policy=1", "trainer.max_steps=12", "trainer.val_every=12"))
    lines = [line for line in read(tmp_path / "run" / "metrics.jsonl") if "teacher_kl" in line]
    assert len(lines) == 12 and np.mean([line["teacher_kl"] for line in lines[-3:]]) < 0.8 * np.mean(
        [line["teacher_kl"] for line in lines[:3]]
    )
    assert all(1 <= line["answer_tokens"] <= 4 and 0 <= line["ended"] <= 1 for line in lines)
    assert summary["teacher_hash"] and "val_loss" in summary and "val_reward" not in summary


@pytest.mark.slow
def test_held_out_answers_are_written(taught: Callable[..., TrainConfig], tmp_path: Path) -> None:
    train_rank(taught("trainer.sample_prompts=held_out", "trainer.max_steps=3", "trainer.val_every=3"))
    blocks = (tmp_path / "run" / "samples.md").read_text().rpartition("## step 3")[2].split("```\n")[1::2]
    assert len(blocks) == 8 and all("Assistant:" in prompt for prompt in blocks[::2]) and "Assistant:" not in "".join(blocks[1::2])


@pytest.mark.slow
def test_a_resumed_run_answers_the_same_to_the_bit(taught: Callable[..., TrainConfig], tmp_path: Path) -> None:
    train_rank(taught("schedule=constant", "run.name=whole"))
    train_rank(taught("schedule=constant", "trainer.max_steps=3", "checkpoint.every=3"))
    train_rank(taught("schedule=constant"))
    assert results(tmp_path / "run")[0] == results(tmp_path / "whole")[0]
    assert told(tmp_path / "run")[-15:] == told(tmp_path / "whole")[-15:]


@pytest.mark.slow
def test_answers_do_not_depend_on_micro_batches(taught: Callable[..., TrainConfig], tmp_path: Path) -> None:
    for rows in (8, 2):
        train_rank(taught(f"trainer.micro_batch={rows}", f"run.name=rows{rows}", "optim=sgd", "optim.lr=0.1"))
    (names, values), (others, wanted) = (zip(*told(tmp_path / f"rows{rows}"), strict=True) for rows in (2, 8))
    assert names == others and values == pytest.approx(wanted, rel=1e-4, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero1"])
def test_two_ranks_answer_and_learn_what_one_does(
    taught: Callable[..., TrainConfig], launch: Launch, tmp_path: Path, strategy: str
) -> None:
    """Of micro-batches of one row, of which some have none to answer."""
    if strategy.startswith("zero"):
        pytest.importorskip("deepspeed")
    train_rank(taught("trainer.micro_batch=1", "run.name=one"))
    launch(taught("trainer.micro_batch=1", *ranks(strategy)))
    (names, values), (others, wanted) = (zip(*told(tmp_path / run), strict=True) for run in ("run", "one"))
    assert names == others and values == pytest.approx(wanted, rel=2e-3, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "own", "said"),
    [
        ("objective.teacher", "teacher", "not the model that the run has learned from so far"),
        ("init_from", "parent", "not the model that the run started from, and objective=gkd answers in the tokens of that one"),
    ],
)
def test_a_teacher_or_a_parent_made_anew_is_noticed(
    taught: Callable[..., TrainConfig], made: Path, tmp_path: Path, key: str, own: str, said: str
) -> None:
    (tmp_path / "there").symlink_to(made / own)
    begun = (f"{key}={tmp_path / 'there'}", "schedule=constant", "checkpoint.every=3")
    train_rank(taught(*begun, "trainer.max_steps=3"))
    (tmp_path / "there").unlink()
    (tmp_path / "there").symlink_to(made / "other")
    with pytest.raises(ConfigError, match=said):
        train_rank(taught(*begun))


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("init_from=null",), r"objective=gkd learns from what the model answers, and a new one cannot\. Set init_from"),
        (("objective.teacher=null",), r"objective\.teacher"),
        (("objective.teacher=nowhere",), r"objective\.teacher=nowhere: does not exist"),
        (("objective.teacher_beta=2",), r"objective\.teacher_beta"),
        (("objective.on_policy=-1",), r"objective\.on_policy"),
        (("objective.rewards={exact:{}}",), r"objective\.rewards"),
        (("objective.n_answers=4",), r"objective\.n_answers"),
        (("model.dropout=0.1",), r"what the model itself has drawn, and model\.dropout=0\.1 makes .* Set model\.dropout=0"),
        (("strategy=zero3", "launch.devices=2"), "strategy=zero3: objective=gkd draws .* Use strategy=fsdp"),
        (("strategy=fsdp", "launch.devices=2", "launch.context=2"), r"launch\.context=2: objective=gkd needs whole rows"),
        (("objective.max_tokens=60",), r"leave no room for objective\.max_tokens=60 in a row"),
    ],
)
def test_what_cannot_be_taught_is_refused(taught: Callable[..., TrainConfig], more: tuple[str, ...], said: str) -> None:
    with pytest.raises((ConfigError, CheckpointError), match=said):
        train_rank(taught(*more))


def test_a_teacher_without_the_runs_tokens_is_refused(taught: Callable[..., TrainConfig], made: Path, tmp_path: Path) -> None:
    given = [*[item for item in TINY if not item.startswith(("data=", "tokenizer"))], *SUMS, "objective=sft", f"run.dir={tmp_path}"]
    train_rank(compose_config(settled(*given, "tokenizer=bpe", "tokenizer.vocab_size=300", "trainer.max_steps=3", "run.name=other")))
    with pytest.raises(ConfigError, match=r"it has another tokenizer, .* Choose one that has all tokens of this run"):
        train_rank(taught(f"objective.teacher={tmp_path / 'other'}"))


@pytest.mark.slow
def test_a_run_is_planned_shown_and_evaluated_as_others_are(taught: Callable[..., TrainConfig], made: Path, tmp_path: Path, lm: Lm) -> None:
    """The teacher counts in FLOPs and memory, its rewards are told by another objective, and without it the run is evaluated still."""
    summary = train_rank(taught())
    assert summary["flops_per_token"] == read_json(made / "parent" / "summary.json")["flops_per_token"] + (
        read_json(made / "teacher" / "summary.json")["flops_per_token"] / 3
    )
    code, out, err = lm("eval", f"from={tmp_path / 'run'}", "format=json")
    assert code == 0, err
    assert json.loads(out.splitlines()[-1])["val_loss"] == pytest.approx(summary["val_loss"], rel=1e-5)
    asked = ("objective=gkd", f"objective.teacher={made / 'teacher'}", f"init_from={made / 'parent'}", "objective.max_tokens=4", *SUMS[:6])
    code, out, err = lm("data", "show", *asked)
    assert code == 0 and re.search(r"[0-9]│\+│[0-9].*says", out, re.DOTALL), err
