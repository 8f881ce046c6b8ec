"""The engine's process: `python -m dovetail.serve.remote.process FD`, started by remote.child with an inherited socket.

The main thread starts the engine and waits, the reader thread takes messages, the engine's thread steps, and the outbox
sends. The process makes no text and no JSON. It ends on request, when its engine dies, and when its parent
ends. An exception in a request or a command is answered and logged; the process goes on.
"""

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

from dovetail.core.errors import RequestError, UserError, as_user_error
from dovetail.core.host import keep_little_freed, return_freed
from dovetail.engine.interface import CONTROLS, EngineDied, EngineStats
from dovetail.engine.options import EngineOptions
from dovetail.io.images.item import ImagePrompt
from dovetail.serve.remote.wire import (
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
    WireError,
    read_frame,
    to_engine,
)
from dovetail.serve.request_context import traceback_text

if TYPE_CHECKING:
    from dovetail.engine.embed import Cancelled, Pooling
    from dovetail.engine.llm import LLM
    from dovetail.engine.loop import EngineLoop
from queue import Empty, SimpleQueue

from dovetail.engine.request.outputs import OutputDelta
from dovetail.serve.remote.wire import FromEngine, Logprob, frame

PROGRESS_SECONDS = 0.1
STEP_TOKENS = 8192  # default of a server's max_num_batched_tokens on an accelerator
PR_SET_PDEATHSIG = 1
# These commands run the model over many prompts, in their own threads; they end early when their caller has left.
FORWARDS = {"embed", "score"}
# These wait for files or compilers, and run in a thread.
SLOW = {"start_profile", "stop_profile"} | {name for name, control in CONTROLS.items() if control.prepare}


def main(fd: int) -> None:
    """Serve the engine over the socket `fd` until the parent or the engine ends."""
    _obey_parent_only()
    keep_little_freed()
    sock = socket.socket(fileno=fd)
    sock.set_inheritable(False)
    inbox, outbox = sock.makefile("rb"), Outbox(sock)
    start = _read(inbox)
    if not isinstance(start, StartEngine):
        return
    when = "" if sys.stderr.isatty() else "%(asctime)s "  # as the HTTP process, which writes to the same log
    logging.basicConfig(format=f"{when}engine: %(message)s")
    logging.getLogger("dovetail").setLevel(start.log_level)
    process = EngineProcess(outbox)
    threading.Thread(target=_serve, args=(process, inbox), name="reader", daemon=True).start()
    try:
        process.start(start)
    except BaseException as error:
        process.fail(_logged(error, "the engine could not be started"))
    process.ended.wait()
    outbox.close()
    os._exit(process.code)  # without waiting for threads that still load or compile


def _obey_parent_only() -> None:
    """Leave it to the parent when this process ends.

    Ctrl-C and SIGTERM, which the whole process group may get, are ignored. Linux kills this process when the parent
    ends, in case it does not see the end of the socket.
    """
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
        log.exception("the engine's process cannot continue")
        os._exit(1)
    os._exit(0)


def _read(inbox: IO[bytes], process: EngineProcess | None = None) -> ToEngine | None:
    """Return the next message, or None at the end; answer a message that cannot be decoded with the reason."""
    while (payload := read_frame(inbox)) is not None:
        try:
            return to_engine.decode(payload)
        except msgspec.ValidationError as error:
            kind, key, *_ = msgspec.msgpack.decode(payload)
            if process is None or kind not in ("add", "call"):
                raise
            process.refuse(kind, key, WireError.of(RequestError(str(error))))
    return None


class EngineProcess:
    """Run requests and commands of the parent on an engine."""

    def __init__(self, outbox: Outbox):
        self._outbox = outbox
        self.ended, self.code = threading.Event(), 0
        # Three pools, so that none waits for another: embeddings take minutes, compiling a grammar takes seconds.
        self._intake = ThreadPoolExecutor(4, thread_name_prefix="intake")
        self._forwards = ThreadPoolExecutor(2, thread_name_prefix="forward")
        self._pool = ThreadPoolExecutor(4, thread_name_prefix="command")
        self._cancels: dict[int, threading.Event] = {}  # by the number of a call that can be cancelled
        self._checking: set[str] = set()  # requests that have arrived and are not in the engine's queue yet
        self._lock = threading.Lock()
        self._progress_sent = 0.0

    def start(self, start: StartEngine) -> None:
        """Load the model, compile its steps, and report that the engine is ready."""
        from dovetail.engine.llm import LLM
        from dovetail.engine.loop import EngineLoop

        llm = LLM.from_options(start.model, _options(start), progress=self._progress, text=False)
        llm.prepare(self._progress)
        _let_go()
        gc.freeze()  # these objects live as long as the process; a collection that visits them all delays a step
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
            self.fail(WireError(str(died)))
        self.ended.set()

    def fail(self, error: WireError) -> None:
        """Report that the engine has failed, and end the process."""
        self._outbox.put(EngineFailed(error))
        self.code = 1
        self.ended.set()

    # --- on the reader's thread ---------------------------------------------------------------------------------------

    def take(self, message: ToEngine) -> None:
        """Handle one message of the parent; its errors are answered, except EngineDied."""
        if isinstance(message, Add):
            self._checking.add(message.id)
            if message.params.structured_outputs or message.params.bad_words:  # a grammar may take a second to compile
                self._intake.submit(self._add, message)
            else:
                self._add(message)
        elif isinstance(message, Call):
            self._call(message)

    def refuse(self, kind: str, key: Any, error: WireError) -> None:
        """Answer an Add (by its id) or a Call (by its number) with an error."""
        self._outbox.put(RequestRefused(key, error) if kind == "add" else CallAnswer(key, error=error))

    # --- commands -----------------------------------------------------------------------------------------------------

    def _call(self, call: Call) -> None:
        """Answer every call that has a number, except `stop`, which ends the process."""
        try:
            self._answer(call, self._run(call))
        except EngineDied:
            raise
        except Exception as error:
            self._fail_call(call, error)

    def _run(self, call: Call) -> Any:
        """Return the call's result, or a future of it."""
        if call.name == "stop":
            return self._pool.submit(self._loop.stop)
        if call.name == "abort":
            return self._abort(**call.args)
        if call.name == "cancel":
            return self._cancel(**call.args)
        command = self._commands.find(call.name)
        if call.name in FORWARDS:
            cancelled = self._cancels[call.number] = threading.Event()
            return self._forwards.submit(command, cancelled.is_set, **call.args)
        return self._pool.submit(command, **call.args) if call.name in SLOW else command(**call.args)

    def _answer(self, call: Call, result: Any) -> None:
        if isinstance(result, Future):
            result.add_done_callback(lambda future: self._answer_future(call, future))
        elif call.number:
            self._outbox.put(CallAnswer(call.number, result))

    def _answer_future(self, call: Call, future: Future) -> None:
        self._cancels.pop(call.number, None)
        error = future.exception()
        if error is None:
            self._answer(call, future.result())
        elif not isinstance(error, EngineDied):
            self._fail_call(call, error)

    def _fail_call(self, call: Call, error: BaseException) -> None:
        failed = _logged(error, f"request {call.request_id}: {call.name} failed")
        if call.number:
            self._outbox.put(CallAnswer(call.number, error=failed))

    def _cancel(self, number: int) -> None:
        """End a call whose caller has left, if it is one that can end early."""
        if (cancelled := self._cancels.get(number)) is not None:
            cancelled.set()

    # --- requests -----------------------------------------------------------------------------------------------------

    def _add(self, add: Add) -> None:
        try:
            prompt = add.prompt
            if add.images:
                prompt = ImagePrompt(tuple(add.prompt), tuple(image.span() for image in add.images))
            request = self._loop.engine.intake.request(
                add.id, prompt, add.params,
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
            self._outbox.put(RequestRefused(id, _logged(error, f"request {id} failed")))

    def _abort(self, id: str, index: int | None = None) -> Future[None] | None:
        with self._lock:
            if id in self._checking:
                self._checking.discard(id)
                return None
            return self._loop.abort(id, index)


class Commands:
    """Answer the calls of an engine's process besides requests: the engine's controls and the methods here."""

    def __init__(self, loop: EngineLoop):
        from dovetail.engine.embed import Embedder

        self._loop = loop
        self._embedder = Embedder(loop.engine, lambda function: loop.submit(function).result())
        self._profile: str | None = None
        self._lock = threading.Lock()

    def find(self, name: str) -> Callable[..., Any]:
        """Return the command of that name; a control returns a future of its result."""
        if name in CONTROLS:
            return partial(self._loop.control, name)
        if name not in COMMANDS:
            raise RuntimeError(f"unknown command {name!r}")
        return getattr(self, name)

    def pulse(self) -> float:
        """Return the seconds that the current step has taken so far."""
        return self._loop.pulse()

    def stats(self) -> EngineStats:
        """Return the engine's statistics."""
        return self._loop.engine.stats()

    def embed(
        self, cancelled: Cancelled, prompts: list[list[int]], pooling: Pooling, adapter: str | None = None
    ) -> list[bytes]:
        """Return each prompt's vector as little-endian float32, which the HTTP process decodes one by one."""
        vectors = self._embedder.embed(prompts, pooling, adapter, cancelled)
        return [np.asarray(vector, "<f4").tobytes() for vector in vectors]

    def score(self, cancelled: Cancelled, prompts: list[list[int]], adapter: str | None = None) -> list[float]:
        """Return a reward model's score of each prompt."""
        return self._embedder.score(prompts, adapter, cancelled)

    def start_profile(self, folder: str) -> None:
        """Start a trace for xprof."""
        import jax

        with self._lock:
            if self._profile is not None:
                raise UserError(f"a profile is already being written to {self._profile}: stop it first")
            jax.profiler.start_trace(folder)
            self._profile = folder

    def stop_profile(self) -> str:
        """Stop the trace and return its folder."""
        import jax

        with self._lock:
            if self._profile is None:
                raise UserError("no profile is being written: start one first")
            folder, self._profile = self._profile, None
            jax.profiler.stop_trace()
            return folder


COMMANDS = {name for name in vars(Commands) if not name.startswith("_")} - {"find"}


def _logged(error: BaseException, what: str) -> WireError:
    """Return the error as a message; log its traceback unless it is the user's."""
    if as_user_error(error) is None:
        log.error("%s\n%s", what, traceback_text(error))
    return WireError.of(error)


def _aborted(add: Add) -> Deltas:
    """Return the last deltas of a request that was aborted before it reached the engine."""
    now = time.monotonic()
    times = DeltaTimes(add.arrival or now, finished=now)
    return Deltas([Delta(add.id, i, [], times, finished=True, finish_reason="abort") for i in range(add.params.n)])


def _options(start: StartEngine) -> EngineOptions:
    """Return the engine's options with the server's own default of max_num_batched_tokens, except on a CPU."""
    import jax

    most = start.options.max_num_batched_tokens or (None if jax.default_backend() == "cpu" else STEP_TOKENS)
    return replace(start.options, max_num_batched_tokens=most)


def _let_go() -> None:
    """Return what compiling has left to the system; on a CPU also what jax keeps of it, 9 to 15 MB.

    Steps stay compiled. Small functions are compiled again when they are next used, in milliseconds on a CPU.
    """
    import jax

    if jax.default_backend() == "cpu":
        jax.clear_caches()
    gc.collect()
    return_freed()


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


class Outbox:
    """Send messages and the engine's updates over a socket, in order, from a thread.

    Neither encoding nor a slow parent delays a step. While the parent does not read, later updates of a sequence are
    joined to earlier ones, so that memory is bounded by what the requests may generate.
    """

    def __init__(self, sock: socket.socket):
        self._socket = sock
        self._queue: SimpleQueue[list[OutputDelta] | FromEngine | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="outbox", daemon=True)
        self._thread.start()

    def put(self, item: list[OutputDelta] | FromEngine) -> None:
        """Queue a message, or the updates of one step."""
        self._queue.put(item)

    def close(self, seconds: float = 2.0) -> None:
        """Send what is queued, if the parent reads it within `seconds`, and end the thread."""
        self._queue.put(None)
        self._thread.join(seconds)

    def _run(self) -> None:
        try:
            while self._send(self._waiting()):
                pass
        except OSError:  # the parent has ended
            os._exit(0)

    def _waiting(self) -> list[list[OutputDelta] | FromEngine | None]:
        """Wait for an item, and return everything that is queued."""
        items = [self._queue.get()]
        try:
            while True:
                items.append(self._queue.get_nowait())
        except Empty:
            return items

    def _send(self, items: list[list[OutputDelta] | FromEngine | None]) -> bool:
        """Send the items in order; return False after the last one (None)."""
        joined: dict[tuple[str, int], OutputDelta] = {}
        for item in items:
            if isinstance(item, list):
                for update in item:
                    key = update.request_id, update.index
                    joined[key] = joined.pop(key).then(update) if key in joined else update
                continue
            self._send_updates(joined)
            if item is None:
                return False
            self._socket.sendall(frame(item))
        self._send_updates(joined)
        return True

    def _send_updates(self, joined: dict[tuple[str, int], OutputDelta]) -> None:
        if joined:
            self._socket.sendall(frame(Deltas([_delta(update) for update in joined.values()])))
            joined.clear()


def _delta(update: OutputDelta) -> Delta:
    times = update.times
    delta = Delta(
        update.request_id,
        update.index,
        update.token_ids,
        DeltaTimes(times.arrival, times.scheduled, times.first_token, times.finished),
        [Logprob(*entry) for entry in update.logprobs] if update.logprobs is not None else None,
        cached_tokens=update.num_cached_tokens,
        weights_version=update.weights_version,
        spec_decode_metrics=update.spec_decode_metrics,
    )
    if update.finished:
        delta.finished, delta.finish_reason, delta.stop_reason = True, update.finish_reason, update.stop_reason
        delta.error = update.error
    if update.prompt_logprobs is not None:
        delta.prompt_logprobs = [entry and Logprob(*entry) for entry in update.prompt_logprobs]
    return delta


log = logging.getLogger(__name__)


if __name__ == "__main__":
    main(int(sys.argv[1]))
