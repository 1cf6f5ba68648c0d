"""Mixtures of experts in real steps: loads summed and applied once, losses per row, what resuming and the optimizers make of them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lm.nn.batch import Batch
from lm.nn.model_config import model_config
from lm.nn.transformer import build_model
from lm.schema import Tree
from lm.storage.checkpoint import CheckpointReader
from lm.storage.model_folder import read_model
from lm.training.config import TrainConfig
from lm.training.module import TrainModule
from lm.training.optim.adamw import AdamWConfig
from lm.training.optim.muon import MuonConfig
from lm.training.run import train_rank
from lm.units import si
from tests.training.conftest import Configure, read, results
from tests.training.optim.optimizers import built
from tests.training.steps import LENGTH, ROWS, SGD, UNCLIPPED, batches, config, train_steps

SIGMOID: Tree = {"kind": "sigmoid", "bias_rate": 0.01}
EXPERT: Tree = {"kind": "mlp", "hidden": 24}
PLAIN = ("model.dropout=0", "trainer.max_steps=3", "trainer.val_every=3", "checkpoint.every=3", "schedule.warmup_steps=1")


def with_experts(cfg: TrainConfig, mtp: Tree | None = None, **changes: Any) -> TrainConfig:
    ffn = {"kind": "moe", "n_experts": 4, "top_k": 2, "expert": EXPERT, "router": SIGMOID} | changes
    return cfg.replace(model=cfg.model.tree() | {"n_layers": 2, "ffn": ffn, "mtp": mtp})


def biases(weights: dict[str, Tensor]) -> Tensor:
    return torch.stack([p for name, p in sorted(weights.items()) if name.endswith("correction_bias")])


class Watched(TrainModule):
    """Remembers the loads that the model is told, and the biases after each step."""

    counted: list[Tensor]
    after: list[Tensor]

    def on_train_start(self) -> None:
        type(self).counted, type(self).after = [], []

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        if self.stepped and self.loads is not None:
            self.counted.append(self.loads.clone())
            self.after.append(biases({name: p.detach().clone() for name, p in self.model.named_parameters()}))


def test_the_split_into_micro_batches_changes_nothing_with_all_losses_and_capacity(configure: Configure, tmp_path: Path) -> None:
    lossy = {"balance_loss": 0.5, "router_z_loss": 0.1, "capacity_factor": 0.8}
    for rows in (8, 2):
        cfg = configure(*PLAIN, "optim=sgd", "optim.lr=0.5", f"trainer.micro_batch={rows}", f"run.name=rows{rows}")
        train_rank(with_experts(cfg, **lossy))
    whole, split = (read_model(tmp_path / f"rows{rows}" / "model")[1] for rows in (8, 2))
    torch.testing.assert_close(split, whole, atol=1e-5, rtol=1e-4)
    assert biases(whole).abs().max() > 0.005
    lines = [read(tmp_path / f"rows{rows}" / "metrics.jsonl")[0] for rows in (8, 2)]
    assert lines[0]["loss"] == pytest.approx(lines[1]["loss"], rel=1e-5)
    assert lines[0]["expert_load/blocks.1"] == lines[1]["expert_load/blocks.1"] > 1
    assert lines[0]["router_loss"] == pytest.approx(lines[1]["router_loss"], rel=1e-5) and 0.5 < lines[0]["router_loss"] < 3


@pytest.mark.parametrize("change", [{"balance_loss": 0.5}, {"router_z_loss": 0.1}, {"capacity_factor": 0.5}], ids=str)
def test_each_loss_and_capacity_act_in_training(change: Tree) -> None:
    free, changed = (train_steps(with_experts(config(UNCLIPPED), **c), batches())[1]["blocks.0.ffn.router.weight"] for c in ({}, change))
    assert (free - changed).abs().max() > 3e-6  # some 30 times what rounding does


def test_capacity_does_not_depend_on_how_wide_others_make_a_batch() -> None:
    model, free = (build_model(with_experts(config(SGD), **c).model, seed=3).eval() for c in ({"capacity_factor": 0.6}, {}))
    tokens, n = torch.arange(10)[None], torch.arange(LENGTH)[None]
    alone = model(Batch(tokens))
    padded = model(Batch(torch.where(n < 10, n, 0), positions=torch.where(n < 10, n, -1)))
    torch.testing.assert_close(padded[:, :10], alone, atol=1e-5, rtol=1e-5)
    assert (free(Batch(tokens)) - alone).abs().max() > 1e-4, "nothing was dropped"


def test_the_bias_moves_once_a_step_by_the_loads_of_the_whole_step() -> None:
    train_steps(with_experts(config(SGD), mtp={"depth": 1}), batches(), kind=Watched)
    assert [tuple(loads.shape) for loads in Watched.counted] == [(3, 4)] * 4  # two blocks and the one of multi-token prediction, four steps
    assert all(loads.sum(-1).tolist() == [ROWS * LENGTH * 2] * 3 for loads in Watched.counted)
    moved = torch.stack([torch.sign(loads.mean(-1, keepdim=True) - loads) * 0.01 for loads in Watched.counted]).cumsum(0)
    torch.testing.assert_close(torch.stack(Watched.after), moved)


def test_a_step_that_is_not_finite_moves_no_bias() -> None:
    class Poisoned(Watched):
        def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
            if self.step == 1:
                self.model.norm.weight.data[0] = float("inf")
            return super().training_step(batch, batch_idx)

    record, _ = train_steps(with_experts(config(SGD)), batches(), kind=Poisoned)
    assert record["bad_step"] == [-1, 1, 1, 1]
    first, *later = Poisoned.after
    assert first.abs().max() > 0 and all(torch.equal(first, after) for after in later)
    assert all((loads.amax(-1) > loads.mean(-1)).all() for loads in Poisoned.counted), "there was nothing to even out"


def test_loads_reach_the_layer_that_they_are_of() -> None:
    tree = with_experts(config(SGD)).model.tree() | {"kind": "encoder_decoder", "n_encoder_layers": 3, "start_token": 0}
    model = build_model(model_config({key: value for key, value in tree.items() if key != "mtp"}), seed=0)
    layers = model.mixtures()
    assert list(layers) == ["encoder.blocks.0", "encoder.blocks.1", "encoder.blocks.2", "blocks.0", "blocks.1"]
    seen: list[str] = []
    for name, layer in layers.items():
        layer.register_forward_hook(lambda *_, name=name: seen.append(name))
    model(Batch(torch.ones(1, 4, dtype=torch.int64), source_tokens=torch.ones(1, 5, dtype=torch.int64)))
    assert seen == list(layers)
    model.balance(torch.tensor([[0.0] * 4] * 3 + [[8.0, 0, 0, 0], [0.0] * 4]))
    moved = {name: layer.router.correction_bias.tolist() for name, layer in layers.items()}
    assert moved.pop("blocks.0") == pytest.approx([-0.01, 0.01, 0.01, 0.01])
    assert set(map(tuple, moved.values())) == {(0.0,) * 4}


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16-true"])
def test_a_resumed_run_is_bitwise_the_run_left_alone_biases_and_their_average_too(
    configure: Configure, tmp_path: Path, precision: str
) -> None:
    options = (f"trainer.precision={precision}", "optim=muon", "trainer.ema_decay=0.9", "trainer.micro_batch=4", "schedule=constant")
    train_rank(with_experts(configure(*options, "run.name=whole")))
    train_rank(with_experts(configure(*options, "trainer.max_steps=5")))
    train_rank(with_experts(configure(*options)))
    assert results(tmp_path / "run")[0] == results(tmp_path / "whole")[0]
    reader = CheckpointReader(tmp_path / "run" / "checkpoints" / "step-00000012")
    name = "blocks.0.ffn.router.correction_bias"
    assert set(reader.kinds(name)) == {"weight", "ema"}
    steps = reader.read(name) / 0.01
    assert reader.read(name).dtype == torch.float32 and steps.abs().max() > 0
    torch.testing.assert_close(steps, steps.round(), atol=1e-4, rtol=0)  # bf16 would have rounded each of them


def test_optimizers_leave_out_what_is_not_trained_and_decay_no_bias() -> None:
    model = build_model(with_experts(config(SGD), expert=EXPERT | {"bias": True}).model, seed=0)
    for cfg in (AdamWConfig(weight_decay=0.5), MuonConfig(weight_decay=0.5, adam_weight_decay=0.5)):
        optimizer = built(cfg, model.named_parameters(), model.matrices())
        group_of = {name: group for group in optimizer.param_groups for name in group["names"]}
        left_out = {name for name, _ in model.named_parameters() if name not in group_of}
        assert left_out == {f"blocks.{layer}.ffn.router.correction_bias" for layer in (0, 1)}
        assert {group_of[name]["weight_decay"] for name in group_of if name.endswith("bias")} == {0.0}
        assert group_of["blocks.0.ffn.experts.up"]["weight_decay"] == 0.5
    assert "momentum" in group_of["blocks.0.ffn.experts.up"] and "momentum" not in group_of["blocks.0.ffn.experts.up_bias"]


@pytest.mark.slow
def test_the_bias_evens_out_a_skewed_router() -> None:
    class Skewed(Watched):
        def on_train_start(self) -> None:
            super().on_train_start()
            for layer in self.model.mixtures().values():
                layer.router.correction_bias.data[:2] = 0.15

    cfg = with_experts(config(UNCLIPPED, 64), n_experts=8, router=SIGMOID | {"bias_rate": 0.002})
    train_steps(cfg, batches(64) * 25, kind=Skewed, steps=100)
    ratios = [float((loads.amax(-1) / loads.mean(-1)).max()) for loads in Skewed.counted]
    assert ratios[0] > 3 and max(ratios[-10:]) < 1.3, ratios


def test_the_console_shows_the_worst_layer(configure: Configure, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train_rank(with_experts(configure(*PLAIN)))
    lines = [line for line in read(tmp_path / "run" / "metrics.jsonl") if "loss" in line]
    told = {"expert_load", "expert_load/blocks.0", "expert_load/blocks.1", "idle_experts"}
    assert all({key for key in line if "expert" in key} == told for line in lines)
    out = capsys.readouterr().out
    worst = [max(line["expert_load/blocks.0"], line["expert_load/blocks.1"]) for line in lines]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert f"({si(summary['parameters_active'])} for one token)" in out and summary["parameters_active"] < summary["parameters"]
    assert "max load" in out and all(f"{ratio:.2f}x" in out for ratio in worst)
