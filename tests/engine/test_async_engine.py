"""AsyncEngine: every stream gets what LLM.generate would give it, whoever comes, leaves, fails or is slow beside it."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import aclosing
from dataclasses import replace

import pytest
from engine.engines import GREEDY, NEW, make_llm, mixed_prompts, tokens_of, variant

from dovetail.engine.async_engine import AsyncEngine
from dovetail.engine.llm import LLM
from dovetail.engine.loop import EngineDied, EngineLoop
from dovetail.engine.params import SamplingParams

PROMPTS = mixed_prompts(16, most=60)
SAMPLED = SamplingParams(temperature=1.2, seed=7, presence_penalty=0.5, max_tokens=NEW, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return make_llm("llama3.1")


@pytest.fixture(scope="module")
def answers(llm) -> list[list[int]]:
    return tokens_of(variant(llm).generate(PROMPTS, GREEDY, progress=False))


@pytest.fixture
def weights(llm):
    """Other weights than the engine's own, which it has again when the test is over."""
    own = llm.runner.weights
    yield {**own.params, "embed": own.params["embed"][::-1]}
    llm.runner.weights = own


def run(main) -> None:
    """A test that hangs fails."""
    asyncio.run(asyncio.wait_for(main, 120))


async def collect(engine: AsyncEngine, prompt, params=GREEDY, **more):
    """A request's tokens as they came, and its output."""
    tokens, update = [], None
    async for update in engine.generate(prompt, params, **more):
        tokens += update.tokens
    assert update is not None and update.finished and update.output is not None
    return tokens, update.output


async def take_steps(engine: AsyncEngine, count: int) -> None:
    """Of a paused engine: exactly so many."""
    for _ in range(count):
        await engine._do(lambda core: engine.loop._hand_on(core.close(core.step())))


async def paused_with(llm, ids: str, params=GREEDY, steps: int = 6, **options) -> AsyncEngine:
    """A paused engine that is in the middle of PROMPTS[0], PROMPTS[1], ... under these ids."""
    engine = AsyncEngine(variant(llm, **options).engine)
    await engine.pause()
    for id, prompt in zip(ids, PROMPTS, strict=False):
        await engine.add(id, prompt, params)
    await take_steps(engine, steps)
    return engine


async def read(engine: AsyncEngine, id: str):
    updates = [update async for update in engine.stream(id)]
    assert [update.output is not None for update in updates] == [False] * (len(updates) - 1) + [True]
    return [token for update in updates for token in update.tokens], updates[-1].output


async def at_rest(engine: AsyncEngine) -> None:
    """What was asked so far is done."""
    await engine._do(lambda _: None)


def no_pages_held(engine: AsyncEngine) -> bool:
    stats = engine.stats()
    return (stats.running, stats.waiting, stats.pages_used) == (0, 0, 0) and not engine._streams


# --- streams ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 4])
def test_16_streams_together(llm, answers, steps):
    async def main():
        async with AsyncEngine(variant(llm, steps=steps).engine) as engine:
            began = time.monotonic()
            done = await asyncio.gather(*(collect(engine, prompt) for prompt in PROMPTS))
            assert [tokens for tokens, _ in done] == answers
            for tokens, output in done:
                (completion,) = output.completions
                times = completion.times
                assert completion.token_ids == tuple(tokens)
                assert (completion.finish_reason, completion.weights_versions) == ("length", ((0, 0),))
                assert began <= times.arrival <= times.scheduled <= times.first_token < times.finished
            assert no_pages_held(engine) and engine.stats().generated_tokens == 16 * NEW

    run(main())


def test_n_samples_and_logprobs_alone_and_among_others(llm):
    asked = replace(SAMPLED, n=3, logprobs=2)
    (expected,) = variant(llm).generate(PROMPTS[0], asked)

    async def sampled(engine):
        parts = {0: [], 1: [], 2: []}
        async for update in engine.generate(PROMPTS[0], asked, id="it"):
            assert update.id == "it" and len(update.logprobs) == len(update.tokens)
            parts[update.index] += zip(update.tokens, update.logprobs, strict=True)
        assert update.output == replace(expected, id="it", completions=update.output.completions)
        for completion, ours in zip(expected.completions, update.output.completions, strict=True):
            assert completion.token_ids == ours.token_ids and len(ours.logprobs) == NEW
            assert parts[ours.index] == list(zip(ours.token_ids, ours.logprobs, strict=True))

    async def main():
        async with AsyncEngine(variant(llm).engine) as engine:
            await asyncio.gather(sampled(engine), *(collect(engine, prompt) for prompt in PROMPTS[1:6]))

    run(main())


def test_a_slow_reader_holds_up_nobody_and_gets_several_updates_in_one(llm, answers):
    async def main():
        async with AsyncEngine(variant(llm).engine) as engine:
            slow = engine.generate(PROMPTS[0], replace(GREEDY, n=2))
            first = await anext(slow)
            others = await asyncio.gather(*(collect(engine, prompt) for prompt in PROMPTS[1:6]))
            assert [tokens for tokens, _ in others] == answers[1:6]
            rest = [update async for update in slow]
            assert len(rest) <= 3 and rest[-1].output is not None
            for index in range(2):
                assert [t for u in [first, *rest] if u.index == index for t in u.tokens] == answers[0]

    run(main())


# --- leaving ----------------------------------------------------------------------------------------------------------


def test_an_abort_frees_the_pages_at_once(llm, answers):
    async def main():
        engine = await paused_with(llm, "abc")
        async with engine:
            held = {seq.request.id: len(seq.pages) for seq in engine.loop.engine.scheduler.running}
            assert engine.stats().pages_used == sum(held.values()) and held["a"] > 0
            await engine.abort("a")
            await engine.abort("no such request")
            assert engine.stats().pages_used == held["b"] + held["c"], "not a step later"
            tokens, output = await read(engine, "a")
            (completion,) = output.completions
            assert completion.finish_reason == "abort" and completion.token_ids == tuple(tokens)
            assert tokens and tokens == answers[0][: len(tokens)] and completion.times.finished
            await engine.resume()
            assert [(await read(engine, id))[0] for id in "bc"] == answers[1:3]
            assert no_pages_held(engine)

    run(main())


@pytest.mark.parametrize("how", ["break", "aclose", "cancel", "timeout", "error"])
def test_who_leaves_is_forgotten(llm, answers, how):
    long = replace(GREEDY, max_tokens=150)

    async def leave(engine):
        if how == "break":
            async for _ in engine.generate(PROMPTS[0], long):
                break
        elif how == "aclose":
            async with aclosing(engine.generate(PROMPTS[0], long)) as updates:
                await anext(updates)
        elif how == "error":
            with pytest.raises(ZeroDivisionError):
                async for _ in engine.generate(PROMPTS[0], long):
                    _ = 1 / 0
        else:
            task = asyncio.create_task(collect(engine, PROMPTS[0], long))
            if how == "cancel":
                while not engine.stats().generated_tokens:
                    await asyncio.sleep(0.001)
                task.cancel()
            with pytest.raises(asyncio.CancelledError if how == "cancel" else TimeoutError):
                await asyncio.wait_for(task, 0.03 if how == "timeout" else None)
        await asyncio.sleep(0)  # a generator that is dropped is closed by the event loop

    async def main():
        async with AsyncEngine(variant(llm).engine) as engine:
            stays = asyncio.create_task(collect(engine, PROMPTS[1]))
            await leave(engine)
            assert (await stays)[0] == answers[1]
            await at_rest(engine)
            assert no_pages_held(engine)
            assert engine.stats().generated_tokens < 150

    run(main())


def test_an_id_left_and_used_again_gets_its_own_tokens(llm, answers):
    async def main():
        async with AsyncEngine(variant(llm).engine) as engine:
            for i in range(4):
                async with aclosing(engine.generate(PROMPTS[i], GREEDY, id="a")) as updates:
                    await anext(updates)
                assert (await collect(engine, PROMPTS[i + 1], id="a"))[0] == answers[i + 1]

    run(main())


def test_cancelled_while_it_is_added(llm, answers):
    async def main():
        async with AsyncEngine(variant(llm).engine) as engine:
            held = threading.Event()
            holding = asyncio.create_task(engine._do(lambda _: held.wait()))
            adding = asyncio.create_task(engine.add("a", PROMPTS[0], GREEDY))
            while not engine._streams:
                await asyncio.sleep(0.001)
            adding.cancel()
            with pytest.raises(asyncio.CancelledError):
                await adding
            held.set()
            await holding
            await at_rest(engine)
            assert no_pages_held(engine) and engine.stats().prompt_tokens == 0
            assert (await collect(engine, PROMPTS[0], id="a"))[0] == answers[0]

    run(main())


# --- what goes wrong --------------------------------------------------------------------------------------------------


def test_bad_requests_among_good_ones(llm, answers):
    bad = [
        (dict(prompt=[]), "prompt is empty"),
        (dict(prompt="text"), "no tokenizer"),
        (dict(prompt=[5] * 300), "300 tokens"),
        (dict(prompt=[5, 160]), "token id 160"),
        (dict(params=replace(GREEDY, stop="x")), "stop strings need a tokenizer"),
        (dict(id="good-0"), "'good-0' is under way already"),
        (dict(id=7), "id is a string; got 7"),
        (dict(priority=1), "start it with policy='priority'"),
        (dict(priority="high"), "priority is an integer"),
        (dict(cache_salt=3), "cache_salt is a string"),
    ]

    async def refused(engine, options, message):
        with pytest.raises(ValueError, match=message):
            await collect(engine, **({"prompt": PROMPTS[0]} | options))

    async def main():
        async with AsyncEngine(variant(llm).engine) as engine:
            good = [asyncio.create_task(collect(engine, PROMPTS[i], id=f"good-{i}")) for i in range(8)]
            while not engine.stats().running:
                await asyncio.sleep(0.001)
            await asyncio.gather(*(refused(engine, *each) for each in bad))
            assert [(await task)[0] for task in good] == answers[:8]
            with pytest.raises(ValueError, match="no request 'x' is under way"):
                await anext(engine.stream("x"))
            assert no_pages_held(engine) and engine.is_alive

    run(main())


@pytest.mark.parametrize("where", ["_launch", "_commit"])
def test_when_the_engine_dies_everybody_hears_of_it(llm, where):
    async def main():
        core = variant(llm).engine
        work, left = getattr(core, where), iter(range(6))

        def breaks(*args):
            if next(left, None) is None:
                raise OSError("the device is gone")
            return work(*args)

        setattr(core, where, breaks)
        async with AsyncEngine(core) as engine:
            engine.check_health()
            long = replace(GREEDY, max_tokens=100)
            streams = [asyncio.create_task(collect(engine, prompt, long)) for prompt in PROMPTS[:12]]
            for done in await asyncio.gather(*streams, return_exceptions=True):
                assert isinstance(done, EngineDied) and isinstance(done.__cause__, OSError)
            assert not engine.is_alive and not engine._streams
            with pytest.raises(EngineDied, match="the device is gone"):
                engine.check_health()
            for refused in (engine.add("a", PROMPTS[0], GREEDY), engine.abort("a"), engine.pause(), engine.wake()):
                with pytest.raises(EngineDied, match="the device is gone"):
                    await refused

    run(main())


def test_a_death_while_steps_are_taken_in_reaches_who_asked_for_it(llm):
    async def main():
        engine = await paused_with(llm, "ab")
        async with engine:

            def breaks(*_):
                raise OSError("gone")

            engine.loop.engine._commit = breaks
            asked = [engine.update_weights(None), engine.sleep(), engine.reset_prefix_cache()]
            for done in await asyncio.gather(*asked, return_exceptions=True):
                assert isinstance(done, EngineDied) and isinstance(done.__cause__, OSError)
            for id in "ab":
                with pytest.raises(EngineDied, match="gone"):
                    await read(engine, id)

    run(main())


def test_what_a_command_raises_is_its_askers_alone(llm, answers, weights):
    async def main():
        engine = await paused_with(llm, "a")
        async with engine:
            with pytest.raises(
                ValueError,
                match=r"weights\['embed'\]: .* with float32\[160, 48\], and float32\[160, 8\]",
            ):
                await engine.update_weights({**weights, "embed": weights["embed"][:, :8]})
            with pytest.raises(ValueError, match=r"weights\['more'\]: .* with nothing, and float32"):
                await engine.update_weights({**weights, "more": weights["embed"]})
            with pytest.raises(ValueError, match="weights come as the tree"):
                await engine.update_weights({"a": 1})
            with pytest.raises(ValueError, match="sleep takes level 1"):
                await engine.sleep(3)
            await engine.resume()
            assert (await read(engine, "a"))[0] == answers[0]
            assert engine.stats().weights_version == 0

    run(main())


def test_closing_ends_open_streams(llm):
    async def main():
        engine = await paused_with(llm, "a", steps=0)
        reading = asyncio.create_task(read(engine, "a"))
        await asyncio.sleep(0)
        await engine.close()
        await engine.close()
        with pytest.raises(EngineDied, match="was stopped"):
            await reading
        assert not engine.is_alive and not engine.loop._thread.is_alive()

    run(main())


# --- weights and memory -----------------------------------------------------------------------------------------------


def test_new_weights_in_flight(llm, answers, weights):
    """What comes after the change is what a new engine makes of the prompt and the tokens so far."""

    async def main():
        engine = await paused_with(llm, "abcd")
        async with engine:
            assert await engine.update_weights(weights) == 1
            stats = engine.stats()
            assert (stats.weights_version, stats.running, stats.waiting, stats.pages_used) == (1, 0, 4, 0)
            await engine.resume()
            done = [await read(engine, id) for id in "abcd"]
            assert engine.stats().preemptions == 4
        for (tokens, output), old, prompt in zip(done, answers, PROMPTS, strict=False):
            completion = output.completions[0]
            (_, first), (changed, second) = completion.weights_versions
            assert (first, second, completion.weights_version) == (0, 1, 1) and 0 < changed < NEW
            assert tokens[:changed] == old[:changed]
            rest = replace(GREEDY, max_tokens=NEW - changed)
            assert [tokens[changed:]] == tokens_of(variant(llm).generate(prompt + tokens[:changed], rest))
        assert [tokens for tokens, _ in done] != answers[:4]

    run(main())


def test_new_weights_that_keep_the_cache(llm, weights):
    async def main():
        engine = await paused_with(llm, "ab")
        async with engine:
            used = engine.stats().pages_used
            await engine.update_weights(weights, keep_cache=True)
            assert (engine.stats().running, engine.stats().pages_used) == (2, used)
            await engine.resume()
            for id in "ab":
                (completion,) = (await read(engine, id))[1].completions
                assert [version for _, version in completion.weights_versions] == [0, 1]
            assert engine.stats().preemptions == 0
            tokens, output = await collect(engine, PROMPTS[0])
            assert output.cached_tokens == 0
        assert [tokens] == tokens_of(variant(llm).generate(PROMPTS[0], GREEDY))

    run(main())


def test_requests_sleep_through_the_engines_sleep(llm, answers):
    expected = tokens_of(variant(llm).generate(PROMPTS[:2], SAMPLED))

    async def main():
        engine = await paused_with(llm, "ab", SAMPLED)
        async with engine:
            await engine.resume()
            await engine.sleep()
            await engine.sleep()
            assert engine.stats().sleeping == 1
            late = asyncio.create_task(collect(engine, PROMPTS[2]))
            steps = engine.stats().steps
            await asyncio.sleep(0.05)
            stats = engine.stats()
            assert (stats.steps, stats.running, stats.waiting, stats.pages_used) == (steps, 0, 3, 0)
            await engine.wake()
            await engine.wake()
            assert [(await read(engine, id))[0] for id in "ab"] == expected
            assert (await late)[0] == answers[2]
            assert engine.stats().sleeping == 0

    run(main())


@pytest.mark.parametrize("weights_first", [True, False])
def test_after_the_deeper_sleep_requests_wait_for_weights(llm, answers, weights, weights_first):
    own = llm.runner.weights.params

    async def main():
        engine = await paused_with(llm, "a", steps=0)
        async with engine:
            await engine.resume()
            await engine.sleep(1)
            await engine.sleep(2)
            assert engine.stats().sleeping == 2
            if weights_first:
                await engine.update_weights(own)
            await engine.wake()
            if not weights_first:
                await asyncio.sleep(0.02)
                assert engine.stats().waiting == 1 and engine.is_alive
                await engine.update_weights(own)
            tokens, output = await read(engine, "a")
            assert (tokens, output.completions[0].weights_version) == (answers[0], 1)

    run(main())


def test_pause_and_resume(llm, answers):
    async def main():
        engine = await paused_with(llm, "ab")
        async with engine:
            late = asyncio.create_task(collect(engine, PROMPTS[2]))
            before = engine.stats()
            await asyncio.sleep(0.05)
            stats = engine.stats()
            assert (stats.steps, stats.pages_used, stats.running) == (before.steps, before.pages_used, 2)
            assert stats.waiting == 1
            await engine.reset_prefix_cache()
            await engine.resume()
            assert [(await read(engine, id))[0] for id in "ab"] == answers[:2]
            assert (await late)[0] == answers[2] and engine.stats().preemptions == 0

    run(main())


# --- the loop alone ---------------------------------------------------------------------------------------------------


def test_the_loop_from_a_plain_thread_and_at_rest(llm, answers, monkeypatch):
    turns, do_asked = [], EngineLoop._do_asked
    monkeypatch.setattr(EngineLoop, "_do_asked", lambda self: (turns.append(1), do_asked(self)))
    got, done, ended = [], threading.Event(), []

    def on_updates(updates):
        got.extend(updates)
        if any(update.output is not None for update in updates):
            done.set()

    loop = EngineLoop(variant(llm).engine, on_updates, ended.append)
    request = loop.engine.intake.request("a", PROMPTS[0], GREEDY)
    loop.submit(lambda engine: engine.enqueue(request)).result(30)
    assert done.wait(30)
    assert [token for update in got for token in update.tokens] == answers[0]
    loop.submit(lambda _: None).result(30)
    before = len(turns)
    time.sleep(0.1)
    assert len(turns) == before, "nothing turns when there is nothing to do"
    loop.stop()
    loop.stop()
    assert [str(died) for died in ended] == ["the engine was stopped"] and not loop.is_alive
    with pytest.raises(EngineDied, match="was stopped"):
        loop.submit(lambda _: None)
