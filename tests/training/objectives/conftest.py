from collections.abc import Callable
from pathlib import Path

import pytest

from lm.cli.compose.compose import compose_config
from lm.training.config import TrainConfig
from lm.training.run import train_rank
from tests.training.conftest import TINY, read, settled

RL = (
    *("data=arithmetic", "data.digits=1", "data.problems=60", "data.val_frac=0.3", "data.seq_len=64", "data.val_rows=8"),
    *("model.dropout=0", "model.max_seq_len=64"),
)
DRAWN = (
    "objective.max_tokens=4",
    "objective.n_answers=4",
    "objective.rewards={regex:{pattern:'[0-9].*'},length:{free:1,most:4,weight:0.5}}",
)

RETRY = "objective.environment={kind:retry,reward:{kind:arithmetic},room:40,answers:3,says:'No.'}"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run `parent` that has seen a few sums."""
    folder = tmp_path_factory.mktemp("made")
    given = [item for item in TINY if not item.startswith("data=")]
    sft = (
        "objective=sft",
        "trainer.max_steps=6",
        "optim.lr=1e-2",
        "run.name=parent",
        f"run.dir={folder}",
        f"data.cache_dir={folder / 'c'}",
    )
    train_rank(compose_config(settled(*given, *RL, *sft)))
    train_rank(compose_config(settled(*given, *RL, *sft, "trainer.max_steps=60", "run.name=ending")))
    return folder


@pytest.fixture
def policy(made: Path, tmp_path: Path) -> Callable[..., TrainConfig]:
    """A run of a few steps from that one."""
    own = [item for item in TINY if not item.startswith(("model", "tokenizer", "data="))]
    given = [*own, *[item for item in RL if not item.startswith("model")], f"init_from={made / 'parent'}", "optim=adamw", "optim.lr=1e-2"]
    given += [f"run.dir={tmp_path}", f"data.cache_dir={made / 'c'}", "trainer.max_steps=6", "trainer.val_every=3"]
    given += ["checkpoint.every=3", *DRAWN]
    return lambda *more: compose_config(settled(*given, *more))


def told(run: Path) -> list[tuple[str, float]]:
    """What is told of answers, in order."""
    names = ("loss", "kl", "ended", "answer_tokens", "grad_norm")
    lines = read(run / "metrics.jsonl")
    return [
        (key, value) for line in lines for key, value in sorted(line.items()) if key in names or "reward" in key or key.startswith("val_")
    ]
