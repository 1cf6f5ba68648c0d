"""/v1/embeddings."""

import base64
import json
import threading
from typing import Any

import httpx
import numpy as np
import pytest
import torch

import lm as api
from lm.data.tokenizer.tokenizer import Tokenizer
from lm.nn.model_config import model_config
from lm.nn.transformer import LM, DecoderLM
from lm.testing.models import BASE
from tests.nn.models import random_model, with_kinds
from tests.serving.conftest import Serve

EMBEDDINGS = "/v1/embeddings"
TEXTS = ["the sea", "", "a" * 200, "x", "the sea is wet"]


def kind_of(kind: str) -> LM:
    return random_model(model_config(with_kinds({**BASE, "kind": kind, "vocab_size": 320, "max_seq_len": 64})))


def found(client: httpx.Client, body: dict[str, Any]) -> list[list[float]]:
    reply = client.post(EMBEDDINGS, json=body)
    assert reply.status_code == 200, reply.text
    assert [each["index"] for each in reply.json()["data"]] == [*range(len(reply.json()["data"]))]
    return [each["embedding"] for each in reply.json()["data"]]


def close(vectors: list[list[float]], expected: torch.Tensor) -> None:
    """A float32 that is rounded otherwise in another batch moves a component by some 1e-7."""
    torch.testing.assert_close(torch.tensor(vectors), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_vectors_are_those_of_embed_while_text_is_drawn(client: httpx.Client, model: DecoderLM, tokenizer: Tokenizer) -> None:
    """From texts, ids, either form of numbers, and beside a completion, which is as it is alone."""
    asked = {"prompt": "abc", "max_tokens": 200, "seed": 3, "logit_bias": {"258": -100, "257": -100, "256": -100}}
    alone, beside = client.post("/v1/completions", json=asked).json(), list[Any]()
    other = threading.Thread(target=lambda: beside.append(client.post("/v1/completions", json=asked).json()))
    other.start()
    expected = api.embed(model, tokenizer, TEXTS)
    close(found(client, {"input": TEXTS}), expected)
    other.join()
    assert beside[0]["choices"] == alone["choices"]
    close(found(client, {"input": "x"}), expected[3:4])
    ids = [*tokenizer.prefix, *tokenizer.encode("x")]
    assert found(client, {"input": ids}) == found(client, {"input": [ids], "model": "tiny", "user": "me"}) == found(client, {"input": "x"})
    [coded] = client.post(EMBEDDINGS, json={"input": "x", "encoding_format": "base64"}).json()["data"]
    assert np.frombuffer(base64.b64decode(coded["embedding"]), "<f4").tolist() == pytest.approx(expected[3].tolist(), abs=1e-5)
    [short] = client.post(EMBEDDINGS, json={"input": "x", "dimensions": 5}).json()["data"]
    assert short["embedding"] == pytest.approx((expected[3][:5] / expected[3][:5].norm()).tolist(), abs=1e-5)
    usage = client.post(EMBEDDINGS, json={"input": ["x", "the sea"], "dimensions": model.cfg.d_model}).json()["usage"]
    n = 8 + 2 * len(tokenizer.prefix)
    assert usage == {"prompt_tokens": n, "total_tokens": n}


def test_the_official_client_reads_vectors(client: httpx.Client, model: DecoderLM, tokenizer: Tokenizer) -> None:
    from openai import OpenAI

    reply = OpenAI(base_url=f"{client.base_url}/v1", api_key="none").embeddings.create(model="tiny", input=TEXTS)
    close([each.embedding for each in reply.data], api.embed(model, tokenizer, TEXTS))


def test_what_has_no_vector_is_told(client: httpx.Client, model: DecoderLM) -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({}, "input: "),
        ({"input": []}, "input: it is an empty list"),
        ({"input": [[65], []]}, "input: number 2 of 2 has no tokens"),
        ({"input": ["a", 1]}, 'input: ["a", 1] is no input. Give a text, token ids, or several of either.'),
        ({"input": [400]}, "input: 400 is not one of the"),
        ({"input": "a" * 257}, f"the model reads {model.max_seq_len}. Shorten it."),
        ({"input": ["a"] * 2049}, "input: 2049 texts are too many for a request; at most 2048"),
        ({"input": ["b", "a\ud800"]}, "does not fit. The value must be text in UTF-8"),
        ({"input": "a", "dimensions": 999}, f"dimensions: 999 is given, and a vector of the model has {model.cfg.d_model} numbers"),
        ({"input": "a", "dimensions": 0}, "dimensions: 0"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format: 'int8'"),
        ({"input": "a", "temperature": 1.0}, "temperature: there is no such key"),
        ({"input": "a", "model": "gpt-4"}, "'gpt-4' is not served here"),
    ]
    for body, says in refused:
        reply = client.post(EMBEDDINGS, content=json.dumps(body).encode())
        error = reply.json()["error"]
        assert reply.status_code == (404 if "model" in body else 400) and sorted(error) == ["code", "message", "param", "type"], error
        assert says in error["message"] and error["param"].partition(".")[0] in (*body, "input"), error


def test_an_encoder_has_vectors_alone_and_an_encoder_decoder_none(serve: Serve, tokenizer: Tokenizer) -> None:
    encoder = kind_of("encoder")
    with serve(encoder) as client:
        close(found(client, {"input": ["the sea", "a"]}), api.embed(encoder, tokenizer, ["the sea", "a"]))
        for path, body in (("completions", {"prompt": "a"}), ("chat/completions", {"messages": [{"role": "user", "content": "a"}]})):
            refused = client.post(f"/v1/{path}", json=body)
            assert refused.status_code == 400 and "the model is an encoder" in refused.json()["error"]["message"]
    both = kind_of("encoder_decoder")
    both.cfg = both.cfg.replace(start_token=0)
    with serve(both) as client:
        refused = client.post(EMBEDDINGS, json={"input": "a"})
        assert refused.status_code == 400 and "embed: the model is an encoder-decoder" in refused.json()["error"]["message"]


def test_weights_that_give_nan_fail_the_texts_alone(serve: Serve) -> None:
    broken = kind_of("encoder")
    with torch.no_grad():
        broken.blocks[1].ffn.down.weight[0, 0] = float("nan")
    with serve(broken) as client:
        for _ in range(2):
            reply = client.post(EMBEDDINGS, json={"input": "a"})
            assert reply.status_code == 500 and "NaN" in reply.json()["error"]["message"]
        assert client.get("/health").json() == {"status": "ok"}
