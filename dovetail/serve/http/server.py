"""The server: it starts an engine, listens on a socket, and ends both together."""

from __future__ import annotations

import asyncio
import errno
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

from dovetail.core.errors import UserError
from dovetail.core.note import NOTE
from dovetail.engine.options import EngineOptions
from dovetail.io.tokenizer import Tokenizer
from dovetail.serve.config import ServerConfig
from dovetail.serve.http.app import make_app
from dovetail.serve.http.connection import HttpConnection
from dovetail.serve.remote.child import ShowProgress
from dovetail.serve.remote.client import EngineClient
from dovetail.serve.remote.supervisor import RestartLimits
from dovetail.serve.remote.wire import EngineInfo

log = logging.getLogger(__name__)
END_SECONDS = 5.0  # for the engine to abort the requests that are ended, and for their errors to be sent
CLOSE_SECONDS = 3  # for connections to close
BACKLOG = 2048  # connections that the system keeps until they are accepted
ACCEPTED = 16  # of them at a time, so that a burst does not exceed the limit on open files
OTHER_FILES = 128  # that the process may have open besides connections


def run(main: Coroutine[Any, Any, None]) -> None:
    """asyncio.run, on uvloop where it is installed: that takes a fifth less CPU time per token."""
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
        log.info("starting the engine's process for %s", path)
        limits = RestartLimits(step_seconds=config.limits.step_timeout)
        engine = await EngineClient.start(path, options, progress, limits)
        try:
            server = Server(make_app(engine, tokenizer, config), config)
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
    """uvicorn's server, with another end. After the first SIGINT or SIGTERM it still listens: new requests and /ready
    get 503, and those under way have `drain_seconds` to end. After that time, or at a second signal, each of them gets
    an error in its own stream. A third signal ends the process at once."""

    def __init__(self, app: FastAPI, config: ServerConfig):
        self._inflight, self._drain_seconds = app.state.service.inflight, config.limits.drain_timeout
        self.signal: int | None = None  # the first that came
        self._hurried = False
        # uvicorn's loggers use the root's handlers; an access log would write one line per request.
        options: dict[str, Any] = dict(log_config=None, access_log=False, server_header=False, timeout_keep_alive=75)
        http = partial(HttpConnection, most=connection_limit(config.limits.max_connections))
        options |= dict(http=http, ws="none", lifespan="on", backlog=ACCEPTED)
        super().__init__(uvicorn.Config(app, timeout_graceful_shutdown=CLOSE_SECONDS, **options))

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for each in sockets or ():
            each.listen(BACKLOG)  # asyncio's own number is also how many it accepts before it looks at any of them

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Unlike uvicorn's, this does not raise the signal again: `serve` does, when the engine has ended too."""
        if self._hurried:
            os._exit(128 + sig)  # the engine's process ends with this one
        self._hurried, self.should_exit = self.should_exit, True
        self.signal = self.signal or sig

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        start, seconds = time.monotonic(), self._drain_seconds
        self._inflight.drain()
        if drained := len(self.server_state.tasks):
            log.log(NOTE, "stopping: %d requests under way have %g s; a second Ctrl-C ends them now", drained, seconds)
            await self._idle(seconds, lambda: self._hurried)
        if count := len(self.server_state.tasks):
            log.warning("stopping: %d requests are ended with an error after %.1f s", count, time.monotonic() - start)
            self._inflight.end_all()
            await self._idle(END_SECONDS)
            for connection in list(self.server_state.connections):  # clients that do not read, or have not sent it all
                connection.transport.abort()
        await super().shutdown(sockets)
        log.log(NOTE if drained else logging.INFO, "stopped after %.1f s", time.monotonic() - start)

    async def _idle(self, seconds: float, or_else: Callable[[], bool] = lambda: False) -> None:
        """Wait until no request is under way, for at most `seconds`."""
        end = time.monotonic() + seconds
        while self.server_state.tasks and time.monotonic() < end and not or_else():
            await asyncio.sleep(0.05)


def connection_limit(wanted: int) -> int:
    """Return how many connections the process may have open: `wanted`, or what its limit on open files leaves. That
    limit is raised if the system allows it: where it is reached, no connection can be accepted at all."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted + OTHER_FILES:
        soft = wanted + OTHER_FILES if hard == resource.RLIM_INFINITY else min(hard, wanted + OTHER_FILES)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        if soft < wanted + OTHER_FILES:
            most = max(soft - OTHER_FILES, soft // 2)
            log.warning("at most %d connections: the limit on open files (ulimit -n) is %d", most, soft)
            return most
    return wanted


def url(config: ServerConfig) -> str:
    """The server's address for a client on this machine."""
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(config.host, config.host)
    return f"http://{host}:{config.port}"


def listening_socket(host: str, port: int) -> socket.socket:
    """Bound, but not listening yet: until the server is ready, clients are refused instead of left waiting."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol is named because asyncio turns off Nagle's delay, 40 ms per event, only for a socket that names it.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host.strip("[]"), port))
    except OSError as error:
        sock.close()
        raise UserError(f"cannot listen on {host}:{port}: {_why_not(error)}") from None
    return sock


def _why_not(error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return "another program listens there; stop it, or choose another --port (0: any that is free)"
    if error.errno == errno.EACCES:
        return "ports below 1024 are for the system's own services; choose a higher --port"
    return f"{error.strerror}; choose another --host or --port"


def read_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer only: the engine's process loads the weights."""
    if path.suffix == ".gguf":
        from dovetail.io.gguf import GgufCheckpoint

        return GgufCheckpoint(path).tokenizer()
    if not (path / "tokenizer.json").exists():
        raise UserError(f"{path} has no tokenizer.json, and a server needs one to read and write text")
    return Tokenizer.from_folder(path)
