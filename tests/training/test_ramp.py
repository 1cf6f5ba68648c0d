"""data.ramp: steps of fewer rows at the beginning of a run."""

from itertools import islice
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lm.ablation.matching import moved, size
from lm.data.batches import Batches
from lm.data.layout.mixed import MixConfig
from lm.data.loader import micro_batches
from lm.errors import ConfigError
from lm.schema import from_tree
from lm.storage.checkpoint import CheckpointReader
from lm.training.module import TrainModule
from lm.training.run import train_rank
from tests.conftest import Lm
from tests.training.conftest import Before, Configure, Launch, needs_deepspeed, ranks, read, settled

RAMP = ["data.ramp=[{until_step:3,global_batch:2},{until_step:6,global_batch:4}]", "optim=adamw", "model.dropout=0"]
ROWS = [2, 2, 2, 4, 4, 4, *[8] * 6]  # of the 12 steps


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "model" / "model.safetensors")


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in read(run / "metrics.jsonl") if "loss" in line]


def test_steps_begin_as_those_of_a_run_of_small_batches_and_each_row_is_read_once(configure: Configure, tmp_path: Path) -> None:
    seen: list[list[int]] = []
    watch = [Before(step, lambda module: seen.append(module.run.rows_of(module.step))) for step in range(1, 13)]
    train_rank(configure(*RAMP, "checkpoint.keep_steps=[3]", "schedule=constant"), callbacks=watch)
    read_rows = [row for rows in seen for row in rows]
    assert list(map(len, seen)) == ROWS and sorted(read_rows[:59]) == list(range(59))  # an epoch
    tokens = [line["tokens"] for line in read(tmp_path / "run" / "metrics.jsonl") if "loss" in line]
    assert tokens == [32 * sum(ROWS[:step]) for step in range(1, 13)]
    train_rank(configure(*RAMP[1:], "data.global_batch=2", "trainer.max_steps=3", "schedule=constant", "run.name=small"))
    early, small = CheckpointReader(tmp_path / "run" / "checkpoints" / "step-00000003"), weights(tmp_path / "small")
    assert all(early.read(name, "weight").equal(tensor) for name, tensor in small.items()) and len(small) > 5


def test_steps_are_those_of_a_loop_of_ones_own(configure: Configure, tmp_path: Path) -> None:
    """Of plain SGD, which adds what each row gives: a step with too many or too few rows, or with a loss over others' labels, shows."""
    cfg = configure(*RAMP[:1], RAMP[2], "optim=sgd", "optim.momentum=0", "optim.clip=null", "schedule=constant", "schedule.warmup_steps=0")
    started: list[dict[str, torch.Tensor]] = []
    module: list[TrainModule] = []

    def begin(found: TrainModule) -> None:
        module[:] = [found]
        started.append({name: p.detach().clone() for name, p in found.model.named_parameters()})

    train_rank(cfg, callbacks=[Before(1, begin)])
    model = module[0].model
    model.load_state_dict(started[0], strict=False)
    data = Batches(cfg.data, cfg.objective, cfg.tokenizer, cfg.model, seed=cfg.seeds.data, log=lambda line: None)
    optimizer = torch.optim.SGD(model.parameters(), lr=cfg.optim.lr, weight_decay=cfg.optim.weight_decay)
    found = []
    for step, (batch,) in data.steps():
        if step == 12:
            break
        loss = torch.nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
        assert len(batch.tokens) == ROWS[step]
    assert found == pytest.approx(losses(tmp_path / "run"), rel=1e-5)


EACH_WAY = [
    pytest.param(["trainer.micro_batch=2"], id="micro-batches"),
    pytest.param(["trainer.micro_batch=1", "trainer.precision=fp16-mixed"], marks=pytest.mark.slow, id="fp16"),
    pytest.param(ranks("ddp"), marks=pytest.mark.slow, id="ddp"),
    pytest.param([*ranks("ddp"), "trainer.micro_batch=1"], marks=pytest.mark.slow, id="ddp, micro-batches"),
    pytest.param([*ranks("fsdp"), "trainer.micro_batch=1"], marks=pytest.mark.slow, id="fsdp, micro-batches"),
    pytest.param([*ranks("fsdp", tensor=2), "trainer.micro_batch=2"], marks=pytest.mark.slow, id="matrices in slices"),
    pytest.param([*ranks("ddp", context=2), "trainer.micro_batch=2"], marks=pytest.mark.slow, id="rows in slices"),
    *(
        pytest.param([*ranks(kind), "trainer.micro_batch=1"], marks=[pytest.mark.slow, needs_deepspeed], id=kind)
        for kind in ("zero1", "zero2", "zero3", "zero2_offload", "zero3_offload")
    ),
]


@pytest.mark.parametrize("where", EACH_WAY)
def test_micro_batches_and_ranks_change_nothing(configure: Configure, launch: Launch, tmp_path: Path, where: list[str]) -> None:
    """Each phase has another number of micro-batches."""
    train_rank(configure(*RAMP, "run.name=whole"))
    cfg = configure(*RAMP, *where)
    launch(cfg) if cfg.launch.world > 1 else train_rank(cfg)
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "whole"), rel=2e-3 if "fp16" in str(where) else 1e-5)


def test_a_loop_of_ones_own_has_the_micro_batches_of_a_training(configure: Configure) -> None:
    cfg = configure("data.ramp=[{until_step:1,global_batch:8}]", "data.global_batch=12")
    data = Batches(cfg.data, cfg.objective, cfg.tokenizer, cfg.model, log=lambda line: None)
    assert [[len(batch.tokens) for batch in batches] for _, batches in islice(data.steps(), 2)] == [[4, 4], [6, 6]]


def test_phases_of_a_mixture_end_with_their_step_whatever_its_rows(tmp_path: Path) -> None:
    data = [{"name": name, "data": {"kind": "text", "files": "x"}, "weight": 1.0} for name in "ab"]
    phases = [{"until_step": 4, "weights": {"a": 1.0}}]
    ramp = [{"until_step": 2, "global_batch": 1}]
    cfg = from_tree(MixConfig, {"kind": "mix", "sources": data, "phases": phases, "ramp": ramp, "global_batch": 8})
    source, _ = cfg.mixture({"a": 50, "b": 50}, {"a": 50, "b": 50}, 0, 1).read(0, 34)
    assert not source[:18].any() and source[18:].tolist().count(1) == 8  # of 2 x 1 and 2 x 8 rows, and of two further steps


def test_a_smaller_step_has_no_larger_micro_batch(configure: Configure) -> None:
    """One that fits beside 12 rows on two ranks: 6, and not the 8 that a step of 8 rows would have."""
    ramp = "data.ramp=[{until_step:3,global_batch:8}]"
    cfg = configure(ramp, "data.global_batch=12")
    assert (cfg.micro_batch, cfg.accumulation.last, cfg.accumulation.of(0)) == (6, 2, 2) and micro_batches(8, 1, 8) == (8, 1)


def test_time_tokens_and_trial_are_of_the_whole_and_of_full_steps(lm: Lm, configure: Configure, tiny: list[str]) -> None:
    cfg = configure(*RAMP)
    assert size(cfg).tokens == 32 * sum(ROWS) == cfg.tokens(12)
    twice = moved(cfg, "trainer.max_steps", 24)
    assert [phase.until_step for phase in twice.data.ramp] == [6, 12] and size(twice).tokens == 2 * size(cfg).tokens
    assert [(phase.until_step, phase.global_batch) for phase in moved(cfg, "trainer.max_steps", 3).data.ramp] == [(1, 2), (2, 4)]
    assert [(phase.until_step, phase.global_batch) for phase in moved(cfg, "trainer.max_steps", 2).data.ramp] == [(1, 2)]
    code, out, err = lm("train", *settled(*tiny, *RAMP, "check=true"))
    assert code == 0, err
    assert f"{32 * sum(ROWS):,} tokens in 12 steps" in out and "check: 12 steps take" in out


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["trainer.max_minutes=1", "schedule=wsd"], "data.ramp makes steps of unlike rows, and trainer.max_minutes counts on steps that"),
        (["numerics.rollbacks=1"], "data.ramp makes steps of unlike rows, and numerics.rollbacks counts on"),
        (ranks("ddp", 4), "data.ramp: global_batch=2 is not a multiple of the 4 ranks. Choose a multiple, or other devices."),
    ],
)
def test_what_needs_steps_of_equal_rows_is_refused(configure: Configure, more: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        configure(*RAMP, *more)
    assert message in str(caught.value)


@pytest.mark.slow
def test_start_and_report_tell_the_smallest_and_the_largest_step(lm: Lm, tiny: list[str], tmp_path: Path) -> None:
    code, out, _ = lm("train", *settled(*tiny, *RAMP))
    assert code == 0 and "2 to 8 x 32 tokens a step (1 x 8 rows), 12 steps, 1.12 epochs" in out
    assert "2 to 8 rows of 32 tokens a step" in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_phases_that_outlast_the_run_are_told(lm: Lm, tiny: list[str]) -> None:
    code, out, _ = lm("train", *settled(*tiny, *RAMP, "trainer.max_steps=5"))
    assert code == 0 and "data: the last of its phases ends at step 6, and the run at 5, so none follows it\n" in out


def test_a_resumed_run_may_change_what_it_has_not_come_to(configure: Configure, tmp_path: Path) -> None:
    """Phases that are other than those of the checkpoint at step 4, and the run that has had them from the beginning."""
    train_rank(configure(*RAMP, "trainer.max_steps=4", "schedule=constant"))
    first, second = "{until_step:3,global_batch:2}", "{until_step:6,global_batch:4}"
    for ramp in (f"[{second}]", f"[{first}]", f"[{{until_step:4,global_batch:2}},{second}]"):
        with pytest.raises(ConfigError, match=r"another config \(data\.ramp\).* and change phases and a schedule that it has not come to"):
            train_rank(configure(*RAMP[1:], f"data.ramp={ramp}", "trainer.max_steps=8", "schedule=constant"))
    later = [*RAMP[1:], f"data.ramp=[{first},{{until_step:5,global_batch:4}}]", "trainer.max_steps=8", "schedule=constant"]
    train_rank(configure(*later))
    train_rank(configure(*later, "run.name=whole"))
    lines = [[line for line in read(tmp_path / name / "metrics.jsonl") if "val_loss" not in line] for name in ("run", "whole")]
    assert [line["tokens"] // 32 for line in lines[0]] == [2, 4, 6, 10, 14, 22, 30, 38]
    assert weights(tmp_path / "run").keys() == weights(tmp_path / "whole").keys()
    assert all(each.equal(weights(tmp_path / "whole")[name]) for name, each in weights(tmp_path / "run").items())
