"""Steps that other processes lower: they are those that this process lowers, and its own when a process fails."""

import os
import signal
from collections.abc import Iterator

import jax
import pytest
from engine.engines import GREEDY, make_llm, tokens_of
from engine.engines import OPTIONS as ENGINE
from engine.test_adapters import saved
from reference_models import reference
from vision_models import vision_reference

from dovetail.engine import pages
from dovetail.engine.device import lowering
from dovetail.engine.device.lowering import Lowering
from dovetail.engine.llm import LLM

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


def answers(model: str = "llama3.1", **options) -> list:
    return tokens_of(make_llm(model, **OPTIONS, **options).generate(PROMPTS, GREEDY, progress=False))


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


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["int8", "adapters", "draft model", "experts", "images"])
def test_each_kind_of_engine_is_lowered_in_other_processes(kind, apart, monkeypatch, tmp_path):
    model, options = "llama3.1", {}
    if kind == "int8":
        options = dict(quantization="int8")
    elif kind == "adapters":
        options = dict(lora_modules={"a": saved(tmp_path / "a", model, 4, 1)}, max_loras=2)
    elif kind == "draft model":
        options = dict(speculative_config={"model": str(reference(model)[1]), "num_speculative_tokens": 2})
    elif kind == "experts":
        model = "qwen3-moe"
    else:
        llm = LLM(vision_reference("smolvlm")[1], **(ENGINE | OPTIONS))
        assert apart and all(apart) and llm.runner.is_warm
        return
    found = answers(model, **options)
    assert apart and all(apart)
    monkeypatch.setattr(pages, "why_not_apart", lambda placement: "for comparison")
    assert found == answers(model, **options)
