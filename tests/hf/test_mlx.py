"""What `lm export` says of MLX: by its rules, and, where mlx-lm is installed, against the logits of its own classes."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lm.errors import ConfigError
from lm.hf.io import mlx
from lm.hf.io.family import families, resolved
from lm.hf.io.handing_on import DECODERS, uses_of_hf
from lm.hf.io.writing import family_for, write_hf
from lm.nn.batch import Batch
from lm.nn.model_config import ModelConfig, model_config
from lm.schema import Tree, flatten, nest
from lm.testing.models import random_model
from tests.hf.draws import drawn
from tests.hf.gguf_models import BIASED, EXPERTS, HEADS, LLAMA3, LONGROPE, MLP, MODELS, ROPE, YARN, built, trained

NORMED: Tree = HEADS | {"qk_norm": "head"}
BEHIND: Tree = {"norm": {"kind": "rms", "place": "output"}}
MIXED: Tree = {**BEHIND, "attention": NORMED | {"window": 9, "global_every": 3}, "position": ROPE | {"none_every": 3}}
DONE = "mlx_lm.generate --model 'an out' --prompt TEXT"
CASES: dict[str, tuple[Tree, str]] = {
    "llama": ({}, DONE),
    "llama with biases and a scaling": ({"attention": BIASED, "position": ROPE | {"scaling": LLAMA3}}, DONE),
    "yarn": ({"position": ROPE | {"scaling": YARN}}, DONE),
    "qwen3": ({"attention": NORMED}, DONE),
    "experts": ({"ffn": EXPERTS}, DONE),
    "a window as wide as the context": ({"attention": HEADS | {"window": 128}}, DONE),
    "windows beside whole layers": (MIXED, DONE),
    "geglu": ({"ffn": MLP | {"activation": "gelu"}}, "LlamaForCausalLM has no model.ffn.activation=gelu, and there it must be silu"),
    "windows": ({"attention": HEADS | {"window": 9}}, "MistralForCausalLM has no model.attention.window=9, and there it must be null"),
    "windows alone": ({**BEHIND, "attention": NORMED | {"window": 9}}, "Exaone4ForCausalLM has no model.attention.window=9 in all layers"),
    "biases": (
        {"attention": NORMED | {"qkv_bias": True, "out_bias": True}},
        "Qwen3ForCausalLM has no model.attention.qkv_bias=true, and there it must be false",
    ),
    "an amplitude": (
        {"position": ROPE | {"scaling": YARN | {"attention_factor": 0.7}}},
        "has no model.position.scaling.attention_factor=0.7, and there it must be null",
    ),
    "longrope": (
        {"position": ROPE | {"scaling": LONGROPE}},
        "has no model.position.scaling.kind=longrope, and there it must be null or linear or llama3 or yarn",
    ),
    "wide heads": (
        {"attention": HEADS | {"head_dim": 32}, "ffn": EXPERTS},
        "MixtralForCausalLM has no heads of 128 numbers together, and there they must be model.d_model=64",
    ),
    "a family that differs": (MODELS["gpt2"], "it has no GPT2LMHeadModel that is known to compute the same"),
}  # fmt: skip


def said(cfg: ModelConfig) -> str:
    command, why = mlx.generate(family_for(cfg), resolved(cfg), Path("an out"))
    return command or why


@pytest.mark.parametrize("case", CASES)
def test_a_command_is_given_only_where_mlx_computes_the_same(case: str) -> None:
    changes, expected = CASES[case]
    assert said(built(changes).cfg).endswith(expected)


def test_of_an_encoder_the_programs_for_decoders_say_so() -> None:
    model = built({"kind": "encoder"})
    uses = {use.program: use for use in uses_of_hf("runs/a", Path("out"), family_for(model.cfg), model, trained("bytes"))}
    assert [uses[program].why for program in DECODERS] == ["it generates with decoders, and this is an encoder"] * 2


def test_all_families_of_the_rules_are_known() -> None:
    assert families().keys() >= mlx.ALLOWED.keys() >= set(mlx.SQUARE)


def allowed(source: random.Random, name: str) -> ModelConfig:
    """Returns a random model of this family that MLX computes by its rules."""
    family, single = families()[name], {key: rule for key, rule in mlx.ALLOWED[name].items() if not isinstance(rule, tuple)}
    while True:
        tree = flatten(drawn(source, name, 0).tree())
        width = {"attention.head_dim": tree["d_model"] // tree["attention.n_heads"]} if name in mlx.SQUARE else {}
        try:
            cfg = model_config(nest(tree | width | {key: rule for key, rule in single.items() if key in tree}))
        except ConfigError:
            continue
        if not family.homeless(cfg) and mlx.generate(family, resolved(cfg), Path("out"))[0]:
            return cfg


@pytest.mark.slow
@pytest.mark.parametrize("name", mlx.ALLOWED)
def test_logits_are_the_same_of_whole_texts_and_token_by_token(name: str, tmp_path: Path) -> None:
    mx: Any = pytest.importorskip("mlx.core", reason="mlx is not installed (pip install mlx-lm, and mlx-cpu where there is no Apple GPU)")
    cache, utils = (pytest.importorskip(f"mlx_lm.{module}") for module in ("models.cache", "utils"))
    for n in range(4):
        cfg = allowed(random.Random(f"{name} {n}"), name)
        ours, folder = random_model(cfg), tmp_path / str(n)
        ids = torch.randint(0, ours.vocab_size, (1, 40), generator=torch.Generator().manual_seed(n))
        with torch.inference_mode():
            expected = ours(Batch(ids)).numpy()
        write_hf(folder, families()[name], cfg, dict(ours.named_parameters()), None)
        theirs, _ = utils.load_model(folder, strict=True)
        tokens, kept = mx.array(ids.numpy()), cache.make_prompt_cache(theirs)
        steps = [theirs(tokens[:, :20], cache=kept), *(theirs(tokens[:, i : i + 1], cache=kept) for i in range(20, 40))]
        for found in (theirs(tokens), mx.concatenate(steps, axis=1)):
            np.testing.assert_allclose(np.array(found), expected, rtol=0, atol=1e-3 * max(1.0, expected.std()))  # float32 on both sides
