"""The server: it starts an engine, listens on a socket, and ends both together."""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import socket
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI

from dovetail.engine.options import EngineOptions
from dovetail.io.tokenizer import Tokenizer
from dovetail.serve.config import ServerConfig
from dovetail.serve.http.app import make_app
from dovetail.serve.remote.child import ShowProgress
from dovetail.serve.remote.client import EngineClient
from dovetail.serve.remote.supervisor import RestartLimits
from dovetail.serve.remote.wire import EngineInfo

log = logging.getLogger(__name__)


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
    config = replace(config, port=sock.getsockname()[1])
    try:
        tokenizer = read_tokenizer(path)
        limits = RestartLimits(step_seconds=config.limits.step_seconds)
        engine = await EngineClient.start(path, options, progress, limits)
        try:
            server = Server(make_app(engine, tokenizer, config), config)
            on_ready(config, engine.info)
            await server.serve([sock])
        finally:
            await engine.close()
    finally:
        sock.close()


class Server(uvicorn.Server):
    """At SIGTERM it takes no more requests, waits for those under way up to the limit, and then ends each with an error
    in its own stream, a moment before uvicorn cancels what is left."""

    def __init__(self, app: FastAPI, config: ServerConfig):
        self._inflight = app.state.service.inflight
        patience = config.limits.drain_seconds + 3
        # uvicorn's loggers use the root's handlers; an access log would write one line per request.
        options: dict[str, Any] = dict(log_config=None, access_log=False, server_header=False, timeout_keep_alive=75)
        super().__init__(uvicorn.Config(app, timeout_graceful_shutdown=math.ceil(patience), **options))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._inflight.drain()
        await super().shutdown(sockets)


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
        raise ValueError(f"cannot listen on {host}:{port}: {_why_not(error)}") from None
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
        raise ValueError(f"{path} has no tokenizer.json, and a server needs one to read and write text")
    return Tokenizer.from_folder(path)
