"""The server under load: nothing wrong, nothing lost, nothing kept; and whatever a body holds, the answer is no error of the server."""

import asyncio
import copy
import json
import random
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lm.data.tokenizer.tokenizer import Tokenizer
from lm.generation.config import SamplingConfig
from lm.generation.writer import Writer
from lm.nn.transformer import DecoderLM
from lm.schema import Tree, from_tree
from tests.serving.conftest import Serve

pytestmark = pytest.mark.slow
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BAD = [b"{", b'{"prompt": 1}', b'{"promt": "a"}', b'{"prompt": "a", "max_tokens": 99999}', b"\xff\xfe", b'{"prompt": "' + b"a" * (2 << 20)]


def body_of(draws: random.Random) -> Tree:
    options = [{"temperature": 0}, {"top_p": 0.9}, {"n": 2}, {"stop": ["e"]}, {"repetition_penalty": 1.2}]
    text = "".join(draws.choice("abcdefg hijk\n") for _ in range(draws.randint(0, 150)))
    return {"prompt": text, "max_tokens": draws.randint(1, 60), "seed": draws.randrange(5), **draws.choice(options)}


async def asks(client: httpx.AsyncClient, number: int, found: dict[str, list[Any]]) -> None:
    """One of five ways: whole, streamed, left in the middle, left at once, or bad."""
    draws = random.Random(number)
    body, way = body_of(draws), number % 5
    if way == 0:
        answer = await client.post(COMPLETIONS, content=draws.choice(BAD))
        found["refused"].append(answer.status_code)
    elif way == 1:
        try:
            await client.post(COMPLETIONS, json=body | {"max_tokens": 2000}, timeout=0.05)
        except httpx.TimeoutException:
            found["left"].append(number)
    elif way == 2:
        async with client.stream("POST", COMPLETIONS, json=body | {"stream": True, "max_tokens": 500}) as answer:
            async for _ in answer.aiter_lines():
                break
        found["left"].append(number)
    elif way == 3:
        parts: dict[int, str] = {}
        async with client.stream("POST", COMPLETIONS, json=body | {"stream": True}) as answer:
            async for line in answer.aiter_lines():
                for choice in json.loads(line[6:])["choices"] if line.startswith("data: {") else ():
                    parts[choice["index"]] = parts.get(choice["index"], "") + choice["text"]
        found["answered"].append((body, [parts[i] for i in sorted(parts)]))
    else:
        answer = await client.post(COMPLETIONS, json=body)
        found["answered"].append((body, [choice["text"] for choice in answer.json()["choices"]]))


async def load(url: str, n: int, clients: int) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {"refused": [], "left": [], "answered": []}
    numbers = iter(range(n))

    async def one() -> None:
        async with httpx.AsyncClient(base_url=url, timeout=120) as client:
            for number in numbers:
                await asks(client, number, found)

    await asyncio.gather(*(one() for _ in range(clients)))
    return found


def test_two_hundred_requests_of_32_clients_are_answered_as_alone(serve: Serve, model: DecoderLM, tokenizer: Tokenizer) -> None:
    with serve(rows=16) as client:
        found = asyncio.run(load(str(client.base_url), 200, 32))
        while "lm_rows_running 0" not in (told := client.get("/metrics").text) or "lm_prompts_waiting 0" not in told:
            pass
    assert (len(found["refused"]), len(found["left"]), len(found["answered"])) == (40, 80, 80)
    assert set(found["refused"]) == {400, 413}
    models = model, copy.deepcopy(model).double()  # the draw of one answer is so near to a tie that the rounding of float32 decides it
    for body, texts in found["answered"]:
        cfg = from_tree(SamplingConfig, {key: value for key, value in body.items() if key != "prompt"})
        assert texts in ([each.text for each in Writer(alone, tokenizer, cfg).complete([body["prompt"]])] for alone in models), body


def test_memory_stays_as_it_is_over_two_thousand_requests(client: httpx.Client) -> None:
    def ask(n: int) -> int:
        """Bytes of this process behind so many requests."""
        for i in range(n):
            assert client.post(COMPLETIONS, json={"prompt": f"abc{i}", "max_tokens": 4, "logprobs": 2}).status_code == 200
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    before = ask(300)
    assert ask(2000) - before < 8 << 20


LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4), max_leaves=8
)
KEYS = st.sampled_from(
    [
        *(
            "model",
            "prompt",
            "echo",
            "stream",
            "stream_options",
            "n",
            "max_tokens",
            "max_completion_tokens",
            "temperature",
            "top_k",
            "top_p",
        ),
        *("min_p", "seed", "stop", "logprobs", "top_logprobs", "logit_bias", "presence_penalty", "frequency_penalty", "repetition_penalty"),
        *("no_repeat_ngram", "messages", "tools", "tool_choice", "response_format", "user"),
    ]
)
LIKELY = st.fixed_dictionaries(
    {},
    optional={
        "prompt": st.text(max_size=20) | st.lists(st.integers(-2, 260), max_size=5) | st.lists(st.text(max_size=4), max_size=3),
        "messages": st.lists(
            st.fixed_dictionaries({"role": st.text(max_size=5) | st.just("user"), "content": st.text(max_size=9)}), max_size=3
        ),
        "max_tokens": st.integers(-1, 6),
        "n": st.integers(0, 3),
        "stop": st.lists(st.text(max_size=3), max_size=3) | st.text(max_size=3),
        "logprobs": st.integers(-1, 22) | st.booleans(),
        "echo": st.booleans(),
        "logit_bias": st.dictionaries(st.integers(-1, 300).map(str) | st.text(max_size=3), st.floats(-200, 200), max_size=3),
        "temperature": st.floats(0, 3),
        "tools": st.lists(st.dictionaries(st.text(max_size=4), VALUES, max_size=2), max_size=2),
    },
)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(path=st.sampled_from([COMPLETIONS, CHAT]), likely=LIKELY, odd=st.dictionaries(KEYS | st.text(max_size=5), VALUES, max_size=2))
def test_no_body_is_an_error_of_the_server(client: httpx.Client, path: str, likely: Tree, odd: Tree) -> None:
    body = {"max_tokens": 3, **likely, **odd}
    data = json.dumps(body).encode()
    found = client.post(path, content=data)
    assert found.status_code in (200, 400, 404), (found.status_code, found.text, data)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(path=st.sampled_from([COMPLETIONS, CHAT]), data=st.binary(max_size=60) | st.text('{}[]",:pro1.e-ntu\\', max_size=60).map(str.encode))
def test_no_bytes_are_an_error_of_the_server(client: httpx.Client, path: str, data: bytes) -> None:
    assert client.post(path, content=data).status_code in (200, 400)


def test_the_official_client_reads_every_answer(client: httpx.Client) -> None:
    from openai import BadRequestError, OpenAI

    api = OpenAI(base_url=f"{client.base_url}/v1", api_key="none")
    assert [model.id for model in api.models.list()] == ["tiny"]
    whole = api.completions.create(model="tiny", prompt="abc", max_tokens=9, seed=1, logprobs=2, extra_body={"top_k": 50})
    chunks = api.completions.create(model="tiny", prompt="abc", max_tokens=9, seed=1, stream=True, extra_body={"top_k": 50})
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert whole.usage is not None and whole.usage.completion_tokens <= 9 and whole.choices[0].logprobs is not None
    said = [{"role": "user", "content": "hi"}]
    answer = api.chat.completions.create(model="tiny", messages=said, max_completion_tokens=9, seed=1, logprobs=True, top_logprobs=2)  # type: ignore[arg-type]
    stream = api.chat.completions.create(model="tiny", messages=said, max_completion_tokens=9, seed=1, stream=True)  # type: ignore[arg-type]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == answer.choices[0].message.content
    for sent in (answer.choices[0].message, answer.choices[0].message.model_dump()):  # whose refusal, audio and so on are null
        chat: Any = [*said, sent, *said]
        assert api.chat.completions.create(model="tiny", messages=chat, max_completion_tokens=2).choices
    with pytest.raises(BadRequestError, match="Did you mean 'top_k'"):
        api.completions.create(model="tiny", prompt="a", extra_body={"topk": 3})
