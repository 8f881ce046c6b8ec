"""A second start compiles nothing: the page count, which programs depend on, does not follow free memory."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import jax
import pytest
from data.conftest import small_tokenizer
from engine.engines import GREEDY, make_llm, tokens_of
from reference_models import reference

from dovetail.core.spec import held_bytes
from dovetail.engine.device import programs
from dovetail.engine.device.batch import Shape
from dovetail.engine.device.programs import CompiledSteps
from dovetail.engine.options import EngineOptions
from dovetail.plan import serve_memory
from dovetail.plan.serve_memory import coarse_pages
from dovetail.serve.remote.wire import EngineInfo, StartEngine

EVERY_PROGRAM = True
pytestmark = pytest.mark.slow

PROMPTS = [[5, 6, 7], [8, 9, 10, 11]]


@pytest.fixture
def empty_cache(tmp_path):
    """Use an empty folder of compiled programs."""
    from jax.experimental.compilation_cache.compilation_cache import reset_cache

    was = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    reset_cache()
    yield tmp_path
    jax.config.update("jax_compilation_cache_dir", was)
    reset_cache()


@pytest.fixture
def compiled(monkeypatch) -> list[str]:
    """Record the keys of programs that are compiled rather than loaded."""
    keys, compile_program = [], programs.compile_program

    def counted(key, compile):
        keys.append(key)
        return compile_program(key, compile)

    monkeypatch.setattr(programs, "compile_program", counted)
    return keys


def test_a_second_start_compiles_nothing_though_other_memory_is_available(empty_cache, compiled, monkeypatch):
    page_bytes = held_bytes(make_llm("llama3.1", kv_cache_memory_bytes=2**18).runner.programs.pages(1))
    pages, answers = [], []
    for free in (64.5, 63.5, 80, 95):  # pages' worth: around a step of the coarse sizes, and up to the next but one
        monkeypatch.setattr(serve_memory, "available_memory", lambda free=free: int(free * page_bytes / 0.2))
        llm = make_llm("llama3.1", max_decode_steps=1)
        answers.append(tokens_of(llm.generate(PROMPTS, GREEDY, progress=False)))
        pages.append(llm.engine.scheduler.config.num_pages)
        if len(pages) == 1:
            assert compiled
            compiled.clear()
    assert pages == [64] * 4 and answers == answers[:1] * 4
    assert not compiled


class OneFails:
    """Imitate programs of which the first one to be compiled fails, and the others take a while."""

    def __init__(self):
        self.begun = 0

    def __call__(self, shape):
        return self

    def load_or_compile(self, *_):
        self.begun += 1
        if self.begun == 1:
            raise ValueError("it does not compile")
        time.sleep(0.2)


def test_an_error_drops_the_steps_that_have_not_begun():
    """Python waits for all work of a pool before it ends: a start that failed, or Ctrl-C, would hang."""
    shapes = [Shape(2 ** (i % 8), i + 1, 1) for i in range(200)]
    made = OneFails()
    with pytest.raises(ValueError, match="does not compile"):
        CompiledSteps(made, []).all(shapes)
    begun = made.begun
    time.sleep(1)
    assert made.begun <= begun + 2 < 100


def test_page_counts_are_coarse_and_never_far_from_what_fits():
    for pages in range(2, 3000):
        own, up, *down = coarse_pages(pages)
        assert 2 / 3 * pages < own + 1 and own <= pages < up <= 1.5 * own + 1 and all(n < own for n in down)


def test_an_engine_that_is_started_again_keeps_its_pages():
    info = EngineInfo("m", 1, 1, 96, 16, 1, "fcfs", (), False, 0, 0.0, 1, "", kv_cache_memory_bytes=96 * 4096)
    assert (
        StartEngine("m", EngineOptions(gpu_memory_utilization=0.3)).again(info).options.kv_cache_memory_bytes
        == 96 * 4096
    )


@pytest.fixture
def folder(tmp_path) -> Path:
    """Write a model that `dovetail serve` accepts."""
    shutil.copytree(reference("llama3.1")[1], tmp_path / "model")
    small_tokenizer().save(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.thorough
def test_a_second_dovetail_serve_compiles_nothing_nor_does_an_engine_that_is_started_again(folder, tmp_path):
    """Each compiled program is a file, under a name made of all it depends on."""

    def programs() -> set[str]:
        return {path.name for path in (tmp_path / "cache").glob("programs-*/*")}

    log = tmp_path / "log"
    with serving(folder, tmp_path / "cache") as (url, engine):
        answer = ask(url)
        # the best step for such a request is compiled while another one answers it
        wait_for(lambda: log.read_text().count("compiling a step") == log.read_text().count("compiled a step") == 3)
        compiled = programs()
        os.kill(engine(), signal.SIGKILL)
        wait_for(lambda: ask(url) == answer)
        assert programs() == compiled
    with serving(folder, tmp_path / "cache") as (url, _):
        assert ask(url) == answer
        assert programs() == compiled


@contextmanager
def serving(model: Path, cache: Path) -> Iterator[tuple[str, Callable[[], int]]]:
    """`dovetail serve`: its address, and the process of its engine."""
    arguments = [str(model), "--port", "0", "--max-model-len", "128", "--max-num-seqs", "2"]
    command = [sys.executable, "-m", "dovetail", "serve", *arguments]
    env = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(cache), "DOVETAIL_API_KEY": ""}
    log = cache.parent / "log"
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=env)
    try:
        wait_for(lambda: process.poll() is not None or re.search(r"http://127\.0\.0\.1:\d+", log.read_text()))
        found = re.search(r"http://127\.0\.0\.1:\d+", log.read_text())
        assert found, log.read_text()
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        yield found[0], lambda: int(children.read_text().split()[0])
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def ask(url: str) -> str | None:
    body = {"model": "any", "prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0}
    body["model"] = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    return answer.json()["choices"][0]["text"] if answer.status_code == 200 else None


def wait_for(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 300
    while time.monotonic() < end:
        try:
            if condition():
                return
        except httpx.TransportError:
            pass
        time.sleep(0.05)
    raise AssertionError("it did not come about")
