"""Connection: uvicorn's HTTP connection, with limits on the size and the time of a request's head. uvicorn has neither:
a client that sends half a head would keep its socket, and a head of any size would be kept in memory."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from dovetail.serve.errors import ApiError

HEAD_BYTES = 64 * 1024  # of the request line and the headers
HEAD_SECONDS = 10.0  # for a client to send them, from its connection or from the first byte of a further request
CLOSE_SECONDS = 1.0  # in which what a refused client still sends is read and dropped, so that it sees the answer


class Connection(HttpToolsProtocol):
    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._timer: asyncio.TimerHandle | None = None
        self._in_head = True  # the request's head has begun, or the connection has, and it is not complete
        self._size = 0  # bytes of the head that have come, without those of the last piece
        self._refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        super().data_received(data)
        if self._in_head and not self._refused:  # then all of the piece belongs to the head
            self._size += len(data)
            if self._size > HEAD_BYTES:
                self._refuse()

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
            self._refuse()
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

    def _refuse(self) -> None:
        """Answer 431, unless an earlier request of this connection is still being answered, and close."""
        self._refused = True
        self._stop_timer()
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.close()
            return
        error = ApiError(431, f"the request's headers are larger than {HEAD_BYTES} bytes", code="headers_too_large")
        answer = error.response("")
        head = [b"HTTP/1.1 431 Request Header Fields Too Large", b"connection: close"]
        head += [name + b": " + value for name, value in answer.raw_headers]
        self.transport.write(b"\r\n".join([*head, b"", bytes(answer.body)]))
        self.loop.call_later(CLOSE_SECONDS, self.transport.close)
