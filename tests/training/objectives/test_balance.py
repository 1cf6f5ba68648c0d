"""Objectives on whole answers, and on texts, balance a mixture of experts as those on tokens do."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lm.cli.compose.compose import compose_config
from lm.data.rows.preference import SimPOConfig
from lm.data.rows.reward import RewardModelConfig
from lm.losses.contrastive import Contrastive
from lm.losses.embeddings import InParts
from lm.losses.measure import Start
from lm.nn.batch import IGNORED, Batch
from lm.nn.model_config import model_config
from lm.nn.transformer import build_model
from lm.storage.model_folder import read_model, resolve_model
from lm.training.config import TrainConfig
from lm.training.objectives.measured import Measured
from lm.training.objectives.preferences import Preferences, RewardModel
from lm.training.run import train_rank
from tests.nn.models import BASE, with_kinds
from tests.training.conftest import TINY, in_each_way, read, settled

MIXED = (
    *("model/ffn=moe", "model.ffn.n_experts=4", "model.ffn.top_k=2", "model.ffn.expert.hidden=24", "model.dropout=0", "model.n_layers=2"),
    *("model.ffn.router={kind:sigmoid,bias_rate:0.01}", "model.ffn.balance_loss=0.5", "model.max_seq_len=64"),
)
WORDS = ["lo", "wide", "up there", "so", "of all", "never", "it", "as"]
ANSWERS = ("objective.rewards={length:{free:1,most:4}}", "objective.max_tokens=4", "objective.n_answers=2", "objective.kl=0")
OBJECTIVES = {
    "dpo": ("preferences", "pairs"),
    "kto": ("rated", "rated"),
    "contrastive": ("alike", "alike", "objective.among=4"),
    "reward": ("preferences", "pairs"),
    "grpo": ("prompts", "pairs", *ANSWERS),
    "regression": ("labels", "labels"),
    "contrastive objective.recompute=true": ("alike", "alike", "objective.among=4"),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with rows of all kinds, and two runs of a few experts, which are almost as they were drawn: one predicts two tokens."""
    folder, said = tmp_path_factory.mktemp("made"), [f"{WORDS[i % 8]} {i}" for i in range(64)]
    rows: dict[str, list[dict[str, Any]]] = {
        "pairs": [{"prompt": f"say {i}", "chosen": one, "rejected": one[::-1] + "!" * (i % 5)} for i, one in enumerate(said)],
        "rated": [{"prompt": f"say {i}", "completion": one, "label": i % 3 > 0} for i, one in enumerate(said)],
        "alike": [{"anchor": one, "positive": one * (1 + i % 3), "negative": [one[::-1]] * (i % 2)} for i, one in enumerate(said)],
        "labels": [{"text": one, "label": i / 64} for i, one in enumerate(said)],
    }
    for name, each in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in each))
    (folder / "a.txt").write_text("\n".join(said) * 20)
    more = ("trainer.max_steps=3", "schedule.warmup_steps=0", f"data.files={folder / 'a.txt'}", f"run.dir={folder}")
    dense = [each for each in TINY if not each.startswith("model.ffn")]
    for name, mtp in (("parent", "{depth:1}"), ("one_token", "null")):
        train_rank(compose_config(settled(*dense, *MIXED, *more, f"data.cache_dir={folder / 'c'}", f"run.name={name}", f"model.mtp={mtp}")))
    return folder


@pytest.fixture
def of(made: Path, tmp_path: Path) -> Callable[..., TrainConfig]:
    """The config of a run by one of the objectives."""
    kept = [each for each in TINY if not each.startswith(("model", "tokenizer"))]
    kept += ["data.val_frac=0.2", "data.seq_len=48", "optim=sgd", "optim.lr=0.1", f"run.dir={tmp_path}", f"data.cache_dir={made / 'c'}"]
    kept += ["trainer.max_steps=3", "schedule.warmup_steps=0", "trainer.val_every=3"]

    def config(objective: str, *more: str) -> TrainConfig:
        data, file, *own = OBJECTIVES[objective]
        parent = made / ("one_token" if objective in ("reward", "regression") else "parent")
        given = [f"init_from={parent}", f"data={data}", f"data.files={made / file}.jsonl", f"objective={objective.split()[0]}"]
        return compose_config(settled(*kept, *given, *own, *objective.split()[1:], *more))

    return config


@pytest.mark.slow
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_experts_are_balanced_alike_however_a_step_is_split(of: Callable[..., TrainConfig], tmp_path: Path, objective: str) -> None:
    """The router learns of the loss of balance, and its biases move by the loads of the whole step; blocks of multi-token prediction, which
    do not run, have none."""

    def trained(name: str, *more: str) -> dict[str, Tensor]:
        train_rank(cfg := of(objective, f"run.name={name}", *more))
        before.update(read_model(resolve_model(str(cfg.init_from)))[1])
        return read_model(tmp_path / name / "model")[1]

    before: dict[str, Tensor] = {}
    whole, split = trained("whole"), trained("split", "trainer.micro_batch=2")
    torch.testing.assert_close(split, whole, atol=2e-5, rtol=1e-3)
    free = trained("free", "model.ffn.balance_loss=0")
    router, bias = "blocks.1.ffn.router.weight", "blocks.1.ffn.router.correction_bias"
    assert (free[router] - whole[router]).abs().max() > 1e-4
    assert (whole[bias] - before[bias]).abs().max() > 0.005
    line = read(tmp_path / "whole" / "metrics.jsonl")[-2]
    assert {name for name in line if name.startswith("expert_load")} >= {"expert_load/blocks.0", "expert_load/blocks.1"}
    further = "mtp.0.block.ffn.router.correction_bias"
    assert further not in whole or torch.equal(whole[further], before[further])


@pytest.mark.slow
@in_each_way
@pytest.mark.parametrize("objective", ["dpo", "reward", "contrastive objective.recompute=true"])
def test_ranks_balance_experts_as_one(
    of: Callable[..., TrainConfig], learns_as_one: Callable[..., None], tmp_path: Path, where: list[str], objective: str
) -> None:
    learns_as_one(lambda *more: of(objective, *more), *where)
    found, alone = ([line["router_loss"] for line in read(tmp_path / run / "metrics.jsonl") if "loss" in line] for run in ("run", "alone"))
    assert found == pytest.approx(alone, rel=1e-3) and min(alone) > 0


@pytest.mark.parametrize("units", ["pairs", "rewards", "texts"])
def test_balance_counts_as_a_mean_over_rows(units: str) -> None:
    tree = BASE | {"ffn": {"kind": "moe", "n_experts": 4, "top_k": 2, "expert": {"kind": "mlp", "hidden": 24}}}
    tree |= {"head": {"labels": ["worth"], "tied": False}} if units == "rewards" else {}
    models = [build_model(model_config(with_kinds(tree | {"ffn": tree["ffn"] | {"balance_loss": loss}})), seed=0) for loss in (0.0, 0.5)]
    tokens, labels = torch.randint(5, 20, (8, 6), generator=torch.Generator().manual_seed(0)), torch.full((8, 6), IGNORED)
    labels[: 4 if units == "texts" else 8, -1] = torch.arange(4 if units == "texts" else 8) * (units != "rewards")
    batch = Batch(tokens, labels, positions=torch.arange(6).repeat(8, 1))
    objective = {
        "pairs": Preferences(SimPOConfig(), Start(None)), "rewards": RewardModel(RewardModelConfig()),
        "texts": Measured(Contrastive(4, 0.1, False, InParts(3))),
    }[units]  # fmt: skip
    free, balanced = (objective(model, batch, 0, 0) for model in models)
    each = models[1](batch, read=lambda hidden, head, ctx: torch.stack(list(ctx.reported.losses["router_loss"].values())).sum(0))
    added = (balanced.total - free.total).item()
    assert added == pytest.approx(4 * each.mean().item(), rel=1e-4) and float(balanced.nll) == float(free.nll)
    assert balanced.loads is not None and balanced.loads.sum(-1).tolist() == [8 * 6 * 2] * 3
