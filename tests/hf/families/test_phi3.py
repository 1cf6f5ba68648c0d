"""Phi-3."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from lm.errors import ConfigError  # noqa: E402
from lm.hf.families.phi3 import FAMILY  # noqa: E402
from lm.hf.io.check import compare  # noqa: E402
from lm.hf.io.reading import read_hf  # noqa: E402
from lm.hf.io.writing import write_hf  # noqa: E402
from lm.nn.batch import Batch  # noqa: E402
from lm.testing.models import Doubles, same  # noqa: E402
from tests.hf.harness import VOCAB, cases, in_doubles, old_spelling_agrees, ours_of, redraw, verify  # noqa: E402
from tests.nn.models import redrawn  # noqa: E402

BASE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}  # fmt: skip
LISTS: dict[str, Any] = {"short_factor": [1.1, 1.0, 1.3, 1.2, 1.5, 1.4], "long_factor": [1.2, 1.7, 2.1, 3.3, 4.8, 6.5]}
LONG = {"rope_type": "longrope", "rope_theta": 500.0, **LISTS}
HALF = {
    "rope_type": "longrope", "rope_theta": 500.0, "partial_rotary_factor": 0.5, "factor": 4.0,
    **{name: factors[::2] for name, factors in LISTS.items()},
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "one key per head": {"num_key_value_heads": None},
    "window": {"sliding_window": 11, "hidden_act": "gelu"},
    "beyond the original length": {"rope_parameters": LONG, "original_max_position_embeddings": 8, "sliding_window": 31},
    "within the original length": {"rope_parameters": LONG, "original_max_position_embeddings": 128},
    "half rotated, tied": {
        "rope_parameters": HALF,
        "original_max_position_embeddings": 8,
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
    },
}


@pytest.mark.parametrize("case", cases(CASES))
def test_phi3(case: str, tmp_path: Path) -> None:
    verify(transformers.Phi3ForCausalLM(transformers.Phi3Config(**deepcopy(BASE | CASES[case]))), tmp_path)


def test_an_exported_longrope_has_the_three_keys_that_transformers_4_demands() -> None:
    there = FAMILY.hf(FAMILY.config(BASE | CASES["beyond the original length"]))
    assert there["rope_scaling"] == {"type": "longrope", **LISTS}
    assert there["original_max_position_embeddings"] == 8


@pytest.mark.parametrize("longest, tokens", [(100, 72), (50, 8)])
def test_the_check_of_an_export_reads_the_list_that_transformers_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, longest: int, tokens: int
) -> None:
    model = redrawn(FAMILY.config(BASE | CASES["beyond the original length"]))
    write_hf(tmp_path / "hf", FAMILY, model.cfg, dict(model.named_parameters()), None)
    monkeypatch.setattr("lm.hf.io.check.LONGEST", longest)
    found = compare(tmp_path / "hf", FAMILY, model)
    assert found.spread > 1 and found.difference < 1e-3 * found.spread  # float32, as users see it
    assert (found.tokens, found.left_out) == (tokens, f"rows of {'up to' if longest == 100 else 'over'} 8 tokens, {OTHERS[longest == 100]}")


OTHERS = {True: "for which transformers has other rotary factors", False: "for which there are other rotary factors"}


@torch.no_grad()
def test_an_import_says_for_which_rows_the_factors_are_and_can_be_for_the_others(tmp_path: Path) -> None:
    """Seen to fail with the amplitude of the shorter context."""
    theirs = transformers.Phi3ForCausalLM(transformers.Phi3Config(**deepcopy(BASE | CASES["beyond the original length"]))).eval()
    redraw(theirs, 1.0)
    theirs.save_pretrained(tmp_path / "hf")
    whole, short = read_hf(tmp_path / "hf"), read_hf(tmp_path / "hf", max_seq_len=8)
    assert "for rows of up to 8 tokens transformers has other rotary factors" in whole.notes[-1] and not short.notes
    ids = torch.randint(0, VOCAB, (2, 8), generator=torch.Generator().manual_seed(0))
    with Doubles():
        expected = in_doubles(theirs)(ids).logits
        same(ours_of(short)(Batch(ids)), expected)
        assert not torch.allclose(ours_of(whole)(Batch(ids)), expected, rtol=0, atol=0.1)
    with pytest.raises(ConfigError, match=r"^max_seq_len=129: the model is for no more of its 128 tokens\. Leave it out\.$"):
        read_hf(tmp_path / "hf", max_seq_len=129)


OLD = {"rope_scaling": {"type": "longrope", **LISTS}, "original_max_position_embeddings": 8, "rope_theta": 500.0, "sliding_window": 11}


@pytest.mark.parametrize("more", [{}, OLD])
def test_phi3_of_transformers_4(more: dict[str, Any]) -> None:
    sizes = {key: BASE[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "pad_token_id")}
    old_spelling_agrees(FAMILY, transformers.Phi3Config, sizes | {"num_attention_heads": 4, "max_position_embeddings": 128} | more)


def test_other_scalings_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="rope_type='linear' is not one that phi3 has"):
        FAMILY.config(BASE | {"rope_parameters": {"rope_type": "linear", "factor": 2.0}})
