"""What is said of squares of runs that are only said to have ended: with numpy's analysis of variance beside it."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from lm.ablation.noise import noise_runs
from lm.cli.compose.compose import compose_config
from lm.errors import ConfigError
from lm.report.statistics import seeds_needed
from tests.ablation.conftest import end
from tests.conftest import Lm

Square = np.ndarray


def drawn(draw: np.random.Generator, init: float, order: float, rest: float) -> Square:
    return draw.normal(0, init, (3, 1)) + draw.normal(0, order, (1, 3)) + draw.normal(0, rest, (3, 3))


def spread(square: Square) -> float:
    """Of one run whose seeds all move: the unbiased sum of the components is the mean of the three mean squares of a 3 x 3 layout."""
    rows, columns = square.mean(1) - square.mean(), square.mean(0) - square.mean()
    left = square - square.mean() - rows[:, None] - columns[None]
    return math.sqrt((3 * (rows**2).sum() / 2 + 3 * (columns**2).sum() / 2 + (left**2).sum() / 4) / 3)


@pytest.mark.slow
def test_pairing_is_measured_on_the_square_of_differences(lm: Lm, corpus: list[str], tmp_path: Path) -> None:
    """Seen to fail with the variant's square in place of the differences."""
    draw = np.random.default_rng(2)
    base = 4 + drawn(draw, 0.03, 0.02, 0.01)
    away = 0.01 + drawn(draw, 0.004, 0.003, 0.003)
    names = {"swiglu": base, "gelu": base + away}
    runs = noise_runs(tmp_path / "ffn", {name: compose_config([*corpus, f"model/ffn={name}"]) for name in names}, 1, "val_loss")
    for name, square in runs.items():
        for i, row in enumerate(square.jobs()):
            for j, job in enumerate(row):
                end(square, job, float(names[name][i, j]))
    call = ("ablate", "noise", "dir=.", "name=ffn", "threads=1", "metric=val_loss", "least_effect=0.02", *corpus)
    code, out, err = lm(*call, "model/ffn=swiglu,gelu")
    assert code == 0 and "runs to go" not in err and "ffn: all runs are there" in err, err
    found = json.loads((tmp_path / "ffn/noise.json").read_text())
    assert found["total"] == pytest.approx(spread(base), rel=1e-9)
    row, alone = found["variants"]["gelu"], spread(base + away)
    assert row["difference"]["total"] == pytest.approx(spread(away), rel=1e-9)
    assert row["pairing"] == pytest.approx((spread(base) ** 2 + alone**2 - spread(away) ** 2) / (2 * spread(base) * alone), rel=1e-9)
    assert f"gelu less swiglu: spreads by {spread(away):.4f} [" in out
    needed = [seeds_needed(sd, 0.02) for sd in (spread(away), math.hypot(spread(base), alone))]
    assert f"an effect of 0.02 takes {needed[0]} seeds a variant [" in out and f", and {needed[1]} without pairing" in out
    code, out, _ = lm(*call, "model/ffn=swiglu")
    assert code == 0 and "where pairing by seed does not help" in out and "name one, as in model/ffn=swiglu,gelu" in out
    code, _, err = lm(*call, "model/ffn=geglu,gelu")
    assert code == 2 and "its runs have begun" in err.splitlines()[-1]
    code, _, err = lm(*call, "optim.lr=0.1,0.10")
    assert code == 2 and "it changes nothing against 0" in err.splitlines()[-1]
    others = {
        kind: compose_config([*(part for part in corpus if part != "tokenizer=bytes"), f"tokenizer={kind}"]) for kind in ("bytes", "bpe")
    }
    with pytest.raises(ConfigError, match=r"metric=val_loss is per token, and variants.bpe .* Say metric=val_bits_per_byte"):
        noise_runs(tmp_path / "tokens", others, 1, "val_loss")
