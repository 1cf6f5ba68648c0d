"""Beam search against transformers on random models in float64; prompts together and alone."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from lm.generation.beams import Beam, search
from lm.generation.config import SamplingConfig
from lm.generation.loop import Vocabulary
from lm.hf.io.reading import read_hf
from lm.nn.transformer import LM
from lm.schema import from_tree
from lm.testing.models import Doubles
from tests.hf.harness import VOCAB, in_doubles, ours_of, redraw

ENDS = set(range(2, 60, 4))  # so many that most of the best candidates end
SIZES: dict[str, dict[str, Any]] = {
    "decoder": {
        "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "vocab_size": VOCAB, "max_position_embeddings": 64,
    },
    "encoder_decoder": {
        "d_model": 32, "d_ff": 40, "d_kv": 8, "num_layers": 2, "num_heads": 4, "vocab_size": VOCAB, "decoder_start_token_id": 0,
    },
}  # fmt: skip
PROMPTS = [[9, 8, 7, 6, 50, 41, 42, 43], [3], [60, 2, 51, 4, 1], [11, 12], [2, 2, 2], [33]]
OPTIONS: list[dict[str, Any]] = [
    {"beams": 3, "n": 2},
    {"beams": 4, "n": 4, "length_penalty": 2.0, "early_stopping": True},
    {"beams": 2, "n": 2, "length_penalty": 1.5, "early_stopping": "never"},
]
MORE: list[dict[str, Any]] = [
    {"beams": 4, "n": 3, "length_penalty": 0.0, "early_stopping": "never"},
    {"beams": 5, "n": 2, "length_penalty": -1.5},
    {"beams": 8, "n": 8, "length_penalty": -0.5, "early_stopping": "never", "repetition_penalty": 1.6},
    {"beams": 3, "n": 3, "no_repeat_ngram": 2},
]


def cfg(**options: Any) -> SamplingConfig:
    return from_tree(SamplingConfig, {"max_tokens": 14, **options})


@pytest.fixture(scope="module", params=["decoder", "encoder_decoder"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, LM]:
    """A random model as transformers and as we build it, in float64."""
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "decoder":
        theirs: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES["decoder"]))
    else:
        theirs = transformers.T5ForConditionalGeneration(transformers.T5Config(**SIZES["encoder_decoder"]))
    redraw(theirs, 0.6 if request.param == "decoder" else 3.6)
    theirs.save_pretrained(folder)
    return in_doubles(theirs.eval()), ours_of(read_hf(folder))


def padded(prompts: list[list[int]], left: bool) -> tuple[Tensor, Tensor]:
    longest = max(map(len, prompts))
    rows = [[0] * (longest - len(row)) + row if left else row + [0] * (longest - len(row)) for row in prompts]
    marks = [[0] * (longest - len(row)) + [1] * len(row) if left else [1] * len(row) + [0] * (longest - len(row)) for row in prompts]
    return torch.tensor(rows), torch.tensor(marks)


def expected(theirs: Any, prompts: list[list[int]], given: SamplingConfig) -> list[tuple[list[int], float]]:
    """The tokens that transformers returns for each prompt, without their end, and their scores."""
    decoder = not theirs.config.is_encoder_decoder
    ids, marks = padded(prompts, left=decoder)
    names = {"num_beams": given.beams, "num_return_sequences": given.n, "max_new_tokens": given.max_tokens}
    names["no_repeat_ngram_size"] = given.no_repeat_ngram or 0
    same = {name: getattr(given, name) for name in ("length_penalty", "early_stopping", "repetition_penalty")}
    with Doubles():
        out = theirs.generate(
            ids, attention_mask=marks, do_sample=False, eos_token_id=sorted(ENDS), pad_token_id=0, return_dict_in_generate=True,
            output_scores=True, **names, **same,
        )  # fmt: skip
    found = []
    for row, score in zip(out.sequences[:, ids.shape[1] if decoder else 1 :].tolist(), out.sequences_scores.tolist(), strict=True):
        end = next((at for at, token in enumerate(row) if token in ENDS), given.max_tokens)
        found.append((row[:end], score))
    return found


def flat(found: list[list[Beam]]) -> list[tuple[list[int], float]]:
    return [(beam.tokens, beam.score) for best in found for beam in best]


@pytest.mark.parametrize("options", [*OPTIONS, *(pytest.param(more, marks=pytest.mark.slow) for more in MORE)], ids=str)
def test_beams_are_those_of_transformers(pair: tuple[Any, LM], options: dict[str, Any]) -> None:
    theirs, ours = pair
    given = cfg(**options)
    wanted = expected(theirs, PROMPTS, given)
    with Doubles():
        found = flat(search(ours, PROMPTS, given, Vocabulary(ours.vocab_size, ENDS)))
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in wanted]
    torch.testing.assert_close(torch.tensor([s for _, s in found]), torch.tensor([s for _, s in wanted]), rtol=1e-5, atol=1e-5)
    lengths = {len(tokens) for tokens, _ in found}
    assert len(lengths) > 1  # some ended before the limit


def test_prompts_together_give_what_each_gives_alone(pair: tuple[Any, LM]) -> None:
    _, ours = pair
    given = cfg(beams=8, n=2, repetition_penalty=1.3)  # so that four prompts are searched at once
    found = [*search(ours, PROMPTS, given, Vocabulary(ours.vocab_size, ENDS))]
    alone = [beams for prompt in PROMPTS for beams in search(ours, [prompt], given, Vocabulary(ours.vocab_size, ENDS))]
    assert [[beam.tokens for beam in best] for best in found] == [[beam.tokens for beam in best] for best in alone]
