"""HttpConnection: uvicorn's HTTP connection with further limits.

It limits the size and time of a request's headers, the time in which a client reads nothing of its answer, and the
number of connections. At that number the connection that has been idle for longest is closed for a new one. So clients
that only hold connections open, for which they need no key, do not keep others out. Running requests are never cut off.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from dovetail.serve.errors import RETRY_SECONDS, ApiError

HEAD_BYTES = 64 * 1024  # of the request line and the headers
HEAD_SECONDS = 10.0  # to send them, from the connection or from the first byte of a further request
STALL_SECONDS = 300.0  # without reading anything of an answer, before the connection is closed
CLOSE_SECONDS = 1.0  # in which the data of a refused client is read and dropped, so that it sees the answer


class HttpConnection(HttpToolsProtocol):
    """Serve one connection of a client; at most `most` may be open."""

    def __init__(self, *args: Any, most: int, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._most = most
        self._timer: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None
        self._idle_since = self.loop.time()
        self._in_head = True  # the connection or a request's headers have begun and are not complete
        self._size = 0  # bytes of the headers so far, without those of the last piece
        self._completed = False  # a request of the last piece: the bytes before these headers are not theirs
        self._refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first request's headers; close an idle connection if there are too many."""
        super().connection_made(transport)
        self._await_head()
        if len(self.connections) > self._most:
            self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers."""
        self._stop_timer()
        self._stop_stall()
        super().connection_lost(exc)

    @property
    def _is_idle(self) -> bool:
        """Return whether no request is running."""
        return self.cycle is None or self.cycle.response_complete

    def _make_room(self) -> None:
        """Close the connection that has been idle for longest, or this one if all others are busy."""
        others = [each for each in self.connections if isinstance(each, HttpConnection) and each is not self]
        idle = [each for each in others if each._is_idle and not each.transport.is_closing()]
        if idle:
            oldest = min(idle, key=lambda each: each._idle_since)
            oldest.transport.abort()
            self.connections.discard(oldest)  # `connection_lost` is called later, after further connections
        else:
            message = f"the limit of {self._most} open connections is reached; try again later"
            self._refuse(ApiError(503, message, code="too_many_connections", retry_after=RETRY_SECONDS))

    def on_response_complete(self) -> None:
        """Note when the connection became idle."""
        self._idle_since = self.loop.time()
        super().on_response_complete()
        self._limit_closing()

    def pause_writing(self) -> None:
        """Start the timer of a client that does not read."""
        super().pause_writing()
        self._stall = self.loop.call_later(STALL_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """Stop that timer."""
        self._stop_stall()
        super().resume_writing()
        self._limit_closing()

    def _limit_closing(self) -> None:
        """Start the timer if the connection is closing: it ends when all is written, for which the client must read."""
        if self.transport.is_closing() and self in self.connections and self._stall is None:
            self._stall = self.loop.call_later(STALL_SECONDS, self.transport.abort)

    def _stop_stall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def data_received(self, data: bytes) -> None:
        """Pass data on, and refuse headers that are too large."""
        if self._refused:
            return
        self._completed = False
        super().data_received(data)
        if self._in_head and not self._completed and not self._refused:  # then the whole piece belongs to the headers
            self._size += len(data)
            if self._size > HEAD_BYTES:
                self._refuse_head()
        self._limit_closing()

    def on_message_begin(self) -> None:
        """Start the timer of a further request's headers."""
        super().on_message_begin()
        self._size = 0
        if not self._in_head:  # a further request on this connection
            self._in_head = True
            self._await_head()

    def on_headers_complete(self) -> None:
        """Check the size of the headers."""
        self._in_head = False
        self._stop_timer()
        if len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers) > HEAD_BYTES:
            self._refuse_head()
        else:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Drop the body of a refused request."""
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """End a request that was not refused."""
        self._completed = True
        if not self._refused:
            super().on_message_complete()

    def _await_head(self) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(HEAD_SECONDS, self._close)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _close(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()
            self._limit_closing()

    def _refuse_head(self) -> None:
        message = f"the request's headers must have at most {HEAD_BYTES} bytes"
        self._refuse(ApiError(431, message, code="headers_too_large"))

    def _refuse(self, error: ApiError) -> None:
        """Send the error, unless an earlier request of this connection is being answered, and close."""
        self._refused = True
        self._stop_timer()
        if not self._is_idle:
            self._close()
            return
        answer = error.response("")
        head = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}".encode(), b"connection: close"]
        head += [name + b": " + value for name, value in answer.raw_headers]
        self.transport.write(b"\r\n".join([*head, b"", bytes(answer.body)]))
        self.loop.call_later(CLOSE_SECONDS, self._close)
