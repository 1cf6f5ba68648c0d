"""A client that does not go on loses its place."""

import json
import socket
import time

import httpx
import pytest

from lm.data.tokenizer.tokenizer import Tokenizer
from tests.serving.conftest import Serve

SAYS = {"nothing": b"", "half of its headers": b"POST /v1/completions HTTP/1.1\r\nHost: localh", "half of its body": b"{"}


def connected(client: httpx.Client, takes: int | None = None) -> socket.socket:
    """takes: bytes that the system receives for it."""
    found = socket.socket()
    if takes is not None:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, takes)
    found.settimeout(20)
    assert client.base_url.port is not None
    found.connect(("127.0.0.1", client.base_url.port))
    return found


def request(body: bytes, size: int | None = None) -> bytes:
    return b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % (size or len(body)) + body


@pytest.mark.slow
@pytest.mark.parametrize("name", SAYS)
def test_a_client_that_sends_no_whole_request_is_closed(serve: Serve, name: str) -> None:
    """Seen to fail: it was waited for until it left."""
    said = request(SAYS[name], 100) if name == "half of its body" else SAYS[name]
    with serve(patience_s=1) as client, connected(client) as idle:
        began = time.monotonic()
        idle.sendall(said)
        assert idle.recv(1) == b""
        assert 0.9 < time.monotonic() - began < 10


@pytest.mark.slow
def test_a_stream_that_nobody_reads_leaves_its_place(serve: Serve, tokenizer: Tokenizer) -> None:
    """The answer is larger than what the system holds for it. Seen to fail: all others got 429 until the client left."""
    no_end = {str(tokenizer.eos): -100}
    body = {"prompt": "a", "max_tokens": 1500, "n": 8, "logprobs": 20, "logit_bias": no_end, "temperature": 0, "stream": True}
    with serve(patience_s=1, queue=1) as client, connected(client, takes=4096) as unread:
        unread.sendall(request(json.dumps(body).encode()))
        statuses, ends = [429], time.monotonic() + 60
        while statuses[-1] == 429 and time.monotonic() < ends:
            time.sleep(0.2)
            statuses.append(client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code)
        assert statuses[-1] == 200 and statuses.count(429) > 2
        assert "lm_requests_cancelled_total 1" in client.get("/metrics").text


@pytest.mark.slow
def test_an_answer_may_take_longer_than_a_client(serve: Serve, tokenizer: Tokenizer) -> None:
    """Its time begins anew with each request, and none runs while it is answered."""
    with serve(patience_s=1) as client:
        for n in (16, 48, 128):  # of which the first is slow enough on most machines
            asked = {"prompt": "a", "n": n, "max_tokens": 1200, "logit_bias": {str(tokenizer.eos): -100}}
            answers = [client.post("/v1/completions", json=asked) for _ in range(2)]
            assert [answer.status_code for answer in answers] == [200, 200]
            if (took := min(answer.elapsed.total_seconds() for answer in answers)) > 1.2:
                break
        assert took > 1.2
