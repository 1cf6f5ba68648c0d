"""Cached decoding = full forwards; together = one by one; where a row ends."""

from typing import Any

import pytest
import torch

from lm.errors import ConfigError, NumericsError
from lm.generation.config import SamplingConfig
from lm.generation.decode import decode
from lm.nn.batch import Batch
from lm.nn.transformer import DecoderLM
from lm.schema import from_tree
from lm.testing.models import VOCAB
from tests.generation.drawing import generate
from tests.nn.models import ATTENTIONS, MIXING, POSITIONS, config, redrawn

PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13], [3], [40, 41], [3], [60, 2, 5, 5, 1], [3]]
MODELS: list[dict[str, Any]] = [
    *({"position": position} for position in POSITIONS),
    *({"attention": attention} for attention in ATTENTIONS[1:]),
    {"norm": {"kind": "layer", "place": "post"}, "block": {"kind": "sequential"}, "dropout": 0.5},
]


def cfg(**options: Any) -> SamplingConfig:
    return from_tree(SamplingConfig, {"max_tokens": 20, **options})


def by_full_forwards(model: DecoderLM, prompt: list[int], n: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(n):
        logits = model.eval()(Batch(torch.tensor([tokens])))
        tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.slow  # what is read in pieces is what is read at once: test_prefill.py
@pytest.mark.parametrize("changes", [*MODELS, *MIXING], ids=str)
def test_greedy_decode_of_a_batch_read_in_chunks_equals_full_forwards_of_each_prompt(changes: dict[str, Any]) -> None:
    model = redrawn(config(**changes))
    together = generate(model, PROMPTS, cfg(temperature=0, prefill_chunk=4))
    assert together == [by_full_forwards(model, prompt, 20) for prompt in PROMPTS]


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0},
        {"temperature": 0.9, "top_k": 9, "repetition_penalty": 1.4},
        {"temperature": 1.2, "top_p": 0.9, "min_p": 0.01, "seed": 7},
        {"temperature": 0, "repetition_penalty": 1.5},
        {"temperature": 1.0, "presence_penalty": 0.5, "frequency_penalty": 0.8, "no_repeat_ngram": 2, "logit_bias": {4: 2.0}},
    ],
)
def test_prompts_together_give_what_each_gives_alone(options: dict[str, Any]) -> None:
    model = redrawn(config(attention=ATTENTIONS[4]))
    unlike = [PROMPTS[i] for i in (0, 1, 2, 4)]
    eos = generate(model, [unlike[1]], cfg(**options))[0][5]
    alone = [generate(model, [prompt], cfg(**options), ends={eos})[0] for prompt in unlike]
    assert generate(model, unlike, cfg(**options), ends={eos}) == alone
    assert generate(model, unlike[::-1], cfg(**options), ends={eos}) == alone[::-1]
    assert len(set(map(len, alone))) > 1  # rows ended at different steps


def test_a_prompt_given_again_gives_another_sample_and_the_same_ones_with_any_company() -> None:
    model = redrawn(config())
    thrice = generate(model, [[3]] * 3, cfg())
    assert len({tuple(new) for new in thrice}) == 3
    found = generate(model, PROMPTS, cfg())
    assert [found[1], found[3], found[5]] == thrice


@pytest.mark.parametrize("mixing", MIXING[:2])
def test_samples_of_a_prompt_are_what_it_gives_so_often_and_read_it_once(mixing: dict[str, Any]) -> None:
    model, fed = redrawn(config(**mixing)), []
    alone = [generate(model, [prompt] * 3, cfg()) for prompt in PROMPTS[:3]]
    model.register_forward_pre_hook(lambda _, args: fed.append(len(args[0].tokens)))
    assert generate(model, PROMPTS[:3], cfg(n=3)) == [new for three in alone for new in three]
    assert generate(model, PROMPTS[:3], cfg(n=1)) == [three[0] for three in alone]
    assert fed[:2] == [3, 9]


def test_logprobs_of_a_decoded_row_are_those_of_a_full_forward() -> None:
    model = redrawn(config())
    for row in decode(model, PROMPTS[:3], cfg(logprobs=2, temperature=1.5, presence_penalty=1.0)):
        p = model(Batch(torch.tensor([row.begin + row.new]))).log_softmax(-1)[0, len(row.begin) - 1 : -1]
        assert [told.token for told in row.logprobs] == row.new
        found = torch.tensor([told.logprob for told in row.logprobs])
        torch.testing.assert_close(found, p.gather(1, torch.tensor(row.new).unsqueeze(1)).squeeze(1), rtol=0, atol=1e-4)
        assert [[token for token, _ in told.top] for told in row.logprobs] == p.topk(2).indices.tolist()


def test_a_bias_forces_and_forbids_tokens_and_one_beyond_the_vocabulary_is_refused() -> None:
    model = redrawn(config())
    assert generate(model, [[1]], cfg(logit_bias={7: 1e4}, max_tokens=4)) == [[7] * 4]
    with pytest.raises(ConfigError, match=r"logit_bias: 61 is not one of the 61 tokens"):
        generate(model, [[1]], cfg(logit_bias={61: 1.0}))


def test_more_prompts_than_are_decoded_at_once_keep_their_order() -> None:
    model = redrawn(config())
    prompts = [[i % 50, i % 7] for i in range(75)]
    found = generate(model, prompts, cfg(max_tokens=3, temperature=0))
    assert found == [generate(model, [prompt], cfg(max_tokens=3, temperature=0))[0] for prompt in prompts]


def test_another_seed_gives_other_samples_and_the_same_seed_the_same() -> None:
    model = redrawn(config())
    first, again, other = (generate(model, [[1, 2]], cfg(seed=seed)) for seed in (0, 0, 1))
    assert first == again != other


def test_each_token_is_computed_once() -> None:
    model, fed = redrawn(config()), []
    model.register_forward_pre_hook(lambda _, args: fed.append(args[0].tokens.shape))
    generate(model, [list(range(10))], cfg(max_tokens=30))
    assert fed == [(1, 10)] + [(1, 1)] * 29


def test_rows_that_ended_are_not_computed_any_more() -> None:
    model, fed = redrawn(config()), []
    lengths = [len(new) for new in generate(model, PROMPTS, cfg(), ends={17})]
    model.register_forward_pre_hook(lambda _, args: fed.append(len(args[0].tokens)))
    generate(model, PROMPTS, cfg(), ends={17})
    assert fed[1:] == [sum(n >= step for n in lengths) for step in range(1, max(lengths) + 1) if step < 20]
    assert len(set(fed)) > 1


def test_eos_ends_a_row_and_is_not_part_of_it() -> None:
    model = redrawn(config())
    free = generate(model, [[3]], cfg(temperature=0))[0]
    eos = free[6]
    assert generate(model, [[3]], cfg(temperature=0), ends={eos})[0] == free[: free.index(eos)]


def test_listener_hears_every_token_in_order_and_can_end_its_row() -> None:
    model = redrawn(config())
    heard: dict[int, list[int]] = {row: [] for row in range(len(PROMPTS))}

    def listen(row: int, token: int) -> bool:
        heard[row].append(token)
        return row == 2 and len(heard[row]) == 4

    found = generate(model, PROMPTS, cfg(), on_token=listen)
    assert found == list(heard.values())
    free = generate(model, PROMPTS, cfg())
    assert found[2] == free[2][:4]
    assert [found[i] for i in (0, 1, 3, 4, 5)] == [free[i] for i in (0, 1, 3, 4, 5)]


def test_rows_stop_where_the_context_is_full_each_by_its_own_length() -> None:
    model = redrawn(config(position={"kind": "learned"}))
    found = generate(model, [[1] * 48, [1] * 40, [1]], cfg(max_tokens=100))
    assert [len(new) for new in found] == [1, 9, 48]


def test_prompt_longer_than_the_context_is_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"49 tokens .* model\.max_seq_len=48"):
        generate(redrawn(config(position={"kind": "learned"})), [[1], [1] * 49], cfg())


def test_prompt_without_tokens_is_refused() -> None:
    with pytest.raises(ConfigError, match="no tokens"):
        generate(redrawn(config()), [[1], []], cfg())


def test_ids_outside_the_vocabulary_are_never_drawn() -> None:
    found = generate(redrawn(config()), PROMPTS, cfg(temperature=5.0, repetition_penalty=1.1), n_tokens=61)
    assert max(max(new) for new in found) > 45
    few = generate(redrawn(config()), [[1], [2, 3]], cfg(temperature=5.0, repetition_penalty=1.1), n_tokens=5)
    assert {token for new in few for token in new} == set(range(5))


def test_a_huge_repetition_penalty_repeats_nothing() -> None:
    new = generate(redrawn(config()), [[1, 2, 3]], cfg(repetition_penalty=1e9, temperature=0, max_tokens=20))[0]
    assert len({1, 2, 3, *new}) == 23 <= VOCAB


@pytest.mark.parametrize("training", [True, False])
def test_mode_of_the_model_is_as_before_and_gradients_still_work(training: bool) -> None:
    model = redrawn(config(dropout=0.3)).train(training)
    assert generate(model, [[1]], cfg()) == generate(redrawn(config()), [[1]], cfg())
    assert model.training is training
    with pytest.raises(KeyboardInterrupt):
        generate(model, [[1]], cfg(), on_token=_interrupt)
    assert model.training is training
    model(Batch(torch.tensor([[1, 2]]))).sum().backward()


def _interrupt(row: int, token: int) -> bool:
    raise KeyboardInterrupt


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_precision_contexts_of_a_trainer_change_nothing(dtype: torch.dtype) -> None:
    model = redrawn(config()).to(dtype)
    expected = generate(model, PROMPTS, cfg())
    default = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.bfloat16)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert generate(model, PROMPTS, cfg()) == expected
    finally:
        torch.set_default_dtype(default)


def test_weights_that_give_nan_are_told() -> None:
    model = redrawn(config())
    with torch.no_grad():
        model.blocks[1].ffn.down.weight[0, 0] = float("nan")
    with pytest.raises(NumericsError, match="NaN"):
        generate(model, [[1]], cfg())
