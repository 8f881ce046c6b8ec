"""LongBodies: requests with a long body are first read in a separate process (http.long_body_process).

Parsing megabytes of JSON, rendering a template and tokenizing hold Python's lock for seconds, in which no stream and no
/health would be served. Most such bodies are refused or are for /tokenize: that process answers them. The others are
read again here, and are then known to be valid and to fit the context.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import pickle
import subprocess
import sys
from collections.abc import AsyncIterator

import msgspec
from fastapi import Response
from starlette.types import Scope

from dovetail.io.tokenizer import Tokenizer
from dovetail.serve.config import ServerConfig
from dovetail.serve.errors import ApiError
from dovetail.serve.media.loader import ImagePlaceholder
from dovetail.serve.remote.client import EngineClient
from dovetail.serve.remote.wire import LENGTH, start_process

log = logging.getLogger(__name__)
LONG = 128 * 1024  # bytes; up to here a body blocks the event loop for a few milliseconds at most
AT_ONCE = 4  # long bodies in memory; others wait in their sockets
IDLE_SECONDS = 30.0  # then the process ends and its memory is free
_CHUNK = 256 * 1024
_BUSY = "the server is reading other long requests; try again later"


class LongBodies:
    """Read long bodies one at a time, in one event loop. The process is started for the first one.

    It ends when it is idle, except on a server of a model with images: with them, most bodies are long.
    """

    def __init__(
        self, engine: EngineClient, tokenizer: Tokenizer, config: ServerConfig, image: ImagePlaceholder | None
    ):
        self._engine, self._config, self._image = engine, config, image
        self._tokenizer = _pickled(tokenizer)  # once: later it would delay streams
        self._places, self._turn = asyncio.Semaphore(AT_ONCE), asyncio.Lock()
        self._reader: _Process | None = None
        self._known = b""  # the description of the server and its engine that the process has
        self._timer: asyncio.TimerHandle | None = None

    @contextlib.asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Wait for a place among the few long bodies that may be in memory at once."""
        try:
            await asyncio.wait_for(self._places.acquire(), self._config.limits.body_timeout)
        except TimeoutError:
            raise ApiError(503, _BUSY, code="busy", retry_after=5) from None
        try:
            yield
        finally:
            self._places.release()

    async def start(self) -> None:
        """Start the process before the first long body, which would wait seconds for it."""
        async with self._turn:
            await self._started()

    async def answer(self, scope: Scope, body: bytearray) -> Response | bytes:
        """Return the answer if it needs no engine (a refusal, or tokens), else the body, which is valid."""
        head = [scope["method"], scope["path"], scope.get("query_string", b""), scope["headers"]]
        async with self._turn:
            reply = msgspec.msgpack.decode(await self._ask(msgspec.msgpack.encode(head), body))
        if reply is None:
            return bytes(body)
        status, headers, content = reply
        answer = Response(content, status)
        answer.raw_headers = [(name, value) for name, value in headers]
        return answer

    async def _ask(self, head: bytes, body: bytearray) -> bytes:
        """Return the process's reply. Any error, and a client that disconnects, ends the process."""
        if self._timer is not None:
            self._timer.cancel()
        seconds = self._config.limits.request_timeout
        try:
            reader = await self._started()
            reply = await asyncio.wait_for(reader.ask(head, body), seconds)
        except TimeoutError:
            self.close()
            raise ApiError(504, f"the request could not be read within {seconds:g} s", code="timeout") from None
        except (OSError, asyncio.IncompleteReadError):
            self.close()
            log.error("long body process died")
            raise ApiError(503, "the request could not be read; try again", code="reader_died", retry_after=5) from None
        except BaseException:
            self.close()
            raise
        if self._image is None:
            self._timer = asyncio.get_running_loop().call_later(IDLE_SECONDS, self.close)
        return reply

    async def _started(self) -> _Process:
        known = pickle.dumps((self._config, self._engine.info, self._image))
        if known != self._known:  # an adapter was loaded or unloaded
            self.close()
        if self._reader is None:
            self._reader = await _Process.start(self._tokenizer, known)
            self._known = known
        return self._reader

    def close(self) -> None:
        """End the process."""
        if self._timer is not None:
            self._timer.cancel()
        if self._reader is not None:
            self._reader.kill()
            self._reader = None


class _Process:
    def __init__(self, process: subprocess.Popen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._process, self._reader, self._writer = process, reader, writer

    @classmethod
    async def start(cls, *first: bytes) -> _Process:
        process, sock = start_process(sys.executable, "-m", "dovetail.serve.http.long_body_process")
        made = cls(process, *await asyncio.open_unix_connection(sock=sock))
        try:
            await made._write(*first)
        except BaseException:
            made.kill()
            raise
        return made

    async def ask(self, head: bytes, body: bytearray) -> bytes:
        await self._write(head, body)
        (size,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
        return await self._reader.readexactly(size)

    async def _write(self, *messages: bytes | bytearray) -> None:
        """Write in chunks, without a copy of the whole: this blocks the event loop for about 1 ms per megabyte."""
        for message in messages:
            self._writer.write(LENGTH.pack(len(message)))
            view = memoryview(message)
            for start in range(0, len(message), _CHUNK):
                self._writer.write(view[start : start + _CHUNK])
                await self._writer.drain()

    def kill(self) -> None:
        self._writer.close()
        self._process.kill()
        asyncio.get_running_loop().run_in_executor(None, self._process.wait)  # freeing its memory may take long


@functools.lru_cache(maxsize=1)
def _pickled(tokenizer: Tokenizer) -> bytes:
    return pickle.dumps(tokenizer)
