"""objective.teacher: a run that learns what another model says."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lm.cost.count import count
from lm.data.kinds import CausalConfig
from lm.errors import CheckpointError, ConfigError, LmError
from lm.losses.measure import Reference
from lm.losses.teacher import divergence
from lm.nn.batch import Batch
from lm.schema import flatten
from lm.storage.reading import read_json
from lm.testing.models import VOCAB
from lm.training.config import TrainConfig
from lm.training.objectives.likelihood import Likelihood
from lm.training.plan import frozen_bytes, plan
from lm.training.run import train_rank
from tests.conftest import Lm
from tests.nn.models import config, near, redrawn
from tests.training.conftest import Configure, in_each_way, read, write_text

Made = Callable[..., Path]


@pytest.fixture
def made(configure: Configure, tmp_path: Path) -> Made:
    """A run of this name, which is to teach."""

    def run(name: str, *more: str) -> Path:
        train_rank(configure(f"run.name={name}", "trainer.max_steps=8", "seed=5", *more))
        return tmp_path / name

    return run


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "model" / "model.safetensors")


def told(run: Path) -> list[float]:
    return [line["teacher_kl"] for line in read(run / "metrics.jsonl") if "teacher_kl" in line]


@pytest.mark.slow
def test_a_model_taught_by_itself_stays_as_it_is(made: Made, configure: Configure) -> None:
    """So the teacher has no dropout, and the labels no part."""
    teacher = made("teacher")
    still = ("model.dropout=0", "optim=sgd", "optim.lr=0.1", "optim.weight_decay=0", "objective.teacher_weight=1")
    train_rank(configure(*still, f"objective.teacher={teacher}").replace(init_from=str(teacher)))
    assert max(told(teacher.parent / "run")) < 1e-6
    for name, weight in weights(teacher.parent / "run").items():
        torch.testing.assert_close(weight, weights(teacher)[name], atol=1e-5, rtol=0)


@pytest.mark.slow
def test_a_larger_teacher_is_come_closer_to_and_labels_have_their_part(made: Made, configure: Configure) -> None:
    teacher = made("teacher", "model.d_model=48", "trainer.max_steps=40")
    runs = {}
    for weight in (0.5, 1.0):
        summary = train_rank(configure(f"run.name=by{weight}", f"objective.teacher={teacher}", f"objective.teacher_weight={weight}"))
        runs[weight] = told(teacher.parent / f"by{weight}")
    assert all(kl[-1] < 0.9 * kl[0] for kl in runs.values())
    own = read_json(teacher / "summary.json")["flops_per_token"]
    assert summary["flops_per_token"] == count(configure().model.sized(260, 32), 32).train_flops_per_token + own / 3
    assert runs[0.5][0] == runs[1.0][0] and runs[0.5][-1] != runs[1.0][-1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        [],
        pytest.param(["objective.scheduled_sampling=0.5"], marks=pytest.mark.slow),
        pytest.param(["objective=mlm", "model=bert_tiny", "tokenizer=bytes"], marks=pytest.mark.slow),
    ],
)
def test_a_resumed_run_is_taught_as_one_that_was_left_alone(
    more: list[str], made: Made, configure: Configure, goes_on_to_the_bit: Callable[[TrainConfig], None]
) -> None:
    teacher = made("teacher", *more)
    cfg = configure(*more, f"objective.teacher={teacher}")
    goes_on_to_the_bit(cfg)


@pytest.mark.slow
@in_each_way
def test_ranks_and_micro_batches_are_taught_as_one(
    where: list[str], made: Made, configure: Configure, learns_as_one: Callable[..., None], tmp_path: Path
) -> None:
    taught = (f"objective.teacher={made('teacher')}", "objective.teacher_weight=0.7")
    learns_as_one(lambda *more: configure(*taught, *more), *where)
    torch.testing.assert_close(told(tmp_path / "run"), told(tmp_path / "alone"), rtol=1e-5, atol=0)


@pytest.mark.slow
def test_a_teacher_that_was_made_anew_is_noticed(made: Made, configure: Configure, killed: Callable[..., None], tmp_path: Path) -> None:
    teacher = made("teacher")
    cfg = configure(f"objective.teacher={teacher}")
    killed(cfg)
    made("other", "seed=6").rename(tmp_path / "moved")
    teacher.rename(tmp_path / "before")
    (tmp_path / "moved").rename(teacher)
    with pytest.raises(ConfigError, match="not the model that the run has learned from so far"):
        train_rank(cfg)
    teacher.rename(tmp_path / "gone")
    with pytest.raises(CheckpointError, match=r"objective\.teacher=.*does not exist"):
        train_rank(cfg)
    (tmp_path / "before").rename(teacher)
    summary = train_rank(cfg)
    assert summary["teacher_hash"] == read_json(next((tmp_path / "run" / "checkpoints").iterdir()) / "meta.json")["teacher_hash"]


@pytest.mark.parametrize(
    ("of_teacher", "of_run", "said"),
    [
        (
            ["tokenizer=bpe", "tokenizer.vocab_size=300"],
            [],
            "in which '.+' is not token .*tokenizer.path=.*teacher/model",
        ),
        (
            ["tokenizer=bpe", "tokenizer.vocab_size=320"],
            ["tokenizer=bpe", "tokenizer.vocab_size=280"],
            "which has all tokens of this one and cuts texts otherwise",
        ),
        (["data.seq_len=16"], [], "it takes rows of 16 tokens, and data.seq_len=32"),
        (["model=bert_tiny", "tokenizer=bytes", "objective=mlm"], [], "its model.kind is encoder, and that of the model decoder"),
        (
            ["model=t5_tiny", "objective=spans", "objective.sentinels=4", "model.start_token=7"],
            ["model=t5_tiny", "objective=spans", "objective.sentinels=4"],
            "its decoder begins otherwise, and both read the same rows. Set model.start_token=7 model.first_token=null",
        ),
    ],
)
def test_a_teacher_that_cannot_say_it_is_refused(
    of_teacher: list[str], of_run: list[str], said: str, made: Made, configure: Configure
) -> None:
    teacher = made("teacher", *of_teacher)
    with pytest.raises(ConfigError, match=said):
        train_rank(configure(*of_run, f"objective.teacher={teacher}"))


@pytest.mark.slow
def test_a_teacher_that_cannot_say_it_is_told_before_text_is_read(made: Made, configure: Configure, tmp_path: Path) -> None:
    """Reading and cutting the text of a long run takes hours."""
    teacher = made("teacher")
    other = ("tokenizer=file", f"tokenizer.path={made('other', 'tokenizer=bpe', 'tokenizer.vocab_size=300')}/model")
    for run, more, said in (
        ("a", [f"objective.teacher={tmp_path}/nowhere"], "nowhere: does not exist"),
        ("b", [f"objective.teacher={teacher}", *other], "it has another tokenizer"),
    ):
        cfg = configure(*more, f"run.name={run}", f"data.files={tmp_path}/none.txt")
        for start in (train_rank, lambda cfg: plan(cfg, print)):
            with pytest.raises(LmError, match=said):
                start(cfg)


def test_what_a_teacher_does_not_go_with_is_refused(configure: Configure) -> None:
    with pytest.raises(ConfigError, match="teacher_weight has no effect without teacher"):
        configure("objective.teacher_weight=0.3")
    with pytest.raises(ConfigError, match="teacher_temperature has no effect without teacher"):
        configure("objective.teacher_temperature=2")
    with pytest.raises(ConfigError, match="label_smoothing has no effect beside teacher_weight=1"):
        configure("objective.teacher=runs/a", "objective.teacher_weight=1", "objective.label_smoothing=0.1")
    with pytest.raises(ConfigError, match=r"launch\.context=2: objective\.teacher needs whole rows"):
        configure("objective.teacher=runs/a", "strategy=fsdp", "launch.devices=2", "launch.context=2")


def test_the_divergence_of_a_config_is_that_of_the_loss(configure: Configure) -> None:
    """Seen to fail: KL(teacher || model), whatever the config says."""
    model, other = redrawn(config(), 0), redrawn(config(), 1)
    batch = Batch(torch.arange(24).view(2, 12) % VOCAB, torch.arange(1, 25).view(2, 12) % VOCAB)
    for beta in (0.0, 0.3, 1.0):
        cfg = CausalConfig(teacher="there", teacher_weight=1.0, teacher_beta=beta)
        sums = Likelihood(cfg, Reference(lambda: other))(model, batch, 0, 0)
        near(sums.total, divergence(other(batch).softmax(-1), model(batch).log_softmax(-1), beta).sum())
    with pytest.raises(ConfigError, match="teacher_beta has no effect without teacher"):
        configure("objective.teacher_beta=1")


def test_its_own_tokenizer_lets_a_run_learn_from_any_teacher(made: Made, configure: Configure, tmp_path: Path) -> None:
    """As the refusal says, though the texts are others."""
    teacher = made("teacher", "tokenizer=bpe", "tokenizer.vocab_size=300")
    other = write_text(tmp_path / "other.txt", seed=3)
    own = ("tokenizer=file", f"tokenizer.path={teacher}/model", f"data.files={other}")
    train_rank(configure(*own, f"objective.teacher={teacher}"))
    assert len(told(tmp_path / "run")) == 12


def test_the_config_of_a_run_names_its_teacher_from_elsewhere_too(configure: Configure) -> None:
    cfg: TrainConfig = configure("objective.teacher=runs/a")
    assert flatten(cfg.tree())["objective.teacher"] == "runs/a" and cfg.objective.learns_from() == ("objective.teacher", "runs/a")


@pytest.mark.slow
def test_a_teacher_may_have_more_tokens_and_another_end_but_no_token_less(made: Made, configure: Configure, tmp_path: Path) -> None:
    """As an instruction-tuned model has beside the base model that is to learn from it."""
    base = made("base")
    teacher = made("teacher", "tokenizer=file", f"tokenizer.path={base}/model", "tokenizer.eos=<|pad|>", "tokenizer.specials=[<|turn|>]")
    train_rank(configure(f"objective.teacher={teacher}").replace(init_from=str(base)))
    assert len(told(tmp_path / "run")) == 12
    more = configure("tokenizer=file", f"tokenizer.path={base}/model", "tokenizer.specials=[<|turn|>]", f"objective.teacher={base}")
    with pytest.raises(ConfigError, match=r"in which '<.turn.>' is not token 259.* Choose one that has all tokens"):
        train_rank(more.replace(init_from=str(base), run=more.run.replace(name="more")))


@pytest.mark.slow
def test_a_plan_counts_the_forward_of_a_teacher_and_its_weights_in_their_own_dtype(made: Made, configure: Configure) -> None:
    """Without these a teacher's forward was free, and one in bf16 took as much memory as in fp32."""
    wide, narrow = made("wide"), made("narrow", "trainer.precision=bf16-true")
    told, held = [], []
    for teacher in (None, wide, narrow):
        cfg = configure(*([f"objective.teacher={teacher}"] if teacher else []))
        lines: list[str] = []
        plan(cfg, lines.append)
        told.append(float(re.findall(r"([\d.]+) MFLOPs;", "".join(lines))[0]))
        held.append(frozen_bytes(cfg, cfg.model.sized(320, 32)))
    assert told == pytest.approx([told[0], *[4 / 3 * told[0]] * 2], rel=0.01)
    n, logits = read_json(wide / "summary.json")["parameters"], 8 * 32 * 320 * 8
    assert held == [0, 4 * n + logits, 2 * n + logits]
    sliced = configure(f"objective.teacher={narrow}", "strategy=fsdp", "launch.devices=2")
    at_work = n  # its only block, and what is outside
    assert frozen_bytes(sliced, sliced.model.sized(320, 32)) == 2 * (-(-n // 2) + at_work) + logits // 2


def test_show_counts_a_teacher_only_where_there_is_one(made: Made, lm: Lm) -> None:
    teacher = made("teacher")
    assert re.search(r"frozen +\d", lm("show", f"objective.teacher={teacher}")[1]) and "frozen" not in lm("show")[1]


@pytest.mark.slow
def test_a_taught_run_is_shown_from_elsewhere_and_when_its_teacher_is_gone(
    made: Made, configure: Configure, lm: Lm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    teacher = made("teacher")
    monkeypatch.chdir(tmp_path)
    train_rank(configure("objective.teacher=teacher", "objective.teacher_weight=0.7"))
    monkeypatch.chdir("/")
    assert re.search(r"frozen +\d", lm("show", f"from={tmp_path}/run")[1])
    teacher.rename(tmp_path / "gone")
    code, out, err = lm("show", f"from={tmp_path}/run")
    assert code == 0 and "frozen" not in out and err == "objective.teacher=teacher is there no more, so memory is without it\n"
