"""docs/distributed.md: its table is what the formula gives, and its links exist."""

import re
from pathlib import Path

from lm.cli.compose.compose import compose
from lm.nn.cost.memory import Setting, memory
from lm.nn.transformer import build_model, model_config
from lm.training.strategies.config import StrategyConfig

STAGES = {kind: cfg.stage for kind, cfg in StrategyConfig.kinds().items()}

PAGE = Path(__file__).parents[2] / "docs" / "distributed.md"
MODELS = ("gpt2", "olmo2_1b", "llama3_8b")
WORLD = 8


def row(stage: int) -> list[str]:
    """GiB of weights, gradients and optimizer on one of 8 ranks, in fp32 with AdamW."""
    found = []
    for name in MODELS:
        tree = compose([f"model={name}", "model.vocab_size=50304", "model.max_seq_len=4096"]).tree["model"]
        held = memory(build_model(model_config(tree), device="meta"), Setting(1, 1024, 1024, stage=stage, world=WORLD))
        found.append(f"{(held.weights + held.gradients + held.optimizer) / 2**30:.1f}")
    return found


def test_the_table_of_memory_is_the_formulas() -> None:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    shown = {cells[1].strip("` "): [c.strip() for c in cells[3:6]] for line in lines if len(cells := line.split("|")) == 8}
    kinds = {kind for kind in shown if kind in STAGES}
    assert kinds == set(STAGES)
    expected = {stage: row(stage) for stage in set(STAGES.values())}
    assert {kind: shown[kind] for kind in kinds} == {kind: expected[STAGES[kind]] for kind in kinds}


def test_every_file_the_page_links_to_is_there() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", PAGE.read_text(encoding="utf-8"))
    assert links and all((PAGE.parent / link).exists() for link in links)
