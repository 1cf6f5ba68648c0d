"""A cache in fewer bits against what it stands for; what decoding promises holds with it too."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from lm.data.tokenizer.tokenizer import Tokenizer
from lm.errors import ConfigError
from lm.generation.beams import search
from lm.generation.config import SamplingConfig
from lm.generation.decode import decode
from lm.generation.drafting.base import Lookup
from lm.generation.load import load
from lm.nn.model_config import model_config
from lm.ops.cache.rounded import FORMS
from lm.schema import from_tree
from lm.storage.model_folder import save_model
from lm.testing.models import BASE, Doubles, random_model
from tests.conftest import Lm
from tests.generation.drawing import generate
from tests.generation.test_engine import agrees
from tests.generation.test_weights import stepped
from tests.nn.models import GLA, MIXING, MLA, config, redrawn

PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13], [3], [40, 41], [60, 2, 5, 5, 1]]
MODELS: list[dict[str, Any]] = [{}, {"attention": {"n_heads": 4, "window": 5}}, {"attention": MLA}, MIXING[5]]
ERROR = {"bf16": 2**-8, "int8": 1 / 254}  # of a number, of the largest number of a head


@pytest.mark.parametrize("form", ERROR)
def test_numbers_come_back_as_nearly_as_their_bits_allow(form: str) -> None:
    held = FORMS[form](torch.float64)
    x = torch.randn(2, 3, 5, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 6, 5).view(
        1, 1, 5, 1
    )
    x[0, 0, 0] = 0
    found = held.unpack(held.pack(x))
    most = x.abs() if form == "bf16" else x.abs().amax(-1, keepdim=True)
    assert found.dtype == x.dtype and ((found - x).abs() <= most * ERROR[form] * (1 + 1e-6)).all() and not torch.equal(found, x)
    assert [part.dtype for part in held.pack(x)] == [part.dtype for part in held.empty(2, 3, 5, 16, device=x.device)]


@pytest.mark.parametrize("form", ERROR)
@pytest.mark.parametrize("changes", MODELS, ids=str)
def test_logits_are_near_those_of_the_exact_cache(changes: dict[str, Any], form: str) -> None:
    model = redrawn(config(**changes)).double()
    with Doubles(), torch.no_grad():
        exact = stepped(model)
        model.cache_form = form
        found = stepped(model)
    assert 0 < (found - exact).std() < 0.05 * exact.std()


@pytest.mark.parametrize("form", ERROR)
@pytest.mark.parametrize("changes", MODELS, ids=str)
def test_a_text_is_the_same_alone_in_a_batch_and_with_drafts(changes: dict[str, Any], form: str) -> None:
    model = redrawn(config(**changes)).double()
    model.cache_form = form
    cfg = from_tree(SamplingConfig, {"max_tokens": 16, "temperature": 0.9, "logit_bias": {7: 6.0, 9: 6.0}})
    with Doubles():
        alone = [generate(model, [prompt], cfg)[0] for prompt in PROMPTS]
        assert generate(model, PROMPTS, cfg) == alone
        drafter = Lookup(4, ngram=2)
        assert [row.new for row in decode(model, PROMPTS, cfg, drafter=drafter)] == alone and drafter.tally.drafted > 0


@pytest.mark.parametrize("form", ERROR)
@pytest.mark.parametrize("changes", [MODELS[1], MODELS[2], MODELS[3]], ids=str)
def test_beams_and_requests_that_come_and_go_are_as_alone(changes: dict[str, Any], form: str) -> None:
    """Rows are reordered, forgotten and adopted, with their scales."""
    model = redrawn(config(**changes)).double()
    model.cache_form = form
    with Doubles():
        beams = from_tree(SamplingConfig, {"max_tokens": 8, "beams": 3, "n": 3})
        together, alone = [*search(model, PROMPTS, beams)], [beam for prompt in PROMPTS for beam in search(model, [prompt], beams)]
        assert [[beam.tokens for beam in each] for each in together] == [[beam.tokens for beam in each] for each in alone]
        agrees(model, seed=4, n=5, most=20)


@pytest.mark.parametrize("form", ERROR)
@pytest.mark.parametrize("changes", MODELS, ids=str)
def test_a_text_read_through_the_cache_costs_little_more_whether_at_once_or_token_by_token(changes: dict[str, Any], form: str) -> None:
    """The loss of a model that is as sure as a trained one: its own likeliest tokens are the text."""
    model = redrawn(config(**changes)).double()
    with Doubles(), torch.no_grad():
        ids = torch.tensor([[3, *generate(model, [[3]], SamplingConfig(max_tokens=30, temperature=0))[0]]])

        def loss(form: str | None, width: int) -> float:
            model.cache_form = form
            cache = model.new_cache(1, 31)
            logits = torch.cat([model(piece, cache=cache) for piece in ids.split(width, 1)], dim=1)
            return float(F.cross_entropy(logits[0, :-1], ids[0, 1:]))

        exact, one, all_at_once = loss(None, 1), loss(form, 1), loss(form, 31)
    assert one == pytest.approx(all_at_once, abs=1e-9) and 0 < abs(one - exact) < 0.1


def test_what_keeps_nothing_of_a_token_takes_no_form(tmp_path: Path, tokenizer: Tokenizer) -> None:
    recurrent = {"recurrent": GLA, "pattern": ["recurrent"], "position": {"kind": "none"}}
    refused = [(recurrent, r"no layer of model\.pattern=\[recurrent\] keeps"), ({"kind": "encoder"}, "an encoder")]
    for i, (changes, rule) in enumerate(refused):
        model = random_model(model_config({**BASE, "vocab_size": 320, **changes}))
        save_model(tmp_path / str(i), model.cfg.tree(), dict(model.named_parameters()), tokenizer.save, {})
        assert load(tmp_path / str(i), "cpu")[0].cache_form is None
        with pytest.raises(ConfigError, match=f"cache=int8: {rule}"):
            load(tmp_path / str(i), "cpu", cache="int8")


def test_generate_takes_a_form_and_refuses_one_that_is_not_there(lm: Lm, model_folder: Path) -> None:
    code, out, _ = lm("generate", f"from={model_folder}", "prompt=def ", "max_tokens=4", "cache=int8")
    assert code == 0 and out.startswith("def ")
    assert load(model_folder, "cpu", cache="bf16")[0].cache_form == "bf16"
    assert lm("generate", f"from={model_folder}", "prompt=a", "cache=int4")[0] == 2
    with pytest.raises(ConfigError, match=r"cache='int4' is not an option"):
        load(model_folder, cache="int4")  # type: ignore[arg-type]
