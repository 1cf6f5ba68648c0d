"""Mamba and Falcon Mamba."""

from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

from lm.errors import ConfigError  # noqa: E402
from lm.hf.io.family import families  # noqa: E402
from lm.hf.io.writing import family_for  # noqa: E402
from lm.hf.options.keys import unheard  # noqa: E402
from tests.hf.harness import VOCAB, cases, verify  # noqa: E402

BASE: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 48, "num_hidden_layers": 3, "state_size": 6}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba": ("Mamba", {}),
    "falcon mamba, another width, kernel and rank, untied": (
        "FalconMamba",
        {"expand": 3, "conv_kernel": 3, "time_step_rank": 5, "mixer_rms_eps": 1e-2, "tie_word_embeddings": False},
    ),
    "mamba, no bias of the convolution, untied": ("Mamba", {"use_conv_bias": False, "tie_word_embeddings": False, "expand": 1}),
    "falcon mamba": ("FalconMamba", {}),
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "mamba": {
        "architectures": ["MambaForCausalLM"], "bos_token_id": 0, "conv_kernel": 4, "d_inner": 1536, "d_model": 768, "eos_token_id": 0,
        "expand": 2, "fused_add_norm": True, "hidden_act": "silu", "hidden_size": 768, "initializer_range": 0.1,
        "intermediate_size": 1536, "layer_norm_epsilon": 1e-05, "model_type": "mamba", "n_layer": 24, "num_hidden_layers": 24,
        "pad_token_id": 0, "pad_vocab_size_multiple": 8, "rescale_prenorm_residual": False, "residual_in_fp32": True, "rms_norm": True,
        "ssm_cfg": {}, "state_size": 16, "time_step_floor": 0.0001, "time_step_init_scheme": "random", "time_step_max": 0.1,
        "time_step_min": 0.001, "time_step_rank": 48, "time_step_scale": 1.0, "use_bias": False, "use_cache": True,
        "use_conv_bias": True, "vocab_size": 50280,
    },
    "falcon_mamba": {
        "architectures": ["FalconMambaForCausalLM"], "bos_token_id": 0, "conv_kernel": 4, "eos_token_id": 11, "expand": 2,
        "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.1, "intermediate_size": 8192, "layer_norm_epsilon": 1e-05,
        "mixer_rms_eps": 1e-06, "model_type": "falcon_mamba", "num_hidden_layers": 64, "pad_token_id": 11,
        "rescale_prenorm_residual": False, "residual_in_fp32": True, "state_size": 16, "tie_word_embeddings": False,
        "time_step_floor": 0.0001, "time_step_init_scheme": "random", "time_step_max": 0.1, "time_step_min": 0.001,
        "time_step_rank": 256, "time_step_scale": 1.0, "use_bias": False, "use_cache": True, "use_conv_bias": True, "vocab_size": 65024,
    },
}  # fmt: skip
"""mamba-130m-hf's and falcon-mamba-7b's, as their files have them."""


@pytest.mark.parametrize("case", cases(CASES, quick=3))
def test_a_family_of_mamba(case: str, tmp_path: Path) -> None:
    name, changes = CASES[case]
    config = getattr(transformers, f"{name}Config")(**BASE | changes)
    found = verify(getattr(transformers, f"{name}ForCausalLM")(config), tmp_path)
    assert found.family.name == config.model_type == family_for(found.config).name


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_config_of_published_sizes_is_understood(name: str) -> None:
    family, there = families()[name], PUBLISHED[name]
    cfg = family.config(there)
    assert all("pad_vocab_size_multiple" in note for note in unheard("config.json", there, family, cfg))
    assert family.homeless(cfg) == [] and family_for(cfg, imported=None).name == name
    auto = {key: value for key, value in there.items() if key not in ("time_step_rank", "intermediate_size", "expand")}
    assert family.config(auto) == cfg


def test_norms_within_are_what_sets_the_two_apart() -> None:
    mamba, falcon = (families()[name].config(PUBLISHED[name]) for name in ("mamba", "falcon_mamba"))
    assert any("mixer_rms_eps=null" in refusal for refusal in families()["falcon_mamba"].homeless(mamba))
    assert families()["mamba"].homeless(falcon) == ["model.recurrent.inner_eps=1e-06 must be null"]


@pytest.mark.parametrize("changes", [{"hidden_act": "gelu"}, {"intermediate_size": 1024}, {"rescale_prenorm_residual": True}])
def test_what_has_no_place_is_refused_by_name(changes: dict[str, Any]) -> None:
    [(key, value)], family, there = changes.items(), families()["mamba"], PUBLISHED["mamba"] | changes
    with pytest.raises(ConfigError, match=f"{key}={value!r} has no place in lm's mamba"):
        unheard("config.json", there, family, family.config(there))
