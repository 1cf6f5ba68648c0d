"""Replies in the JSON of OpenAI's API, from pieces of text."""

import base64
import json
import math
import secrets
import time
from collections.abc import Sequence

from lm.data.tokenizer.stream import Stream
from lm.generation.embed import Vector, shortest
from lm.generation.sampling import Logprob
from lm.generation.text import primed
from lm.schema import Tree
from lm.serving.asked import Asked, Texts
from lm.serving.bodies import ChatBody
from lm.serving.calls import Said
from lm.serving.worker import Piece


class Answer:
    """The reply to one request, whole or in chunks. It has one more key, `seed`: a request sent again with this seed gets the same
    answer."""

    def __init__(self, asked: Asked, name: str) -> None:
        self._asked, self._cfg, self._tokenizer = asked, asked.writer.cfg, asked.writer.tokenizer
        self._chat = isinstance(asked.body, ChatBody)
        self._head = {
            "id": f"{'chatcmpl' if self._chat else 'cmpl'}-{secrets.token_hex(12)}", "created": int(time.time()), "model": name,
            "seed": self._cfg.seed,
        }  # fmt: skip
        self._said: dict[int, Said] = {}  # by sample
        self._read: dict[int, tuple[Stream, int]] = {}  # by sample: the stream that decodes its tokens, and how many characters it gave

    def whole(self, samples: Sequence[Piece]) -> Tree:
        """Returns the reply that holds all samples."""
        kind = "chat.completion" if self._chat else "text_completion"
        choices = [self._choice(sample, self._message(sample)) for sample in samples]
        return {**self._head, "object": kind, "choices": choices, "usage": self._usage(sum(sample.n_tokens for sample in samples))}

    def chunks(self, piece: Piece, first: bool) -> list[Tree]:
        """Returns the chunks that a stream sends for a piece.  first: it is the first piece of its sample.  Why a sample ends is told
        behind its calls of tools, as OpenAI does: its client takes a call for whole at the chunk after it."""
        parts = [self._choice(piece, self._delta(piece, first))]
        if parts[0].get("delta", {}).get("tool_calls"):
            parts.append(parts[0] | {"delta": {}, "logprobs": None})
            parts[0]["finish_reason"] = None
        return [{**self._head, "object": self._streamed, "choices": [part]} for part in parts]

    def last(self, n_tokens: int) -> Tree:
        """Returns a stream's last chunk, with the counts of tokens."""
        return {**self._head, "object": self._streamed, "choices": [], "usage": self._usage(n_tokens)}

    def _usage(self, n_tokens: int) -> Tree:
        """Returns the counts of tokens.  n_tokens: of all samples."""
        n = self._asked.n_prompt
        return {"prompt_tokens": n, "completion_tokens": n_tokens, "total_tokens": n + n_tokens}

    @property
    def _streamed(self) -> str:
        return "chat.completion.chunk" if self._chat else "text_completion"

    def _message(self, piece: Piece) -> Tree:
        text, calls = self._divided(piece)
        message: Tree = {"role": "assistant", "content": text if text or not calls else None}
        return {"message": message | {"tool_calls": calls}, **_called(piece)} if calls else {"message": message}

    def _delta(self, piece: Piece, first: bool) -> Tree:
        text, calls = self._divided(piece)
        delta: Tree = ({"role": "assistant"} if first else {}) | ({"content": text} if text or first else {})
        numbered = [{"index": number, **call} for number, call in enumerate(calls)]
        return {"delta": delta | {"tool_calls": numbered}, **_called(piece)} if calls else {"delta": delta}

    def _divided(self, piece: Piece) -> tuple[str, list[Tree]]:
        """Returns what the piece says, and, of a sample's last piece, the calls of tools in its text."""
        said = self._said.setdefault(piece.index, Said(self._asked.marks))
        text = said.push(piece.text)
        rest, calls = said.end() if piece.finish is not None else ("", [])
        return text + rest, calls

    def _choice(self, piece: Piece, said: Tree) -> Tree:
        """Returns a sample's part of a reply.  said: of a chat, the message or the piece of one."""
        found = piece.logprobs if self._cfg.logprobs is not None else None
        if self._chat:
            logprobs = None if found is None else {"content": [self._in_chat(each) for each in found]}
            return {"index": piece.index, "logprobs": logprobs, "finish_reason": piece.finish, **said}
        logprobs = None if found is None else self._in_lists(piece.index, found)
        return {"index": piece.index, "text": piece.text, "logprobs": logprobs, "finish_reason": piece.finish}

    def _in_lists(self, index: int, found: Sequence[Logprob]) -> Tree:
        """Returns logprobs as /v1/completions writes them: a list of each of their parts.  index: of the sample."""
        request = self._asked.requests[index // self._cfg.n]
        before = [] if request.scores is not None else request.rows[0].begin  # where they begin with the prompt
        stream, at = self._read.get(index) or (primed(self._tokenizer, before), 0)
        places = []
        for each in found:
            text, own = stream.push(each.token), self._tokenizer.decode([each.token])
            places.append(at + (len(text) - len(own)) * text.endswith(own))  # behind the text that a token before it left incomplete
            at += len(text)
        self._read[index] = stream, at
        return {
            "tokens": [self._name(each.token) for each in found],
            "token_logprobs": [_number(each.logprob) for each in found],
            "top_logprobs": [self._by_name(each) for each in found],
            "text_offset": places,
        }

    def _by_name(self, one: Logprob) -> dict[str, float] | None:
        """Returns log p by name of the likeliest tokens and of the token itself; of tokens with the same name, that of the likeliest."""
        if math.isnan(one.logprob):
            return None
        ranked = sorted({*one.top, (one.token, one.logprob)}, key=lambda each: each[1])  # of equal names the last one stays
        return {self._name(token): logprob for token, logprob in ranked}

    def _in_chat(self, one: Logprob) -> Tree:
        """Returns a logprob as /v1/chat/completions writes it."""
        top = [self._entry(token, logprob) for token, logprob in one.top]
        return {**self._entry(one.token, one.logprob), "top_logprobs": top}

    def _entry(self, token: int, logprob: float) -> Tree:
        data = self._bytes(token)
        return {"token": self._name(token), "logprob": _number(logprob), "bytes": None if data is None else list(data)}

    def _bytes(self, token: int) -> bytes | None:
        special = self._tokenizer.special_names.get(token)
        return special.encode() if special is not None else self._tokenizer.token_text(token)

    def _name(self, token: int) -> str:
        """Returns the text of a token; a part of a character is written as OpenAI does: bytes:\\xe2\\x82."""
        data = self._bytes(token)
        if data is None:
            return self._tokenizer.decode([token])
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def of_vectors(texts: Texts, vectors: Sequence[Vector], name: str) -> bytes:
    """Returns the reply to a request for vectors as JSON, which takes long to write where they are many.  name: of the model."""

    said: list[str | list[float]]
    if texts.body.encoding_format == "base64":
        said = [base64.b64encode(vector.astype("<f4").tobytes()).decode() for vector in vectors]
    else:
        said = [shortest(vector) for vector in vectors]
    data = [{"object": "embedding", "index": index, "embedding": each} for index, each in enumerate(said)]
    usage = {"prompt_tokens": texts.n_tokens, "total_tokens": texts.n_tokens}
    return json.dumps({"object": "list", "data": data, "model": name, "usage": usage}).encode()


def _called(piece: Piece) -> Tree:
    """Returns why a sample with calls of tools ends, where it is not cut."""
    return {"finish_reason": "tool_calls"} if piece.finish == "stop" else {}


def _number(logprob: float) -> float | None:
    """Returns log p for JSON: None for NaN, and a very low number for minus infinity, which JSON does not have."""
    return None if math.isnan(logprob) else max(logprob, -1e9)
