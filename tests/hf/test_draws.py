"""Whatever an export chooses for a random model is, to transformers, that model."""

import random
from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers")

from lm.errors import ConfigError  # noqa: E402
from lm.hf.io.check import compare  # noqa: E402
from lm.hf.io.family import families  # noqa: E402
from lm.hf.io.reading import read_hf  # noqa: E402
from lm.hf.io.writing import family_for, write_hf  # noqa: E402
from lm.nn.model_config import ModelConfig  # noqa: E402
from lm.schema import flatten  # noqa: E402
from lm.testing.models import random_model  # noqa: E402
from tests.hf.draws import drawn  # noqa: E402
from tests.hf.harness import logits_agree, ours_of  # noqa: E402

ROUNDS = 8
SHORT = ("gemma2", "gpt_neox")


def written(cfg: ModelConfig, folder: Path, wanted: str | None = None) -> str | None:
    """Returns the name of the family, whose logits agree; None where no family holds the model."""
    try:
        family = family_for(cfg, wanted)
    except ConfigError:
        return None
    write_hf(folder, family, cfg, dict(random_model(cfg).named_parameters()), None)
    if cfg.head.labels is not None:
        assert compare(folder, family, ours_of(read_hf(folder))).difference < 1e-4
        return family.name
    theirs = getattr(transformers, family.auto).from_pretrained(folder).eval()
    counts = family.name == "recurrent_gemma" or flatten(cfg.tree()).get("recurrent.bias", False)  # padding on the left does, there
    lefts = (False, False, cfg.kind != "encoder_decoder" and not counts)
    logits_agree(theirs, ours_of(read_hf(folder)), lefts, spread=0.01)
    return family.name


@pytest.mark.parametrize(
    ("name", "rounds"), [*((name, 1) for name in SHORT), *(pytest.param(name, ROUNDS, marks=pytest.mark.slow) for name in families())]
)
def test_what_is_chosen_for_a_random_model_computes_the_same(name: str, rounds: int, tmp_path: Path) -> None:
    """A model that the family holds; and the same with one or two options changed, which another may hold, or none."""
    for number in range(rounds):
        source = random.Random(f"{name} {number}")
        exact = drawn(source, name, mutations=0)
        assert written(exact, tmp_path / f"{number} of the family", name) == name
        if rounds > 1:
            assert written(exact, tmp_path / f"{number} chosen") is not None
            written(drawn(source, name, mutations=1 + number % 2), tmp_path / f"{number} near it")
