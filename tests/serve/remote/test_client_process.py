"""The engine's process from inside: early aborts, a parent that does not read, a dying engine."""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import Future
from dataclasses import replace

import pytest
from engine.engines import GREEDY, make_llm, mixed_prompts, tokens_of, variant

import dovetail.engine.llm
from dovetail.core.errors import RequestError, UserError
from dovetail.engine.llm import LLM
from dovetail.serve.remote.process import Commands, EngineProcess, Outbox
from dovetail.serve.remote.wire import (
    LENGTH,
    Add,
    Call,
    CallAnswer,
    Deltas,
    EngineFailed,
    EngineReady,
    Progress,
    RequestRefused,
    StartEngine,
    WireError,
    from_engine,
)

pytestmark = pytest.mark.slow

PROMPTS = mixed_prompts(4, most=40)
CHECKED = replace(GREEDY, bad_words=("x",), n=2)  # on a thread of its own


class Parent:
    """The parent's end of the socket, with a service on the given engine."""

    def __init__(self, monkeypatch, llm: LLM):
        self.llm = variant(llm)
        self.llm.start_seconds = 0.0
        monkeypatch.setattr(dovetail.engine.llm.LLM, "from_options", lambda *_, **__: self.llm)
        self.socket, theirs = socket.socketpair()
        self.socket.settimeout(60)
        self.theirs, self.inbox = theirs, self.socket.makefile("rb")
        self.service = EngineProcess(Outbox(theirs))
        self.service.start(StartEngine("model"))
        while isinstance(first := self.read(), Progress):  # of what is compiled before it is ready
            pass
        assert isinstance(first, EngineReady)

    def read(self):
        size = LENGTH.unpack(self.inbox.read(LENGTH.size))[0]
        return from_engine.decode(self.inbox.read(size))

    def close(self):
        self.service._loop.stop()
        self.service._outbox.close()
        for each in (self.inbox, self.socket, self.theirs):
            each.close()


@pytest.fixture(scope="module")
def llm() -> LLM:
    return make_llm("llama3.1")


@pytest.fixture
def parent(monkeypatch, llm):
    parent = Parent(monkeypatch, llm)
    yield parent
    parent.close()


def test_an_abort_overtakes_a_request_that_is_still_checked(parent, monkeypatch):
    intake = parent.llm.engine.intake
    may_go, request = threading.Event(), intake.request

    def slowly(id, prompt, params, **more):
        assert may_go.wait(30)
        return request(id, prompt, replace(params, bad_words=()), **more)

    monkeypatch.setattr(intake, "request", slowly)
    parent.service.take(Add("a", PROMPTS[0], CHECKED))
    parent.service.take(Call(7, "abort", {"id": "a"}))
    assert parent.read() == CallAnswer(7)
    may_go.set()
    deltas = parent.read().deltas
    assert [(delta.index, delta.finished, delta.finish_reason) for delta in deltas] == [
        (0, True, "abort"),
        (1, True, "abort"),
    ]
    assert not parent.llm.engine.has_work and not parent.service._checking


def test_a_parent_that_does_not_read_delays_no_step(parent):
    """Its socket fills, the engine goes on, and waiting updates are joined."""
    parent.theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    params = replace(GREEDY, max_tokens=200, logprobs=20)
    for i, prompt in enumerate(PROMPTS):
        parent.service.take(Add(str(i), prompt, params))
    engine = parent.llm.engine
    end = time.monotonic() + 60
    while engine.stats().generated_tokens < 4 * 200:
        assert time.monotonic() < end, "the engine waits for its parent"
        time.sleep(0.01)
    tokens, messages = {str(i): [] for i in range(4)}, 0
    finished = 0
    while finished < 4:
        message = parent.read()
        assert isinstance(message, Deltas)
        messages += 1
        for delta in message.deltas:
            tokens[delta.id] += delta.tokens
            finished += delta.finished
    assert messages < 150, "one per step, while there was room for them; then all the rest in one"
    assert list(tokens.values()) == tokens_of(variant(parent.llm).generate(PROMPTS, params, progress=False))


def test_text_and_stop_strings_are_left_to_the_parent(parent, monkeypatch):
    """The engine makes no text for a request from here, although it has a tokenizer."""
    monkeypatch.setattr(parent.llm.engine, "tokenizer", object())
    parent.service.take(Add("a", PROMPTS[0], replace(GREEDY, stop=("a",))))
    tokens, delta = [], None
    while delta is None or not delta.finished:
        (delta,) = parent.read().deltas
        tokens += delta.tokens
    assert len(tokens) == 12 and delta.finish_reason == "length"


def test_the_engines_death_is_reported(parent, monkeypatch):
    def step():
        raise OSError("the device is gone")

    monkeypatch.setattr(parent.llm.engine, "step", step)
    parent.service.take(Add("a", PROMPTS[0], GREEDY))
    message = parent.read()
    assert isinstance(message, EngineFailed) and "the device is gone" in message.error.message
    assert message.error.kind is None
    assert parent.service.ended.wait(10) and parent.service.code == 1


def test_pulse_counts_a_long_step_but_not_compiling(parent, monkeypatch):
    loop, runner, may_go = parent.service._loop, parent.llm.engine.runner, threading.Event()
    step = parent.llm.engine.step
    assert loop.pulse() == 0, "it waits for something to do"
    monkeypatch.setattr(parent.llm.engine, "step", lambda: may_go.wait(30) and step())
    parent.service.take(Add("a", PROMPTS[0], GREEDY))
    while loop.pulse() < 0.05:
        time.sleep(0.01)
    monkeypatch.setitem(runner.steps._futures, "another", Future())
    assert loop.pulse() == 0
    runner.steps._futures["another"].set_result(None)
    time.sleep(0.05)
    assert 0.05 <= loop.pulse() < 1
    may_go.set()
    while not parent.read().deltas[-1].finished:
        pass


def test_embeddings_hold_up_neither_grammars_nor_commands_and_can_be_cancelled(parent, monkeypatch):
    def forever(self, cancelled, prompts, pooling, adapter=None):
        while not cancelled():
            time.sleep(0.01)
        raise RequestError("cancelled")

    monkeypatch.setattr(Commands, "embed", forever)
    for number in range(1, 9):
        parent.service.take(Call(number, "embed", {"prompts": [[1]], "pooling": "mean"}))
    monkeypatch.setattr(parent.llm.engine.intake, "request", _without_words(parent.llm.engine.intake.request))
    parent.service.take(Add("a", PROMPTS[0], replace(CHECKED, n=1)))
    while not parent.read().deltas[-1].finished:
        pass
    for number in range(1, 9):
        parent.service.take(Call(0, "cancel", {"number": number}))
    parent.service.take(Call(0, "cancel", {"number": 99}))  # one that has ended, or never was
    answers = [parent.read() for _ in range(8)]
    assert {answer.number: answer.error.message for answer in answers} == dict.fromkeys(range(1, 9), "cancelled")
    assert not parent.service._cancels


def _without_words(request):
    """The tests' engine has no tokenizer."""
    return lambda id, prompt, params, **more: request(id, prompt, replace(params, bad_words=()), **more)


def test_unreadable_messages_and_unknown_commands_are_answered(parent, caplog):
    parent.service.refuse("add", "a", WireError.of(RequestError("no", param="top_k", code="c")))
    refused = parent.read()
    assert refused == RequestRefused("a", WireError("no", "RequestError", "top_k", "c"))
    again = refused.error.exception()
    assert (type(again), str(again), again.param, again.code) == (RequestError, "no", "top_k", "c")
    parent.service.take(Call(3, "_loop", {}, "abc"))
    error = parent.read().error
    assert error.kind is None and isinstance(error.exception(), RuntimeError) and "request abc" in caplog.text


@pytest.mark.parametrize("kind", [RuntimeError, ValueError])
def test_an_exception_in_the_intake_or_a_command_is_logged_and_the_next_request_is_answered(
    parent, monkeypatch, caplog, kind
):
    def fail(*_, **__):
        raise kind("operands could not be broadcast")

    with monkeypatch.context() as patch:
        patch.setattr(parent.llm.engine.intake, "request", fail)
        parent.service.take(Add("r1-0", PROMPTS[0], GREEDY))
        refused = parent.read()
        patch.setattr(parent.llm.engine, "stats", fail)
        parent.service.take(Call(5, "stats", {}, "r2"))
        answer = parent.read()
    for error, id in ((refused.error, "r1-0"), (answer.error, "r2")):
        assert error.kind is None and not isinstance(error.exception(), UserError)
        (logged,) = [record.getMessage() for record in caplog.records if f"request {id}" in record.getMessage()]
        assert "Traceback" in logged and f"{kind.__name__}: operands" in logged
    parent.service.take(Add("r3-0", PROMPTS[0], GREEDY))
    while not parent.read().deltas[-1].finished:
        pass
    parent.service.take(Call(6, "stats"))
    assert parent.read().error is None and not parent.service._checking
