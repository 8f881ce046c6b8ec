"""Steps that other processes lower: they are those that this process lowers, and its own when a process fails."""

import os
import signal
from collections.abc import Iterator

import jax
import pytest
from engine.engines import GREEDY, make_llm, tokens_of

from dovetail.engine import pages
from dovetail.engine.device import lowering
from dovetail.engine.device.lowering import Lowering

pytestmark = pytest.mark.slow
PROMPTS = [[5, 6, 7], [8, 9, 10, 11]]
# bf16: the kernels for f32 on a CPU are calls that cannot be exported
OPTIONS = dict(dtype="bf16", warm_up=True, max_num_seqs=2, max_num_batched_tokens=32, max_decode_steps=1)


@pytest.fixture
def apart(monkeypatch) -> Iterator[list[bool]]:
    """Lower all steps in other processes; record whether each was."""
    found, lower = [], Lowering.lower

    def recorded(self, program):
        lowered = lower(self, program)
        found.append(lowered is not None)
        return lowered

    monkeypatch.setattr(Lowering, "lower", recorded)
    monkeypatch.setattr(pages, "why_not_apart", lambda placement: None)
    jax.config.update("jax_enable_compilation_cache", False)  # each step is lowered
    yield found
    jax.config.update("jax_enable_compilation_cache", True)


@pytest.fixture
def processes(monkeypatch) -> list[int]:
    """Record the processes that are started."""
    found, start = [], lowering._Process.__init__

    def recorded(self, request):
        start(self, request)
        found.append(self._popen.pid)

    monkeypatch.setattr(lowering._Process, "__init__", recorded)
    return found


def answers(**options) -> list:
    return tokens_of(make_llm("llama3.1", **OPTIONS, **options).generate(PROMPTS, GREEDY, progress=False))


def test_a_step_that_another_process_lowers_gives_the_same_tokens_and_the_process_ends(apart, processes, monkeypatch):
    found = answers()
    assert apart and all(apart) and processes
    for pid in processes:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    monkeypatch.setattr(pages, "why_not_apart", lambda placement: "for comparison")
    assert found == answers()


def test_a_process_that_is_killed_costs_no_step(apart, processes, monkeypatch):
    ask = lowering._Process.ask

    def killed(self, shape):
        os.kill(self._popen.pid, signal.SIGKILL)
        return ask(self, shape)

    monkeypatch.setattr(lowering._Process, "ask", killed)
    assert len(answers()[0]) and apart and not any(apart)
