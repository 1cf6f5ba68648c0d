"""The thread that the model runs in, and the way of its answers into the event loop."""

import asyncio
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from queue import SimpleQueue

from lm.errors import LmError, NumericsError, ResourceError, internal
from lm.generation.embed import Vector
from lm.generation.engine import Engine, Event, Finish, Request
from lm.generation.sampling import Logprob
from lm.generation.text import Continuation
from lm.nn.device_memory import out_of_memory
from lm.printing import note
from lm.serving.asked import Asked, Refusal, Texts
from lm.serving.metrics import Metrics

_UNTOLD = float("nan")  # in place of log p of a prompt's first token, which has no context


@dataclass
class Piece:
    """New text and tokens of a sample since its last piece; or, once pieces are added up, all of them."""

    index: int
    text: str = ""
    logprobs: list[Logprob] = field(default_factory=list)
    n_tokens: int = 0
    finish: Finish | None = None

    def add(self, more: "Piece") -> None:
        """Appends the next piece of the same sample to this one."""
        self.text, self.logprobs, self.n_tokens = self.text + more.text, self.logprobs + more.logprobs, self.n_tokens + more.n_tokens
        self.finish = more.finish


class Ticket:
    """A request that is being answered: the worker puts pieces in, the event loop takes them out."""

    def __init__(self, asked: Asked) -> None:
        self.asked, self._loop = asked, asyncio.get_running_loop()
        self._out: asyncio.Queue[Piece | LmError] = asyncio.Queue()
        self._texts: dict[int, Continuation] = {}
        self.n_open = sum(len(request.rows) for request in asked.requests)

    async def take(self) -> Piece:
        """Returns the next piece of any of its samples. Raises LmError where the request failed."""
        found = await self._out.get()
        if isinstance(found, LmError):
            self.n_open = 0  # nothing more comes
            raise found
        self.n_open -= found.finish is not None
        return found

    def put(self, what: Piece | LmError) -> None:
        """Hands a piece or an error to the event loop; called in the worker's thread."""
        with suppress(RuntimeError):  # the loop has ended, and nobody waits
            self._loop.call_soon_threadsafe(self._out.put_nowait, what)

    def piece(self, event: Event) -> Piece:
        """Returns the new text of the event's sample that is certain by now; `finish` is also set where a stop string ends it."""
        request, row = event.sample.request, event.sample.row
        found = [] if event.logprob is None else [event.logprob]
        piece = Piece(row.index, logprobs=found, n_tokens=int(event.token is not None), finish=event.finish)
        if row.index not in self._texts:
            self._texts[row.index] = self.asked.writer.text_of(row)
            piece.text = self.asked.echoes[row.index // request.cfg.n]
            piece.logprobs = ([Logprob(row.begin[0], _UNTOLD, []), *request.scored] if request.scores is not None else []) + found
        text = self._texts[row.index]
        if event.token is not None:
            piece.text += text.push(event.token)
        piece.finish = "stop" if text.stopped else piece.finish
        piece.text += text.finish() if piece.finish else ""
        return piece


class EmbeddingJob:
    """Texts that become vectors, a batch between two of the engine's steps."""

    def __init__(self, texts: Texts) -> None:
        self.done: Future[list[Vector]] = Future()
        """The vectors, in the order of the texts."""
        self.done.set_running_or_notify_cancel()  # from here on who waits for it cannot cancel it
        self._batches, self._found = texts.work.batches(), dict[int, Vector]()

    def step(self) -> bool:
        """Reads the next batch; returns whether all are read. Called in the worker's thread."""
        try:
            if (batch := next(self._batches, None)) is not None:
                self._found |= dict(batch)
                return False
            self.done.set_result([self._found[i] for i in sorted(self._found)])
        except LmError as error:  # of these texts alone
            self.done.set_exception(error)
        return True


class Worker(threading.Thread):
    """Steps the engine and the jobs while there is a request. Tickets come in by a queue, so that nothing is shared."""

    def __init__(self, engine: Engine, queue: int, metrics: Metrics) -> None:
        super().__init__(name="model", daemon=True)
        self.draining = False
        self._engine, self._queue, self._metrics = engine, queue, metrics
        self._inbox: SimpleQueue[tuple[str, Ticket | EmbeddingJob | None]] = SimpleQueue()
        self._open: set[Ticket | EmbeddingJob] = set()  # touched by the event loop only
        self._tickets: dict[Request, Ticket] = {}  # touched by the worker only, and so is the next
        self._jobs: deque[EmbeddingJob] = deque()

    @contextmanager
    def opened(self, work: Ticket | EmbeddingJob) -> Iterator[None]:
        """Hands a ticket's requests, or a job, to the worker, and cancels what is left of it behind the block. Raises Refusal where too
        many are open, or the server is shutting down."""
        if self.draining:
            raise Refusal(503, "server: it is shutting down and takes no more requests. Ask another one.", "shutting_down")
        if len(self._open) >= self._queue:
            raise Refusal(429, f"server: {len(self._open)} requests are in hand, and no more are taken. Try again later.", "queue_full")
        self._open.add(work)
        self._inbox.put(("add", work))
        try:
            yield
        finally:
            self._open.discard(work)
            self._inbox.put(("cancel", work))

    def stop(self) -> None:
        """Ends the thread after its present step; unfinished requests are dropped."""
        self._inbox.put(("stop", None))
        self.join()

    def run(self) -> None:
        """Steps the engine and a job in turn until `stop`; an error of a step goes to all open tickets, and the thread goes on."""
        while self._read_inbox():
            try:
                for event in self._engine.step():
                    self._tell(event)
                if self._jobs:
                    over = self._jobs[0].step()
                    self._jobs.rotate(-1)
                    if over:
                        self._jobs.pop()
            except Exception as error:
                self._lose(error)

    def _read_inbox(self) -> bool:
        """Takes in added and cancelled tickets and jobs, and waits for one where nothing is to be done; returns False when the thread
        shall end."""
        while not self._inbox.empty() or not (self._engine.running or self._engine.waiting or self._jobs):
            self._metrics.running, self._metrics.waiting = self._engine.running, self._engine.waiting
            what, work = self._inbox.get()
            if work is None:
                return False
            match what, work:
                case "add", EmbeddingJob():
                    self._jobs.append(work)
                case _, EmbeddingJob():
                    self._jobs = deque(job for job in self._jobs if job is not work)
                case "add", _:
                    for request in work.asked.requests:
                        self._tickets[request] = work
                        self._engine.add(request)
                case _:
                    self._engine.cancel(work.asked.requests)
                    for request in work.asked.requests:
                        self._tickets.pop(request, None)
        self._metrics.running, self._metrics.waiting = self._engine.running, self._engine.waiting
        return True

    def _tell(self, event: Event) -> None:
        """Puts what an event did into its ticket, unless that was cancelled meanwhile."""
        ticket = self._tickets.get(event.sample.request)
        if ticket is None:
            return
        piece = ticket.piece(event)
        if piece.finish is not None:
            self._engine.end(event.sample)
        self._metrics.tokens += piece.n_tokens
        nan = "model: its logits hold NaN or infinity, and no token can be drawn. Serve another checkpoint."
        ticket.put(NumericsError(nan) if piece.finish == "error" else piece)

    def _lose(self, error: Exception) -> None:
        """Puts the error into all open tickets and jobs, and empties the engine."""
        known = error if isinstance(error, LmError) else internal(error)
        lost = ResourceError("server: an allocation failed. Ask for less, or serve with fewer rows.") if out_of_memory(error) else known
        note(lost.sentence)
        self._engine.clear()
        for ticket in set(self._tickets.values()):
            ticket.put(lost)
        for job in self._jobs:
            job.done.set_exception(lost)
        self._tickets.clear()
        self._jobs.clear()
