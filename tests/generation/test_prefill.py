"""A prompt read in pieces = read at once; no forward reads more than was asked for; a long prompt holds nobody up."""

from typing import Any

import pytest
import torch

from lm.generation.beams import search
from lm.generation.config import SamplingConfig
from lm.generation.decode import begin, rows_of
from lm.generation.engine import Engine, Request
from lm.generation.loop import Vocabulary
from lm.generation.prefill import chunks, prefill
from lm.generation.sampling import History
from lm.nn.batch import Batch
from lm.nn.transformer import LM
from lm.schema import from_tree
from lm.testing.models import Doubles, same, tokens
from tests.generation.drawing import generate
from tests.generation.test_answers import MODELS as ANSWERING
from tests.generation.test_answers import encoder_decoder
from tests.nn.models import ATTENTIONS, MIXING, POSITIONS, config, redrawn

PROMPTS = [tokens(1, n, seed=n)[0].tolist() for n in (23, 1, 9, 14)]
ALL = [*({"attention": each} for each in ATTENTIONS), *({"position": each} for each in POSITIONS), *MIXING]


def cfg(**options: Any) -> SamplingConfig:
    return from_tree(SamplingConfig, {"max_tokens": 12, "temperature": 0, **options})


def widths(model: LM) -> list[tuple[int, ...]]:
    """The shape of the tokens of each forward to come."""
    fed: list[tuple[int, ...]] = []
    model.register_forward_pre_hook(lambda _, args: fed.append(tuple(args[0].tokens.shape)))
    return fed


@pytest.mark.parametrize(
    ("chunk", "form"), [(5, None), *(pytest.param(n, form, marks=pytest.mark.slow) for n, form in ((1, None), (1, "int8"), (5, "int8")))]
)
@pytest.mark.parametrize("changes", ALL, ids=str)
def test_ragged_rows_read_in_pieces_are_what_they_are_read_at_once(changes: dict[str, Any], chunk: int, form: str | None) -> None:
    """What the head reads of every token, and the logits of further ones, which tell what is in the cache."""
    model = redrawn(config(**changes)).double()
    model.cache_form = form
    rows, more = [History(b"", prompt) for prompt in PROMPTS], tokens(4, 3)
    ends = torch.tensor([[len(prompt)] for prompt in PROMPTS])
    with Doubles(), torch.no_grad():
        found, expected = (prefill(model, rows, 0, 4, most) for most in (chunk, 99))
        assert torch.equal(found[1], expected[1])
        same(found[2][found[1] >= 0], expected[2][found[1] >= 0])
        same(found[3], expected[3])
        same(*(model(Batch(more, positions=ends + torch.arange(3)), cache=cache) for cache in (found[0], expected[0])))


@pytest.mark.parametrize("changes", ANSWERING[:2], ids=str)
def test_a_source_is_read_with_the_first_piece_alone(changes: dict[str, Any]) -> None:
    model = encoder_decoder(**changes).double()
    rows = [History(b"", [*begin(model, prompt), *prompt], source=prompt[::-1]) for prompt in PROMPTS]
    with Doubles(), torch.no_grad():
        found, expected = (prefill(model, rows, 0, 4, most) for most in (5, 99))
        same(found[3], expected[3])
    batch = Batch(tokens(2, 200), positions=torch.arange(200).expand(2, 200), source_tokens=tokens(2, 30), source_positions=None)
    assert [piece.source_tokens is None for piece in chunks(batch, 128)] == [False, True, True, True]


@pytest.mark.parametrize("rows, chunk, width", [(1, 512, 512), (1, 7, 7), (4, 512, 128), (32, 512, 64), (32, 48, 48), (3, 1000, 333)])
def test_pieces_have_about_as_many_tokens_whatever_the_rows(rows: int, chunk: int, width: int) -> None:
    batch = Batch(tokens(rows, 700), positions=torch.arange(700).expand(rows, 700))
    read = [piece.tokens for piece in chunks(batch, chunk)]
    assert torch.equal(torch.cat(read, 1), batch.tokens) and {piece.shape[1] for piece in read[:-1]} == {width}


def test_samples_and_beams_are_the_same_whatever_is_read_at_a_time() -> None:
    model = redrawn(config(attention=ATTENTIONS[4]))
    sampled, beams = generate(model, PROMPTS, cfg(temperature=0.9)), [*search(model, PROMPTS, cfg(beams=3))]
    fed = widths(model)
    assert generate(model, PROMPTS, cfg(temperature=0.9, prefill_chunk=3)) == sampled
    assert [[beam.tokens for beam in each] for each in search(model, PROMPTS, cfg(beams=3, prefill_chunk=3))] == [
        [beam.tokens for beam in each] for each in beams
    ]
    assert max(width for _, width in fed) == 3


def request(model: LM, prompt: list[int], scores: int | None = None, **options: Any) -> Request:
    return Request(rows_of(model, [prompt], cfg(**options), Vocabulary(model.vocab_size)), cfg(**options), scores=scores)


def test_a_long_prompt_does_not_hold_up_those_who_are_answered() -> None:
    model, engine = (made := redrawn(config())), Engine(made, Vocabulary(made.vocab_size), 4, chunk=5)
    first, long, last = request(model, PROMPTS[1]), request(model, PROMPTS[0]), request(model, PROMPTS[2])
    engine.add(first)
    engine.step()
    engine.add(long)
    engine.add(last)
    fed = widths(model)
    told = [[event.sample.request for event in engine.step()] for _ in range(7)]
    assert fed == [(1, 5), (1, 1)] * 4 + [(1, 3), (2, 1)] + [(1, 5), (2, 1)] + [(1, 4), (3, 1)]
    assert all(first in each for each in told) and [long in each for each in told] == [False] * 4 + [True] * 3
    while engine.running or engine.waiting:
        engine.step()
    expected = [generate(model, [prompt], cfg())[0] for prompt in (PROMPTS[1], PROMPTS[0], PROMPTS[2])]
    assert [one.rows[0].new for one in (first, long, last)] == expected


def test_a_prompt_that_is_being_read_waits_and_can_be_forgotten() -> None:
    model, engine = (made := redrawn(config())), Engine(made, Vocabulary(made.vocab_size), 4, chunk=5)
    left, kept = request(model, PROMPTS[0]), request(model, PROMPTS[3])
    engine.add(left)
    engine.add(kept)
    assert engine.step() == [] and (engine.running, engine.waiting) == (0, 2)
    engine.cancel([left])
    while engine.running or engine.waiting:
        engine.step()
    assert kept.rows[0].new == generate(model, [PROMPTS[3]], cfg())[0] and not left.rows[0].new
    engine.add(request(model, PROMPTS[0]))
    engine.step()
    assert engine.waiting == 1
    engine.clear()
    assert engine.waiting == 0 and engine.step() == []
    engine.add(kept := request(model, PROMPTS[3]))
    while engine.running or engine.waiting:
        engine.step()
    assert kept.rows[0].new == generate(model, [PROMPTS[3]], cfg())[0]


@pytest.mark.parametrize("chunk", [1, 4, 23])
def test_scores_of_a_prompt_are_those_of_a_full_forward(chunk: int) -> None:
    model = redrawn(config())
    asked = request(model, PROMPTS[0], scores=2)
    engine = Engine(model, Vocabulary(model.vocab_size), 4, chunk=chunk)
    engine.add(asked)
    while engine.running or engine.waiting:
        engine.step()
    expected = model(Batch(torch.tensor([PROMPTS[0]])))[0].log_softmax(-1)
    assert [told.token for told in asked.scored] == PROMPTS[0][1:]
    assert [[token for token, _ in told.top] for told in asked.scored] == expected[:-1].topk(2).indices.tolist()
    found = torch.tensor([told.logprob for told in asked.scored])
    torch.testing.assert_close(found, expected[torch.arange(22), PROMPTS[0][1:]], rtol=0, atol=1e-4)


@pytest.mark.parametrize("changes", [{}, {"attention": ATTENTIONS[4]}, MIXING[3]], ids=str)
def test_requests_whose_prompts_are_read_in_pieces_are_answered_as_alone(changes: dict[str, Any]) -> None:
    model = redrawn(config(**changes))
    asked = [request(model, prompt, temperature=0.9, n=n) for n, prompt in enumerate(PROMPTS, 1)]
    engine = Engine(model, Vocabulary(model.vocab_size), 7, chunk=6)
    for one in asked:
        engine.add(one)
        engine.step()
    while engine.running or engine.waiting:
        engine.step()
    assert [[row.new for row in one.rows] for one in asked] == [
        generate(model, [prompt], cfg(temperature=0.9, n=n)) for n, prompt in enumerate(PROMPTS, 1)
    ]
