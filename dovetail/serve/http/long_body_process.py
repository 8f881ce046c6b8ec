"""The process that reads long requests: `python -m dovetail.serve.http.long_body_process FD`.

It is started by http.long_bodies with an inherited socket, and runs the server's routes with an engine that does
nothing. If they answer without the engine (every refusal and the tokenizer's routes), that is the answer. A request
that reaches the engine is valid.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import socket
import sys
from typing import Any, NoReturn

import msgspec
from fastapi import FastAPI
from starlette.types import Message, Scope

from dovetail.serve.errors import as_api_error
from dovetail.serve.http.app import routed
from dovetail.serve.http.gate import check_text
from dovetail.serve.media.loader import UnreadImages
from dovetail.serve.remote.wire import framed, read_frame
from dovetail.serve.request_context import begin_request

NICE = 19  # streams of the server go first on a machine with few cores


def main(fd: int) -> None:
    """Answer the requests that arrive on the socket `fd` until it is closed."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the parent ends this process by closing the socket
    os.nice(NICE)
    with socket.socket(fileno=fd) as sock, sock.makefile("rb") as wire:
        tokenizer, (config, info, image) = (pickle.loads(read_frame(wire) or b"") for _ in range(2))
        engine = _NoEngine(info)
        # Images are read once, in the HTTP process: a fetch has effects elsewhere, and threads decode them there.
        images = image and UnreadImages(image, config)
        app = routed(engine, tokenizer, config, images)  # type: ignore[arg-type]
        with asyncio.Runner() as runner:
            while head := read_frame(wire):
                reply = runner.run(_answer(app, engine, head, read_frame(wire) or b""))
                sock.sendall(framed(msgspec.msgpack.encode(reply)))


async def _answer(app: FastAPI, engine: _NoEngine, head: bytes, body: bytes) -> list[Any] | None:
    """Return status, headers and body; None if the engine was called."""
    method, path, query, headers = msgspec.msgpack.decode(head)
    scope: Scope = {"type": "http", "http_version": "1.1", "method": method, "path": path}
    scope |= {"query_string": query, "headers": headers}
    begin_request()
    engine.asked, out = False, _Out()
    try:
        check_text(body)
        await app(scope, _Body(body), out)
    except Exception as error:
        if not engine.asked:
            out = _Out()
            await as_api_error(error).response(path)(scope, _Body(b""), out)
    return None if engine.asked else [out.status, out.headers, out.body]


class _NoEngine:
    """Stand in for an engine: note that it was called, and raise."""

    trouble = unready = None

    def __init__(self, info: Any):
        self.info, self.asked = info, False

    async def generate(self, *_: Any, **__: Any):
        self._note()
        yield

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)

        async def call(*_: Any, **__: Any) -> None:
            self._note()

        return call

    def _note(self) -> NoReturn:
        self.asked = True
        raise RuntimeError("there is no engine here")


class _Body:
    """Implement the `receive` of a client that has sent its body and waits."""

    def __init__(self, body: bytes):
        self._rest: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def __call__(self) -> Message:
        if not self._rest:
            await asyncio.Event().wait()
        return self._rest.pop()


class _Out:
    """Implement a `send` that collects an application's answer."""

    def __init__(self):
        self.status, self.headers, self.body = 500, [], b""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], list(message["headers"])
        else:
            self.body += message.get("body", b"")


if __name__ == "__main__":
    main(int(sys.argv[1]))
