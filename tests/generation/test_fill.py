"""`lm fill`: masks filled in as the model's own probabilities say, in the order that is asked for."""

import itertools
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lm
from lm.data.kinds import BytesConfig, DiffusionConfig
from lm.data.tokenizer.tokenizer import Tokenizer
from lm.errors import ConfigError
from lm.generation.config import FillConfig
from lm.generation.fill import Filled, Filling
from lm.generation.load import save
from lm.generation.text import ends_of
from lm.nn.batch import Batch
from lm.nn.transformer import LM, EncoderConfig
from lm.schema import from_tree
from tests.conftest import Lm
from tests.nn.models import BASE, random_model, with_kinds

M = "<|mask|>"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return BytesConfig().build(extra=DiffusionConfig().specials())


@pytest.fixture(scope="module")
def model() -> LM:
    return encoder()


def encoder(**changes: Any) -> LM:
    return random_model(from_tree(EncoderConfig, with_kinds(BASE | {"kind": "encoder", "vocab_size": 320, "max_seq_len": 64} | changes)))


def filled(model: LM, tokenizer: Tokenizer, texts: list[str], **options: Any) -> list[Filled]:
    return Filling(model, tokenizer, texts, FillConfig(**options)).all()


def log_p(model: LM, tokenizer: Tokenizer, ids: list[int], behind: int = 0) -> Tensor:
    """(s, v) log p under the model, of the tokens that may be chosen: no special ones but an end at the last `behind` places."""
    with torch.inference_mode():
        logits: Tensor = model(Batch(torch.tensor([ids])))[0, :, : tokenizer.vocab_size]
    found = logits.log_softmax(-1)
    for place in range(len(ids)):
        ends = ends_of(tokenizer) if place >= len(ids) - behind else []
        found[place, [token for token in tokenizer.special_names if token not in ends]] = -math.inf
    return found


def ids_of(tokenizer: Tokenizer, text: str, masks: int = 0) -> list[int]:
    assert tokenizer.mask is not None
    begun = [*tokenizer.prefix, *(token for piece in text.split(M) for token in (tokenizer.mask, *tokenizer.encode(piece)))]
    del begun[len(tokenizer.prefix)]
    return [*begun, *([tokenizer.mask] * masks or tokenizer.suffix)]


def reference(model: LM, tokenizer: Tokenizer, ids: list[int], behind: int, at_once: int, block: int | None) -> list[int]:
    """One text, one forward at a time: the surest masks of the first block that has some are filled in with their likeliest tokens."""
    ids, places = [*ids], [i for i, token in enumerate(ids) if token == tokenizer.mask]
    for start in range(0, len(places), block or len(places)):
        left = places[start : start + (block or len(places))]
        while left:
            found = log_p(model, tokenizer, ids, behind)[left].max(-1)
            ranked = sorted(zip((-found.values).tolist(), left, found.indices.tolist(), strict=True))[:at_once]
            for _, place, token in ranked:
                ids[place] = token
                left.remove(place)
    return ids


@pytest.mark.parametrize(("at_once", "block"), [(1, None), (3, None), (2, 5), (9, 1)])
def test_the_surest_masks_are_filled_in_first_alone_or_in_a_batch(model: LM, tokenizer: Tokenizer, at_once: int, block: int | None) -> None:
    texts = [f"ab{M}d{M}{M}", f"{M} is longer than the other one, {M}{M}{M}{M}", "no mask of its own"]
    together = filled(model, tokenizer, texts, max_tokens=6, at_once=at_once, **({} if block is None else {"block": block}))
    for text, found in zip(texts, together, strict=True):
        [alone] = filled(model, tokenizer, [text], max_tokens=6, at_once=at_once, **({} if block is None else {"block": block}))
        assert alone.text == found.text and [one.token for one in alone.tokens] == [one.token for one in found.tokens]
        ids = reference(model, tokenizer, ids_of(tokenizer, text, 6), 6, at_once, block)
        behind = next((i for i in range(len(ids) - 6, len(ids)) if ids[i] in ends_of(tokenizer)), len(ids))
        assert found.text == tokenizer.decode(ids[:behind])


def test_a_masks_own_log_p_and_the_likeliest_ones_are_told(model: LM, tokenizer: Tokenizer) -> None:
    [found] = filled(model, tokenizer, [f"x{M}y{M}z"], likeliest=4, at_once=2)
    ids = ids_of(tokenizer, f"x{M}y{M}z")
    wanted = log_p(model, tokenizer, ids)[[i for i, token in enumerate(ids) if token == tokenizer.mask]]
    with torch.inference_mode():
        raw = model(Batch(torch.tensor([ids])))[0, :, : tokenizer.vocab_size].log_softmax(-1)
    for one, of, row in zip(found.tokens, wanted, raw[[i for i, token in enumerate(ids) if token == tokenizer.mask]], strict=True):
        assert one.token == of.argmax() and one.logprob == pytest.approx(float(of.max()), abs=1e-5)
        assert [token for token, _ in one.top] == row.topk(4).indices.tolist()
        assert [value for _, value in one.top] == pytest.approx(row.topk(4).values.tolist(), abs=1e-5)


def test_draws_in_any_order_are_those_of_the_model(model: LM, tokenizer: Tokenizer) -> None:
    """Two masks of two candidates each: a pair is as likely as the mean over both orders of p(first) p(second | first). By a chi-square of
    three degrees of freedom, which is beyond 16.3 once in a thousand."""
    text, n = f"q{M}r{M}", 1500
    ids = ids_of(tokenizer, text)
    places = [i for i, token in enumerate(ids) if token == tokenizer.mask]

    def two(given: list[int], place: int) -> dict[int, float]:
        top = log_p(model, tokenizer, given)[place].topk(2)
        return dict(zip(top.indices.tolist(), top.values.softmax(-1).tolist(), strict=True))

    chance: Counter[tuple[int, int]] = Counter()
    for first, second in itertools.permutations(range(2)):
        for token, p in two(ids, places[first]).items():
            given = [token if i == places[first] else each for i, each in enumerate(ids)]
            for other, q in two(given, places[second]).items():
                pair = {places[first]: token, places[second]: other}
                chance[pair[places[0]], pair[places[1]]] += p * q / 2
    drawn = Counter(
        tuple(one.token for one in filled(model, tokenizer, [text], temperature=1.0, top_k=2, order="random", seed=seed)[0].tokens)
        for seed in range(n)
    )
    assert drawn.keys() <= chance.keys() and sum(chance.values()) == pytest.approx(1)
    likely = {pair: p for pair, p in chance.items() if n * p >= 5}
    assert sum((drawn[pair] - n * p) ** 2 / (n * p) for pair, p in likely.items()) < 16.3 + 2 * max(0, len(likely) - 4)


def test_draws_repeat_and_depend_on_the_seed_and_the_text_alone(model: LM, tokenizer: Tokenizer) -> None:
    options: dict[str, Any] = {"temperature": 1.0, "max_tokens": 12, "at_once": 2}
    alone = lm.fill(model, tokenizer, "some text", **options)
    assert lm.fill(model, tokenizer, ["another one, and longer", "some text"], **options)[1] == alone
    assert lm.fill(model, tokenizer, "some text", seed=1, **options) != alone


def test_each_forward_draws_anew(model: LM, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five masks, one of which each forward fills in: 5 + 4 + 3 + 2 + 1 draws, by numbers of their own."""
    asked: list[tuple[bytes, int]] = []
    monkeypatch.setattr("lm.generation.fill.uniform", lambda key, step: asked.append((key, step)) or 0.5)
    filled(model, tokenizer, [M * 5], temperature=1.0)
    assert len(asked) == len({*asked}) == 15


def test_what_comes_behind_an_end_is_left_out_and_not_waited_for(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A head that says eos wherever the token before is no mask: the first mask is filled in, and the text has ended."""
    model = encoder()
    assert tokenizer.eos is not None
    calls = []
    head = model.head.forward

    def says_end(*args: Any, **kwargs: Any) -> Tensor:
        logits: Tensor = head(*args, **kwargs)
        calls.append(len(logits))
        logits[:, tokenizer.eos] += 100.0 - 10 * torch.arange(len(logits))
        return logits

    monkeypatch.setattr(model.head, "forward", says_end)
    [found] = filled(model, tokenizer, ["it ends"], max_tokens=8)
    assert found.text == "it ends" and not found.tokens and calls == [8]
    [whole] = filled(model, tokenizer, [f"it {M} ends"])
    assert len(whole.tokens) == 1 and whole.tokens[0].token not in ends_of(tokenizer), "a text does not end in its midst"


def test_what_cannot_be_filled_in_is_told(model: LM, tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigError, match=r"text: number 2 of 2 has no mask\. Write <\|mask\|> where"):
        lm.fill(model, tokenizer, [M, "none"])
    with pytest.raises(ConfigError, match=r"has 102 tokens with its masks, .* at most 64\. Shorten it, or lower max_tokens"):
        lm.fill(model, tokenizer, "a", max_tokens=100)
    with pytest.raises(ConfigError, match=r"the tokenizer has no mask token"):
        lm.fill(model, BytesConfig().build(), M)
    with pytest.raises(ConfigError, match=r"fill: the model is no encoder .* Use lm generate"):
        lm.fill(random_model(from_tree(lm.DecoderConfig, with_kinds(BASE))), tokenizer, M)
    with pytest.raises(ConfigError, match=r"top_k=3 is for draws, and temperature=0 draws nothing"):
        lm.fill(model, tokenizer, M, top_k=3)


@pytest.fixture
def folder(model: LM, tokenizer: Tokenizer, tmp_path: Path) -> Path:
    save(model, tokenizer, tmp_path / "model")
    return tmp_path / "model"


def test_the_verb_prints_texts_json_and_files(folder: Path, lm: Lm) -> None:
    texts = [f"one {M}", f"two {M}{M}"]
    code, out, err = lm("fill", f"from={folder}", *(f"text={text}" for text in texts), "likeliest=2")
    assert code == 0 and len(out.splitlines()) == 2 and len(err.splitlines()) == 3, (out, err)
    _, told, _ = lm("fill", f"from={folder}", *(f"text={text}" for text in texts), "format=json")
    found = json.loads(told)
    assert [one["filled"]["text"] for one in found] == out.splitlines() and [len(one["filled"]["tokens"]) for one in found] == [1, 2]
    (folder.parent / "texts.txt").write_text("\n".join(texts) + "\n")
    code, _, err = lm("fill", f"from={folder}", f"texts={folder.parent}/texts.txt", f"out={folder.parent}/out.jsonl")
    assert code == 0 and "2 texts filled in, 2 now" in err
    lines = [json.loads(line) for line in (folder.parent / "out.jsonl").read_text().splitlines()]
    assert [line["filled"] for line in lines] == [one["filled"] for one in found]


def test_a_line_keeps_its_own_fields_or_is_refused(folder: Path, lm: Lm) -> None:
    """Seen to fail: its tokens were replaced."""
    call = ("fill", f"from={folder}", f"texts={folder.parent}/texts.jsonl", f"out={folder.parent}/out.jsonl")
    (folder.parent / "texts.jsonl").write_text(json.dumps({"text": M, "tokens": "its own"}) + "\n")
    assert lm(*call)[0] == 0 and json.loads((folder.parent / "out.jsonl").read_text())["tokens"] == "its own"
    (folder.parent / "texts.jsonl").write_text(json.dumps({"text": M, "filled": "its own"}) + "\n")
    code, _, err = lm(*call, "overwrite=true")
    assert code == 2 and "it has the field filled already, which is written here. Rename it." in err, err


def test_the_likeliest_tokens_are_those_of_transformers(tokenizer: Tokenizer, tmp_path: Path, lm: Lm) -> None:
    """Of the exported model, by the pipeline of transformers."""
    pipeline, folder = pytest.importorskip("transformers").pipeline, tmp_path / "model"
    save(encoder(vocab_size=tokenizer.vocab_size, head={"tied": False}), tokenizer, folder)
    code, _, err = lm("export", f"from={folder}", "format=hf", f"out={tmp_path}/hf")
    assert code == 0, err
    theirs = pipeline("fill-mask", model=str(tmp_path / "hf"), device="cpu", top_k=5)(f"a text with {M} in it")
    _, told, _ = lm("fill", f"from={folder}", f"text=a text with {M} in it", "likeliest=5", "format=json")
    [[token]] = [one["filled"]["tokens"] for one in json.loads(told)]
    assert [one["token"] for one in theirs] == [each for each, _ in token["top"]]
    assert [math.log(one["score"]) for one in theirs] == pytest.approx([value for _, value in token["top"]], abs=1e-4)
