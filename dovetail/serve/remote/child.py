"""DeltaStream: a request's deltas between the engine's process and their reader.

Child: the engine's process, from its start to its end, as the HTTP process sees it. Streams and calls that are open
when it dies raise EngineDied at once."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import msgspec

from dovetail.core.errors import RequestError, UserError
from dovetail.engine.controls import EngineDied
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
)

TOKENS = 32  # that a reader is given at once: to make their text takes well under a millisecond


class DeltaStream:
    """At most one delta waits per sequence: later ones are joined to it, so a slow reader costs no more memory than its
    answer. It is given a long one in parts, and other tasks run between them."""

    def __init__(self, n: int):
        self._open = n  # sequences whose last delta has not come
        self._waiting: dict[int, Delta] = {}
        self._error: Exception | None = None
        self._ended = False
        self._news = asyncio.Event()

    @property
    def is_complete(self) -> bool:
        """No more deltas will come."""
        return self._open == 0 or self._error is not None

    def put(self, delta: Delta) -> None:
        earlier = self._waiting.pop(delta.index, None)  # back to the end: the request's last delta stays last
        self._waiting[delta.index] = delta if earlier is None else earlier.then(delta)
        self._open -= delta.finished
        self._news.set()

    def fail(self, error: Exception) -> None:
        self._error = error
        self._news.set()

    def end(self) -> None:
        """Let the reader go on without the deltas that have not come. The stream is not complete until they have."""
        self._ended = True
        self._news.set()

    async def get(self) -> Delta | None:
        """The next delta; None after the last. Raises the error that `fail` was given once none is left."""
        while not self._waiting:
            if self._open == 0 or self._ended:
                return None
            if self._error is not None:
                raise self._error
            self._news.clear()
            await self._news.wait()
        index, delta = next(iter(self._waiting.items()))
        if len(delta.tokens) > TOKENS:
            await asyncio.sleep(0)
            return self._waiting[index].cut(TOKENS)
        return self._waiting.pop(index)


log = logging.getLogger(__name__)
ShowProgress = Callable[[str, int, int], None]
COMMAND = (sys.executable, "-m", "dovetail.serve.remote.process")
EXIT_SECONDS = 2.0  # between the end of its socket and a SIGKILL
READ_AHEAD = 2**20


class Child:
    """Made by `spawn`, in a running event loop. `streams` are those whose last delta has not come, including those that
    are no longer read: an id can be used again only after the engine has forgotten it."""

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
        self.served = False  # a request has been answered to its end
        self.why = "the engine's process ended"
        self._calls: dict[int, asyncio.Future] = {}
        self._numbers = itertools.count(1)
        self._ready: asyncio.Future[EngineInfo] = asyncio.get_running_loop().create_future()
        self._failed: EngineFailed | None = None
        self.idle.set()
        self._task = asyncio.create_task(self._read(progress))

    @classmethod
    async def spawn(cls, start: StartEngine, progress: ShowProgress | None = None) -> Child:
        """A child that is ready; ValueError with the engine's sentence where the model or an option is wrong."""
        first = frame(start)  # before the process starts: an option that cannot be sent is refused here
        ours, theirs = socket.socketpair()
        # From this thread, which runs the event loop: Linux ends the child with the thread that started it.
        with theirs:
            command = [*COMMAND, str(theirs.fileno())]
            process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        child = cls(process, *await asyncio.open_unix_connection(sock=ours, limit=READ_AHEAD), progress)
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
        return not self.ended.is_set()

    def set_version(self, version: int) -> None:
        """The version of the weights it has now."""
        self.info = msgspec.structs.replace(self.info, weights_version=version)

    def set_adapters(self, adapters: dict[str, LoadedAdapter]) -> None:
        """Those it has now."""
        self.info = msgspec.structs.replace(self.info, adapters=adapters)

    # --- asking -------------------------------------------------------------------------------------------------------

    def open(self, add: Add) -> DeltaStream:
        if add.id in self.streams:
            raise UserError(f"a request {add.id!r} is under way already")
        stream = DeltaStream(add.params.n)
        self._send(add)
        self.streams[add.id] = stream
        self.idle.clear()
        return stream

    def leave(self, id: str, stream: DeltaStream) -> None:
        """Stop reading this stream: abort the request unless it has ended."""
        if not stream.is_complete and self.is_alive:
            self._send(Call(0, "abort", [id]))

    async def call(self, name: str, *args: Any) -> Any:
        """A command's answer. ValueError, with the engine's own sentence, for a call it refuses. Being cancelled
        cancels it there too, if it is one that can end early."""
        number = next(self._numbers)
        self._send(Call(number, name, list(args)))
        future = self._calls[number] = asyncio.get_running_loop().create_future()
        try:
            return await future
        except asyncio.CancelledError:
            if self.is_alive:
                self._send(Call(0, "cancel", [number]))
            raise
        finally:
            del self._calls[number]

    def _send(self, message: ToEngine) -> None:
        if self.ended.is_set():
            raise EngineDied(self.why)
        self._writer.write(frame(message))

    # --- its end ------------------------------------------------------------------------------------------------------

    async def stop(self, seconds: float) -> None:
        """End it after its current step; kill it if that takes longer than `seconds`."""
        with contextlib.suppress(EngineDied):
            self._send(Call(0, "stop"))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.ended.wait(), seconds)
        self.kill()
        await self._task

    def give_up(self, why: str) -> None:
        """Treat it as dead and do not wait for it: a process that waits for a broken device cannot always be killed."""
        self.why = why
        self.kill()
        self._task.cancel()

    def kill(self) -> None:
        if self.process.returncode is None:
            self.process.kill()

    async def _end(self) -> None:
        if self._failed is not None:
            self.why = self._failed.sentence
        self.ended.set()
        died = UserError if self._failed is not None and self._failed.user else EngineDied
        if not self._ready.done():
            self._ready.set_exception(died(self.why))
        for stream in self.streams.values():
            stream.fail(EngineDied(self.why))
        for future in self._calls.values():
            if not future.done():
                future.set_exception(EngineDied(self.why))
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
            log.error("the engine's process %d does not end: is its device broken?", self.process.pid)
        elif code and not (self._failed and self._failed.user):  # a user's error is raised by `spawn`
            log.warning("the engine's process %d ended with %d: %s", self.process.pid, code, self.why)

    async def _exit_code(self, seconds: float) -> int | None:
        """Polls instead of waiting in a thread: a process that never ends would keep that thread forever."""
        end = time.monotonic() + seconds
        while self.process.poll() is None and time.monotonic() < end:
            await asyncio.sleep(0.01)
        return self.process.returncode

    # --- its messages -------------------------------------------------------------------------------------------------

    async def _read(self, progress: ShowProgress | None) -> None:
        try:
            while True:
                size = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))[0]
                self._take(from_engine.decode(await self._reader.readexactly(size)), progress)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass  # it has ended, or give_up was called
        except msgspec.MsgspecError:
            log.exception("a message of the engine's process cannot be decoded")
            self.kill()
        finally:
            await self._end()

    def _take(self, message: FromEngine, progress: ShowProgress | None) -> None:
        match message:
            case Deltas():
                self._deliver(message)
            case RequestRefused():
                error = RequestError(message.sentence) if message.user else RuntimeError(message.sentence)
                self._close(message.id, error)
            case CallAnswer():
                self._answer(message)
            case Progress():
                if progress is not None:
                    progress(message.what, message.done, message.total)
            case EngineReady():
                if not self._ready.done():
                    self._ready.set_result(message.info)
            case EngineFailed():
                self._failed = message

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
            future.set_exception(UserError(answer.error) if answer.user else RuntimeError(answer.error))
