"""The server: start an engine, listen on a socket, and stop both together."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
import socket
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from dovetail.core.host import return_freed
from dovetail.core.reporter import NOTE
from dovetail.engine.options import EngineOptions
from dovetail.serve.config import ServerConfig
from dovetail.serve.http.app import make_app
from dovetail.serve.http.connection import HttpConnection
from dovetail.serve.http.start import read_image_processor, read_tokenizer
from dovetail.serve.remote.child import ShowProgress
from dovetail.serve.remote.client import EngineClient
from dovetail.serve.remote.supervisor import RestartLimits
from dovetail.serve.remote.wire import EngineInfo

log = logging.getLogger(__name__)
END_SECONDS = 5.0  # for the engine to abort requests, and for their errors to be sent
CLOSE_SECONDS = 3  # for connections to close
BACKLOG = 2048  # connections that the system keeps until they are accepted
ACCEPTED = 16  # connections accepted at a time, so that a burst does not exceed the limit on open files
OTHER_FILES = 128  # open files of the process besides connections


def run(main: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine, on uvloop if it is installed: that takes a fifth less CPU time per token."""
    try:
        from uvloop import new_event_loop
    except ImportError:
        new_event_loop = None
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(main)


async def serve(
    path: Path,
    options: EngineOptions,
    config: ServerConfig,
    sock: socket.socket,
    on_ready: Callable[[ServerConfig, EngineInfo], None],
    progress: ShowProgress | None = None,
) -> None:
    """Serve the model at `path` on the socket, which is closed at the end, until SIGINT or SIGTERM."""
    start, config = time.monotonic(), replace(config, port=sock.getsockname()[1])
    try:
        tokenizer = read_tokenizer(path)
        processor = read_image_processor(path, tokenizer)
        log.info("starting the engine process for %s", path)
        limits = RestartLimits(step_seconds=config.limits.step_timeout)
        engine = await EngineClient.start(path, options, progress, limits)
        try:
            server = Server(make_app(engine, tokenizer, config, processor), config)
            return_freed()  # of the tokenizer
            sock.listen(ACCEPTED)  # before anybody reads that the server is ready
            on_ready(config, engine.info)
            log.info("ready at %s after %.1f s", url(config), time.monotonic() - start)
            await server.serve([sock])
        finally:
            await engine.close()
    finally:
        sock.close()
    if server.signal is not None:
        signal.raise_signal(server.signal)  # the exit status says what ended it


class Server(uvicorn.Server):
    """Uvicorn's server with a graceful stop.

    After the first SIGINT or SIGTERM it still listens: new requests and /ready get 503, and running ones have a limited
    time to end. After that time, or at a second signal, each of them gets an error in its own stream. A third signal
    ends the process at once.
    """

    def __init__(self, app: FastAPI, config: ServerConfig):
        self._inflight, self._drain_seconds = app.state.service.inflight, config.limits.drain_timeout
        self.signal: int | None = None  # the first signal
        self._hurried = False
        # uvicorn's loggers use the root's handlers; an access log would write one line per request.
        options: dict[str, Any] = dict(log_config=None, access_log=False, server_header=False, timeout_keep_alive=75)
        http = partial(HttpConnection, most=connection_limit(config.limits.max_connections))
        options |= dict(http=http, ws="none", lifespan="on", backlog=ACCEPTED)
        super().__init__(uvicorn.Config(app, timeout_graceful_shutdown=CLOSE_SECONDS, **options))

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen with a long backlog."""
        await super().startup(sockets)
        for each in sockets or ():
            each.listen(BACKLOG)  # asyncio's own backlog is also how many it accepts at a time

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Note a signal. `serve` raises it again when the engine has ended too."""
        if self._hurried:
            os._exit(128 + sig)  # the engine's process ends with this one
        self._hurried, self.should_exit = self.should_exit, True
        self.signal = self.signal or sig

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait for running requests, end the others, and close all connections."""
        start, seconds = time.monotonic(), self._drain_seconds
        self._inflight.draining = True
        if drained := len(self.server_state.tasks):
            log.log(NOTE, "stopping: %d running requests have %g s; a second Ctrl-C ends them now", drained, seconds)
            await self._idle(seconds, lambda: self._hurried)
        if count := len(self.server_state.tasks):
            log.warning("stopping: %d requests ended with an error after %.1f s", count, time.monotonic() - start)
            self._inflight.end_all()
            await self._idle(END_SECONDS)
            for connection in list(self.server_state.connections):  # clients that do not read or send
                connection.transport.abort()
        await super().shutdown(sockets)
        log.log(NOTE if drained else logging.INFO, "stopped after %.1f s", time.monotonic() - start)

    async def _idle(self, seconds: float, or_else: Callable[[], bool] = lambda: False) -> None:
        """Wait until no request is running, for at most `seconds`."""
        end = time.monotonic() + seconds
        while self.server_state.tasks and time.monotonic() < end and not or_else():
            await asyncio.sleep(0.05)


def connection_limit(wanted: int) -> int:
    """Return how many connections the process may have open: `wanted`, or what its limit on open files allows.

    The limit on open files is raised if the system allows it. When it is reached, no connection can be accepted.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted + OTHER_FILES:
        soft = wanted + OTHER_FILES if hard == resource.RLIM_INFINITY else min(hard, wanted + OTHER_FILES)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        if soft < wanted + OTHER_FILES:
            most = max(soft - OTHER_FILES, soft // 2)
            log.warning("connections limited to %d: the limit on open files (ulimit -n) is %d", most, soft)
            return most
    return wanted


def url(config: ServerConfig) -> str:
    """Return the server's address for a client on this machine."""
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(config.host, config.host)
    return f"http://{host}:{config.port}"
