"""Connection: uvicorn's HTTP connection, with limits that uvicorn does not have: on the size and time of a request's
head, on the time in which a client takes nothing of its answer, and on the number of connections.

At that number the connection that has been idle for longest makes room for a new one. So clients that only hold
connections open, for which they need no key, do not keep others out; requests under way are never cut off."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from dovetail.serve.errors import RETRY_SECONDS, ApiError

HEAD_BYTES = 64 * 1024  # of the request line and the headers
HEAD_SECONDS = 10.0  # for a client to send them, from its connection or from the first byte of a further request
STALL_SECONDS = 300.0  # in which a client takes nothing of an answer, before its connection is closed
CLOSE_SECONDS = 1.0  # in which what a refused client still sends is read and dropped, so that it sees the answer


class HttpConnection(HttpToolsProtocol):
    """`most`: the connections that may be open at once."""

    def __init__(self, *args: Any, most: int, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._most = most
        self._timer: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None
        self._idle_since = self.loop.time()
        self._in_head = True  # the request's head has begun, or the connection has, and it is not complete
        self._size = 0  # bytes of the head that have come, without those of the last piece
        self._refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()
        if len(self.connections) > self._most:
            self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._stop_stall()
        super().connection_lost(exc)

    @property
    def _is_idle(self) -> bool:
        """Whether no request is under way."""
        return self.cycle is None or self.cycle.response_complete

    def _make_room(self) -> None:
        """Close the connection that has been idle for longest, or this one where all others are busy."""
        others = [each for each in self.connections if isinstance(each, HttpConnection) and each is not self]
        idle = [each for each in others if each._is_idle and not each.transport.is_closing()]
        if idle:
            oldest = min(idle, key=lambda each: each._idle_since)
            oldest.transport.abort()
            self.connections.discard(oldest)  # `connection_lost` comes later, and further connections before it
        else:
            message = f"this server has {self._most} connections open, and takes no more; try again later"
            self._refuse(ApiError(503, message, code="too_many_connections", retry_after=RETRY_SECONDS))

    def on_response_complete(self) -> None:
        self._idle_since = self.loop.time()
        super().on_response_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stall = self.loop.call_later(STALL_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        self._stop_stall()
        super().resume_writing()

    def _stop_stall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        super().data_received(data)
        if self._in_head and not self._refused:  # then all of the piece belongs to the head
            self._size += len(data)
            if self._size > HEAD_BYTES:
                self._refuse_head()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._size = 0
        if not self._in_head:  # a further request on this connection
            self._in_head = True
            self._await_head()

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._stop_timer()
        if len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers) > HEAD_BYTES:
            self._refuse_head()
        else:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._refused:
            super().on_message_complete()

    def _await_head(self) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(HEAD_SECONDS, self._too_late)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_late(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()

    def _refuse_head(self) -> None:
        message = f"the request's headers are larger than {HEAD_BYTES} bytes"
        self._refuse(ApiError(431, message, code="headers_too_large"))

    def _refuse(self, error: ApiError) -> None:
        """Send the error, unless an earlier request of this connection is still being answered, and close."""
        self._refused = True
        self._stop_timer()
        if not self._is_idle:
            self.transport.close()
            return
        answer = error.response("")
        head = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}".encode(), b"connection: close"]
        head += [name + b": " + value for name, value in answer.raw_headers]
        self.transport.write(b"\r\n".join([*head, b"", bytes(answer.body)]))
        self.loop.call_later(CLOSE_SECONDS, self.transport.close)
