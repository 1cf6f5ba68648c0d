"""trainer.freeze: weights that no step moves, under every strategy."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from lm.cost.count import count
from lm.cost.memory import memory
from lm.errors import ConfigError
from lm.nn.model_config import model_config
from lm.nn.transformer import build_model
from lm.storage.checkpoint import CheckpointReader
from lm.storage.reading import read_json
from lm.training.plan import counts_of
from lm.training.run import train_rank
from lm.training.weights.freeze import freeze, freeze_untrained, on_meta, trainable
from tests.training.conftest import Before, Configure, Launch, ranks, results
from tests.training.steps import MOE, SGD, batches, config, train_steps

FROZEN = "trainer.freeze=[embed.*,blocks.*.attention.q*]"
BF16 = "trainer.precision=bf16-mixed"


def drawn(run: Path) -> dict[str, Tensor]:
    """The weights before the first step."""
    tree = read_json(run / "model" / "config.json")["model"]
    return {name: p.detach() for name, p in build_model(model_config(tree), seed=0).named_parameters()}


def require_frozen(run: Path, kinds: set[str], start: dict[str, Tensor]) -> None:
    """The frozen weights are those at the start, the others are not, and every one is in checkpoint and model."""
    end = load_file(run / "model" / "model.safetensors")
    reader = CheckpointReader(run / "checkpoints" / "step-00000012")
    assert start.keys() == end.keys() == set(reader.names())
    frozen = {name for name in start if name.startswith("embed.") or ".attention.q" in name}
    assert 2 < len(frozen) < len(start)
    for name, p in start.items():
        assert torch.equal(end[name], p) == torch.equal(reader.read(name), p) == (name in frozen), name
        assert set(reader.kinds(name)) == {"weight"} | (set() if name in frozen else kinds), name
        assert end[name].dtype == torch.float32


@pytest.mark.slow
def test_frozen_weights_are_saved_counted_and_unchanged_to_the_bit_and_a_run_resumes(configure: Configure, tmp_path: Path) -> None:
    """Seen to fail with the patterns left aside, and with the optimizer given all weights."""
    summary = train_rank(configure(FROZEN, "optim=adamw", "run.name=whole"))
    require_frozen(tmp_path / "whole", {"exp_avg", "exp_avg_sq", "step"}, drawn(tmp_path / "whole"))
    left = summary["parameters"] - summary["parameters_trained"]
    assert left == sum(p.numel() for name, p in load_file(tmp_path / "whole" / "model" / "model.safetensors").items()
                       if name.startswith("embed.") or ".attention.q" in name)  # fmt: skip
    with pytest.raises(ZeroDivisionError):
        train_rank(configure(FROZEN, "optim=adamw"), callbacks=[Before(7, lambda module: 1 // 0)])
    train_rank(configure(FROZEN, "optim=adamw"))
    assert results(tmp_path / "run") == results(tmp_path / "whole")
    with pytest.raises(ConfigError, match=r"trainer.freeze"):
        train_rank(configure("optim=adamw", "trainer.max_steps=13"))


def test_blocks_for_further_tokens_stay_as_they_are_where_the_loss_does_not_read_them() -> None:
    """Seen to fail: with ZeRO, for which a weight without gradient has one of 0, they decayed, and with other strategies they did not."""
    causal = config(SGD, model={"mtp": {"depth": 1}})
    pairs = {"kind": "text", "files": "pairs.jsonl", "record": {"kind": "preference"}, "seq_len": 16}
    for cfg in (causal, causal.replace(objective={"kind": "orpo"}, data=pairs), causal.replace(objective={"kind": "simpo"}, data=pairs)):
        trained = trainable(on_meta(cfg, cfg.model))
        assert "blocks.0.attention.q.weight" in trained
        assert any(name.startswith("mtp.") for name in trained) is (cfg.objective.kind == "causal"), cfg.objective.kind


def test_blocks_for_further_tokens_run_in_training_where_the_loss_reads_them_and_are_counted_so() -> None:
    """Seen to fail: a training on preferences ran them for nothing."""
    cfg = config(SGD, model={"mtp": {"depth": 2}})
    pairs = {"kind": "text", "files": "pairs.jsonl", "record": {"kind": "preference"}, "seq_len": 16}
    seen, costs = [], []
    for objective, data in (({"kind": "causal"}, cfg.data.tree()), ({"kind": "orpo"}, pairs)):
        own = cfg.replace(objective=objective, data=data | {"seq_len": 16})
        built = build_model(own.model, seed=0)
        built.runs_mtp = own.objective.trains_mtp
        freeze_untrained(built, own)
        seen.append(built.train()(torch.zeros(1, 8, dtype=torch.int64), read=lambda hidden, head, ctx: len(ctx.mtp)))
        costs.append((counts_of(own, own.model).train_flops_per_token, memory(on_meta(own, own.model), own.setting()).activations))
    assert seen == [2, 0] and costs[0][0] > costs[1][0] and costs[0][1] > costs[1][1]
    plain = cfg.model.replace(mtp=None)
    assert costs[1][0] == count(plain, 16).train_flops_per_token


def test_the_average_of_a_frozen_weight_is_the_weight_and_takes_no_place(configure: Configure, tmp_path: Path) -> None:
    train_rank(configure(FROZEN, "optim=muon", "trainer.ema_decay=0.9"))
    reader = CheckpointReader(tmp_path / "run" / "checkpoints" / "step-00000012")
    assert reader.kinds("embed.weight") == ["weight"] and "ema" in reader.kinds("norm.weight")
    assert torch.equal(load_file(tmp_path / "run/model/model.safetensors")["embed.weight"], reader.read("embed.weight"))


@pytest.mark.parametrize(
    ("strategy", "more"),
    [
        pytest.param(kind, more, marks=pytest.mark.slow, id=f"{kind}{'-bf16' if more else ''}")
        for kind in ("ddp", "zero1", "zero3", "fsdp")
        for more in ((), (BF16,))
    ],
)
def test_frozen_weights_are_unchanged_on_two_ranks(
    configure: Configure, launch: Launch, tmp_path: Path, strategy: str, more: tuple[str, ...]
) -> None:
    """Started, saved at step 4, and resumed. Under ZeRO the engine computes with copies in bf16, which are not what is saved."""
    small = ["strategy.persistence_threshold=0"] if strategy == "zero3" else []
    given = (FROZEN, "optim=adamw", *ranks(strategy), *small, *more)
    launch(configure(*given, "trainer.max_steps=4"))
    exact = (strategy, more) != ("zero3", (BF16,))  # DeepSpeed rounds what is drawn within its shards, but nothing that is read
    start = drawn(tmp_path / "run") if exact else load_file(tmp_path / "run" / "model" / "model.safetensors")
    launch(configure(*given))
    require_frozen(tmp_path / "run", {"exp_avg", "exp_avg_sq", "step"}, start)
    reader = CheckpointReader(tmp_path / "run" / "checkpoints" / "step-00000012")
    files = {str(file) for file, *_ in reader._entry("embed.weight", "weight").pieces}
    assert len(files) == 2  # each rank wrote its part


def test_a_frozen_router_is_not_steered_and_others_are() -> None:
    cfg = config(SGD, model=MOE)
    for patterns, moved in (([], True), (["blocks.1.ffn.*"], False)):
        _, weights = train_steps(cfg.replace(trainer=cfg.trainer.tree() | {"freeze": patterns}), batches(), steps=3)
        bias = next(p for name, p in weights.items() if name.endswith("correction_bias"))
        assert bool(bias.any()) == moved


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (["head"], r"trainer.freeze: no weight has a name like 'head'\. The head is the embedding .*: name embed\.weight\."),
        (["embd.*"], r"trainer.freeze: no weight has a name like 'embd\.\*'\. Near are .*embed\.weight"),
        (["*"], r"trainer.freeze=\*: all weights are frozen, and one at least must learn"),
    ],
)
def test_a_pattern_of_nothing_or_of_everything_is_refused(patterns: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        freeze(build_model(config(SGD, model=MOE).model, device="meta"), patterns)


def test_what_is_steered_alone_is_not_left_to_train() -> None:
    model = build_model(config(SGD, model=MOE).model, device="meta")
    everything = [name for name, _ in model.named_parameters() if name not in model.self_updated()]
    assert everything and model.self_updated()
    with pytest.raises(ConfigError, match="all weights are frozen"):
        freeze(model, everything)
