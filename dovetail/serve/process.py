"""The engine's process: `python -m dovetail.serve.process FD`, its socket inherited, started by serve.child.

The main thread starts the engine and waits; the reader takes requests in, the engine's thread steps, the outbox sends.
It makes no text and no JSON. It ends when it is told to, when its engine dies, and when its parent does.
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
from concurrent.futures import Future, ThreadPoolExecutor
from typing import IO, TYPE_CHECKING, Any

import msgspec

from dovetail.engine.died import EngineDied
from dovetail.serve.messages import (
    LENGTH,
    Add,
    Answer,
    Call,
    Delta,
    Deltas,
    EngineInfo,
    Failed,
    Progress,
    Ready,
    Refused,
    Start,
    Times,
    ToEngine,
    to_engine,
)
from dovetail.serve.outbox import Outbox

if TYPE_CHECKING:
    from dovetail.engine.llm import LLM

log = logging.getLogger(__name__)
USER_ERRORS = (ValueError, OSError, ImportError)  # whoever asked can do something about these: see cli.errors
PROGRESS_SECONDS = 0.1
PR_SET_PDEATHSIG = 1


def main(fd: int) -> None:
    _be_a_child()
    sock = socket.socket(fileno=fd)
    sock.set_inheritable(False)
    inbox, outbox = sock.makefile("rb"), Outbox(sock)
    start = _read(inbox)
    if not isinstance(start, Start):
        return
    logging.basicConfig(format="engine: %(message)s")
    logging.getLogger("dovetail").setLevel(start.log_level)
    service = Service(outbox)
    threading.Thread(target=_serve, args=(service, inbox), name="reader", daemon=True).start()
    try:
        service.start(start)
    except BaseException as error:
        user = isinstance(error, USER_ERRORS)
        if not user:
            log.exception("the engine could not be started")
        service.fail(Failed(str(error) if user else repr(error), user))
    service.ended.wait()
    outbox.close()
    os._exit(service.code)  # no thread that still loads or compiles holds it up


def _be_a_child() -> None:
    """The parent decides when this ends: a ctrl-C, or a stop sent to the whole group, is his to answer. Without him
    there is nothing to do: besides the end of the socket, Linux tells."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _serve(service: Service, inbox: IO[bytes]) -> None:
    try:
        while (message := _read(inbox, service)) is not None:
            service.take(message)
    except EngineDied:  # said by the engine's own thread
        return
    except BaseException:
        log.exception("the engine's process cannot go on")
        os._exit(1)
    os._exit(0)


def _read(inbox: IO[bytes], service: Service | None = None) -> ToEngine | None:
    """The next message; None at the end. One that cannot be read is answered with what is wrong with it."""
    while len(size := inbox.read(LENGTH.size)) == LENGTH.size:
        payload = inbox.read(LENGTH.unpack(size)[0])
        try:
            return to_engine.decode(payload)
        except msgspec.ValidationError as error:
            kind, key, *_ = msgspec.msgpack.decode(payload)
            if service is None or kind not in ("add", "call"):
                raise
            service.refuse(kind, key, str(error))
    return None


class Service:
    def __init__(self, outbox: Outbox):
        self._outbox = outbox
        self.ended, self.code = threading.Event(), 0
        self._pool = ThreadPoolExecutor(4, thread_name_prefix="command")
        self._checking: set[str] = set()  # requests on their way to the engine: still to be checked, say
        self._lock = threading.Lock()
        self._said = 0.0

    def start(self, start: Start) -> None:
        from dovetail.engine.llm import LLM
        from dovetail.engine.loop import EngineLoop
        from dovetail.serve.commands import NAMES, SLOW, Commands

        llm = LLM(start.model, **start.options, progress=self._progress)
        gc.collect()
        gc.freeze()  # it stays as long as the process: a search for garbage through all of it would hold up a step
        self._loop = EngineLoop(llm.engine, self._outbox.put, self._on_end)
        self._commands, self._names, self._slow = Commands(self._loop), NAMES, SLOW
        self._outbox.put(Ready(_info(start.model, llm)))

    def _progress(self, what: str, done: int, total: int) -> None:
        now = time.monotonic()
        if done >= total or now - self._said > PROGRESS_SECONDS:
            self._said = now
            self._outbox.put(Progress(what, done, total))

    def _on_end(self, died: EngineDied) -> None:
        if died.__cause__ is not None:
            self.fail(Failed(str(died)))
        self.ended.set()

    def fail(self, failed: Failed) -> None:
        self._outbox.put(failed)
        self.code = 1
        self.ended.set()

    # --- on the reader's thread ---------------------------------------------------------------------------------------

    def take(self, message: ToEngine) -> None:
        if isinstance(message, Add):
            self._checking.add(message.id)
            if message.params.structured or message.params.bad_words:  # a grammar may take a second to compile
                self._pool.submit(self._add, message)
            else:
                self._add(message)
        elif isinstance(message, Call):
            self._call(message)

    def refuse(self, kind: str, key: Any, sentence: str) -> None:
        self._outbox.put(Refused(key, sentence) if kind == "add" else Answer(key, error=sentence))

    def _call(self, call: Call) -> None:
        """Every call is answered, if it wants to be; but the answer to `stop` is the end."""
        if call.name == "stop":
            self._pool.submit(self._loop.stop)
        elif call.name == "abort":
            self._answer(call, self._abort(*call.args))
        elif call.name not in self._names:
            self._outbox.put(Answer(call.number, error=f"the engine knows no command {call.name!r}", user=False))
        elif call.name in self._slow:
            self._answer(call, self._pool.submit(getattr(self._commands, call.name), *call.args))
        else:
            self._answer(call, getattr(self._commands, call.name)(*call.args))

    def _answer(self, call: Call, result: Any) -> None:
        if isinstance(result, Future):
            result.add_done_callback(lambda future: self._answer_future(call, future))
        elif call.number:
            self._outbox.put(Answer(call.number, result))

    def _answer_future(self, call: Call, future: Future) -> None:
        error = future.exception()
        if error is None:
            self._answer(call, future.result())
        elif call.number and not isinstance(error, EngineDied):
            sentence, user = _said(error, f"{call.name} failed")
            self._outbox.put(Answer(call.number, error=sentence, user=user))

    # --- requests -----------------------------------------------------------------------------------------------------

    def _add(self, add: Add) -> None:
        try:
            request = self._loop.engine.intake.request(
                add.id, add.prompt, add.params,
                priority=add.priority, cache_salt=add.cache_salt, arrival=add.arrival, text=False,
            )  # fmt: skip
            with self._lock:  # an abort comes before this, and is seen here, or after it, and finds the request queued
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
            self._outbox.put(Refused(id, *_said(error, f"request {id} failed")))

    def _abort(self, id: str, index: int | None = None) -> Future[None] | None:
        with self._lock:
            if id in self._checking:
                self._checking.discard(id)
                return None
            return self._loop.abort(id, index)


def _said(error: BaseException, what: str) -> tuple[str, bool]:
    """The sentence, and whether it is the asker's to act on. What is not goes to the log."""
    user = isinstance(error, USER_ERRORS)
    if not user:
        log.error(what, exc_info=error)
    return str(error) if user else repr(error), user


def _aborted(add: Add) -> Deltas:
    """The end of a request that never came as far as the engine."""
    now = time.monotonic()
    times = Times(add.arrival or now, finished=now)
    return Deltas([Delta(add.id, i, [], times, finished=True, finish_reason="abort") for i in range(add.params.n)])


def _info(model: str, llm: LLM) -> EngineInfo:
    engine = llm.engine
    config = engine.scheduler.config
    return EngineInfo(
        model, config.max_model_len, llm.config.vocab, config.num_pages, config.page_size, config.max_num_seqs,
        config.policy, engine.eos_ids, engine.tokenizer is not None, engine.runner.weights.version,
        llm.start_seconds, os.getpid(), llm.describe(),
    )  # fmt: skip


if __name__ == "__main__":
    main(int(sys.argv[1]))
