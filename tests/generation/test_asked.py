"""A prompt is put to a model as its objective has had it: seen from all sides (prefix), as a source, behind the token of a mode."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import lm as library
from lm.data.kinds import BytesConfig, UL2Config
from lm.data.tokenizer.gap import Gap
from lm.data.tokenizer.tokenizer import Tokenizer
from lm.generation.config import GenerateConfig
from lm.generation.decode import decode, rows_of
from lm.generation.drafting.base import Lookup
from lm.generation.engine import Engine, Request
from lm.generation.harness import Harness
from lm.generation.loop import Vocabulary
from lm.generation.writer import Writer
from lm.nn.batch import AskedAs, Batch
from lm.nn.transformer import LM
from lm.schema import Tree
from tests.conftest import Lm
from tests.generation.test_answers import encoder_decoder
from tests.nn.models import ATTENTIONS, MIXING, POSITIONS, config, redrawn

PROMPTS = [[5, 9, 2, 7, 11, 3, 8, 1, 6, 4, 12, 20], [17, 4, 9], [3]]
SLOTS: list[Tree] = [
    *({"attention": attention} for attention in ATTENTIONS),
    *({"position": position} for position in POSITIONS),
    *MIXING,
]


def seen_whole(**model: Any) -> LM:
    made = redrawn(config(**model)).double()
    made.asked_as = "prefix"
    return made


def told(model: LM, prompt: list[int], new: list[int]) -> Tensor:
    """log p of the new tokens by one forward without a cache, whose prompt is a prefix.  (n, v)"""
    ids = torch.tensor([[*prompt, *new[:-1]]])
    with torch.no_grad():
        logits = model(Batch(ids, prefix=(torch.arange(ids.shape[1]) < len(prompt)).unsqueeze(0)))
    return logits[0, len(prompt) - 1 :].log_softmax(-1)


@pytest.mark.parametrize("slots", SLOTS, ids=lambda slots: json.dumps(slots)[:60])
def test_decoding_sees_a_prompt_from_all_sides(slots: Tree) -> None:
    """Of different lengths, read together, in one piece whatever prefill_chunk says."""
    model = seen_whole(**slots)
    cfg = GenerateConfig(max_tokens=5, temperature=0.7, seed=3, logprobs=0)
    rows = decode(model, PROMPTS, cfg.replace(prefill_chunk=2))
    for prompt, row in zip(PROMPTS, rows, strict=True):
        own = told(model, prompt, row.new)
        found = torch.tensor([one.logprob for one in row.logprobs], dtype=torch.float64)
        torch.testing.assert_close(found, own[range(len(row.new)), row.new], rtol=1e-6, atol=1e-6)


def test_a_prompt_that_is_seen_whole_is_another_one() -> None:
    model, cfg = seen_whole(), GenerateConfig(max_tokens=5, temperature=0, logprobs=0)
    before = decode(model, PROMPTS[:1], cfg)[0].logprobs
    model.asked_as = "text"
    assert max(abs(a.logprob - b.logprob) for a, b in zip(before, decode(model, PROMPTS[:1], cfg)[0].logprobs, strict=True)) > 0.01


def test_the_server_s_engine_and_drafts_see_it_so_too() -> None:
    model, cfg = seen_whole(), GenerateConfig(max_tokens=12, temperature=0)
    plain = [row.new for row in decode(model, PROMPTS, cfg)]
    assert [row.new for row in decode(model, PROMPTS, cfg, drafter=Lookup(3, 2))] == plain
    vocabulary = Vocabulary(model.vocab_size)
    engine, requests = (
        Engine(model, vocabulary, 3, chunk=2),
        [Request(rows_of(model, [prompt], cfg, vocabulary), cfg) for prompt in PROMPTS],
    )
    for request in requests:
        engine.add(request)
    while any(len(request.rows[0].new) < 12 for request in requests):
        engine.step()
    assert [request.rows[0].new for request in requests] == plain


def test_a_task_s_context_is_seen_from_all_sides_and_its_answer_is_not() -> None:
    tokenizer, model = BytesConfig().build(), seen_whole(vocab_size=320)
    pairs = [(None, [5, 9, 2, 7, 11], [3, 8, 1]), (None, [17, 4], [6])]
    for (_, context, answer), (score, _) in zip(pairs, Harness(model, tokenizer, rows=2)._loglikelihood_tokens(pairs), strict=True):
        own = told(model, context, answer)
        assert score == pytest.approx(float(own[range(len(answer)), answer].sum()), abs=1e-5)


@pytest.fixture(scope="module")
def spoken() -> Tokenizer:
    return BytesConfig().build(extra=UL2Config(sentinels=4).specials())


def names(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    return [tokenizer.special_names.get(i) or tokenizer.decode([i]) for i in ids]


@pytest.mark.parametrize(
    ("asked_as", "encodes", "prompt", "read"),
    [
        ("text", False, "ab", ["<|bos|>", "a", "b"]),
        ("prefix", False, "ab", ["<|bos|>", "a", "b"]),
        ("source", False, "ab", ["<|bos|>", "a", "b", "<|eos|>"]),
        ("source", True, "ab", ["<|bos|>", "a", "b", "<|eos|>"]),
        ("modes", False, "ab", ["<|S|>", "<|bos|>", "a", "b"]),
        ("modes", True, "ab", ["<|S|>", "<|bos|>", "a", "b"]),
        ("spans", False, Gap("a", "b"), ["<|bos|>", "a", "<extra_id_0>", "b", "<extra_id_1>"]),
        ("spans", True, Gap("a", "b"), ["<|bos|>", "a", "<extra_id_0>", "b", "<extra_id_1>", "<|eos|>"]),
        ("text", True, Gap("a", "b"), ["<|bos|>", "a", "<extra_id_0>", "b", "<extra_id_1>", "<|eos|>"]),
        ("modes", False, Gap("a", "b"), ["<|X|>", "<|bos|>", "a", "<extra_id_0>", "b", "<extra_id_1>"]),
    ],
)
def test_what_a_model_reads_is_as_in_its_training(
    spoken: Tokenizer, asked_as: AskedAs, encodes: bool, prompt: Any, read: list[str]
) -> None:
    size = spoken.vocab_size
    model = encoder_decoder(vocab_size=size) if encodes else redrawn(config(vocab_size=size))
    model.asked_as = asked_as
    writer = Writer(model, spoken)
    assert names(spoken, (writer.in_gaps() if isinstance(prompt, Gap) else writer).ids(prompt)) == read


LETTERS = "abcdefghijklmnopqrstuvwxyz"
SMALL = ["tokenizer=bytes", "data=text", "data.files=[letters.jsonl]", "data.seq_len=64", "data.val_rows=8", "trainer.device=cpu"]


def letters(lines: list[Tree]) -> None:
    Path("letters.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))


@pytest.fixture
def alphabet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve letters of the alphabet in each document."""
    monkeypatch.chdir(tmp_path)
    starts = np.random.default_rng(0).integers(0, 14, 400)
    letters([{"text": LETTERS[start : start + 12]} for start in starts])


@pytest.mark.slow
def test_a_model_of_span_corruption_fills_gaps(alphabet: None) -> None:
    """Whose middle follows from what is around it."""
    options = ["recipes=pretrain/spans_tiny", "model=nano", "objective.mean_span=3", "objective.noise_frac=0.4", "trainer.max_steps=300"]
    run = library.train(library.config(overrides=[*options, *SMALL]))
    model, tokenizer = library.load(run.model, device="cpu")
    right = [
        library.generate(model, tokenizer, LETTERS[start : start + 4], suffix=LETTERS[start + 7 : start + 10], temperature=0, max_tokens=8)
        == LETTERS[start + 4 : start + 7]
        for start in range(12)
    ]
    assert sum(right) >= 8


@pytest.mark.slow
def test_a_run_s_folders_say_how_they_are_asked(lm: Lm, alphabet: None) -> None:
    """Its checkpoint too, and what is made of it."""
    run = library.train(library.config(overrides=["recipes=pretrain/prefix_tiny", *SMALL, "trainer.max_steps=2"]))
    folders = [run.model, next((run.path / "checkpoints").glob("step*"))]
    assert lm("remodel", f"from={run.path}", "out=remodeled", "model.head.tied=false")[0] == 0
    assert lm("merge", str(folders[1]), str(run.model), "out=merged")[0] == 0
    model, tokenizer = library.load(run.model, device="cpu")
    folders += [Path("remodeled"), Path("merged"), library.save(model, tokenizer, "saved")]
    assert [library.load(folder, device="cpu")[0].asked_as for folder in folders] == ["prefix"] * 5
    assert "prompts: this model sees them from all sides" in lm("export", f"from={run.path}", "out=exported", "check=false")[2]
    further = library.train(
        library.config(overrides=[f"init_from={run.path}", "recipes=finetune/continued_tiny", *SMALL[1:], "trainer.max_steps=1"])
    )
    assert library.load(further.model, device="cpu")[0].asked_as == "text"


@pytest.mark.slow
def test_a_decoder_that_has_learned_pairs_answers_a_source(lm: Lm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer alone is printed."""
    monkeypatch.chdir(tmp_path)
    draw = np.random.default_rng(0)
    sources = ["".join(draw.choice([*"abc"], 3)) for _ in range(300)]
    letters([{"source": source, "target": source.upper()} for source in sources])
    options = ["model=nano", "objective=seq2seq", "data=pairs", *(each for each in SMALL if each != "data=text"), "optim.lr=0.01"]
    run = library.train(library.config(overrides=[*options, "data.global_batch=16", "trainer.max_steps=250"]))
    code, out, _ = lm("generate", f"from={run.path}", "prompt=bca", "temperature=0")
    assert code == 0 and out.endswith("\nBCA\n")
