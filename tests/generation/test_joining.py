"""More prompts than are decoded together: rows join those that are left, and their tokens are those that they get alone."""

from typing import Any

import pytest

from lm.generation.config import SamplingConfig
from lm.generation.decode import decode
from lm.generation.drafting.base import Lookup
from lm.nn.transformer import LM
from lm.schema import from_tree
from tests.generation.drawing import generate
from tests.generation.test_answers import encoder_decoder
from tests.nn.models import ATTENTIONS, MIXING, POSITIONS, SMEARED, config, redrawn

PROMPTS = [
    [5, 6, 7, 8, 9, 10, 11, 12, 13],
    [3],
    [40, 41],
    [3],
    [60, 2, 5, 5, 1],
    [9, 9],
    [7],
    [11, 12, 13],
    [30, 31, 32, 33],
    [17],
    [18, 2],
]
MODELS: list[dict[str, Any]] = [{}, {"position": POSITIONS[1]}, *({"attention": ATTENTIONS[n]} for n in (4, 15)), *MIXING[:4], SMEARED]


@pytest.fixture(autouse=True)
def _four_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lm.generation.loop.ROWS", 4)
    monkeypatch.setattr("lm.generation.loop.TOKENS", 0)


def alone(model: LM, cfg: SamplingConfig, ends: set[int]) -> list[list[int]]:
    """Each prompt in a call of its own; the second of two equal ones is the second that a call of both has."""
    found = [generate(model, [prompt], cfg, ends=ends)[0] for prompt in PROMPTS]
    found[3] = generate(model, [[3], [3]], cfg, ends=ends)[1]
    return found


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("changes", [*MODELS, None], ids=str)
def test_tokens_are_those_of_each_prompt_alone(changes: dict[str, Any] | None, ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows end at tokens and at their limit; the context ends within some of them."""
    model = encoder_decoder() if changes is None else redrawn(config(**changes, max_seq_len=20))
    cfg = from_tree(SamplingConfig, {"max_tokens": 16, "temperature": 0.9, "top_k": 40})
    free = generate(model, PROMPTS, cfg)
    ends = {free[0][9], free[2][4], free[4][1], free[7][6]}
    expected = alone(model, cfg, ends)
    monkeypatch.setattr("lm.generation.decode.goes_ahead", lambda *given: ahead)
    assert generate(model, PROMPTS, cfg, ends=ends) == expected
    assert len({*map(len, expected)}) > 3


@pytest.mark.parametrize(("position", "n"), [(POSITIONS[2], 21), (POSITIONS[1], 18)], ids=str)
def test_a_prompt_as_long_as_the_context_joins(position: dict[str, Any], n: int) -> None:
    """It slides from its first new token on; or it gets three tokens, where the rows that it joins get more."""
    model, prompts = redrawn(config(position=position, max_seq_len=20)), [[5], [6], [7], [8], *([*range(i, n + i)] for i in range(7))]
    cfg = from_tree(SamplingConfig, {"max_tokens": 12, "temperature": 0, "logprobs": 0})
    alone = [decode(model, [prompt], cfg)[0].logprobs for prompt in prompts]
    found = [row.logprobs for row in decode(model, prompts, cfg, on_token=lambda row, token: row < 3)]
    assert [*map(len, found)] == [1, 1, 1, 12, *[12 if n > 20 else 21 - n] * 7]
    for told, expected in zip(found, alone, strict=True):
        assert [each.logprob for each in told] == pytest.approx([each.logprob for each in expected[: len(told)]], abs=1e-5)


@pytest.mark.parametrize("drafts", [False, True])
def test_of_short_rows_more_are_decoded_together(drafts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest of ten has 3 + 20 tokens, and so nine fit into 210. Beside a longer one they would take the time of that."""
    monkeypatch.setattr("lm.generation.loop.TOKENS", 210)
    model, cfg, seen = redrawn(config()), SamplingConfig(max_tokens=20), list[int]()
    drafter = Lookup(2, 2) if drafts else None
    prompts = [[n, *range(n % 3)] for n in range(10, 20)] + [PROMPTS[0]]
    alone = [decode(model, [prompt], cfg, drafter=drafter)[0].new for prompt in prompts]
    model.blocks[0].register_forward_hook(lambda module, given, out: seen.append(len(out)))
    assert [row.new for row in decode(model, prompts[:-1], cfg, drafter=drafter)] == alone[:-1] and max(seen) == 9
    seen.clear()
    assert [row.new for row in decode(model, prompts, cfg, drafter=drafter)] == alone and max(seen) == 4


@pytest.mark.parametrize(("ahead", "rows"), [(False, [4, 3, 2, 2, 4, 4, 2, 2]), (True, [4, 4, 4, 2, 4, 4, 4, 2])])
def test_rows_join_once_half_of_the_places_are_free(ahead: bool, rows: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The first row ends at once, the second soon, and a recorded step keeps its number of rows until then."""
    monkeypatch.setattr("lm.generation.decode.goes_ahead", lambda *given: ahead)
    model, seen, said = redrawn(config()), list[list[int]](), list[tuple[int, int]]()
    model.blocks[0].register_forward_hook(lambda module, given, out: seen.append([*out.shape[:2]]))

    def ended(row: int, token: int) -> bool:
        said.append((row, token))
        return [at for at, _ in said].count(row) == {0: 1, 1: 2}.get(row, 5)

    found = generate(model, [[5], [6], [7], [8], [9], [10]], from_tree(SamplingConfig, {"max_tokens": 5}), on_token=ended)
    assert [len(row) for row in found] == [1, 2, 5, 5, 5, 5]
    assert [n for n, s in seen] == rows
