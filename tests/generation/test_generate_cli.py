"""`lm generate`: what is printed, where prompts come from, and what a mistake is answered with."""

import io
import json
import os
import re
import sys
from pathlib import Path

import pytest

import lm as library
from lm.data.kinds import BytesConfig
from lm.nn.transformer import DecoderLM
from lm.storage.model_folder import save_model
from tests.conftest import Lm


def expected(folder: Path, prompt: str, **options: object) -> str:
    model, tokenizer = library.load(folder, device="cpu")
    return library.generate(model, tokenizer, prompt, **options)


def stdin(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))


@pytest.mark.parametrize("prompt", ["def main(", "a=b", 'What\'s up, "you"?', "", "[1, 2]", "日本\n\n語", " --help=", "from=x"])
def test_any_prompt_is_printed_and_continued(lm: Lm, model_folder: Path, prompt: str) -> None:
    code, out, err = lm("generate", f"from={model_folder}", f"prompt={prompt}", "max_tokens=12", "seed=3")
    assert code == 0, err
    assert out == prompt + expected(model_folder, prompt, max_tokens=12, seed=3) + "\n"


def test_several_prompts_give_what_each_gives_alone(lm: Lm, model_folder: Path) -> None:
    code, out, err = lm("generate", f"from={model_folder.parent}", "prompt=abc", "prompt=d", "max_tokens=12", "temperature=0")
    texts = [prompt + expected(model_folder, prompt, max_tokens=12, temperature=0) for prompt in ("abc", "d")]
    assert (code, err) == (0, "")
    assert out == f"--- 1 of 2 ---\n{texts[0]}\n--- 2 of 2 ---\n{texts[1]}\n"


def test_json_tells_of_each_sample_its_tokens_and_their_logprobs(lm: Lm, model_folder: Path) -> None:
    args = ("generate", f"from={model_folder}", "prompt=abc", "prompt=d", "max_tokens=4", "n=2", "logprobs=1", 'logit_bias={"256":-100}')
    code, out, err = lm(*args, "format=json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert [each["prompt"] for each in found] == ["abc", "abc", "d", "d"] and {each["finish"] for each in found} == {"length"}
    model, tokenizer = library.load(model_folder, device="cpu")
    told = library.complete(model, tokenizer, ["abc", "d"], max_tokens=4, n=2, logprobs=1, logit_bias={256: -100})
    assert [each["text"] for each in found] == [each.text for each in told]
    assert [token["token"] for token in found[3]["logprobs"]] == found[3]["tokens"] == told[3].tokens
    assert library.generate(model, tokenizer, "d", n=2, max_tokens=4, logit_bias={256: -100}) == [each.text for each in told[2:]]
    code, out, err = lm(*args)
    assert out.startswith("--- 1 of 4 ---\nabc") and err.count("\n") == 16
    assert err.startswith(f"{told[0].logprobs[0].logprob:.4f} {tokenizer.decode(told[0].tokens[:1])!r}  ")


@pytest.mark.parametrize("data, prompt", [(b"def f\n", "def f"), (b"a\r\n", "a"), (b"a\n\n", "a\n"), ("é".encode(), "é"), (b"", "")])
def test_standard_input_is_the_prompt_where_none_is_given(
    lm: Lm, model_folder: Path, monkeypatch: pytest.MonkeyPatch, data: bytes, prompt: str
) -> None:
    stdin(monkeypatch, data)
    code, out, err = lm("generate", f"from={model_folder}", "max_tokens=5")
    assert code == 0, err
    assert out == prompt + expected(model_folder, prompt, max_tokens=5) + "\n"


def test_stop_texts_may_be_repeated_and_hold_anything(lm: Lm, model_folder: Path) -> None:
    free = expected(model_folder, "x", max_tokens=30)
    _, out, _ = lm("generate", f"from={model_folder}", "prompt=x", "max_tokens=30", "stop==,[\n", f"stop={free[9:11]}", "stop=1")
    assert out == "x" + expected(model_folder, "x", max_tokens=30, stop=["=,[\n", free[9:11], "1"]) + "\n"
    assert len(out) < len(free)


def test_a_full_context_is_told(lm: Lm, model_folder: Path) -> None:
    code, _, err = lm("generate", f"from={model_folder}", "prompt=abcdefg", "max_tokens=500")
    assert code == 0
    assert err == "stopped after 41 tokens, since the context of 48 is full (max_tokens=500).\n"


def test_beams_print_the_best_texts_of_each_prompt(lm: Lm, model_folder: Path) -> None:
    options = {"beams": 4, "max_tokens": 12, "length_penalty": 0.5, "early_stopping": "never"}
    given = [f"{key}={value}" for key, value in options.items()]
    code, out, err = lm("generate", f"from={model_folder}", "prompt=ab", "prompt=c", "n=2", *given)
    texts = [text for prompt in ("ab", "c") for text in expected(model_folder, prompt, n=2, **options)]
    assert (code, err) == (0, "")
    assert out == "".join(f"--- {i} of 4 ---\n{'ab' if i < 3 else 'c'}{text}\n" for i, text in enumerate(texts, 1))
    _, out, _ = lm("generate", f"from={model_folder}", "prompt=ab", *given)
    assert out == f"ab{texts[0]}\n"


def test_a_beam_ends_at_a_stop_text(model_folder: Path) -> None:
    best = expected(model_folder, "x", beams=3, max_tokens=12)
    stop = best[4:6]
    found = expected(model_folder, "x", beams=3, n=3, max_tokens=12, stop=stop)
    assert best[: best.find(stop)] in found
    assert not any(stop in text for text in found)


@pytest.mark.parametrize("how", ["lookup=2", "draft={folder}"])
def test_drafts_change_no_text_and_tell_what_they_gained(lm: Lm, model_folder: Path, how: str) -> None:
    args = ("generate", f"from={model_folder}", "prompt=abab", "prompt=c", "max_tokens=12", "n=2", 'logit_bias={"97":9,"98":9}')
    code, out, err = lm(*args, how.format(folder=model_folder))
    assert (code, out) == (0, lm(*args)[1])
    assert re.fullmatch(r"\d+ of \d+ drafted tokens accepted \(\d+ %\); \d\.\d\d tokens a step, \d+\.\d\d times .* one by one\.\n", err)


def test_a_draft_may_have_more_tokens_but_no_token_less(lm: Lm, model_folder: Path, model: DecoderLM) -> None:
    more, args = model_folder.parent / "more", ("prompt=abab", "max_tokens=8")
    save_model(more, model.cfg.tree(), dict(model.named_parameters()), BytesConfig().build(extra=("<|more|>",)).save, {})
    code, out, err = lm("generate", f"from={model_folder}", *args, f"draft={more}")
    assert (code, out) == (0, lm("generate", f"from={model_folder}", *args)[1]) and "drafted tokens accepted" in err
    code, out, err = lm("generate", f"from={more}", *args, f"draft={model_folder}")
    assert (code, out) == (2, "") and "it has another tokenizer, in which '<|more|>' is not token 259, so" in err


MISTAKES = {
    "two drafts": (["prompt=a", "lookup=3", "draft=mtp"], 2, ["draft=mtp and lookup=3 exclude each other"]),
    "a draft for beams": (["prompt=a", "lookup=3", "beams=2"], 2, ["lookup=3 and beams=2 exclude each other"]),
    "no blocks that draft": (["prompt=a", "draft=mtp"], 2, ["draft=mtp: the model has no blocks"]),
    "no such draft": (["prompt=a", "draft=runs/nowhere"], 3, ["runs/nowhere: does not exist"]),
    "misspelt option": (["prompt=a", "temprature=1"], 2, ["temprature", "Did you mean 'temperature'?"]),
    "wrong type": (["prompt=a", "top_k=many"], 2, ["top_k: 'many' does not fit", "integer"]),
    "out of range": (["prompt=a", "top_p=2"], 2, ["top_p: 2 does not fit", "less than or equal to 1"]),
    "NaN": (["prompt=a", "temperature=NaN"], 2, ["temperature: NaN does not fit", "finite"]),
    "empty stop text": (["prompt=a", "stop="], 2, ["stop", "''"]),
    "bias of no token": (["prompt=a", 'logit_bias={"259":1}'], 2, ["logit_bias: 259", "259 tokens"]),
    "no grammar": (["prompt=a", 'grammar=start: "a" | b'], 2, ["grammar: at 1(8): unknown name"]),
    "no key": (["def main("], 2, ["def main(", "key=value"]),
    "prompt too long": ([f"prompt={'a' * 48}"], 2, ["49 tokens", "model.max_seq_len=48"]),
    "unknown device": (["prompt=a", "device=gpu"], 2, ["device: 'gpu'", "auto, cpu, cuda or mps"]),
    "given twice": (["prompt=a", "top_k=1", "top_k=2"], 2, ["top_k", "twice"]),
    "a draw's option for beams": (["prompt=a", "beams=3", "top_p=0.9"], 2, ["top_p=0.9", "beams=3"]),
    "more texts than beams": (["prompt=a", "beams=3", "n=4"], 2, ["n=4", "beams=3"]),
    "more beams than tokens": (["prompt=a", "beams=259"], 2, ["beams=259", "259 tokens"]),
    "two models": (["prompt=a", "from=other"], 2, ["from", "twice", "other"]),
}


@pytest.mark.parametrize("args, exit_code, parts", MISTAKES.values(), ids=MISTAKES.keys())
def test_mistake_is_answered_with_one_sentence_and_nothing_is_printed(
    lm: Lm, model_folder: Path, args: list[str], exit_code: int, parts: list[str]
) -> None:
    code, out, err = lm("generate", f"from={model_folder}", *args)
    assert (code, out) == (exit_code, "")
    assert all(part in err.splitlines()[-1] for part in parts), err


def test_missing_model_is_told(lm: Lm) -> None:
    code, _, err = lm("generate", "prompt=a")
    assert (code, "from=runs/NAME" in err) == (2, True)
    code, _, err = lm("generate", "from=runs/nowhere", "prompt=a")
    assert (code, "runs/nowhere: does not exist" in err) == (3, True)


def test_standard_input_that_is_not_utf8_is_told_with_its_byte(lm: Lm, model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stdin(monkeypatch, b"abc\xff")
    code, out, err = lm("generate", f"from={model_folder}")
    assert (code, out) == (2, "")
    assert "byte 3 is not UTF-8" in err


@pytest.mark.parametrize("closed", [True, False])
def test_no_prompt_at_a_terminal_is_an_error_not_a_wait(lm: Lm, model_folder: Path, monkeypatch: pytest.MonkeyPatch, closed: bool) -> None:
    leader, follower = os.openpty()
    with os.fdopen(follower) as terminal:
        monkeypatch.setattr(sys, "stdin", None if closed else terminal)
        code, _, err = lm("generate", f"from={model_folder}")
    os.close(leader)
    assert code == 2
    assert "prompt=TEXT" in err


def test_reader_that_went_away_ends_the_command_quietly(lm: Lm, model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with monkeypatch.context() as patch, os.fdopen(writer, "w") as stdout:
        patch.setattr(sys, "stdout", stdout)
        code, _, err = lm("generate", f"from={model_folder}", "prompt=a", "max_tokens=5")
    assert (code, err) == (0, "")


def test_a_pipe_gets_the_text_in_utf8_whatever_the_locale_says(lm: Lm, model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    code, _, err = lm("generate", f"from={model_folder}", "prompt=é", "max_tokens=5")
    assert (code, err) == (0, "")
    assert raw.getvalue().startswith("é".encode())


def test_help_lists_every_option(lm: Lm) -> None:
    code, out, _ = lm("generate", "--help")
    assert code == 0
    assert all(name in out for name in ("from", "prompt", "max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "stop", "device"))
