"""Ends of the engine's process: a failed start, a dead parent, too many deaths, a stop."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time

import pytest
from refusals import refuses
from serve.servers import hanging

from dovetail.core.errors import FileError
from dovetail.engine.options import EngineOptions
from dovetail.engine.request.params import SamplingParams
from dovetail.serve.remote.client import EngineClient, EngineDied
from dovetail.serve.remote.supervisor import EngineSupervisor, RestartLimits
from dovetail.serve.remote.wire import StartEngine

pytestmark = pytest.mark.slow

OPTIONS = EngineOptions(
    load_format="dummy",
    max_num_seqs=2,
    max_model_len=128,
    max_num_batched_tokens=32,
    block_size=16,
    kv_cache_memory_bytes=2**20,
)
LONG = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
PARENT = """
import asyncio, json, sys
from dovetail.engine.options import EngineOptions
from dovetail.serve.remote.client import EngineClient

async def main():
    engine = await EngineClient.start(sys.argv[1], EngineOptions(**json.loads(sys.argv[2])))
    print(engine.info.pid, flush=True)
    await asyncio.sleep(600)

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Return a folder with a config.json only: its weights are dummies."""
    folder = tmp_path_factory.mktemp("model")
    config = dict(
        model_type="llama", architectures=["LlamaForCausalLM"], vocab_size=64, hidden_size=16, intermediate_size=32,
        num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=128,
        rms_norm_eps=1e-5, rope_theta=10000.0, tie_word_embeddings=True, hidden_act="silu",
    )  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def run(main) -> None:
    """Run with a timeout, so that a hanging test fails."""
    asyncio.run(asyncio.wait_for(main, 120))


def is_running(pid: int) -> bool:
    """A zombie does not run: it only waits for its parent to read its exit status."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_failed_start_reports_the_reason(tmp_path, model):
    async def main():
        with refuses(None, FileError, naming="config.json"):
            await EngineClient.start(tmp_path / "nothing", OPTIONS)
        with refuses():
            await EngineClient.start(model, EngineOptions(dtype=object()))

    run(main())


def test_the_child_ends_with_its_parent(model):
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(model), json.dumps(vars(OPTIONS))], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    with parent.stdout:
        child = int(parent.stdout.readline())
    assert is_running(child)
    os.kill(child, signal.SIGINT)  # the child ignores ctrl-C: the parent handles it
    os.kill(child, signal.SIGTERM)
    time.sleep(0.2)
    assert is_running(child)
    parent.kill()
    parent.wait()
    end = time.monotonic() + 60
    while is_running(child):
        assert time.monotonic() < end, "the child outlives its parent"
        time.sleep(0.02)


@pytest.mark.thorough
def test_after_too_many_deaths_the_engine_is_not_restarted(model):
    async def main():
        engine = await EngineClient.start(model, OPTIONS, limits=RestartLimits(deaths=2, seconds=100, backoff=0.01))
        for death in range(2):
            while not engine.is_alive:
                await asyncio.sleep(0.02)
            assert engine.restarts == death
            os.kill(engine.info.pid, signal.SIGKILL)
            while engine.is_alive:
                await asyncio.sleep(0.02)
        while engine.state == "restarting":
            await asyncio.sleep(0.02)
        assert engine.state == "failed"
        with pytest.raises(EngineDied, match="died 2 times within 100 s and is not started again"):
            await engine.stats()
        await engine.close()
        assert engine.state == "closed"

    run(main())


@pytest.mark.thorough
def test_close_drains_and_then_aborts(model):
    async def read(engine, id, params=LONG):
        return [delta async for delta in engine.generate(id, [3, 4], params)][-1].finish_reason

    async def main():
        engine = await EngineClient.start(model, OPTIONS)
        drained = asyncio.create_task(read(engine, "a"))
        while not engine.num_open:
            await asyncio.sleep(0)
        closing = asyncio.create_task(engine.close(drain_seconds=60))
        await asyncio.sleep(0)
        with pytest.raises(EngineDied, match="stopping"):
            await read(engine, "b")
        assert (await drained, engine.is_alive) == ("length", False)
        await closing
        assert not is_running(engine.info.pid)

        engine = await EngineClient.start(model, OPTIONS)
        await engine.control("pause")
        aborted = asyncio.create_task(read(engine, "a"))
        while not engine.num_open:
            await asyncio.sleep(0)
        await engine.close(drain_seconds=0.1)
        assert await aborted == "abort"

    run(main())


def test_the_reader_of_an_aborted_request_does_not_wait_for_a_busy_engine(model, tmp_path, monkeypatch):
    """The engine may compile for a minute."""
    monkeypatch.setattr("dovetail.serve.remote.client.ABORT_SECONDS", 0.05)
    gate = tmp_path / "gate"

    async def main():
        with hanging(gate):
            engine = await EngineClient.start(model, OPTIONS)
        async with engine:
            stream = engine.generate("a", [1, 2, 3], LONG)
            await anext(stream)
            gate.touch()
            while await engine._call("pulse") < 0.2:  # seconds of the step under way
                await asyncio.sleep(0.05)
            reading = asyncio.create_task(_last(stream))
            aborting = asyncio.create_task(engine.abort("a"))
            assert await asyncio.wait_for(reading, 30) != "abort", "the engine has not answered"
            assert not aborting.done()
            gate.unlink()
            await asyncio.wait_for(aborting, 30)

    async def _last(stream) -> str | None:
        reasons = [delta.finish_reason async for delta in stream]
        return reasons[-1] if reasons else None

    run(main())


def test_only_deaths_close_together_and_without_service_count():
    supervisor = EngineSupervisor(StartEngine("model"), RestartLimits(deaths=2, seconds=0.05))
    supervisor._note_death("it crashed", served=False)
    assert not supervisor._gives_up()
    supervisor._note_death("it crashed", served=True)
    assert not supervisor._gives_up(), "it had served since"
    time.sleep(0.06)
    supervisor._note_death("it crashed", served=False)
    assert not supervisor._gives_up(), "the one before was long ago"
    supervisor._note_death("it crashed", served=False)
    assert supervisor._gives_up() and supervisor.gave_up
