"""A step as a CUDA graph: the tokens of the model as it is, no host that waits, and what cannot be recorded."""

import copy
from typing import Any

import pytest
import torch

from lm.errors import ConfigError
from lm.generation.config import SamplingConfig
from lm.generation.decode import rows_of
from lm.generation.engine import Engine, Request
from lm.generation.loop import Vocabulary
from lm.generation.weights.compiled import Step
from lm.generation.weights.prepare import prepare
from lm.generation.weights.replayed import Replayed
from lm.nn.batch import Batch
from lm.nn.head import last_position
from lm.testing.models import tokens
from tests.generation.drawing import generate
from tests.generation.test_step import PROMPTS
from tests.nn.models import ATTENTIONS, EMBEDS, MIXING, MIXTURES, POSITIONS, config, redrawn

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
ENDS = [3, 4, 5, 7, 8, 9]  # enough for rows of many lengths in each model
MODELS: list[dict[str, Any]] = [
    *({"attention": each} for each in ATTENTIONS),
    {"position": POSITIONS[-2]},
    {"position": POSITIONS[-1]},
    *MIXING[1:],
]


@pytest.mark.parametrize("changes", MODELS, ids=str)
def test_graphs_give_the_texts_of_the_model_as_it_is(changes: dict[str, Any]) -> None:
    model = redrawn(config(**changes)).cuda()
    made = prepare(copy.deepcopy(model), "saved", compiled=True)
    for options in (SamplingConfig(max_tokens=40), SamplingConfig(max_tokens=40, temperature=0.9, top_p=0.9)):
        assert generate(made, PROMPTS, options, ends=[7]) == generate(model, PROMPTS, options, ends=[7])


@pytest.mark.parametrize(
    "changes", [{}, *({"attention": ATTENTIONS[n]} for n in (11, 15)), MIXING[1], *({"embed": each} for each in EMBEDS[-2:])], ids=str
)
def test_rows_join_those_that_are_left_of_a_recorded_step(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that have ended are computed on with the others until half have."""
    monkeypatch.setattr("lm.generation.loop.ROWS", 4)
    monkeypatch.setattr("lm.generation.loop.TOKENS", 0)
    model, prompts = redrawn(config(**changes)).cuda(), [[n, 5, n + 1] for n in range(11)]
    made, options = prepare(copy.deepcopy(model), "saved", compiled=True), SamplingConfig(max_tokens=30, temperature=0.9)
    alone = [generate(model, [prompt], options, ends=ENDS)[0] for prompt in prompts]
    assert generate(made, prompts, options, ends=ENDS) == alone and len({*map(len, alone)}) > 3


@pytest.mark.parametrize("changes", [{"attention": ATTENTIONS[1]}, {"attention": ATTENTIONS[11]}, MIXING[1]], ids=str)
def test_a_graph_goes_on_where_a_row_takes_the_place_of_another(changes: dict[str, Any]) -> None:
    model = redrawn(config(**changes)).cuda()
    made, cfg, steps = prepare(copy.deepcopy(model), "saved", compiled=True), SamplingConfig(max_tokens=12, temperature=0), []
    engine = Engine(made, Vocabulary(61), 2)
    requests = [Request(rows_of(made, [[n, 5, n + 1]], cfg, Vocabulary(61)), cfg) for n in range(8)]
    for request in requests:
        engine.add(request)
    while engine.waiting or engine.running:
        engine.step()
        if engine._cache is not None and engine._cache.recorded is not None:
            steps.append(engine._cache.recorded[1])
    for n, request in enumerate(requests):
        assert [row.new for row in request.rows] == generate(model, [[n, 5, n + 1]], cfg)
    assert len({id(step) for step in steps if step is not None}) <= 3 and len(steps) - steps.count(None) > 30


def test_a_step_of_one_row_is_compiled_before_it_is_recorded() -> None:
    made = prepare(redrawn(config()).cuda().bfloat16(), "saved", compiled=True)
    assert isinstance(made.fast_path, Replayed) and isinstance(made.fast_path.one, Step)


@pytest.mark.parametrize("changes", [{}, MIXING[3], {"ffn": MIXTURES[0]}], ids=str)
def test_a_replayed_step_never_waits_for_the_device(changes: dict[str, Any]) -> None:
    model = prepare(redrawn(config(**changes)).cuda().bfloat16(), "saved", compiled=True)
    cache, ids = model.new_cache(2, 20), tokens(2, 20).cuda()
    at = torch.arange(20, device="cuda").expand(2, -1)
    with torch.inference_mode():
        for start, stop in ((0, 8), *((i, i + 1) for i in range(8, 20))):
            torch.cuda.set_sync_debug_mode("error" if start > 9 else "default")
            try:
                model(Batch(ids[:, start:stop], positions=at[:, start:stop], padded=False), read=last_position, cache=cache)
            finally:
                torch.cuda.set_sync_debug_mode("default")
    assert cache.recorded is not None and cache.recorded[1] is not None


def test_experts_of_which_the_host_reads_the_loads_are_refused() -> None:
    model = prepare(redrawn(config(ffn=MIXTURES[0])).cuda(), "saved", compiled=True)
    with pytest.raises(ConfigError, match=r"^compile=true: a layer cannot be recorded \(.*\). Leave it out.$"):
        generate(model, [[5, 6]], SamplingConfig(max_tokens=8))
