"""Text with drafts = text without, token for token, whatever drafts, samples and mixes; what was accepted is told."""

import itertools
from typing import Any

import pytest
import torch

from lm.errors import ConfigError
from lm.generation.config import SamplingConfig
from lm.generation.decode import decode
from lm.generation.drafting.base import Drafter, Lookup, Tally
from lm.generation.drafting.model import DraftModel
from lm.generation.drafting.mtp import MTP
from lm.generation.loop import Vocabulary
from lm.generation.sampling import History, choose
from lm.nn.batch import Batch
from lm.nn.transformer import LM, DecoderLM, EncoderDecoderConfig
from lm.schema import from_tree
from lm.testing.models import BASE, Doubles, random_model
from tests.nn.models import CONV, MIXTURES, MLA, config, redrawn, with_kinds

PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13], [3], [40, 41], [3], [60, 2, 5, 5, 1]]
SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.7},
    {"temperature": 1.0, "top_k": 9, "seed": 4},
    {"temperature": 1.2, "top_p": 0.8},
    {"temperature": 0.9, "min_p": 0.05},
    {"temperature": 0.8, "repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2, "no_repeat_ngram": 3},
]
MODELS: list[dict[str, Any]] = [
    {},
    {"attention": {"n_heads": 4, "window": 5, "global_every": 2}},
    {"recurrent": CONV, "pattern": ["recurrent", "attention"]},
    {"attention": MLA},
    {"position": {"kind": "learned"}},
    {"ffn": MIXTURES[0]},
    {"kind": "encoder_decoder", "position": {"kind": "t5_relative", "n_buckets": 8, "max_distance": 12}, "start_token": 0},
]
DRAFTERS = ("lookup", "model", "mtp")
EACH = list(itertools.product(range(len(MODELS)), DRAFTERS, range(len(SAMPLINGS))))
QUICK = {(0, "lookup", 0), (1, "model", 1), (2, "mtp", 5), (3, "lookup", 3), (6, "model", 2)}


def made(changes: dict[str, Any], noise: float = 0.0) -> LM:
    """A random model in float64, with noise on its weights."""
    if changes.get("kind") == "encoder_decoder":
        model = random_model(from_tree(EncoderDecoderConfig, with_kinds(BASE | changes)))
    else:
        model = redrawn(config(mtp={"depth": 3, "weight": 0.3}, **changes))
    with torch.no_grad():
        for n, p in enumerate(model.parameters()):
            p += noise * torch.randn(p.shape, generator=torch.Generator().manual_seed(n))
    return model.double()


def drafter_of(kind: str, model: LM, changes: dict[str, Any]) -> Drafter:
    if kind == "lookup":
        return Lookup(4, ngram=2)
    return DraftModel(3, made(changes, 0.02), model) if kind == "model" else MTP(3, model)


@pytest.mark.parametrize(
    ("n", "kind", "sampling"),
    [pytest.param(*each, marks=[] if each in QUICK else [pytest.mark.slow]) for each in EACH if each[:2] != (6, "mtp")],
)
def test_text_with_drafts_is_the_text_without(n: int, kind: str, sampling: int) -> None:
    model, likely = made(MODELS[n]), {} if kind == "model" else {"logit_bias": {7: 6.0, 9: 6.0}}  # so that some drafts are right
    cfg = from_tree(SamplingConfig, {"max_tokens": 20, "logprobs": 1, **SAMPLINGS[sampling], **likely})
    with Doubles():
        free = decode(model, PROMPTS, cfg)
        late = [token for row in free for token in row.new[12:] if all(token not in other.new[:9] for other in free)]
        vocabulary = Vocabulary(model.vocab_size, {[*late, free[2].new[9]][0]})
        plain = decode(model, PROMPTS, cfg, vocabulary)
        drafter = drafter_of(kind, model, MODELS[n])
        found = decode(model, PROMPTS, cfg, vocabulary, drafter=drafter)
        alone = decode(model, PROMPTS[:1], cfg, vocabulary, drafter=drafter)
    assert [row.new for row in found] == [row.new for row in plain]
    assert alone[0].new == plain[0].new
    assert [told.token for row in found for told in row.logprobs] == [token for row in plain for token in row.new]
    assert len({len(row.new) for row in plain}) > 1
    assert drafter.tally.drafted > drafter.tally.accepted > 0 or kind != "model"


@pytest.mark.slow
def test_drafts_go_on_beyond_the_context() -> None:
    model = made({"attention": {"n_heads": 4, "window": 5, "global_every": 3}})
    cfg = SamplingConfig(max_tokens=80, temperature=0.8, logit_bias={7: 6.0})
    for kind in DRAFTERS:
        with Doubles():
            plain, found = (decode(model, PROMPTS[:2], cfg, drafter=drafter) for drafter in (None, drafter_of(kind, model, {})))
        assert [row.new for row in plain] == [row.new for row in found], kind


def test_a_model_that_drafts_for_itself_is_always_right_and_saves_forwards() -> None:
    model, fed = made({}), []
    drafter = DraftModel(4, made({}), model)
    model.register_forward_pre_hook(lambda _, args: fed.append(args[0].tokens.shape[1]))
    with Doubles():
        decode(model, [[1, 2]], SamplingConfig(max_tokens=24, temperature=1.3, top_p=0.9), drafter=drafter)
    assert fed == [2, 1, 1, 1, 5, 5, 5, 5]  # 1 and three tokens, then five a step
    assert (drafter.tally.drafted, drafter.tally.accepted, drafter.tally.steps, drafter.tally.tokens) == (16, 16, 7, 23)


class Compared(MTP):
    """Compares each draft with whole rows through the blocks, without a cache."""

    def propose(self, rows: list[History]) -> list[list[int]]:  # type: ignore[override]
        found = super().propose(rows)
        model = self.model
        for row, draft in zip(rows, found, strict=True):
            text, hidden = torch.tensor([row.begin + row.new]), None
            for k, token in enumerate(draft, 1):
                places = text.shape[1] - k
                ctx = model.context(Batch(text[:, :places]), None)
                if hidden is None:
                    hidden = model.norm(model.through_blocks(model.embedded(model.embed(text[:, :places]), ctx, None), ctx))
                hidden = model.mtp[k - 1](hidden, model.embed(text[:, k:]), ctx)
                expected = choose(model.head(hidden[:, -1]), [row.extended(draft[: k - 1])], self.cfg)
                assert int(expected) == token
                text = torch.cat([text, torch.tensor([[token]])], 1)
        return found


@pytest.mark.parametrize("changes", [MODELS[1], *(pytest.param(MODELS[n], marks=pytest.mark.slow) for n in (0, 2))], ids=str)
def test_the_models_own_blocks_draft_what_whole_rows_give(changes: dict[str, Any]) -> None:
    model = made(changes)
    assert isinstance(model, DecoderLM)
    drafter = Compared(3, model)
    with Doubles():
        decode(model, PROMPTS, SamplingConfig(max_tokens=20, temperature=0.8, logit_bias={7: 8.0}), drafter=drafter)
    assert drafter.tally.accepted > 5


def test_lookup_goes_on_as_the_last_tokens_went_on_before() -> None:
    def draft(text: list[int], ngram: int = 3, source: tuple[int, ...] = ()) -> list[int]:
        return Lookup(4, ngram).propose([History(b"", text[:2], text[2:], [*source])])[0]

    assert draft([1, 2, 3, 4, 5, 6, 7, 1, 2, 3]) == [4, 5, 6, 7]
    assert draft([1, 2, 3, 9, 8, 2, 3]) == [9, 8, 2, 3]  # two tokens stood there before, three did not
    assert draft([5, 1, 6, 1, 7, 1]) == [7, 1, 7, 1]  # the last time counts, and what is periodic stays so
    assert draft([4, 4, 4]) == [4, 4, 4, 4]
    assert draft([1, 2, 3]) == draft([1]) == []
    assert draft([1, 2, 3, 4, 9, 2, 3], ngram=1) == [4, 9, 2, 3]
    assert draft([0, 8], source=(7, 8, 9, 6, 5, 4)) == [9, 6, 5, 4]


def test_what_was_gained_is_told() -> None:
    assert Tally().sentence() == "0 of 0 drafted tokens accepted."
    told = Tally(drafted=10, accepted=6, tokens=30, steps=12, seconds=2.0, one_by_one=[0.5, 0.1, 0.2]).sentence()
    assert told == "6 of 10 drafted tokens accepted (60 %); 2.50 tokens a step, 3.00 times as fast as one by one."


@pytest.mark.parametrize(
    ("draft", "model", "said"),
    [
        ({"position": {"kind": "learned"}}, {}, "ends after 48 tokens, and the model goes further"),
        (MODELS[6], {}, "of kind encoder_decoder, and the model of kind decoder"),
    ],
)
def test_a_model_that_cannot_draft_for_another_is_refused(draft: dict[str, Any], model: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        DraftModel(4, made(draft), made(model))
    with pytest.raises(ConfigError, match="no blocks that predict further tokens"):
        MTP(2, redrawn(config()))


@pytest.mark.parametrize("kind", DRAFTERS)
def test_a_drafter_takes_no_memory_for_tokens_that_do_not_come(kind: str) -> None:
    """The model's own blocks kept a place for each of max_tokens, and more than the memory holds were an internal error."""
    model = made({})
    cfg, new = SamplingConfig(max_tokens=10**12), [[], []]  # type: SamplingConfig, list[list[int]]

    def enough(row: int, token: int) -> bool:
        new[row].append(token)
        return len(new[row]) >= 40

    rows = decode(model, PROMPTS[:2], cfg, on_token=enough, drafter=drafter_of(kind, model, {}))
    assert [row.new for row in rows] == new == [row.new[:40] for row in decode(model, PROMPTS[:2], cfg.replace(max_tokens=40))]
