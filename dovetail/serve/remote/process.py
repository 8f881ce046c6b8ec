"""The engine's process: `python -m dovetail.serve.remote.process FD`, its socket inherited, started by remote.child.

The main thread starts the engine and waits; the reader takes requests in, the engine's thread steps, the outbox sends.
It makes no text and no JSON. It ends when it is told to, when its engine dies, and when its parent does.


Commands: what the HTTP process may ask of the engine besides tokens. The engine's
controls are commands, and each public method here is one that returns its answer."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import IO, TYPE_CHECKING, Any

import msgspec
import numpy as np

from dovetail.core.errors import UserError, as_user_error
from dovetail.engine.controls import CONTROLS, EngineDied
from dovetail.engine.options import EngineOptions
from dovetail.engine.stats import EngineStats
from dovetail.serve.remote.outbox import Outbox
from dovetail.serve.remote.wire import (
    LENGTH,
    Add,
    Call,
    CallAnswer,
    Delta,
    Deltas,
    DeltaTimes,
    EngineFailed,
    EngineInfo,
    EngineReady,
    LoadedAdapter,
    Progress,
    RequestRefused,
    StartEngine,
    ToEngine,
    to_engine,
)
from dovetail.serve.request_context import traceback_text

if TYPE_CHECKING:
    from dovetail.engine.embed import Cancelled, Pooling
    from dovetail.engine.llm import LLM
    from dovetail.engine.loop import EngineLoop

log = logging.getLogger(__name__)
PROGRESS_SECONDS = 0.1
STEP_TOKENS = 8192  # most of a server's step on an accelerator
PR_SET_PDEATHSIG = 1


def main(fd: int) -> None:
    _obey_parent_only()
    sock = socket.socket(fileno=fd)
    sock.set_inheritable(False)
    inbox, outbox = sock.makefile("rb"), Outbox(sock)
    start = _read(inbox)
    if not isinstance(start, StartEngine):
        return
    when = "" if sys.stderr.isatty() else "%(asctime)s "  # as the HTTP process, in whose log these lines are
    logging.basicConfig(format=f"{when}engine: %(message)s")
    logging.getLogger("dovetail").setLevel(start.log_level)
    process = EngineProcess(outbox)
    threading.Thread(target=_serve, args=(process, inbox), name="reader", daemon=True).start()
    try:
        process.start(start)
    except BaseException as error:
        process.fail(EngineFailed(*_sentence_of(error, "the engine could not be started")))
    process.ended.wait()
    outbox.close()
    os._exit(process.code)  # without waiting for threads that still load or compile


def _obey_parent_only() -> None:
    """The parent decides when this process ends, so a ctrl-C or a SIGTERM that the whole process group gets is ignored.
    Linux kills this process when the parent ends, in case it does not see the end of the socket."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _serve(process: EngineProcess, inbox: IO[bytes]) -> None:
    try:
        while (message := _read(inbox, process)) is not None:
            process.take(message)
    except EngineDied:  # reported by the engine's own thread
        return
    except BaseException:
        log.exception("the engine's process cannot go on")
        os._exit(1)
    os._exit(0)


def _read(inbox: IO[bytes], process: EngineProcess | None = None) -> ToEngine | None:
    """The next message; None at the end. One that cannot be decoded is answered with the reason."""
    while len(size := inbox.read(LENGTH.size)) == LENGTH.size:
        payload = inbox.read(LENGTH.unpack(size)[0])
        try:
            return to_engine.decode(payload)
        except msgspec.ValidationError as error:
            kind, key, *_ = msgspec.msgpack.decode(payload)
            if process is None or kind not in ("add", "call"):
                raise
            process.refuse(kind, key, str(error))
    return None


class EngineProcess:
    def __init__(self, outbox: Outbox):
        self._outbox = outbox
        self.ended, self.code = threading.Event(), 0
        # Three pools, so that none of these waits for another: embeddings take minutes, a grammar seconds.
        self._intake = ThreadPoolExecutor(4, thread_name_prefix="intake")
        self._forwards = ThreadPoolExecutor(2, thread_name_prefix="forward")
        self._pool = ThreadPoolExecutor(4, thread_name_prefix="command")
        self._cancels: dict[int, threading.Event] = {}  # by the number of a call that can be cancelled
        self._checking: set[str] = set()  # requests that have come and are not in the engine's queue yet
        self._lock = threading.Lock()
        self._progress_sent = 0.0

    def start(self, start: StartEngine) -> None:
        from dovetail.engine.llm import LLM
        from dovetail.engine.loop import EngineLoop

        llm = LLM.from_options(start.model, _options(start), progress=self._progress)
        llm.prepare(self._progress)
        gc.collect()
        gc.freeze()  # these objects live as long as the process: a collection that visits them all would delay a step
        self._loop = EngineLoop(llm.engine, self._outbox.put, self._on_end)
        self._commands = Commands(self._loop)
        self._outbox.put(EngineReady(_info(start.model, llm)))

    def _progress(self, what: str, done: int, total: int) -> None:
        now = time.monotonic()
        if done >= total or now - self._progress_sent > PROGRESS_SECONDS:
            self._progress_sent = now
            self._outbox.put(Progress(what, done, total))

    def _on_end(self, died: EngineDied) -> None:
        if died.__cause__ is not None:
            self.fail(EngineFailed(str(died)))
        self.ended.set()

    def fail(self, failed: EngineFailed) -> None:
        self._outbox.put(failed)
        self.code = 1
        self.ended.set()

    # --- on the reader's thread ---------------------------------------------------------------------------------------

    def take(self, message: ToEngine) -> None:
        if isinstance(message, Add):
            self._checking.add(message.id)
            if message.params.structured_outputs or message.params.bad_words:  # a grammar may take a second to compile
                self._intake.submit(self._add, message)
            else:
                self._add(message)
        elif isinstance(message, Call):
            self._call(message)

    def refuse(self, kind: str, key: Any, sentence: str) -> None:
        self._outbox.put(RequestRefused(key, sentence) if kind == "add" else CallAnswer(key, error=sentence))

    def _call(self, call: Call) -> None:
        """Every call with a number is answered, except `stop`: the process ends."""
        if call.name == "stop":
            self._pool.submit(self._loop.stop)
        elif call.name == "abort":
            self._answer(call, self._abort(*call.args))
        elif call.name == "cancel":
            self._cancel(*call.args)
        elif (command := self._commands.find(call.name)) is None:
            self._outbox.put(CallAnswer(call.number, error=f"the engine knows no command {call.name!r}", user=False))
        elif call.name in FORWARDS:
            cancelled = self._cancels[call.number] = threading.Event()
            self._answer(call, self._forwards.submit(command, cancelled.is_set, *call.args))
        elif call.name in SLOW:
            self._answer(call, self._pool.submit(command, *call.args))
        else:
            self._answer(call, command(*call.args))

    def _answer(self, call: Call, result: Any) -> None:
        if isinstance(result, Future):
            result.add_done_callback(lambda future: self._answer_future(call, future))
        elif call.number:
            self._outbox.put(CallAnswer(call.number, result))

    def _cancel(self, number: int) -> None:
        """End a call whose caller has left, if it is one that can end early."""
        if (cancelled := self._cancels.get(number)) is not None:
            cancelled.set()

    def _answer_future(self, call: Call, future: Future) -> None:
        self._cancels.pop(call.number, None)
        error = future.exception()
        if error is None:
            self._answer(call, future.result())
        elif call.number and not isinstance(error, EngineDied):
            sentence, user = _sentence_of(error, f"{call.name} failed")
            self._outbox.put(CallAnswer(call.number, error=sentence, user=user))

    # --- requests -----------------------------------------------------------------------------------------------------

    def _add(self, add: Add) -> None:
        try:
            request = self._loop.engine.intake.request(
                add.id, add.prompt, add.params,
                priority=add.priority, adapter=add.adapter, cache_salt=add.cache_salt, arrival=add.arrival, text=False,
            )  # fmt: skip
            with self._lock:  # an abort comes before this and is seen here, or after it and finds the request queued
                if add.id in self._checking:
                    self._checking.discard(add.id)
                    queued = self._loop.submit(lambda engine: engine.enqueue(request))
                    queued.add_done_callback(lambda future: self._refuse(add.id, future.exception()))
                    return
            self._outbox.put(_aborted(add))
        except Exception as error:
            self._checking.discard(add.id)
            self._refuse(add.id, error)

    def _refuse(self, id: str, error: BaseException | None) -> None:
        if error is not None and not isinstance(error, EngineDied):
            self._outbox.put(RequestRefused(id, *_sentence_of(error, f"request {id} failed")))

    def _abort(self, id: str, index: int | None = None) -> Future[None] | None:
        with self._lock:
            if id in self._checking:
                self._checking.discard(id)
                return None
            return self._loop.abort(id, index)


def _sentence_of(error: BaseException, what: str) -> tuple[str, bool]:
    """The error's sentence, and whether the caller can act on it; an error it cannot act on is logged."""
    if (known := as_user_error(error)) is not None:
        return str(known), True
    log.error("%s\n%s", what, traceback_text(error))
    return repr(error), False


def _aborted(add: Add) -> Deltas:
    """The end of a request that was aborted before it reached the engine."""
    now = time.monotonic()
    times = DeltaTimes(add.arrival or now, finished=now)
    return Deltas([Delta(add.id, i, [], times, finished=True, finish_reason="abort") for i in range(add.params.n)])


def _options(start: StartEngine) -> EngineOptions:
    """Return the engine's options with the server's default of tokens per step; on a CPU the engine derives it."""
    import jax

    most = start.options.max_num_batched_tokens or (None if jax.default_backend() == "cpu" else STEP_TOKENS)
    return replace(start.options, max_num_batched_tokens=most)


def _info(model: str, llm: LLM) -> EngineInfo:
    from dovetail.core.spec import held_bytes

    engine, room = llm.engine, llm.runner.adapters.layout
    config = engine.scheduler.config
    return EngineInfo(
        model, config.context, llm.config.vocab, config.num_pages, config.page_size, config.max_num_seqs,
        config.policy, engine.eos_ids, engine.tokenizer is not None, engine.runner.weights.version,
        llm.start_seconds, os.getpid(), llm.describe(), _adapters(llm), room.slots, room.rank,
        llm.prediction(), held_bytes(llm.runner.cache),
    )  # fmt: skip


def _adapters(llm: LLM) -> dict[str, LoadedAdapter]:
    find = llm.runner.adapters.find
    return {name: LoadedAdapter(path, find(name).version) for name, path in llm.options.lora_modules.items()}


# These run the model over many prompts, in threads of their own; they end early when their caller has left.
FORWARDS = {"embed", "score"}
# These wait for files or compilers, and run in a thread.
SLOW = {"start_profile", "stop_profile"} | {name for name, control in CONTROLS.items() if control.prepare}


class Commands:
    def __init__(self, loop: EngineLoop):
        from dovetail.engine.embed import Embedder

        self._loop = loop
        self._embedder = Embedder(loop.engine, lambda function: loop.submit(function).result())
        self._profile: str | None = None
        self._lock = threading.Lock()

    def find(self, name: str) -> Callable[..., Any] | None:
        """The command of that name; a control gives a future of its answer."""
        if name in CONTROLS:
            return partial(self._loop.control, name)
        return getattr(self, name) if name in PUBLIC else None

    def pulse(self) -> float:
        return self._loop.pulse()

    def stats(self) -> EngineStats:
        return self._loop.engine.stats()

    def embed(
        self, cancelled: Cancelled, prompts: list[list[int]], pooling: Pooling, adapter: str | None = None
    ) -> list[bytes]:
        """Little-endian float32, which the HTTP process decodes one by one."""
        vectors = self._embedder.embed(prompts, pooling, adapter, cancelled)
        return [np.asarray(vector, "<f4").tobytes() for vector in vectors]

    def score(self, cancelled: Cancelled, prompts: list[list[int]], adapter: str | None = None) -> list[float]:
        return self._embedder.score(prompts, adapter, cancelled)

    def start_profile(self, folder: str) -> None:
        with self._lock:
            if self._profile is not None:
                raise UserError(f"a profile is being written to {self._profile}: stop that first")
            import jax

            jax.profiler.start_trace(folder)
            self._profile = folder

    def stop_profile(self) -> str:
        """The folder it was written to."""
        with self._lock:
            if self._profile is None:
                raise UserError("no profile is being written: start one first")
            folder, self._profile = self._profile, None
            import jax

            jax.profiler.stop_trace()
            return folder


PUBLIC = {name for name in vars(Commands) if not name.startswith("_")} - {"find"}


if __name__ == "__main__":
    main(int(sys.argv[1]))
