"""What the server answers: as `lm generate`, alone and among others, whole and in chunks, in the shapes of OpenAI's API."""

import copy
import json
import math
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from tokenizers import Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as RawTokenizer

import lm
from lm.data.kinds import BytesConfig
from lm.data.tokenizer.gap import SENTINELS
from lm.data.tokenizer.tokenizer import Specials, Tokenizer, load_tokenizer
from lm.generation.config import SamplingConfig
from lm.generation.writer import Writer
from lm.nn.batch import Batch
from lm.nn.transformer import DecoderLM
from lm.schema import Tree, from_tree
from lm.serving.worker import Worker
from tests.generation.test_answers import encoder_decoder
from tests.nn.models import config, redrawn
from tests.serving.conftest import Serve

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPTS = ["def main(", "", "größer 😀 " + "x" * 70]
SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0, "max_tokens": 20, "seed": 0},
    {"temperature": 0.9, "top_k": 40, "max_tokens": 12, "seed": 3},
    {"temperature": 1.2, "top_p": 0.9, "min_p": 0.01, "max_tokens": 30, "seed": 4},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2, "max_tokens": 15, "seed": 5},
    {"logit_bias": {"101": 3.5}, "stop": ["e", "zz"], "max_tokens": 40, "seed": 6},
    {"n": 3, "max_tokens": 10, "seed": 7},
    {"regex": "[a-c]{4}(yes|no)", "max_tokens": 10, "seed": 8},
]


def events(client: httpx.Client, path: str, body: Tree) -> list[Tree]:
    with client.stream("POST", path, json={**body, "stream": True}) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def choices(client: httpx.Client, path: str, body: Tree) -> list[Tree]:
    found = client.post(path, json=body)
    assert found.status_code == 200, found.text
    return list(found.json()["choices"])


@pytest.mark.slow
def test_answers_among_sixteen_others_equal_those_of_generate(client: httpx.Client, model: DecoderLM, tokenizer: Tokenizer) -> None:
    asked = [{"prompt": prompt, **options} for options in SAMPLINGS for prompt in PROMPTS]
    expected = [
        [(each.text, each.finish) for each in Writer(model, tokenizer, from_tree(SamplingConfig, without(body))).complete([body["prompt"]])]
        for body in asked
    ]
    with ThreadPoolExecutor(17) as pool:
        found = list(pool.map(lambda body: choices(client, COMPLETIONS, body), asked))
    assert [[(choice["text"], choice["finish_reason"]) for choice in each] for each in found] == expected
    assert {finish for each in expected for _, finish in each} == {"stop", "length"}


def without(body: Tree) -> Tree:
    return {key: value for key, value in body.items() if key != "prompt"}


def test_a_stream_joined_is_the_whole_answer(client: httpx.Client) -> None:
    body = {"prompt": ["abc", "größer"], "n": 2, "max_tokens": 30, "seed": 1, "stop": ["a"], "logprobs": 2, "echo": True}
    chunks = events(client, COMPLETIONS, body | {"stream_options": {"include_usage": True}})
    whole = client.post(COMPLETIONS, json=body).json()
    for choice in whole["choices"]:
        parts = [each for chunk in chunks for each in chunk["choices"] if each["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        for key in ("tokens", "text_offset"):
            assert [each for part in parts for each in part["logprobs"][key]] == choice["logprobs"][key]
        assert [part["finish_reason"] for part in parts if part["finish_reason"]] == [choice["finish_reason"]]
    assert chunks[-1]["usage"] == whole["usage"] and not chunks[-1]["choices"]


def test_an_answer_is_json_of_the_schema_that_was_asked_for(client: httpx.Client) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
    body = {"messages": [{"role": "user", "content": "?"}], "max_tokens": 20, "seed": 0}
    [found] = choices(client, CHAT, body | {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}})
    assert json.loads(found["message"]["content"])["a"] in (True, False) and found["finish_reason"] == "stop"
    for given in (schema, json.dumps(schema)):
        assert choices(client, CHAT, body | {"json_schema": given}) == [found]
    [found] = choices(client, CHAT, body | {"response_format": {"type": "json_object"}})
    assert found["message"]["content"].startswith("{")


def test_logprobs_of_an_echoed_prompt_are_those_of_one_forward(client: httpx.Client, model: DecoderLM, tokenizer: Tokenizer) -> None:
    ids = [[97, 98, 99, 100, 32], [40, 41]]
    body = {"prompt": ids, "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 1, "model": "tiny"}
    for prompt, choice in zip(ids, choices(client, COMPLETIONS, body), strict=True):
        with torch.no_grad():
            told = model(Batch(torch.tensor([prompt])))[0].log_softmax(-1)
        expected = [float(told[i, token]) for i, token in enumerate(prompt[1:])]
        found = choice["logprobs"]
        assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
        torch.testing.assert_close(torch.tensor(found["token_logprobs"][1:-1]), torch.tensor(expected), rtol=1e-5, atol=1e-5)
        assert all(
            math.isclose(max(top.values()), float(row.max()), abs_tol=1e-5)
            for top, row in zip(found["top_logprobs"][1:], told, strict=False)
        )
        assert len(found["tokens"]) == len(prompt) + 1 == len(found["text_offset"])
        assert choice["text"].startswith(tokenizer.decode(prompt))


def test_a_suffix_asks_for_what_fills_the_gap(serve: Serve) -> None:
    """As `lm.generate`, several prompts too."""
    tokenizer = BytesConfig().build(extra=SENTINELS)
    model, sampling = redrawn(config(vocab_size=tokenizer.vocab_size, max_seq_len=256)), {"max_tokens": 9, "seed": 3}
    with serve(model, tokenizer) as client:
        found = choices(client, COMPLETIONS, {"prompt": ["def f(", "größe"], "suffix": " end", **sampling})
        assert [one["text"] for one in found] == lm.generate(model, tokenizer, ["def f(", "größe"], suffix=" end", **sampling)
        (plain,) = choices(client, COMPLETIONS, {"prompt": "def f(", **sampling})
        assert plain["text"] == lm.generate(model, tokenizer, "def f(", **sampling) != found[0]["text"]


def test_text_offsets_are_places_in_the_text(client: httpx.Client) -> None:
    """Of parts of one character too, and behind a special token. Seen to fail: the lengths of the tokens' names were added up."""
    body = {"prompt": "日é b", "max_tokens": 0, "echo": True, "logprobs": 0}
    (choice,) = choices(client, COMPLETIONS, body)
    told = choice["logprobs"]
    assert told["text_offset"] == [0, 0, 0, 0, 1, 1, 2, 3] and choice["text"] == "日é b"
    (choice,) = choices(client, COMPLETIONS, body | {"max_tokens": 20, "echo": False, "seed": 1})
    named = [(name, at) for name, at in zip(choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"], strict=True) if len(name) == 1]
    assert named and all(choice["text"][at] == name for name, at in named if at < len(choice["text"]))


def test_the_answer_of_an_encoder_decoder_has_no_space_before_its_first_word(serve: Serve, tmp_path: Path) -> None:
    """As `lm.generate` has none. Seen to begin with one: its first token was decoded behind the source, which the answer does not go on."""
    raw = RawTokenizer(models.BPE({"\u2581": 0, "a": 1, "\u2581a": 2, "<pad>": 3}, [("\u2581", "a")]))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    raw.add_special_tokens(["<pad>"])
    raw.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"pad_token": "<pad>"}')
    model, spoken = encoder_decoder(vocab_size=4, start_token=3), load_tokenizer(tmp_path)
    with serve(model, spoken) as client:
        [choice] = choices(client, COMPLETIONS, {"prompt": "a a", "max_tokens": 3, "logit_bias": {"2": 10000}, "logprobs": 0})
    assert choice["text"] == "a a a" == lm.generate(model, spoken, "a a", max_tokens=3, logit_bias={2: 1e4})
    assert choice["logprobs"]["text_offset"] == [0, 2, 4]


@pytest.mark.parametrize("stream", [False, True])
def test_an_echoed_prompt_may_end_within_a_character(client: httpx.Client, stream: bool) -> None:
    """The answer completes it. Seen to come twice: as U+FFFD of the prompt, and whole."""
    first, second, third = "日".encode()
    body: Tree = {"prompt": [65, first, second], "echo": True, "logprobs": 0, "stream": stream}

    def answered(more: Tree) -> tuple[str, list[int]]:
        if not stream:
            [choice] = choices(client, COMPLETIONS, body | more)
            return choice["text"], choice["logprobs"]["text_offset"]
        parts = [part for chunk in events(client, COMPLETIONS, body | more) for part in chunk["choices"]]
        return "".join(part["text"] for part in parts), [at for part in parts for at in part["logprobs"]["text_offset"]]

    assert answered({"max_tokens": 1, "logit_bias": {str(third): 1000}}) == ("A日", [0, 1, 1, 1])
    assert answered({"max_tokens": 0}) == ("A\ufffd", [0, 1, 1])


def test_a_prompt_is_scored_without_new_tokens(client: httpx.Client) -> None:
    body = {"prompt": "abcd", "max_tokens": 0, "echo": True, "logprobs": 0}
    (choice,) = choices(client, COMPLETIONS, body)
    assert (choice["text"], choice["finish_reason"]) == ("abcd", "length") and len(choice["logprobs"]["tokens"]) == len("abcd") + 1  # bos


def test_a_chat_is_written_by_the_template(client: httpx.Client, model: DecoderLM, tokenizer: Tokenizer) -> None:
    body: Tree = {"messages": [{"role": "user", "content": "Hello"}], "max_completion_tokens": 12, "seed": 2}
    cfg = from_tree(SamplingConfig, {"max_tokens": 12, "seed": 2})
    expected = Writer(model, tokenizer, cfg).in_chat().complete(["Hello"])[0].text
    (choice,) = choices(client, CHAT, body)
    assert choice["message"] == {"role": "assistant", "content": expected}
    parts = [part for chunk in events(client, CHAT, body) for part in chunk["choices"]]
    assert "".join(part["delta"].get("content", "") for part in parts) == expected
    assert parts[0]["delta"]["role"] == "assistant" and parts[-1]["finish_reason"] == choice["finish_reason"]
    in_parts = [{"role": "user", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]}]
    assert choices(client, CHAT, body | {"messages": in_parts}) == [choice]
    with_tools = body | {"tools": [{"type": "function", "function": {"name": "f"}}]}
    assert choices(client, CHAT, with_tools) != [choice] == choices(client, CHAT, with_tools | {"tool_choice": "none"})
    (told,) = choices(client, CHAT, body | {"logprobs": True, "top_logprobs": 3})
    content = told["logprobs"]["content"]
    assert bytes(byte for each in content for byte in each["bytes"]).decode("utf-8", "replace").startswith(expected)
    assert all(len(each["top_logprobs"]) == 3 for each in content)


def test_an_answer_that_is_begun_goes_on(client: httpx.Client) -> None:
    ask = {"role": "user", "content": "Hello"}
    body: Tree = {"max_tokens": 12, "temperature": 0, "logit_bias": {str(i): -100 for i in range(128, 259)}}  # ASCII alone
    whole = choices(client, CHAT, body | {"messages": [ask]})[0]["message"]["content"]
    begun = [ask, {"role": "assistant", "content": whole[:5]}]
    assert choices(client, CHAT, body | {"messages": begun})[0]["message"]["content"] != whole[5:]
    for more in ({}, {"add_generation_prompt": False}):
        on = body | {"messages": begun, "max_tokens": 7, "continue_final_message": True} | more
        assert choices(client, CHAT, on)[0]["message"] == {"role": "assistant", "content": whole[5:]}


ASK: Tree = {"messages": [{"role": "user", "content": "?"}]}


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        (COMPLETIONS, b"{", 400, "not JSON"),
        (COMPLETIONS, b"[1]", 400, "must be a JSON object"),
        (COMPLETIONS, b"\xff", 400, "not JSON"),
        (COMPLETIONS, b"[" * 100_000, 400, "nested too deeply"),
        (COMPLETIONS, b'{"stop": ' + b"[" * 5000 + b"]" * 5000 + b"}", 400, "nested too deeply"),
        (COMPLETIONS, b'{"tools": ' + b"[" * 100 + b"]" * 100 + b"}", 400, "tools: there is no such key"),
        (COMPLETIONS, {"promt": "a"}, 400, "Did you mean 'prompt'?"),
        (COMPLETIONS, {"prompt": "a", "temperature": "hot"}, 400, "temperature: 'hot'"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 0}, 400, "max_tokens: 0"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 5000}, 400, "over 4096 together"),
        (COMPLETIONS, {"prompt": []}, 400, "empty list"),
        (COMPLETIONS, {"prompt": [[]]}, 400, "no tokens"),
        (COMPLETIONS, {"prompt": [1, 400]}, 400, "400 is not one of the 259 tokens"),
        (COMPLETIONS, {"prompt": [-1]}, 400, "-1 is not one"),
        (COMPLETIONS, {"prompt": "\ud800"}, 400, "prompt: "),
        (COMPLETIONS, {"prompt": ["a"] * 60, "n": 3}, 400, "60 x 3 samples are too many"),
        (COMPLETIONS, {"prompt": "a", "logprobs": 21}, 400, "logprobs: 21 is over 20"),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {"300": 1}}, 400, "300"),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {"x": 1}}, 400, "logit_bias"),
        (COMPLETIONS, {"prompt": "a", "stop": ["a"] * 17}, 400, "17 texts are over 16"),
        (COMPLETIONS, {"prompt": "a", "suffix": "b"}, 400, "suffix: the tokenizer has not all of <|fim_prefix|>"),
        (COMPLETIONS, {"prompt": "a", "suffix": "b", "echo": True}, 400, "echo: with a suffix"),
        (COMPLETIONS, {"prompt": [1], "suffix": "b"}, 400, "suffix: it goes with a prompt that is text"),
        (COMPLETIONS, {"prompt": "a", "model": "gpt-4"}, 404, "'gpt-4' is not served here"),
        (COMPLETIONS, b'{"prompt": "' + b"a" * (1 << 20) + b'"}', 413, "over 1024 KiB"),
        (CHAT, {"messages": []}, 400, "messages: [] is empty"),
        (CHAT, {"messages": [{"role": "user", "content": "?"}, {"role": "assistant"}]}, 400, "nothing is called"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "image_url"),
        (CHAT, {"messages": [{"role": "usr", "content": "?"}]}, 400, "nobody is called 'usr'. Did you mean 'user'?"),
        (CHAT, {"messages": [{"role": "user", "content": "?"}], "response_format": {"type": "xml"}}, 400, "response_format.type: 'xml'"),
        (CHAT, {**ASK, "response_format": {"type": "json_schema", "json_schema": {"type": "integer"}}}, 400, "it holds no schema"),
        (CHAT, {**ASK, "response_format": {"type": "json_schema"}}, 400, "it holds no schema"),
        (CHAT, {**ASK, "response_format": {"type": "text", "json_schema": {"schema": {}}}}, 400, "no effect with type=text"),
        (CHAT, {**ASK, "response_format": {"type": "json_object"}, "regex": "a"}, 400, "response_format: regex says too"),
        (CHAT, {**ASK, "response_format": {"type": "json_object"}, "json_schema": "{}"}, 400, "response_format: json_schema says too"),
        (CHAT, {**ASK, "max_tokens": 2, "max_completion_tokens": 3}, 400, "both were given"),
        (CHAT, {**ASK, "continue_final_message": True}, 400, "the last message is no text of the assistant"),
        (CHAT, {**ASK, "add_generation_prompt": False}, 400, "false contradicts continue_final_message=false"),
        (CHAT, {**ASK, "stream_options": {"include_usage": True}}, 400, "no effect without stream=true"),
        (COMPLETIONS, b'{"prompt": "a", "prompt": "b"}', 400, "'prompt' is given twice"),
        (COMPLETIONS, b'{"prompt": ' + b"[" * 300 + b"]" * 300 + b"}", 400, "nested too deeply"),
        (COMPLETIONS, {"prompt": "a", "seed": 1 << 70}, 400, "seed: a number of 71 bits"),
        (COMPLETIONS, {"prompt": [1, 2.5]}, 400, "prompt: [1, 2.5] is no prompt. Give a text, token ids, or several of either."),
        (COMPLETIONS, {"prompt": "a", "regex": "[ab"}, 400, "unclosed character class"),
        (CHAT, {"messages": [{"role": "user", "content": "?"}], "tool_choice": "required"}, 400, "tool_choice"),
        (CHAT, {"messages": [{"role": "user", "content": "?"}], "top_logprobs": 2}, 400, "without logprobs=true"),
        ("/v1/images", {}, 404, "Not Found"),
        ("/health", {}, 405, "Method Not Allowed"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_be_answered_is_told_in_openais_shape(client: httpx.Client, path: str, body: Any, status: int, says: str) -> None:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    found = client.post(path, content=data)
    error = found.json()["error"]
    assert (found.status_code, sorted(error)) == (status, ["code", "message", "param", "type"]) and says in error["message"]
    allowed = found.headers.get("Allow")
    assert error["message"].endswith(".") and (set(allowed.split(", ")) if allowed else None) == (
        {"GET", "HEAD"} if status == 405 else None
    )
    assert (error["param"] is None) == (status in (404, 405) and "model" not in body)
    assert error["param"] != "config", "which is no key of a request"


def test_labels_of_a_request_change_no_answer(client: httpx.Client) -> None:
    drawn = {**ASK, "seed": 3, "max_tokens": 8, "user": "me"}
    labels = {"metadata": {"of": "a test"}, "store": False, "service_tier": "auto", "safety_identifier": "me", "prompt_cache_key": "k"}
    assert choices(client, CHAT, drawn) == choices(client, CHAT, drawn | labels)
    assert client.post(CHAT, json={**drawn, "store": True}).json()["error"]["param"] == "store"


def test_a_probe_by_head_is_answered(client: httpx.Client) -> None:
    assert [client.head(path).status_code for path in ("/health", "/metrics", "/v1/models", "/")] == [200] * 4


def test_a_key_is_asked_for_and_other_sites_are_refused(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVED_KEY", "s3cret")
    with serve(key_env="SERVED_KEY") as client:
        bearer = {"Authorization": "Bearer s3cret"}
        statuses = [client.get("/v1/models", headers=headers).status_code for headers in ({}, {"Authorization": "Bearer x"}, bearer)]
        assert statuses == [401, 401, 200]
        served = client.get("/v1/models", headers=bearer).json()["data"][0]
        assert client.get(f"/v1/models/{served['id']}", headers=bearer).json() == served
        assert client.get("/v1/models/another", headers=bearer).status_code == 404
        assert client.get("/health").status_code == client.get("/").status_code == 200
        for headers in ({"Origin": "http://evil.example"}, {"Host": "evil.example"}, {"Origin": "http://["}, {"Host": "["}):
            assert client.get("/v1/models", headers=bearer | headers).status_code == 403


def test_a_full_queue_refuses_and_a_client_that_leaves_makes_room(serve: Serve) -> None:
    body = {"prompt": "a", "max_tokens": 4000, "temperature": 0, "logit_bias": {"258": -100, "257": -100, "256": -100}}
    with serve(queue=1) as client, client.stream("POST", COMPLETIONS, json=body | {"stream": True}) as first:
        lines = first.iter_lines()
        next(lines)
        full = client.post(COMPLETIONS, json=body)
        assert (full.status_code, full.headers["Retry-After"]) == (429, "1")
        first.close()
        began = time.monotonic()
        while (last := client.post(COMPLETIONS, json=body | {"max_tokens": 3})).status_code == 429:
            assert time.monotonic() - began < 20, "the place of who left is still taken"
        assert last.status_code == 200


def test_a_server_that_shuts_down_says_that_it_is_its_own_doing(serve: Serve) -> None:
    """Seen to be called an invalid_request_error."""
    others = set(threading.enumerate())
    with serve() as client:
        for thread in set(threading.enumerate()) - others:
            if isinstance(thread, Worker):
                thread.draining = True
        found = client.post(COMPLETIONS, json={"prompt": "a"})
        error = found.json()["error"]
        assert (found.status_code, error["type"], error["code"]) == (503, "server_error", "shutting_down")
        assert client.get("/health").json() == {"status": "draining"}


def test_metrics_count_what_was_done(client: httpx.Client) -> None:
    def count(name: str) -> float:
        return float(next(line.split()[-1] for line in client.get("/metrics").text.splitlines() if line.startswith(name)))

    names = ("lm_generated_tokens_total", "lm_prompt_tokens_total", "lm_request_seconds_count")
    before = [count(name) for name in names]
    choices(client, COMPLETIONS, {"prompt": [65, 66], "max_tokens": 7, "logit_bias": {"258": -100, "257": -100, "256": -100}})
    assert [count(name) - n for name, n in zip(names, before, strict=True)] == [7, 2, 1]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_is_counted_and_one_that_stays_is_not(client: httpx.Client, stream: bool) -> None:
    """Of those that left a stream none was counted."""

    def left() -> int:
        return int(next(line.split()[-1] for line in client.get("/metrics").text.splitlines() if line.startswith("lm_requests_cancelled")))

    before, body = left(), {"prompt": "a", "stream": stream, "logit_bias": {"258": -100, "257": -100, "256": -100}}
    client.post(COMPLETIONS, json=body | {"max_tokens": 3})
    assert left() == before
    data = json.dumps(body | {"max_tokens": 4000}).encode()
    with socket.create_connection((client.base_url.host, client.base_url.port)) as leaving:
        leaving.sendall(b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s" % (COMPLETIONS.encode(), len(data), data))
        time.sleep(0.1)
    began = time.monotonic()
    while left() == before:
        assert time.monotonic() - began < 20, "who left was not counted"
        time.sleep(0.01)
    assert left() == before + 1


def test_weights_that_give_nan_are_an_error_of_the_server(serve: Serve, model: DecoderLM) -> None:
    broken = copy.deepcopy(model)
    with torch.no_grad():
        broken.blocks[1].ffn.down.weight[0, 0] = float("nan")
    with serve(broken) as client:
        found = client.post(COMPLETIONS, json={"prompt": "a"})
        assert found.status_code == 500 and "NaN" in found.json()["error"]["message"]
        assert client.get("/health").json() == {"status": "ok"}


def test_without_max_tokens_an_answer_is_as_long_as_there_is_room(serve: Serve) -> None:
    """Also where a context has less room than the usual 256. Seen to be refused."""
    with serve(tokens=40) as client:
        found = client.post(COMPLETIONS, json={"prompt": "abc", "seed": 0})
        assert found.status_code == 200 and found.json()["usage"]["total_tokens"] <= 40
        assert client.post(COMPLETIONS, json={"prompt": "abc", "max_tokens": 256}).status_code == 400


@pytest.mark.slow
def test_a_tokenizer_whose_library_panics_does_not_end_the_model_s_thread(serve: Serve) -> None:
    """Seen to fail: the thread ended, and no request behind that one was answered."""
    raw = RawTokenizer(models.BPE(vocab={"x": 0, "</s>": 1}, merges=[]))
    raw.decoder = decoders.Sequence([decoders.Fuse(), decoders.Replace(Regex(r"(\w+\w+)+\b\B"), "")])
    with serve(spoken=Tokenizer(raw, Specials(None, "</s>", None))) as client:
        asked = {"prompt": "x", "logit_bias": {"1": -100}, "max_tokens": 60}
        found = client.post("/v1/completions", json=asked, timeout=20)
        assert found.status_code == 400 and "the tokenizers library breaks on this text" in found.json()["error"]["message"]
        found = client.post("/v1/completions", json=asked | {"max_tokens": 2}, timeout=20)
        assert found.status_code == 200 and found.json()["choices"][0]["text"] == "xx"
