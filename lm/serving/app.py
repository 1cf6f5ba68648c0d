"""The endpoints of OpenAI's API, on FastAPI. Long work is done elsewhere: the model runs in its thread, templates and tokenizers in
another."""

import asyncio
import hmac
import json
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import SplitResult, urlsplit

from fastapi import Depends, FastAPI, Request, Response
from fastapi.responses import FileResponse, JSONResponse, PlainTextResponse, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lm.errors import ConfigError, LmError, ResourceError, internal
from lm.printing import note
from lm.schema import Tree
from lm.serving.answers import Answer, of_vectors
from lm.serving.asked import Asked, Reader, Refusal
from lm.serving.metrics import Metrics
from lm.serving.worker import EmbeddingJob, Piece, Ticket, Worker

PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/v1/models", "/health", "/metrics", "/")

T = TypeVar("T")
_PAGE = Path(__file__).with_name("page.html")
_KINDS = {400: "invalid_request_error", 401: "authentication_error", 429: "rate_limit_error", 503: "server_error"}


class Door:
    """Decides which requests are let in: by host, origin, key and size."""

    def __init__(self, hosts: set[str] | None, key: str | None, most_bytes: int) -> None:
        """hosts: names that requests may call this server by, without ports; None: any.  key: the one that requests to /v1 must bring;
        None: they need none."""
        self._hosts, self._key, self._most_bytes = hosts, key, most_bytes

    def check(self, request: Request) -> None:
        """Raises Refusal for requests from web pages of other sites, which a browser lets through, and for those without the key."""
        host, origin = request.headers.get("host", ""), request.headers.get("origin")
        if self._hosts is not None and _split(f"//{host}").hostname not in self._hosts:
            raise Refusal(403, f"host: {host[:80]!r} is not a name of this server. Use one of {', '.join(sorted(self._hosts))}.")
        if origin is not None and _split(origin).netloc != host:
            raise Refusal(403, f"origin: {origin[:80]!r} is another site, and only this server's own page may send. Ask without a browser.")
        given = request.headers.get("authorization", "").removeprefix("Bearer ").encode()
        if self._key is not None and request.url.path.startswith("/v1/") and not hmac.compare_digest(given, self._key.encode()):
            raise Refusal(401, "authorization: the key is missing, or another one. Send 'Authorization: Bearer KEY'.", "invalid_api_key")

    async def body(self, request: Request) -> bytes:
        """Returns the request's body. Raises Refusal where it is too large."""
        data = bytearray()
        async for chunk in request.stream():
            data += chunk
            if len(data) > self._most_bytes:
                raise Refusal(413, f"body: it is over {self._most_bytes >> 10} KiB. Send a smaller one.", "request_too_large")
        return bytes(data)


class Service:
    """Answers requests with one model."""

    def __init__(self, reader: Reader, worker: Worker, door: Door, metrics: Metrics) -> None:
        self.worker, self.metrics = worker, metrics
        self._reader, self._door = reader, door
        self._thread = ThreadPoolExecutor(1, "reader")

    @asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        """Runs the model's thread for as long as the application."""
        self.worker.start()
        try:
            yield
        finally:
            self.worker.stop()
            self._thread.shutdown(wait=False, cancel_futures=True)

    async def complete(self, request: Request) -> Response:
        """/v1/completions."""
        return await self._answer(request, self._reader.completion)

    async def chat(self, request: Request) -> Response:
        """/v1/chat/completions."""
        return await self._answer(request, self._reader.chat_completion)

    async def embed(self, request: Request) -> Response:
        """/v1/embeddings."""
        began, data, loop = time.monotonic(), await self._door.body(request), asyncio.get_running_loop()
        texts = await loop.run_in_executor(self._thread, self._reader.texts, data)
        job = EmbeddingJob(texts)
        with self.worker.opened(job):
            self.metrics.prompt_tokens += texts.n_tokens
            vectors = await self._unless_left(request, asyncio.wrap_future(job.done))
        if vectors is None:
            return Response(status_code=499)
        self.metrics.whole_s.add(time.monotonic() - began)
        reply = await loop.run_in_executor(self._thread, of_vectors, texts, vectors, self._reader.name)
        return Response(reply, media_type="application/json")

    async def models(self) -> Tree:
        """/v1/models, with two more keys that the page reads."""
        return {"object": "list", "data": [await self.model(self._reader.name)]}

    async def model(self, name: str) -> Tree:
        """/v1/models/NAME."""
        if name != self._reader.name:
            raise Refusal(404, f"model: {name[:80]!r} is not served here. Ask for {self._reader.name}.")
        entry = {"id": name, "object": "model", "created": 0, "owned_by": "lm"}
        return {**entry, "chat": self._reader.chat is not None, "context": self._reader.writer.model.max_seq_len}

    async def health(self) -> Tree:
        """/health, without a key."""
        if not self.worker.is_alive():
            raise Refusal(503, "server: the model's thread has ended. Start it again.")
        return {"status": "draining" if self.worker.draining else "ok"}

    async def show_metrics(self) -> Response:
        """/metrics, without a key."""
        return PlainTextResponse(self.metrics.text(), media_type="text/plain; version=0.0.4")

    async def page(self) -> Response:
        """/, the chat page."""
        policy = "default-src 'none'; connect-src 'self'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; frame-ancestors 'none'"
        return FileResponse(_PAGE, headers={"Content-Security-Policy": policy})

    async def _answer(self, request: Request, read: Callable[[bytes], Asked]) -> Response:
        began, data = time.monotonic(), await self._door.body(request)
        asked = await asyncio.get_running_loop().run_in_executor(self._thread, read, data)
        ticket, answer = Ticket(asked), Answer(asked, self._reader.name)
        stack = ExitStack()
        stack.enter_context(self.worker.opened(ticket))
        self.metrics.prompt_tokens += asked.n_prompt
        if asked.body.stream:
            stack.callback(self._count_if_left, ticket)
            return _Stream(self._chunks(ticket, answer, began), stack)
        with stack:
            samples = await self._unless_left(request, asyncio.ensure_future(self._whole(ticket, began)))
            return Response(status_code=499) if samples is None else JSONResponse(answer.whole(samples))

    async def _unless_left(self, request: Request, whole: "asyncio.Future[T]") -> T | None:
        """Returns the result of `whole`; None where the client leaves first, which is counted."""
        gone = asyncio.ensure_future(_left(request))
        await asyncio.wait((whole, gone), return_when=asyncio.FIRST_COMPLETED)
        gone.cancel()
        if whole.done():
            return whole.result()
        whole.cancel()
        self.metrics.cancelled += 1
        return None

    def _count_if_left(self, ticket: Ticket) -> None:
        """Called when a stream has ended. Where samples are still open, the client has left, which is counted."""
        self.metrics.cancelled += ticket.n_open > 0

    async def _whole(self, ticket: Ticket, began: float) -> list[Piece]:
        """Returns the samples of a ticket, in their order, once all have ended.  began: when the request came, by time.monotonic."""
        found: dict[int, Piece] = {}
        async for piece in self._pieces(ticket, began):
            found.setdefault(piece.index, Piece(piece.index)).add(piece)
        return [found[index] for index in sorted(found)]

    async def _pieces(self, ticket: Ticket, began: float) -> AsyncIterator[Piece]:
        """Yields the pieces of a ticket as they come, and counts how long the first and all of them took.  began: as of `_whole`."""
        first = True
        while ticket.n_open:
            yield await ticket.take()
            if first:
                self.metrics.first_s.add(time.monotonic() - began)
                first = False
        self.metrics.whole_s.add(time.monotonic() - began)

    async def _chunks(self, ticket: Ticket, answer: Answer, began: float) -> AsyncIterator[str]:
        """Yields server-sent events; an error is sent as an event too, since the status line has gone out already."""
        seen: set[int] = set()
        n_tokens = 0
        try:
            async for piece in self._pieces(ticket, began):
                n_tokens += piece.n_tokens
                for chunk in answer.chunks(piece, piece.index not in seen):
                    yield _event(chunk)
                seen.add(piece.index)
            if ticket.asked.body.counts:
                yield _event(answer.last(n_tokens))
        except LmError as error:
            yield _event(_error_body(error.sentence, "server_error"))
        yield "data: [DONE]\n\n"


class _Stream(StreamingResponse):
    """A response of server-sent events that closes `stack` when the last one is sent or the client has left."""

    def __init__(self, events: AsyncIterator[str], stack: ExitStack) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-store"})
        self._stack = stack

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._stack:
            await super().__call__(scope, receive, send)


class Counted:
    """ASGI middleware that counts answers by path and status."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                path = scope["path"] if scope["path"] in PATHS else "other"
                self._metrics.requests[path, message["status"]] += 1
            await send(message)

        await self._app(scope, receive, sent if scope["type"] == "http" else send)


def build(service: Service, door: Door) -> FastAPI:
    """Returns the application."""
    app = FastAPI(title="lm", openapi_url=None, dependencies=[Depends(door.check)], lifespan=service.lifespan)
    posts: tuple[Callable[..., Any], ...] = (service.complete, service.chat, service.embed)
    endpoints = (*posts, service.models, service.health, service.show_metrics, service.page)
    for path, endpoint in zip(PATHS, endpoints, strict=True):
        app.add_api_route(path, endpoint, methods=["POST"] if endpoint in posts else ["GET", "HEAD"], response_model=None)
    app.add_api_route("/v1/models/{name:path}", service.model, methods=["GET", "HEAD"], response_model=None)
    app.add_middleware(Counted, metrics=service.metrics)
    for error in (Refusal, LmError, HTTPException, ClientDisconnect, Exception):
        app.add_exception_handler(error, _refused)
    return app


async def _refused(request: Request, error: Exception) -> Response:
    """Returns the answer to any error, in OpenAI's shape."""
    if isinstance(error, ClientDisconnect):
        return Response(status_code=499)
    headers: dict[str, str] = {}
    if isinstance(error, HTTPException):
        headers |= error.headers or {}  # of 405, Allow
        error = Refusal(error.status_code, f"{request.method} {request.url.path[:80]}: {error.detail}. Paths: {', '.join(PATHS)}.")
    if isinstance(error, Refusal):
        headers |= {"Retry-After": "1"} if error.status in (429, 503) else {}
        kind = _KINDS.get(error.status, "invalid_request_error")
        return JSONResponse(_error_body(error.sentence, kind, error.code), error.status, headers)
    if isinstance(error, ConfigError):
        return JSONResponse(_error_body(error.sentence, "invalid_request_error"), 400)
    known = error if isinstance(error, LmError) else internal(error)
    if known is not error:
        note(known.sentence)
    return JSONResponse(_error_body(known.sentence, "server_error"), 503 if isinstance(known, ResourceError) else 500)


def _error_body(sentence: str, kind: str, code: str | None = None) -> Tree:
    """Returns an error as OpenAI's API writes it.  sentence: begins with the key that is wrong, and a colon."""
    param = sentence.partition(":")[0]  # of a path that there is not, "GET /..."
    return {"error": {"message": sentence, "type": kind, "param": None if " " in param else param, "code": code}}


def _event(tree: Tree) -> str:
    return f"data: {json.dumps(tree, ensure_ascii=False)}\n\n"


async def _left(request: Request) -> None:
    """Returns when the client has gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _split(url: str) -> SplitResult:
    """Returns the parts of a URL; for a text that is no URL those of an empty one."""
    try:
        return urlsplit(url)
    except ValueError:
        return urlsplit("")
