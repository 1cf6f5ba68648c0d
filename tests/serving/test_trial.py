"""A grammar that breaks llguidance, or never ends, is refused, and the server goes on."""

import json
from typing import Any

import httpx
import pytest

N = 9000
CHAIN = "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(N)) + f'\nr{N}: "x"'
DEEP = {"$defs": {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(N)} | {f"d{N}": {"type": "string"}}, "$ref": "#/$defs/d0"}
CRASH, TIME = r"its process ended with SIG", "it takes more than a second"
BOMBS: dict[str, tuple[dict[str, Any], str]] = {
    "rules": ({"grammar": CHAIN}, CRASH),
    "references": ({"json_schema": json.dumps(DEEP)}, CRASH),
    "options": ({"regex": "(a|b)?" * 100_000}, TIME),
    "memory": ({"regex": "(" + "a?" * 32_000 + ")*"}, f"{TIME}|{CRASH}"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BOMBS)
def test_a_grammar_that_breaks_its_library_does_not_end_the_server(client: httpx.Client, name: str) -> None:
    """Seen to fail: SIGSEGV ended the process of all requests, or no request was read for minutes."""
    form, why = BOMBS[name]
    answer = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 4, **form})
    assert answer.status_code == 400
    [key] = form
    assert answer.json()["error"]["message"].startswith(f"{key}: it is too large or too deep (")
    assert any(each in answer.text for each in why.split("|")), answer.text
    answer = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 4, "regex": "[xy]z"})
    assert answer.status_code == 200 and answer.json()["choices"][0]["text"] in ("xz", "yz")


def test_more_prompts_than_are_answered_are_not_read(client: httpx.Client) -> None:
    """Seen to fail: hundreds of thousands were encoded first, and nobody else was answered for seconds."""
    answer = client.post("/v1/completions", json={"prompt": ["a"] * 129})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "prompt: 129 prompts are too many for a request; at most 128. Ask for fewer."
