"""Filters = transformers' warpers; draws follow the distribution; a row's randomness is its own."""

from typing import Any

import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from lm.errors import ConfigError
from lm.generation.config import SamplingConfig
from lm.generation.sampling import (
    History,
    adjusted,
    biased,
    by_pieces,
    choose,
    counts,
    drawn,
    filtered,
    logprobs,
    min_p,
    no_repeat,
    penalise,
    row_keys,
    top_k,
    top_p,
    uniform,
)
from lm.schema import from_tree


@pytest.mark.parametrize("v", [1, 255, 256, 1000, 5003])
def test_the_likeliest_token_is_found_by_pieces_and_of_equal_ones_the_first(v: int) -> None:
    many = logits(200, v).round()  # most rows have their highest number several times
    many[0], many[1] = float("-inf"), -3.0
    many[2, v // 2] = float("nan")
    assert torch.equal(by_pieces(many), many.argmax(-1))
    assert v == 1 or ((many == many.amax(-1, keepdim=True)).sum(-1) > 1).sum() > 20


def logits(b: int = 50, v: int = 211, scale: float = 3.0, seed: int = 0) -> torch.Tensor:
    return scale * torch.randn(b, v, generator=torch.Generator().manual_seed(seed))


def cfg(**options: Any) -> SamplingConfig:
    return from_tree(SamplingConfig, options)


def rows(v: int = 211) -> list[History]:
    """50 rows of histories that repeat themselves, and have read 9 tokens and written up to 49."""
    drawn = torch.randint(0, v, (50, 58), generator=torch.Generator().manual_seed(1)).remainder(23).tolist()
    return [History(key, ids[:9], ids[9 : 9 + i]) for i, (key, ids) in enumerate(zip(row_keys(drawn, 0), drawn, strict=True))]


@pytest.mark.parametrize("k", [1, 2, 50, 211, 5000])
def test_top_k_equals_transformers(k: int) -> None:
    assert torch.equal(top_k(logits(), k), TopKLogitsWarper(k)(None, logits()))


@pytest.mark.parametrize("p", [1e-9, 0.1, 0.5, 0.9, 0.999])
def test_top_p_equals_transformers(p: float) -> None:
    assert torch.equal(top_p(logits(), p), TopPLogitsWarper(p)(None, logits()))


@pytest.mark.parametrize("p", [1e-9, 0.05, 0.5, 1.0])
def test_min_p_equals_transformers(p: float) -> None:
    assert torch.equal(min_p(logits(), p), MinPLogitsWarper(p)(None, logits()))


@pytest.mark.parametrize("penalty", [0.5, 1.3, 5.0])
def test_repetition_penalty_equals_transformers(penalty: float) -> None:
    ids = torch.randint(0, 211, (50, 30), generator=torch.Generator().manual_seed(1))
    seen = torch.zeros(50, 211, dtype=torch.bool).scatter(1, ids, True)
    expected = RepetitionPenaltyLogitsProcessor(penalty)(ids, logits())
    torch.testing.assert_close(penalise(logits(), seen, penalty), expected, rtol=0, atol=0)


@pytest.mark.parametrize("n", [1, 2, 3, 60])
def test_repeated_ngrams_are_hidden_as_in_transformers(n: int) -> None:
    ids, processor = [row.begin + row.new for row in rows()], NoRepeatNGramLogitsProcessor(n)
    expected = [processor(torch.tensor([text]), each.unsqueeze(0))[0] for text, each in zip(ids, logits(), strict=True)]
    assert torch.equal(no_repeat(logits(), ids, n), torch.stack(expected))
    assert torch.stack(expected).isinf().any() == (n < 60)


def test_a_text_that_could_only_repeat_itself_may() -> None:
    assert torch.equal(no_repeat(logits(1, 3), [[0, 1, 2, 1]], 1), logits(1, 3))


def test_bias_equals_transformers() -> None:
    bias = {3: -100.0, 7: 2.5, 210: 30.0}
    expected = SequenceBiasLogitsProcessor([[[token], each] for token, each in bias.items()])(
        torch.zeros(50, 1, dtype=torch.int64), logits()
    )
    assert torch.equal(biased(logits(), bias), expected)


def test_presence_and_frequency_count_what_was_generated_alone() -> None:
    found = adjusted(logits(), rows(), cfg(presence_penalty=0.7, frequency_penalty=0.3))
    expected = logits()
    for each, row in zip(expected, rows(), strict=True):
        for token in set(row.new):
            each[token] -= 0.7 + 0.3 * row.new.count(token)
    torch.testing.assert_close(found, expected)


def test_tokens_beyond_those_that_may_be_drawn_count_nothing() -> None:
    assert counts([[1, 1, 9], [], [0]], torch.zeros(3, 3)).tolist() == [[0, 2, 0], [0, 0, 0], [1, 0, 0]]


def test_all_adjustments_together_equal_transformers_in_its_order() -> None:
    options = {"repetition_penalty": 1.4, "no_repeat_ngram": 2, "logit_bias": {3: 1.5, 7: -4.0}}
    for row, each, ours in zip(rows(), logits(), adjusted(logits(), rows(), cfg(**options)), strict=True):
        ids, scores = torch.tensor([row.begin + row.new]), each.unsqueeze(0)
        for processor in (
            SequenceBiasLogitsProcessor([[[3], 1.5], [[7], -4.0]]),
            RepetitionPenaltyLogitsProcessor(1.4),
            NoRepeatNGramLogitsProcessor(2),
        ):
            scores = processor(ids, scores)
        assert torch.equal(ours, scores[0])


def test_logprobs_are_those_of_the_raw_logits() -> None:
    ids = logits(seed=2).argmax(-1)
    expected = logits().double().log_softmax(-1)
    for n, (found, p, token) in enumerate(zip(logprobs(logits(), ids, 3), expected, ids.tolist(), strict=True)):
        assert found.token == token and found.logprob == pytest.approx(float(p[token]), abs=1e-5)
        assert [token for token, _ in found.top] == p.topk(3).indices.tolist(), n
        assert [logprob for _, logprob in found.top] == pytest.approx(p.topk(3).values.tolist(), abs=1e-5)


def test_all_filters_together_equal_transformers_in_its_order() -> None:
    scores = logits()
    for warper in (TemperatureLogitsWarper(1.7), TopKLogitsWarper(40), TopPLogitsWarper(0.8), MinPLogitsWarper(0.1)):
        scores = warper(None, scores)
    ours = filtered(logits(), cfg(temperature=1.7, top_k=40, top_p=0.8, min_p=0.1))
    assert torch.equal(ours.isinf(), scores.isinf())
    torch.testing.assert_close(ours.softmax(-1), scores.softmax(-1))


def test_even_draws_give_each_token_its_share() -> None:
    n = 20_000
    row = logits(1, 17, scale=1.5)
    ids = drawn(filtered(row.expand(n, -1), cfg(temperature=1.3)), [(i + 0.5) / n for i in range(n)])
    shares = torch.bincount(ids, minlength=17) / n
    torch.testing.assert_close(shares, (row[0] / 1.3).softmax(-1), atol=1.01 / n, rtol=0)  # each share is off by less than a draw


@pytest.mark.parametrize("options", [{"top_k": 5}, {"top_p": 0.3}, {"min_p": 0.2}])
def test_hidden_tokens_are_never_drawn_even_at_the_ends(options: dict[str, Any]) -> None:
    shown = filtered(logits(), cfg(**options)).isfinite()
    for u in (0.0, 1e-12, 0.5, 1 - 2**-48):
        assert shown.gather(1, drawn(filtered(logits(), cfg(**options)), [u] * 50).unsqueeze(1)).all()


@pytest.mark.parametrize("temperature", [0.0, 1e-300, 1e-6])
def test_zero_temperature_and_almost_zero_take_the_likeliest(temperature: float) -> None:
    assert torch.equal(choose(logits(), rows(), cfg(temperature=temperature)), logits().argmax(-1))


def test_logits_of_any_size_and_dtype_are_drawn_from_safely() -> None:
    for scores in (logits(scale=1e30), logits(scale=1e-30), logits().bfloat16(), torch.zeros(50, 211)):
        ids = choose(scores, rows(), cfg(temperature=0.7, top_p=0.9))
        assert ((ids >= 0) & (ids < 211)).all()


def test_row_keys_depend_on_seed_prompt_and_its_occurrence_alone() -> None:
    keys = row_keys([[1, 2], [3], [1, 2], [1], [2, 3]], seed=0)
    assert len(set(keys)) == 5
    assert row_keys([[3], [1, 2], [1, 2]], seed=0) == [keys[1], keys[0], keys[2]]
    assert not set(row_keys([[1, 2], [3]], seed=1)) & set(keys)
    assert row_keys([[1, 23]], 0) != row_keys([[12, 3]], 0)


def test_draws_are_uniform_over_steps_and_rows() -> None:
    draws = torch.tensor([[uniform(key, step) for step in range(200)] for key in row_keys([[i] for i in range(100)], 0)])
    counts = torch.histc(draws, bins=20, min=0, max=1)
    chi2 = ((counts - 1000).square() / 1000).sum().item()
    assert chi2 < 50  # 19 degrees of freedom: 43.8 at p = 0.001
    assert abs(torch.corrcoef(draws).fill_diagonal_(0)).max() < 0.35  # 4,950 pairs of 200: 5 sigma


@pytest.mark.parametrize(
    "options, expected",
    [
        ({"top_p": 0.0}, ["top_p", "0.0", "greater than 0"]),
        ({"top_p": 1.5}, ["top_p", "1.5", "less than or equal to 1"]),
        ({"top_k": 0}, ["top_k", "greater than 0"]),
        ({"temperature": -1}, ["temperature", "-1", "greater than or equal to 0"]),
        ({"temperature": float("nan")}, ["temperature", "NaN", "finite"]),
        ({"min_p": "0.1"}, ["min_p", "'0.1'", "number"]),
        ({"repetition_penalty": 0}, ["repetition_penalty", "greater than or equal to"]),
        ({"no_repeat_ngram": 0}, ["no_repeat_ngram", "greater than 0"]),
        ({"presence_penalty": 1e9}, ["presence_penalty", "less than or equal to 100"]),
        ({"logit_bias": {"7": 1e9}}, ["logit_bias.7", "less than or equal to 10000"]),
        ({"logit_bias": {"the": 1.0}}, ["logit_bias.the", "'the'", "integer"]),
        ({"n": 0}, ["n", "greater than 0"]),
        ({"logprobs": -1}, ["logprobs", "greater than or equal to 0"]),
        ({"max_tokens": 0}, ["max_tokens", "greater than 0"]),
        ({"stop": ["a", ""]}, ["stop", "''"]),
        ({"stop": ""}, ["stop", "''"]),
        ({"temprature": 1.0}, ["temprature", "Did you mean 'temperature'?"]),
    ],
)
def test_bad_option_is_told_with_its_rule(options: dict[str, Any], expected: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        cfg(**options)
    assert all(part in str(raised.value) for part in expected)
