"""Helpers of the server's tests: a server on a free port in a thread, and an engine with scripted answers."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from few_programs import APPLY

from dovetail.core.errors import RequestError
from dovetail.engine.interface import EngineDied, EngineStats
from dovetail.io.tokenizer import Tokenizer
from dovetail.serve.config import ServerConfig
from dovetail.serve.http.app import make_app
from dovetail.serve.http.server import Server
from dovetail.serve.http.start import listening_socket
from dovetail.serve.remote import child
from dovetail.serve.remote.wire import Delta, DeltaTimes, Logprob

MODEL = "smollm2"
# Favour { } " , : and 1, so that objects end soon: the first layers of a model alone would write blanks.
SHORT_JSON = dict.fromkeys(("107", "109", "18", "28", "42"), 100) | {"33": 80}


@contextmanager
def running(backend: Callable[[], Coroutine[Any, Any, Any]], tokenizer: Tokenizer, processor=None, **config: Any):
    """A real server: its url, its app, its backend, `run` for a coroutine in its event loop, and `stop` to end it as
    SIGTERM would."""
    found, ready = SimpleNamespace(), threading.Event()

    async def main() -> None:
        sock = listening_socket("127.0.0.1", 0)
        engine = await backend()
        app = make_app(engine, tokenizer, ServerConfig(**{"names": (MODEL,)} | config), processor)
        server = Server(app, app.state.service.config)
        found.url, found.app, found.engine = f"http://127.0.0.1:{sock.getsockname()[1]}", app, engine
        found.server = server
        loop = asyncio.get_running_loop()
        found.run = lambda work: asyncio.run_coroutine_threadsafe(work, loop).result(60)
        found.stop = lambda: setattr(server, "should_exit", True)
        threading.Thread(target=_signal_when, args=(lambda: server.started, ready), daemon=True).start()
        await server.serve([sock])
        sock.close()

    thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    thread.start()
    try:
        assert ready.wait(600), "the server did not start"
        yield found
    finally:
        if ready.is_set():
            found.stop()
        thread.join(30)
        assert not thread.is_alive(), "the server did not stop"


def _signal_when(condition: Callable[[], bool], event: threading.Event) -> None:
    while not condition():
        time.sleep(0.01)
    event.set()


# The engine's process, with a device that does not answer while a file exists, and is slow while FILE.slow exists.
_HANGS = f"""
import pathlib, sys, time
from dovetail.engine.engine import Engine
from dovetail.serve.remote import process

step = Engine.step

def wait_and_step(self):
    while pathlib.Path(sys.argv[1]).exists():
        time.sleep(0.02)
    if pathlib.Path(sys.argv[1] + ".slow").exists():
        time.sleep(0.03)
    return step(self)

Engine.step = wait_and_step
{APPLY}
process.main(int(sys.argv[2]))
"""


@contextmanager
def hanging(file: Path):
    """Engines started in this block take no step while the file exists, and slow steps while FILE.slow exists."""
    command, child.COMMAND = child.COMMAND, (sys.executable, "-c", _HANGS, str(file))
    try:
        yield
    finally:
        child.COMMAND = command


@contextmanager
def openai_refuses(kind: type[Exception], param: str | None = None, code: str | None = None):
    """Expect an error of OpenAI's client with this `param` and `code`; yield pytest's record of it."""
    with pytest.raises(kind) as caught:
        yield caught
    assert (getattr(caught.value, "param", None), getattr(caught.value, "code", None)) == (param, code), caught.value


class Script:
    """An engine with scripted answers: each request gets the next text, one token at a time."""

    def __init__(self, tokenizer: Tokenizer, delay: float = 0.0, max_num_seqs: int = 64):
        self.tokenizer, self.delay = tokenizer, delay
        self.info = SimpleNamespace(
            max_model_len=512, vocab=tokenizer.vocab_size, max_num_seqs=max_num_seqs, weights_version=0, adapters={}
        )
        self.trouble: str | None = None
        self.rest: str | None = None
        self.texts: list[str | list[int]] = []
        self.asked: list[Any] = []  # (prompt's text, params, priority, cache_salt)
        self.prompts: list[list[int]] = []  # in tokens
        self.images: list[Any] = []  # of each prompt
        self.adapters: list[str | None] = []  # that they were asked of
        self.ended: list[str] = []  # how each request ended: "whole", or "left"
        self.called: list[Any] = []
        self.aborted: set[str] = set()
        self.dies = False

    @property
    def unready(self) -> str | None:
        return self.trouble or self.rest

    async def generate(self, id, prompt, params, *, priority=0, cache_salt=None, adapter=None, images=()):
        self.images.append(images)
        self.asked.append((self.tokenizer.decode(prompt, skip_special=False), params, priority, cache_salt))
        self.prompts.append(list(prompt))
        self.adapters.append(adapter)
        if params.max_tokens == 13:
            raise RequestError("`max_tokens` must not be 13", param="max_tokens")
        text = self.texts.pop(0) if self.texts else "Fine."
        tokens = self.tokenizer.encode(text, add_special=False) if isinstance(text, str) else list(text)
        tokens = (tokens + [self.tokenizer.eos_id])[: params.max_tokens]
        ended = "left"
        try:
            for i, token in enumerate(tokens):
                await asyncio.sleep(self.delay)
                if self.dies and i == 2:
                    raise EngineDied("the engine died: somewhere/secret.py")
                if id in self.aborted:
                    for index in range(params.n):
                        yield Delta(id, index, [], DeltaTimes(0.0), finished=True, finish_reason="abort")
                    return
                last = i == len(tokens) - 1
                reason = ("stop" if token == self.tokenizer.eos_id else "length") if last else None
                for index in range(params.n):
                    logprobs = None if params.logprobs is None else [Logprob(token, -0.5, 1, ((token, -0.5),))]
                    delta = Delta(id, index, [token], DeltaTimes(0.0), logprobs, last, reason, cached_tokens=3)
                    if params.prompt_logprobs is not None and last and index == params.n - 1:
                        delta.prompt_logprobs = [None, *(Logprob(token, -0.5, 1, ()) for token in prompt[1:])]
                    yield delta
            ended = "whole"
        finally:
            self.ended.append(ended)

    async def abort(self, id, index=None):
        if index is None:
            self.aborted.add(id)

    async def stats(self):
        return EngineStats(1, 2, 3, 4, 10, 0.0, 0, 5, 6, 7)

    async def embed(self, prompts, pooling, adapter=None):
        self.called.append(("embed", pooling))
        await self._forward()
        return [[float(len(prompt)), 1.0] for prompt in prompts]

    async def score(self, prompts, adapter=None):
        self.called.append(("score", prompts))
        await self._forward()
        return [len(prompt) / 2 for prompt in prompts]

    async def _forward(self):
        """Take as long as an answer of 300 tokens."""
        try:
            await asyncio.sleep(300 * self.delay)
        except asyncio.CancelledError:
            self.ended.append("left")
            raise

    async def start_profile(self, folder):
        self.called.append(("start_profile", folder))

    async def close(self):
        self.trouble = "it was stopped"

    async def stop_profile(self):
        self.called.append(("stop_profile",))

    async def control(self, name, /, **args):
        self.called.append((name, args) if args else (name,))
        return 7
