"""Forwards that begin before the host knows what they read give the tokens of those that wait."""

from types import SimpleNamespace
from typing import Any

import pytest

from lm.errors import NumericsError
from lm.generation.config import SamplingConfig
from lm.generation.drafting.base import Drafter, Lookup
from lm.generation.loop import Coming, goes_ahead
from lm.nn.transformer import LM
from lm.schema import from_tree
from tests.generation.drawing import generate
from tests.generation.test_answers import encoder_decoder
from tests.nn.models import ATTENTIONS, MIXING, POSITIONS, config, redrawn

PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13], [3], [40, 41], [3], [60, 2, 5, 5, 1]]
MODELS: list[dict[str, Any]] = [{"position": POSITIONS[1]}, {"attention": ATTENTIONS[4]}, MIXING[1]]


def cfg(**options: Any) -> SamplingConfig:
    return from_tree(SamplingConfig, {"max_tokens": 20, **options})


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lm.generation.decode.goes_ahead", lambda *given: True)


def both(monkeypatch: pytest.MonkeyPatch, model: LM, options: SamplingConfig, **how: Any) -> list[list[list[int]]]:
    """Waiting, and ahead."""
    found = []
    for wanted in (False, True):
        monkeypatch.setattr("lm.generation.decode.goes_ahead", lambda *given, wanted=wanted: wanted)
        found.append(generate(model, PROMPTS, options, **how))
    return found


@pytest.mark.parametrize("changes", [*MODELS, None], ids=str)
@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 0.9, "top_k": 30, "repetition_penalty": 1.4, "n": 2}], ids=str)
def test_tokens_are_those_of_forwards_that_wait(
    changes: dict[str, Any] | None, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows end at a token, at a listener's word, and at their limit, which without a rotation is the context's."""
    model = encoder_decoder() if changes is None else redrawn(config(**changes))
    free = generate(model, PROMPTS, cfg(**options))
    waiting, found = both(monkeypatch, model, cfg(**options), ends={free[0][4], free[2][9]}, n_tokens=50)
    assert found == waiting and len({*map(len, found)}) > 1
    heard: list[list[tuple[int, int]]] = []
    for wanted in (False, True):
        monkeypatch.setattr("lm.generation.decode.goes_ahead", lambda *given, wanted=wanted: wanted)
        heard.append([])
        generate(model, PROMPTS, cfg(**options), on_token=lambda row, token: bool(heard[-1].append((row, token))) or token == free[1][6])
    assert heard[0] == heard[1]


@pytest.mark.slow
def test_rows_go_to_the_end_of_a_context_of_fixed_length_and_beyond_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    for position in POSITIONS:
        model = redrawn(config(position=position, max_seq_len=16))
        waiting, found = both(monkeypatch, model, cfg(temperature=0, max_tokens=30))
        assert found == waiting


def test_a_forward_begins_before_the_tokens_that_it_is_over_are_read(ahead: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model, events = redrawn(config()), list[str]()
    model.blocks[0].register_forward_hook(lambda module, given, out: events.append("forward"))
    here = Coming.here
    monkeypatch.setattr(Coming, "here", lambda self: (events.append("read"), here(self))[1])
    generate(model, [[5, 6]], cfg(max_tokens=3))
    assert events == ["forward", "forward", "read", "forward", "read", "read"]  # the first of the prompt


def test_no_forward_follows_the_last_token(ahead: None) -> None:
    model, seen = redrawn(config()), []
    model.blocks[0].register_forward_hook(lambda module, given, out: seen.append(out.shape[:2]))
    generate(model, PROMPTS, cfg(max_tokens=4))
    assert [tuple(each) for each in seen] == [(4, 9), *[(5, 1)] * 3]  # two prompts are the same one


@pytest.mark.parametrize("temperature", [0, 1])
def test_weights_that_give_nan_are_told(ahead: None, temperature: float) -> None:
    model = redrawn(config())
    model.head.weight.data.fill_(float("nan"))
    with pytest.raises(NumericsError, match="logits hold NaN"):
        generate(model, PROMPTS, cfg(temperature=temperature))


def test_only_a_device_that_works_by_itself_is_not_waited_for() -> None:
    model: Any = SimpleNamespace(embed=SimpleNamespace(weight=SimpleNamespace(is_cuda=True)))
    assert goes_ahead(model, cfg(), Drafter(0))
    assert not goes_ahead(model, cfg(), Lookup(3, 2)) and not goes_ahead(model, cfg(logprobs=2), Drafter(0))
    assert not goes_ahead(redrawn(config()), cfg(), Drafter(0))
