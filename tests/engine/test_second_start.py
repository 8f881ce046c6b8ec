"""A second start compiles nothing: the page count, which programs are compiled for, does not move with free memory."""

from __future__ import annotations

import jax
import pytest
from engine.engines import GREEDY, make_llm, tokens_of

from dovetail.engine import memory, program
from dovetail.engine.memory import coarse_pages, held_bytes
from dovetail.engine.options import EngineOptions
from dovetail.serve.remote.wire import EngineInfo, Start

pytestmark = pytest.mark.slow

PROMPTS = [[5, 6, 7], [8, 9, 10, 11]]


@pytest.fixture
def empty_cache(tmp_path):
    """A folder of compiled programs that nothing is in yet."""
    from jax.experimental.compilation_cache.compilation_cache import reset_cache

    was = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    reset_cache()
    yield tmp_path
    jax.config.update("jax_compilation_cache_dir", was)
    reset_cache()


@pytest.fixture
def compiled(monkeypatch) -> list[str]:
    """The keys of the programs that are compiled, not loaded."""
    keys, compile_program = [], program.compile_program

    def counted(key, compile):
        keys.append(key)
        return compile_program(key, compile)

    monkeypatch.setattr(program, "compile_program", counted)
    return keys


def test_a_second_start_compiles_nothing_though_other_memory_is_available(empty_cache, compiled, monkeypatch):
    page_bytes = held_bytes(make_llm("llama3.1", kv_bytes=2**18).runner.programs.pages(1))
    pages, answers = [], []
    for free in (64.5, 63.5, 80, 95):  # pages' worth: around a step of the coarse sizes, and up to the next but one
        monkeypatch.setattr(memory, "available_memory", lambda free=free: int(free * page_bytes / 0.2))
        llm = make_llm("llama3.1", multi_step=False)
        answers.append(tokens_of(llm.generate(PROMPTS, GREEDY, progress=False)))
        pages.append(llm.engine.scheduler.config.num_pages)
        if len(pages) == 1:
            assert compiled
            compiled.clear()
    assert pages == [64] * 4 and answers == answers[:1] * 4
    assert not compiled


def test_page_counts_are_coarse_and_never_far_from_what_fits():
    for pages in range(2, 3000):
        own, up, *down = coarse_pages(pages)
        assert 2 / 3 * pages < own + 1 and own <= pages < up <= 1.5 * own + 1 and all(n < own for n in down)


def test_an_engine_that_is_started_again_keeps_its_pages():
    info = EngineInfo("m", 1, 1, 96, 16, 1, "fcfs", (), False, 0, 0.0, 1, "", kv_bytes=96 * 4096)
    assert Start("m", EngineOptions(memory_fraction=0.3)).again(info).options.kv_bytes == 96 * 4096
