"""Embeddings that are narrower than the model."""

import copy

import pytest
import torch

from lm.cost.count import count
from lm.errors import ConfigError
from lm.hf.io.writing import family_for
from lm.nn.batch import Batch
from lm.nn.head import OF_HEAD
from lm.nn.model_config import model_config
from lm.nn.position.absolute import Learned
from lm.nn.transformer import DecoderLM
from lm.schema import Tree
from lm.testing.invariants import check_model, check_rows_of_the_cache
from lm.testing.models import BASE, Doubles, same
from lm.training.optim.traits import traits_of
from tests.nn.models import config, redrawn, with_kinds

TOKENS: Tree = {"embed": {"factorized": {"width": 12}}}
SUM: Tree = {"position": {"kind": "learned"}, "embed": {"norm": True, "factorized": {"width": 12, "bias": True, "widened": "sum"}}}
TRANSFORMED: Tree = SUM | {"head": {"transform": "gelu", "bias": True}}
IDS = torch.arange(3, 24)[None]


def whole(model: DecoderLM) -> DecoderLM:
    """A model of the same function whose embedding and head have d_model numbers."""
    out = copy.deepcopy(model)
    assert model.widen is not None and model.head.narrow is not None
    out.embed.weight = torch.nn.Parameter(model.widen(model.embed.weight).detach())
    out.head.weight = torch.nn.Parameter((model.embed.weight @ model.head.narrow.weight).detach())
    out.widen = out.head.narrow = None
    return out


@torch.no_grad()
def test_it_is_a_table_and_a_head_of_low_rank() -> None:
    model = redrawn(config(**TOKENS)).double()
    assert model.embed.weight.shape == (BASE["vocab_size"], 12) and model.head.weight is model.embed.weight
    with Doubles():
        same(model(IDS), whole(model)(IDS))


@torch.no_grad()
def test_the_sum_with_positions_is_widened_behind_its_norm() -> None:
    model = redrawn(config(**SUM))
    assert model.widen is not None and model.embed_norm is not None and isinstance(model.position, Learned)
    x = model.embed(IDS)
    narrow = model.embed_norm(x + model.position.weight[: IDS.shape[1]])
    found = model.embedded(x, model.context(Batch(IDS), None), None)
    torch.testing.assert_close(found, narrow @ model.widen.weight.T + model.widen.bias, atol=1e-12, rtol=1e-12)


@torch.no_grad()
def test_a_transform_narrows_by_itself_and_a_head_of_its_own_does_not() -> None:
    model = redrawn(config(**TRANSFORMED))
    assert model.head.narrow is None and model.head.dense is not None and model.head.dense.weight.shape == (12, 32)
    own = redrawn(config(**TOKENS, head={"tied": False}))
    assert own.head.narrow is None and own.head.weight.shape == (BASE["vocab_size"], 32)


@pytest.mark.parametrize("kind", ["decoder", "encoder", "encoder_decoder"])
@pytest.mark.parametrize("changes", [TOKENS, SUM, TRANSFORMED], ids=["tokens", "sum", "transform"])
@torch.no_grad()
def test_the_invariants_hold(kind: str, changes: Tree) -> None:
    cfg = model_config(with_kinds(BASE | changes | {"kind": kind}))
    check_model(cfg)
    if kind != "encoder":
        check_rows_of_the_cache(cfg)


def test_its_matrices_are_counted() -> None:
    cfg, n = config(**TOKENS), BASE["vocab_size"]
    found, plain = count(cfg, 16), count(cfg.replace(embed={}), 16)
    assert plain.parameters - found.parameters == n * (32 - 12) - 2 * 12 * 32
    assert found.non_embedding - plain.non_embedding == 2 * 12 * 32
    assert plain.forward_flops_per_token - found.forward_flops_per_token == 2 * (n * (32 - 12) - 2 * 12 * 32)


def test_layer_decay_counts_it_as_below_the_blocks() -> None:
    layers = traits_of(redrawn(config(**TOKENS)), layer_decay=0.5)
    assert layers["widen.weight"].factor == layers["embed.weight"].factor == 0.5**4 and layers["head.narrow.weight"].factor == 1
    assert not layers["widen.weight"].matrix


def test_a_head_that_tells_labels_begins_anew_with_what_stands_before_it() -> None:
    before = config(**TRANSFORMED)
    labels = {"labels": ["a", "b"], "tied": False, "transform": "gelu", "bias": True}
    assert before.replace(head=labels).new_in_head(before) == OF_HEAD
    plain = before.replace(embed={})
    assert plain.replace(head=labels).new_in_head(plain) == {"head.weight", "head.bias"}
    assert before.new_in_head(before) == set()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (TOKENS | {"mtp": {"depth": 1}}, "embed.factorized narrows what blocks of mtp read at d_model numbers. Set mtp=null"),
        ({"embed": {"ngrams": {"rows": 37, "sizes": [2]}, **SUM["embed"]}}, "which widened=sum leaves narrow. Use widened=tokens."),
        (TOKENS | {"parametrization": {"kind": "mup", "base_width": 8}}, "weights of parametrization=mup. Leave one out."),
        ({"embed": {"factorized": {"width": 0}}}, "embed.factorized.width: 0 does not fit. The value must be greater than 0."),
    ],
)
def test_what_does_not_fit_is_refused(changes: Tree, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        config(**changes)
    assert said in str(error.value)


def test_a_family_without_a_place_for_it_is_not_taken() -> None:
    with pytest.raises(ConfigError, match=r"model\.embed\.factorized must be null"):
        family_for(config(**TOKENS))
