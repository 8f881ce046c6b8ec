"""EngineClient: an engine in another process gives the same tokens, and its faults never block the client."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from contextlib import aclosing
from dataclasses import replace

import numpy as np
import pytest
from engine.engines import GREEDY, OPTIONS, make_llm, mixed_prompts, tokens_of
from reference_models import reference
from refusals import refuses

from dovetail.core.errors import RequestError, UserError
from dovetail.engine.llm import LLM
from dovetail.engine.options import EngineOptions
from dovetail.engine.request.params import SamplingParams
from dovetail.io.load import load
from dovetail.models.decoder import forward
from dovetail.serve.remote.child import MAX_TOKENS
from dovetail.serve.remote.client import EngineClient, EngineDied
from dovetail.serve.remote.supervisor import RestartLimits
from dovetail.serve.remote.wire import Delta

pytestmark = pytest.mark.slow

MODEL = "llama3.1"
SIZES = OPTIONS | dict(max_decode_steps=1)
PROMPTS = mixed_prompts(8, most=60)
LONG = replace(GREEDY, max_tokens=180)
SAMPLED = SamplingParams(temperature=1.2, seed=7, n=2, logprobs=3, max_tokens=12, ignore_eos=True)
SCORED = replace(GREEDY, prompt_logprobs=2, logprobs=0)


class Harness:
    """One engine and the event loop that it is used from, shared because a process takes seconds to start."""

    def __init__(self):
        self.runner = asyncio.Runner()
        self.engine: EngineClient = self.run(
            EngineClient.start(reference(MODEL)[1], EngineOptions(**SIZES), limits=RestartLimits(backoff=0.05))
        )

    def run(self, main):
        """Run with a timeout, so that a hanging test fails."""
        return self.runner.run(asyncio.wait_for(main, 120))

    def close(self):
        self.run(self.engine.close())
        self.runner.close()


@pytest.fixture(scope="module")
def llm() -> LLM:
    return make_llm(MODEL, **SIZES)


@pytest.fixture(scope="module")
def harness():
    harness = Harness()
    yield harness
    harness.close()


@pytest.fixture(scope="module")
def engine(harness) -> EngineClient:
    return harness.engine


async def collect(engine: EngineClient, id: str, prompt, params=GREEDY, **more) -> list[Delta]:
    async with aclosing(engine.generate(id, prompt, params, **more)) as deltas:
        return [delta async for delta in deltas]


def joined(deltas: list[Delta]) -> list[int]:
    return [token for delta in deltas for token in delta.tokens]


async def at_rest(engine: EngineClient) -> bool:
    """Return whether soon (a step may compile first) no sequence runs or waits and no page is in use."""
    end = time.monotonic() + 30
    while time.monotonic() < end:
        stats = await engine.stats()
        if (stats.running, stats.waiting, stats.pages_used, engine.num_open) == (0, 0, 0, 0):
            return True
        await asyncio.sleep(0.01)
    return False


# --- requests ---------------------------------------------------------------------------------------------------------


def test_eight_streams_together_equal_the_engine_in_this_process(harness, engine, llm):
    params = [GREEDY, replace(SAMPLED, n=1, logprobs=None)] * 4

    async def main():
        return await asyncio.gather(*(collect(engine, f"r{i}", PROMPTS[i], params[i]) for i in range(8)))

    answers = harness.run(main())
    assert [joined(deltas) for deltas in answers] == tokens_of(llm.generate(PROMPTS, params, progress=False))
    for deltas in answers:
        assert [delta.finished for delta in deltas] == [False] * (len(deltas) - 1) + [True]
        last = deltas[-1]
        assert (last.finish_reason, last.stop_reason, last.error, last.weights_version) == ("length", None, None, 0)
        times = last.times
        assert times.arrival <= times.scheduled <= times.first_token <= times.finished <= time.monotonic()
    assert harness.run(at_rest(engine))


def same(mine, theirs) -> bool:
    """Log-probabilities as the other process computed them; how many steps a dispatch took may move the last bits."""
    pairs = list(zip(mine, theirs, strict=True))
    top = [(a, b) for x, y in pairs if x and y for a, b in zip(x.top, y.top, strict=True)]
    found = [(x.logprob, y.logprob) for x, y in pairs if x and y] + [(a[1], b[1]) for a, b in top]
    named = [(x and (x.token, x.rank)) == (y and (y.token, y.rank)) for x, y in pairs] + [a[0] == b[0] for a, b in top]
    return all(named) and all(abs(a - b) < 1e-4 for a, b in found)


def test_logprobs_and_several_samples_travel(harness, engine, llm):
    deltas = harness.run(collect(engine, "a", PROMPTS[0], SAMPLED))
    (output,) = llm.generate(PROMPTS[0], SAMPLED)
    for completion in output.outputs:
        mine = [delta for delta in deltas if delta.index == completion.index]
        assert tuple(joined(mine)) == completion.token_ids
        assert same([entry for delta in mine for entry in delta.logprobs], completion.logprobs)
    deltas = harness.run(collect(engine, "b", PROMPTS[1], SCORED))
    (output,) = llm.generate(PROMPTS[1], SCORED)
    assert same(deltas[-1].prompt_logprobs, output.prompt_logprobs)
    assert all(delta.prompt_logprobs is None for delta in deltas[:-1])


def test_a_refused_request_says_why(harness, engine):
    for prompt, params in [
        ([], GREEDY),
        ([3] * 300, GREEDY),
        ([999], GREEDY),
        ([10**30], GREEDY),
        ([3], replace(GREEDY, bad_words=("\ud800",))),
        ([3], replace(GREEDY, bad_words=("a",))),
        (["a"], GREEDY),
    ]:
        with pytest.raises(UserError):
            harness.run(collect(engine, "a", prompt, params))
    with refuses("priority", RequestError, naming="scheduling_policy='priority'"):  # the engine's own sentence
        harness.run(collect(engine, "a", [3], priority=1))

    async def twice():
        async with aclosing(engine.generate("a", PROMPTS[0], LONG)) as deltas:
            await anext(deltas)
            with pytest.raises(RequestError) as refused:
                await collect(engine, "a", PROMPTS[0])
            assert refused.value.param == "id"

    harness.run(twice())
    assert harness.run(at_rest(engine))


def test_a_reader_that_leaves_frees_its_pages(harness, engine):
    async def left():
        async with aclosing(engine.generate("a", PROMPTS[0], LONG)) as deltas:
            await anext(deltas)
            assert (await engine.stats()).pages_used > 0
        assert await at_rest(engine)

    async def cancelled():
        tasks = [asyncio.create_task(collect(engine, f"r{i}", PROMPTS[i], LONG)) for i in range(8)]
        while not (await engine.stats()).running:
            await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()
        assert all(isinstance(r, asyncio.CancelledError) for r in await asyncio.gather(*tasks, return_exceptions=True))
        assert await at_rest(engine)

    harness.run(left())
    harness.run(cancelled())


def test_abort_of_one_sample_and_of_all(harness, engine):
    async def main():
        ends = {}
        async with aclosing(engine.generate("a", PROMPTS[0], replace(LONG, n=3))) as deltas:
            async for delta in deltas:
                if delta.finished:
                    ends[delta.index] = delta.finish_reason
                if not ends and delta.index == 1 and delta.tokens:
                    await engine.abort("a", 1)
                elif len(ends) == 1:
                    assert (await engine.stats()).running == 2
                    await engine.abort("a")
        await engine.abort("unknown")
        return ends

    assert harness.run(main()) == {0: "abort", 1: "abort", 2: "abort"}
    assert harness.run(at_rest(engine))


def test_a_slow_reader_gets_all_and_slows_no_other(harness, engine, llm):
    async def main():
        slow = engine.generate("slow", PROMPTS[0], LONG)
        first = await anext(slow)
        others = await asyncio.gather(*(collect(engine, f"r{i}", PROMPTS[i], LONG) for i in range(1, 4)))
        while engine.num_open:  # the engine has ended it although it is not read
            await asyncio.sleep(0.01)
        rest = [delta async for delta in slow]
        assert rest[-1].finished and len(rest) <= 1 + LONG.max_tokens // MAX_TOKENS, "what waited was not joined"
        return [first.tokens + joined(rest), *map(joined, others)]

    assert harness.run(main()) == tokens_of(llm.generate(PROMPTS[:4], LONG))


def test_embeddings_end_when_their_caller_leaves(harness, engine):
    async def main():
        many = [asyncio.create_task(engine.embed([PROMPTS[0]] * 50_000)) for _ in range(2)]  # as many as run at once
        await engine.stats()  # they have arrived
        for task in many:
            task.cancel()
        (one,) = await engine.embed([PROMPTS[0]])
        return one

    assert len(harness.run(main())) > 1


# --- the engine -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_embeddings_equal_a_direct_forward(harness, engine, pooling):
    from dovetail.core.types import Packed

    model = load(reference(MODEL)[1])

    async def main():
        busy = asyncio.create_task(collect(engine, "a", PROMPTS[3], LONG))
        vectors = await engine.embed(PROMPTS[:3], pooling)
        await busy
        return vectors

    for prompt, vector in zip(PROMPTS, harness.run(main()), strict=False):
        tokens = np.asarray([prompt], np.int32)
        ctx = Packed(np.ones_like(tokens))
        hidden = np.asarray(forward(model.params, model.config, tokens, np.arange(len(prompt))[None], ctx)[0])[0]
        want = hidden.mean(0) if pooling == "mean" else hidden[-1]
        np.testing.assert_allclose(vector, want / np.linalg.norm(want), atol=2e-5)


def test_bad_embeddings_are_refused(harness, engine):
    with pytest.raises(UserError):
        harness.run(engine.embed([[3]], "max"))  # type: ignore[arg-type]
    with pytest.raises(UserError):
        harness.run(engine.embed([[3], [1000]]))


def test_sleep_pause_and_new_weights(harness, engine, llm):
    async def main():
        expected = joined(await collect(engine, "a", PROMPTS[0]))
        with pytest.raises(UserError):
            await engine.control("sleep", level=3)
        await engine.control("sleep", level=1)
        assert (await engine.stats()).sleeping == 1
        with refuses(naming="wake_up()"):
            await engine.embed([[3]])
        waits = asyncio.create_task(collect(engine, "a", PROMPTS[0]))
        await asyncio.sleep(0.05)
        assert not waits.done()
        await engine.control("wake_up")
        assert joined(await waits) == expected
        await engine.control("pause")
        waits = asyncio.create_task(collect(engine, "a", PROMPTS[0]))
        await asyncio.sleep(0.05)
        assert not waits.done()
        await engine.control("resume")
        assert (await waits)[-1].cached_tokens > 0
        await engine.control("reset_prefix_cache")
        deltas = await collect(engine, "a", PROMPTS[0])
        assert (joined(deltas), deltas[-1].cached_tokens) == (expected, 0)
        with refuses("path", naming="nowhere"):
            await engine.control("update_weights", path="/nowhere")
        assert await engine.control("update_weights", path=str(reference(MODEL)[1])) == 1
        deltas = await collect(engine, "a", PROMPTS[0])
        assert (joined(deltas), deltas[-1].weights_version) == (expected, 1)
        assert engine.info.weights_version == 1

    harness.run(main())


def test_engine_info_and_stats(harness, engine, llm):
    config = llm.engine.scheduler.config
    info = engine.info
    assert (info.max_model_len, info.page_size, info.max_num_seqs, info.num_pages) == (256, 4, 8, config.num_pages)
    assert (info.vocab, info.description, info.has_tokenizer) == (160, llm.describe(), False)
    assert engine.is_alive and engine.state == "ready"
    before = harness.run(engine.stats())
    harness.run(collect(engine, "a", PROMPTS[0]))
    after = harness.run(engine.stats())
    assert after.generated_tokens - before.generated_tokens == 12 and after.pages_total == config.num_pages


def test_a_profile(harness, engine, tmp_path):
    with refuses():
        harness.run(engine.stop_profile())
    harness.run(engine.start_profile(tmp_path))
    with refuses(naming=str(tmp_path)):
        harness.run(engine.start_profile(tmp_path))
    harness.run(collect(engine, "a", PROMPTS[0]))
    assert harness.run(engine.stop_profile()) == str(tmp_path)
    assert list(tmp_path.rglob("*.xplane.pb"))


# --- its death (last: it is started again) ----------------------------------------------------------------------------


@pytest.mark.thorough
def test_an_engine_killed_during_streams_is_restarted(harness, engine, llm):
    async def main():
        tasks = [asyncio.create_task(collect(engine, f"r{i}", PROMPTS[i], LONG)) for i in range(8)]
        await engine.control("pause")  # so that none ends before the engine does
        tasks.append(asyncio.create_task(engine.embed([PROMPTS[0]] * 50)))
        start, pid = time.monotonic(), engine.info.pid
        os.kill(pid, signal.SIGKILL)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert time.monotonic() - start < 60
        assert {type(result) for result in results} == {EngineDied}
        assert not engine.is_alive and engine.state == "restarting"
        with pytest.raises(EngineDied, match="started again"):
            await collect(engine, "a", PROMPTS[0])
        with pytest.raises(EngineDied):
            await engine.stats()
        while not engine.is_alive:
            await asyncio.sleep(0.05)
        assert (engine.restarts, engine.info.pid != pid, engine.num_open) == (1, True, 0)
        await engine.control("resume")  # the new one is paused as the old one was
        return joined(await collect(engine, "r0", PROMPTS[0]))

    assert [harness.run(main())] == tokens_of(llm.generate(PROMPTS[0], GREEDY))
