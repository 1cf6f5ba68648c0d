"""The model that a loss compares with is the one that training starts from, to the bit."""

import json
from pathlib import Path

import pytest

import lm
from lm.cli.compose.compose import compose_config
from lm.training.run import train_rank
from tests.training.conftest import Configure, Launch, ranks, read, settled


@pytest.mark.parametrize("where", [[], pytest.param(ranks("fsdp"), marks=pytest.mark.slow)], ids=["one", "fsdp"])
def test_weights_in_bf16_are_compared_with_those_that_were_rounded_too(
    configure: Configure, launch: Launch, tiny: list[str], tmp_path: Path, where: list[str]
) -> None:
    """Seen to fail with a parent in float32: the margin before the first step was 0.18, and not 0."""
    train_rank(configure("run.name=parent", "optim=adamw", "optim.lr=0.03", "data.seq_len=64"))
    pairs = [{"prompt": f"q{i} def", "chosen": f" return {i} model", "rejected": f" none {i} token"} for i in range(40)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    of_pairs = ["data=preferences", f"data.files={tmp_path / 'pairs.jsonl'}", "data.val_frac=0.2", "data.seq_len=64", "objective=dpo"]
    own = [arg for arg in tiny if not arg.startswith(("model", "tokenizer"))]
    more = [f"init_from={tmp_path / 'parent'}", "trainer.precision=bf16-true", "optim=adamw", "trainer.max_steps=3", "objective.beta=1"]
    cfg = compose_config(settled(*own, *of_pairs, *more, *where))
    (launch if where else train_rank)(cfg)
    first, *_, last = [line for line in read(tmp_path / "run" / "metrics.jsonl") if "val_margin" in line]
    assert (first["step"], first["val_margin"], first["val_accuracy"]) == (0, 0.0, 0.5)
    told = lm.evaluate(tmp_path / "run", micro_batch=8)
    assert [told["val_margin"], told["val_accuracy"]] == pytest.approx([last["val_margin"], last["val_accuracy"]], abs=0.02)
