"""Steps interrupted by Ctrl-C or a failure: the engine continues as if they had not been planned."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest
from engine.engines import GREEDY, make_llm, mixed_prompts, tokens_of, variant

from dovetail.engine.llm import LLM

pytestmark = pytest.mark.slow

PROMPTS = mixed_prompts(6, most=60)


@pytest.fixture(scope="module")
def shared() -> LLM:
    return make_llm("llama3.1")


@pytest.fixture(scope="module")
def answers(shared) -> list[list[int]]:
    return tokens_of(variant(shared).generate(PROMPTS, GREEDY))


@pytest.fixture
def llm(shared, monkeypatch):
    """Yield an engine; changes of the shared runner are undone."""
    llm = variant(shared)
    monkeypatch.setattr(llm.runner, "launch", llm.runner.launch)
    return llm


def breaks(function, at: int, how):
    """Return the function, except that its call number `at` runs `how(call)`."""
    calls = iter(range(10**9))

    def broken(*args, **more):
        return how(lambda: function(*args, **more)) if next(calls) == at else function(*args, **more)

    return broken


def interrupted(call):
    signal.raise_signal(signal.SIGINT)
    return call()


def interrupted_twice(call):
    signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGINT)


def failed(call):
    raise RuntimeError("out of memory")


@pytest.mark.parametrize("at", [0, 2, 5])
@pytest.mark.parametrize(
    "how, error",
    [(interrupted, KeyboardInterrupt), (interrupted_twice, KeyboardInterrupt), (failed, RuntimeError)],
    ids=["Ctrl-C", "Ctrl-C twice", "a failure"],
)
def test_requests_after_a_broken_off_step_are_answered(llm, answers, how, error, at):
    llm.runner.launch = breaks(llm.runner.launch, at, how)
    with pytest.raises(error):
        llm.generate(PROMPTS, GREEDY)
    assert not llm.engine._requests and not llm.engine.scheduler.has_work
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert tokens_of(llm.generate(PROMPTS, GREEDY)) == answers


class Breaking:
    """Steps of which the first one fails."""

    def __init__(self, steps, how):
        self.nearest, self.is_ready, self.busy = steps.nearest, steps.is_ready, False
        self._steps, self._how = steps, how

    def __call__(self, shape):
        return breaks(self._steps(shape), 0, self._how)


def test_pages_of_a_failed_step_are_allocated_again(llm, answers):
    def taken(call):
        out = call()
        del out
        raise RuntimeError("after the pages were handed over")

    steps = llm.runner.steps
    llm.runner.steps = Breaking(steps, taken)
    with pytest.raises(RuntimeError, match="handed over"):
        llm.generate(PROMPTS, GREEDY)
    llm.runner.steps = steps
    assert tokens_of(llm.generate(PROMPTS, GREEDY)) == answers


@pytest.mark.parametrize("how", [interrupted, failed], ids=["Ctrl-C", "a failure"])
def test_a_stream_goes_on_after_a_generate_that_was_broken_off(llm, answers, how):
    stream = llm.stream(PROMPTS[0], GREEDY)
    tokens = list(next(stream).token_ids)
    launch, llm.runner.launch = llm.runner.launch, breaks(llm.runner.launch, 1, how)
    with pytest.raises((KeyboardInterrupt, RuntimeError)):
        llm.generate(PROMPTS[1:3], GREEDY)
    llm.runner.launch = launch
    assert tokens + [token for update in stream for token in update.token_ids] == answers[0]


def test_ctrl_c_while_prompts_are_taken_in_leaves_nothing_behind(llm, answers):
    llm.engine.sampler.start = breaks(llm.engine.sampler.start, 1, interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, replace(GREEDY, n=2))
    assert not llm.engine._requests and not llm.engine.scheduler.has_work
    assert tokens_of(llm.generate(PROMPTS, GREEDY)) == answers
