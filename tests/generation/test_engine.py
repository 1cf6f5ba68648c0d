"""One running batch: requests that come at any step and leave at any other are answered as if each were alone."""

import random
from typing import Any

import pytest
import torch

from lm.generation.config import SamplingConfig
from lm.generation.decode import rows_of
from lm.generation.engine import Engine, Request, Sample
from lm.generation.loop import Vocabulary
from lm.nn.transformer import LM
from lm.ops.cache.cache import Cache
from lm.schema import from_tree
from tests.generation.drawing import generate
from tests.generation.test_answers import MODELS as ANSWERING
from tests.generation.test_answers import encoder_decoder
from tests.nn.models import ATTENTIONS, MIXING, POSITIONS, SMEARED, config, redrawn

FEW: list[dict[str, Any]] = [
    {"attention": ATTENTIONS[4]},
    {"position": {"kind": "learned"}},
    MIXING[1],
    {"attention": ATTENTIONS[10]},
    {"attention": ATTENTIONS[11]},
    SMEARED,
]
ALL = [*({"attention": each} for each in ATTENTIONS), *({"position": each} for each in POSITIONS), *MIXING]


def asked(seed: int, n: int, most: int) -> list[tuple[list[int], SamplingConfig]]:
    """Prompts of several lengths, some beyond a window, with as many ways to draw; some go on beyond the context of 48."""
    draws = random.Random(seed)
    options = ({"temperature": 0}, {"temperature": 0.9, "top_k": 20}, {"top_p": 0.9, "repetition_penalty": 1.3}, {"n": 3, "logprobs": 1})
    return [
        (
            [draws.randrange(50) for _ in range(draws.randint(1, 30))],
            from_tree(SamplingConfig, {"max_tokens": draws.randint(1, most), "seed": draws.randrange(9), **options[i % 4]}),
        )
        for i in range(n)
    ]


def served(model: LM, requests: list[Request], apart: int, most_rows: int = 7) -> Engine:
    """All are answered; a new one comes every `apart` steps."""
    engine, left, step = Engine(model, Vocabulary(model.vocab_size), most_rows), list(requests), 0
    while left or engine.running or engine.waiting:
        if left and step % apart == 0:
            engine.add(left.pop(0))
        engine.step()
        step += 1
    return engine


def agrees(model: LM, seed: int, n: int = 8, most: int = 40) -> None:
    each = asked(seed, n, most)
    requests = [Request(rows_of(model, [prompt], cfg, Vocabulary(model.vocab_size)), cfg) for prompt, cfg in each]
    served(model, requests, apart=3)
    expected = [generate(model, [prompt], cfg) for prompt, cfg in each]
    assert [[row.new for row in request.rows] for request in requests] == expected


@pytest.mark.parametrize("changes", FEW, ids=str)
def test_requests_that_come_and_go_are_answered_as_alone(changes: dict[str, Any]) -> None:
    agrees(redrawn(config(**changes)), seed=1, n=5, most=30)


@pytest.mark.slow
@pytest.mark.parametrize("changes", ALL, ids=str)
def test_requests_to_any_decoder_are_answered_as_alone(changes: dict[str, Any]) -> None:
    agrees(redrawn(config(**changes)), seed=2, n=12, most=60)


CROWDED = [*FEW, {"attention": ATTENTIONS[12]}, MIXING[5]]


@pytest.mark.parametrize("changes", [CROWDED[0], *(pytest.param(each, marks=pytest.mark.slow) for each in [*CROWDED[1:], *ALL])], ids=str)
def test_a_row_that_joins_takes_the_place_of_one_that_has_left(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen to fail: the cache of all rows was copied for each that came or went, half of the time of a server with more clients than
    rows. The answers are those alone, of windows and beyond the context too."""
    model, replace, adopt = redrawn(config(**changes)), Cache.replace, Cache.adopt
    each = [(prompt, cfg.model_copy(update={"n": 1, "logprobs": None})) for prompt, cfg in asked(4, n=24, most=50)]
    requests = [Request(rows_of(model, [prompt], cfg, Vocabulary(model.vocab_size)), cfg) for prompt, cfg in each]
    calls: list[str] = []
    monkeypatch.setattr(Cache, "replace", lambda self, *of: calls.append("replace") or replace(self, *of))
    monkeypatch.setattr(Cache, "adopt", lambda self, *of: calls.append("adopt") or adopt(self, *of))
    served(model, requests, apart=1, most_rows=4)
    assert calls.count("replace") >= 10
    assert [[row.new for row in request.rows] for request in requests] == [generate(model, [prompt], cfg) for prompt, cfg in each]


def test_a_cache_twice_as_long_as_its_rows_is_made_anew() -> None:
    """Else the rows would go on beside the empty slots of a long one that has left."""
    model, cfg = redrawn(config(max_seq_len=400)), from_tree(SamplingConfig, {"max_tokens": 30, "temperature": 0})
    long, *short = (Request(rows_of(model, [[1] * n], cfg, Vocabulary(model.vocab_size)), cfg) for n in (300, 3, 4, 5))
    engine = Engine(model, Vocabulary(model.vocab_size), 2)
    for request in (long, short[0]):
        engine.add(request)
    engine.step()
    engine.cancel([long])
    engine.add(short[1])
    engine.step()
    assert engine.running == 2 and engine._cache is not None and engine._cache.length < 10


@pytest.mark.parametrize("changes", [ANSWERING[1], *(pytest.param(each, marks=pytest.mark.slow) for each in ANSWERING)], ids=str)
def test_answers_to_sources_of_several_lengths_are_as_alone(changes: dict[str, Any]) -> None:
    agrees(encoder_decoder(**changes), seed=3, n=5)


def test_a_request_waits_for_room_and_a_cancelled_one_makes_some() -> None:
    model, cfg = redrawn(config()), from_tree(SamplingConfig, {"max_tokens": 20, "n": 2})
    first, second, third = (Request(rows_of(model, [[1, 2, n]], cfg, Vocabulary(model.vocab_size)), cfg) for n in range(3))
    engine = Engine(model, Vocabulary(model.vocab_size), 4)
    for request in (first, second, third):
        engine.add(request)
    engine.step()
    assert (engine.running, engine.waiting) == (4, 1) and not third.rows[0].new
    engine.cancel([first])
    engine.step()
    assert (engine.running, engine.waiting) == (4, 0) and len(third.rows[0].new) == 2 and len(first.rows[0].new) == 2
    engine.cancel([second, third])
    assert engine.step() == [] and engine.running == 0


def test_a_row_without_finite_logits_ends_and_another_one_draws_from_its_own() -> None:
    model, cfg = redrawn(config()), from_tree(SamplingConfig, {"temperature": 0})
    request = Request(rows_of(model, [[5], [6]], cfg, Vocabulary(model.vocab_size)), cfg)
    samples, logits = [Sample(request, row) for row in request.rows], torch.zeros(2, model.vocab_size)
    logits[0, 3], logits[0, 9], logits[1, 7] = 2.0, float("nan"), 1.0
    events = Engine(model, Vocabulary(model.vocab_size), 2)._drawn(logits, samples)
    assert [(event.sample, event.token, event.finish) for event in events] == [(samples[0], None, "error"), (samples[1], 7, None)]
