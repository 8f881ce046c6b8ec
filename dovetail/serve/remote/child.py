"""Child: one process of the engine, as the HTTP process sees it, and DeltaStream, the deltas of one of its requests."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import msgspec

from dovetail.core.errors import RequestError, UserError
from dovetail.engine.interface import EngineDied
from dovetail.serve.remote.wire import (
    LENGTH,
    Add,
    Call,
    CallAnswer,
    Delta,
    Deltas,
    EngineFailed,
    EngineInfo,
    EngineReady,
    FromEngine,
    LoadedAdapter,
    Progress,
    RequestRefused,
    StartEngine,
    ToEngine,
    frame,
    from_engine,
    start_process,
)
from dovetail.serve.request_context import request_id

log = logging.getLogger(__name__)
ShowProgress = Callable[[str, int, int], None]
COMMAND = (sys.executable, "-m", "dovetail.serve.remote.process")
EXIT_SECONDS = 2.0  # between the end of the process's socket and a SIGKILL
READ_AHEAD = 2**20
MAX_TOKENS = 32  # per delta for a reader: detokenizing them takes well under a millisecond


class DeltaStream:
    """Queue the deltas of one request between the engine's process and their reader.

    At most one delta waits per sequence: later ones are joined to it, so a slow reader needs no more memory than its
    answer. A long delta is given to the reader in parts, and other tasks run between them.
    """

    def __init__(self, n: int):
        self._open = n  # sequences whose last delta has not arrived
        self._waiting: dict[int, Delta] = {}
        self._error: Exception | None = None
        self._ended = False
        self._news = asyncio.Event()

    @property
    def is_complete(self) -> bool:
        """Return whether no more deltas will arrive."""
        return self._open == 0 or self._error is not None

    def put(self, delta: Delta) -> None:
        """Add a delta from the engine."""
        earlier = self._waiting.pop(delta.index, None)  # back to the end: the request's last delta stays last
        self._waiting[delta.index] = delta if earlier is None else earlier.then(delta)
        self._open -= delta.finished
        self._news.set()

    def fail(self, error: Exception) -> None:
        """Raise `error` in the reader after the deltas that wait."""
        self._error = error
        self._news.set()

    def end(self) -> None:
        """Let the reader continue without the deltas that have not arrived; the stream stays open until they have."""
        self._ended = True
        self._news.set()

    async def get(self) -> Delta | None:
        """Return the next delta, or None after the last one; raise the error that `fail` was given."""
        while not self._waiting:
            if self._open == 0 or self._ended:
                return None
            if self._error is not None:
                raise self._error
            self._news.clear()
            await self._news.wait()
        index, delta = next(iter(self._waiting.items()))
        if len(delta.tokens) > MAX_TOKENS:
            await asyncio.sleep(0)
            return self._waiting[index].cut(MAX_TOKENS)
        return self._waiting.pop(index)


class Child:
    """Control a process of the engine, made by `spawn` in a running event loop.

    When it dies, open streams and calls raise EngineDied at once. `streams` holds every stream whose last delta has not
    arrived, including streams that are no longer read: an id can be used again only after the engine has forgotten it.
    """

    info: EngineInfo

    def __init__(
        self,
        process: subprocess.Popen,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        progress: ShowProgress | None,
    ):
        self.process, self._reader, self._writer = process, reader, writer
        self.ended, self.idle = asyncio.Event(), asyncio.Event()  # idle: no stream is open
        self.streams: dict[str, DeltaStream] = {}
        self.served = False  # whether a request has been answered completely
        self.reason = "the engine's process ended"
        self._calls: dict[int, asyncio.Future] = {}
        self._numbers = itertools.count(1)
        self._ready: asyncio.Future[EngineInfo] = asyncio.get_running_loop().create_future()
        self._failure: Exception | None = None
        self.idle.set()
        self._task = asyncio.create_task(self._read(progress))

    @classmethod
    async def spawn(cls, start: StartEngine, progress: ShowProgress | None = None) -> Child:
        """Start a process and wait until its engine is ready.

        Raises:
            UserError: The model or an option is wrong.
            EngineDied: The engine could not start for another reason.
        """
        first = frame(start)  # before the process starts: an option that cannot be sent is refused here
        # Started from the event loop's thread: Linux ends a child with the thread that started it.
        process, sock = start_process(*COMMAND)
        child = cls(process, *await asyncio.open_unix_connection(sock=sock, limit=READ_AHEAD), progress)
        child._writer.write(first)
        try:
            child.info = await asyncio.shield(child._ready)
        except BaseException:
            child.kill()
            await child._task
            child._ready.exception()  # retrieved, or asyncio logs that it never was
            raise
        return child

    @property
    def is_alive(self) -> bool:
        """Return whether the process is running."""
        return not self.ended.is_set()

    def set_version(self, version: int) -> None:
        """Record the version of the engine's current weights."""
        self.info = msgspec.structs.replace(self.info, weights_version=version)

    def set_adapters(self, adapters: dict[str, LoadedAdapter]) -> None:
        """Record the engine's current adapters."""
        self.info = msgspec.structs.replace(self.info, adapters=adapters)

    # --- requests and calls -------------------------------------------------------------------------------------------

    def open(self, add: Add, payload: bytes | None = None) -> DeltaStream:
        """Send a request, or `payload` if it is the request as bytes, and return the stream of its deltas."""
        if add.id in self.streams:
            raise RequestError(f"`id` must be unique, got {add.id!r}, which is in use", param="id")
        stream = DeltaStream(add.params.n)
        self._send(payload or add)
        self.streams[add.id] = stream
        self.idle.clear()
        return stream

    def leave(self, id: str, stream: DeltaStream) -> None:
        """Stop reading a stream; abort its request if it has not ended."""
        if not stream.is_complete and self.is_alive:
            self._send(Call(0, "abort", {"id": id}))

    async def call(self, name: str, /, **args: Any) -> Any:
        """Call a command of the engine's process and return its result.

        Cancelling this cancels the command too, if it is one that can end early.

        Raises:
            UserError: The command refused its arguments.
            RuntimeError: The command failed; the engine's process has logged the traceback.
        """
        number = next(self._numbers)
        self._send(Call(number, name, args, request_id()))
        future = self._calls[number] = asyncio.get_running_loop().create_future()
        try:
            return await future
        except asyncio.CancelledError:
            if self.is_alive:
                self._send(Call(0, "cancel", {"number": number}))
            raise
        finally:
            del self._calls[number]

    def _send(self, message: ToEngine | bytes) -> None:
        if self.ended.is_set():
            raise EngineDied(self.reason)
        self._writer.write(message if isinstance(message, bytes) else frame(message))

    # --- the end of the process ---------------------------------------------------------------------------------------

    async def stop(self, seconds: float) -> None:
        """End the process after its current step; kill it if that takes longer than `seconds`."""
        with contextlib.suppress(EngineDied):
            self._send(Call(0, "stop"))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.ended.wait(), seconds)
        self.kill()
        await self._task

    def give_up(self, reason: str) -> None:
        """Treat the process as dead without waiting: one that waits for a broken device cannot always be killed."""
        self.reason = reason
        self.kill()
        self._task.cancel()

    def kill(self) -> None:
        """Send SIGKILL to the process."""
        if self.process.returncode is None:
            self.process.kill()

    async def _end(self) -> None:
        if self._failure is not None:
            self.reason = str(self._failure)
        self.ended.set()
        if not self._ready.done():
            is_user = isinstance(self._failure, UserError)
            self._ready.set_exception(self._failure if is_user else EngineDied(self.reason))  # type: ignore[arg-type]
        for stream in self.streams.values():
            stream.fail(EngineDied(self.reason))
        for future in self._calls.values():
            if not future.done():
                future.set_exception(EngineDied(self.reason))
        self.streams.clear()
        self.idle.set()
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()
        await self._reap()

    async def _reap(self) -> None:
        code = await self._exit_code(EXIT_SECONDS)
        if code is None:
            self.process.kill()
            code = await self._exit_code(EXIT_SECONDS)
        if code is None:
            log.error("engine process %d does not end: the device may be broken", self.process.pid)
        elif code and not isinstance(self._failure, UserError):  # `spawn` raises a UserError
            log.warning("engine process %d ended with exit code %d: %s", self.process.pid, code, self.reason)

    async def _exit_code(self, seconds: float) -> int | None:
        """Poll for the exit code: waiting in a thread would keep that thread if the process never ends."""
        end = time.monotonic() + seconds
        while self.process.poll() is None and time.monotonic() < end:
            await asyncio.sleep(0.01)
        return self.process.returncode

    # --- messages from the process ------------------------------------------------------------------------------------

    async def _read(self, progress: ShowProgress | None) -> None:
        try:
            while True:
                size = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))[0]
                self._take(from_engine.decode(await self._reader.readexactly(size)), progress)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass  # the process has ended, or `give_up` was called
        except msgspec.MsgspecError:
            log.exception("engine process %d: a message cannot be decoded", self.process.pid)
            self.kill()
        finally:
            await self._end()

    def _take(self, message: FromEngine, progress: ShowProgress | None) -> None:
        match message:
            case Deltas():
                self._deliver(message)
            case RequestRefused():
                self._close(message.id, message.error.exception())
            case CallAnswer():
                self._answer(message)
            case Progress():
                if progress is not None:
                    progress(message.what, message.done, message.total)
            case EngineReady():
                if not self._ready.done():
                    self._ready.set_result(message.info)
            case EngineFailed():
                self._failure = message.error.exception()

    def _deliver(self, message: Deltas) -> None:
        for delta in message.deltas:
            stream = self.streams.get(delta.id)
            if stream is not None:
                stream.put(delta)
                if stream.is_complete:
                    self.served = True
                    self._close(delta.id)

    def _close(self, id: str, error: Exception | None = None) -> None:
        stream = self.streams.pop(id, None)
        if stream is not None and error is not None:
            stream.fail(error)
        if not self.streams:
            self.idle.set()

    def _answer(self, answer: CallAnswer) -> None:
        future = self._calls.get(answer.number)
        if future is None or future.done():
            return
        if answer.error is None:
            future.set_result(answer.result)
        else:
            future.set_exception(answer.error.exception())
