"""Embeddings of several tokens together, beside those of single ones."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.models.blt.modeling_blt import compute_hash_embeddings

from lm.cost.count import count
from lm.errors import ConfigError
from lm.generation.config import SamplingConfig
from lm.hf.io.writing import family_for
from lm.nn.model_config import model_config
from lm.nn.ngrams import NGrams
from lm.nn.transformer import build_model
from lm.schema import Tree
from lm.testing.invariants import check_rows_of_the_cache, check_sizes
from lm.testing.models import BASE, tokens
from lm.training.optim.traits import Rates, traits_of
from tests.generation.drawing import generate
from tests.nn.models import CONV, config, packed, redrawn, with_kinds

SIZES = [2, 3, 5]
NGRAMS: Tree = {"embed": {"ngrams": {"rows": 37, "sizes": SIZES}}}


def added(cfg: Any, batch: Any) -> Any:
    """What the n-grams add to the embedding."""
    model = redrawn(cfg)
    assert isinstance(model.ngrams, NGrams)
    x = torch.zeros(*batch.tokens.shape, cfg.d_model)
    return model.ngrams(x, model.context(batch, None)), model.ngrams.table


@pytest.mark.parametrize("largest", [64, 2**24 - 1])
@torch.no_grad()
def test_they_are_those_of_the_byte_latent_transformer(largest: int) -> None:
    """Ids so large that the hash overflows 64 bits, in documents of all lengths, of which each is as alone."""
    lengths = [9, 1, 2, 3, 6]
    batch = packed(lengths)
    batch.tokens = torch.randint(largest, batch.tokens.shape, generator=torch.Generator().manual_seed(0))
    out, table = added(config(**NGRAMS), batch)
    nothing = SimpleNamespace(embed_tokens=lambda ids: torch.zeros(*ids.shape, 32))
    each = [compute_hash_embeddings(one, nothing, table, 1, SIZES, 37) for one in batch.tokens.split(lengths, dim=1)]
    torch.testing.assert_close(out, torch.cat(each, dim=1), atol=1e-6, rtol=0)
    assert out.abs().max() > 0.1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_tokens_before_are_exact_in_every_dtype(dtype: torch.dtype) -> None:
    model = redrawn(config(**NGRAMS))
    ids = torch.randint(2**24, (3, 50))
    batch = packed([50])
    batch.tokens = ids
    found = model.ngrams._earlier(ids, model.context(batch, None), dtype)
    for back in range(1, 5):
        assert found[:, back:, back - 1].equal(ids[:, :-back])
        assert not found[:, :back, back - 1].any()


@torch.no_grad()
def test_they_add_nothing_at_first() -> None:
    ids = tokens(2, 9)
    assert build_model(config(**NGRAMS), seed=0)(ids).equal(build_model(config(), seed=0)(ids))


HYBRID: Tree = {"recurrent": CONV, "pattern": ["recurrent", "attention"]}
LOOP: Tree = {"residual": {"kind": "loop", "times": 2}}
BOTH: Tree = {"embed": NGRAMS["embed"] | {"smear": {"channels": 5}}}
OTHERS = [{}, HYBRID, LOOP, BOTH, {"kind": "encoder_decoder"}]


@pytest.mark.parametrize("changes", OTHERS, ids=["plain", "hybrid", "loop", "smear", "encoder-decoder"])
def test_a_cache_keeps_the_last_tokens_which_it_forgets_and_reorders(changes: Tree) -> None:
    cfg = model_config(with_kinds(BASE | NGRAMS | changes))
    check_rows_of_the_cache(cfg)
    check_sizes(cfg)
    without = cfg.replace(embed={"smear": {"channels": 5}} if changes is BOTH else {})
    assert count(cfg, 16).cache_bytes_per_row - count(without, 16).cache_bytes_per_row == 2 * 4 * 12
    stacks = 2 if cfg.kind == "encoder_decoder" else 1
    assert count(cfg, 16).parameters - count(without, 16).parameters == stacks * 3 * 37 * 32
    assert count(cfg, 16).non_embedding == count(without, 16).non_embedding
    assert count(cfg, 16).forward_flops_per_token - count(without, 16).forward_flops_per_token == stacks * 3 * 32


def test_rows_that_are_generated_together_are_those_of_each_alone() -> None:
    """Prompts of unlike lengths stand side by side with padding, and the last tokens of each are its own."""
    model, cfg = redrawn(config(**NGRAMS)), SamplingConfig(max_tokens=9, temperature=0)
    prompts = [[5, 6, 7, 8, 9, 10], [3], [40, 41, 2]]
    assert generate(model, prompts, cfg) == [generate(model, [prompt], cfg)[0] for prompt in prompts]


def test_its_table_is_trained_as_an_embedding_is() -> None:
    model = build_model(config(d_model=64, parametrization={"kind": "mup", "base_width": 16}, **NGRAMS), seed=0)
    of = traits_of(model, layer_decay=0.5)
    assert of["ngrams.table.weight"] == of["embed.weight"] and of["embed.weight"].table
    assert of["embed.weight"].rates == Rates(eps=1 / 4)


@pytest.mark.parametrize("sizes", [[1, 2], [3, 2], [2, 2], [2, 9]], ids=str)
def test_sizes_that_are_none_are_refused(sizes: list[int]) -> None:
    with pytest.raises(ConfigError, match=r"embed\.ngrams: sizes=.*they are to grow from 2 at least to 8 at most\. Write sizes=\[2,3\]"):
        config(embed={"ngrams": {"rows": 37, "sizes": sizes}})


def test_rows_in_slices_are_refused() -> None:
    assert config(**NGRAMS).why_not_context_parallel(2) == (
        "model.embed.ngrams reads the token before, maybe another rank's. Set model.embed.ngrams=null"
    )


def test_no_family_of_transformers_has_a_place_for_it() -> None:
    with pytest.raises(ConfigError, match=r"model\.embed\.ngrams must be null"):
        family_for(config(**NGRAMS))
