"""Connections that wait for no client forever: one that sends no request, or takes nothing of its answer, would hold its place for good."""

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


def patient(seconds: float) -> type[H11Protocol]:
    """Returns uvicorn's protocol, in which a client has so many seconds to send a request, and to take more of an answer that waits."""

    class Patient(H11Protocol):
        _request: asyncio.TimerHandle | None = None
        _answer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._expect()

        def on_response_complete(self) -> None:
            self._expect()
            super().on_response_complete()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._answer = self.loop.call_later(seconds, self.transport.abort)

        def resume_writing(self) -> None:
            _cancel(self._answer)
            super().resume_writing()

        def connection_lost(self, exc: Exception | None) -> None:
            _cancel(self._request)
            _cancel(self._answer)
            super().connection_lost(exc)

        def _expect(self) -> None:
            _cancel(self._request)
            self._request = self.loop.call_later(seconds, self._close)

        def _close(self) -> None:
            if self.conn.their_state in (h11.IDLE, h11.SEND_BODY):  # else the request is here, and is being answered
                self.transport.abort()

    return Patient


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
