"""The model that a loss compares with is the one that training starts from, to the bit."""

import json
from pathlib import Path

import pytest

import lm
from lm.cli.compose.compose import compose_config
from lm.training.run import train_rank
from tests.training.conftest import Configure, Launch, ranks, read, settled


def of_pairs(folder: Path) -> list[str]:
    pairs = [{"prompt": f"q{i} def", "chosen": f" return {i} model", "rejected": f" none {i} token"} for i in range(40)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return ["data=preferences", f"data.files={folder / 'pairs.jsonl'}", "data.val_frac=0.2", "data.seq_len=64", "objective=dpo"]


@pytest.mark.parametrize("where", [[], pytest.param(ranks("fsdp"), marks=pytest.mark.slow)], ids=["one", "fsdp"])
def test_weights_in_bf16_are_compared_with_those_that_were_rounded_too(
    configure: Configure, launch: Launch, tiny: list[str], tmp_path: Path, where: list[str]
) -> None:
    """Seen to fail with a parent in float32: the margin before the first step was 0.18, and not 0."""
    train_rank(configure("run.name=parent", "optim=adamw", "optim.lr=0.03", "data.seq_len=64"))
    own = [arg for arg in tiny if not arg.startswith(("model", "tokenizer"))]
    more = [f"init_from={tmp_path / 'parent'}", "trainer.precision=bf16-true", "optim=adamw", "trainer.max_steps=3", "objective.beta=1"]
    cfg = compose_config(settled(*own, *of_pairs(tmp_path), *more, *where))
    (launch if where else train_rank)(cfg)
    first, *_, last = [line for line in read(tmp_path / "run" / "metrics.jsonl") if "val_margin" in line]
    assert (first["step"], first["val_margin"], first["val_accuracy"]) == (0, 0.0, 0.5)
    told = lm.evaluate(tmp_path / "run", micro_batch=8)
    assert [told["val_margin"], told["val_accuracy"]] == pytest.approx([last["val_margin"], last["val_accuracy"]], abs=0.02)


@pytest.mark.parametrize(("objective", "told"), [("objective=dpo", True), ("objective=orpo", False)])
def test_dropout_that_the_start_has_not_is_told(
    configure: Configure, tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], objective: str, told: bool
) -> None:
    train_rank(configure("run.name=parent", "optim=adamw", "data.seq_len=64", "model.dropout=0.1", "trainer.max_steps=3"))
    own = [arg for arg in tiny if not arg.startswith(("model", "tokenizer"))]
    train_rank(compose_config(settled(*own, *of_pairs(tmp_path), objective, f"init_from={tmp_path / 'parent'}", "trainer.max_steps=3")))
    said = "model.dropout=0.1 is drawn for the model, and not for its start, so that what objective=dpo compares differs by that too"
    assert (f"{said}; model.dropout=0 takes it out" in capsys.readouterr().out) == told
