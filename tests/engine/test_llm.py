"""LLM: sleep and wake-up, new weights, statistics, embeddings, options, and interleaved calls."""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from engine.engines import GREEDY, NEW, PAGE, make_llm, mixed_prompts, tokens_of, variant
from reference_models import reference
from refusals import refuses

from dovetail.core.compute import COMPUTES, compute_of
from dovetail.core.errors import CheckpointError, OutOfMemoryError, RequestError, UserError
from dovetail.core.option import options_of
from dovetail.core.spec import held_bytes
from dovetail.core.types import Packed
from dovetail.engine.engine import Engine
from dovetail.engine.llm import LLM
from dovetail.engine.options import DTYPES, EngineOptions
from dovetail.engine.schedule.scheduler import Scheduler
from dovetail.io.load import load
from dovetail.models.decoder import forward
from dovetail.plan.serve_memory import SLACK, num_pages, pool_bytes

EVERY_PROGRAM = True
pytestmark = pytest.mark.slow

PROMPTS = mixed_prompts(6, most=60)


@pytest.fixture(scope="module")
def shared() -> LLM:
    return make_llm("llama3.1")


@pytest.fixture
def llm(shared):
    """Yield an engine on the shared compiled steps; restore its weights and wake it up afterwards."""
    weights, llm = shared.runner.weights, variant(shared)
    yield llm
    llm.wake_up()
    shared.runner.weights = weights


@pytest.fixture(scope="module")
def answers(shared) -> list[list[int]]:
    return tokens_of(variant(shared).generate(PROMPTS, GREEDY))


# --- sleep ------------------------------------------------------------------------------------------------------------


def _bytes(tree) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(tree))


def _live() -> int:
    return sum(x.nbytes for x in jax.live_arrays() if not x.is_deleted())


def test_sleep_frees_memory_and_wake_up_gives_the_same_tokens(answers):
    llm = make_llm("llama3.1")  # its weights are not shared
    before = llm.generate(PROMPTS[:3], GREEDY)
    assert llm.engine.sampler.history.nbytes  # as after a request with penalties
    pages, weights = _bytes(llm.runner.cache), _bytes(llm.runner.weights.params)
    awake = _live()
    llm.sleep()
    assert awake - _live() >= pages + weights
    assert llm.stats().sleeping == 1 and llm.engine.sampler._history is None
    llm.sleep(1)
    with refuses(naming="wake_up()"):
        llm.generate(PROMPTS, GREEDY)
    with refuses():
        next(llm.stream(PROMPTS[0], GREEDY))
    llm.wake_up()
    after = llm.generate(PROMPTS[:3], GREEDY)
    assert tokens_of(before) == tokens_of(after) == answers[:3]
    assert [output.num_cached_tokens for output in after] == [0] * 3, "the pages are new and empty"
    assert after[0].outputs[0].weights_version == llm.stats().weights_version == 0
    assert llm.stats().sleeping == 0


@pytest.mark.parametrize("weights_first", [True, False])
def test_sleep_level_2_requires_new_weights(llm, answers, weights_first):
    params = load(reference("llama3.1")[1]).params
    llm.sleep(level=2)
    assert not any(isinstance(x, jax.Array) for x in jax.tree.leaves((llm.runner.weights.params, llm.runner.cache)))
    if weights_first:
        assert llm.update_weights(params) == 1
    llm.wake_up()
    if not weights_first:
        with refuses(naming="update_weights(params)"):
            llm.generate(PROMPTS[0], GREEDY)
        llm.sleep(1)  # nothing to keep, and no harm
        llm.wake_up()
        with refuses():
            llm.generate(PROMPTS[0], GREEDY)
        assert llm.update_weights(params) == 1
    assert tokens_of(llm.generate(PROMPTS[:2], GREEDY)) == answers[:2]


def test_steps_may_be_compiled_while_the_engine_sleeps(llm, answers):
    """A start compiles steps in the background."""
    shape, steps = llm.runner.buckets.largest(), llm.runner.steps._futures
    for level in (1, 2):
        params = load(reference("llama3.1")[1]).params
        compiled = {key: steps.pop(key) for key in list(steps)}
        llm.sleep(level)
        llm.runner.steps(shape)
        assert steps
        llm.wake_up()
        if level == 2:
            llm.update_weights(params)
        assert tokens_of(llm.generate(PROMPTS[:1], GREEDY)) == answers[:1]
        steps.update(compiled)


@pytest.mark.thorough
def test_sleep_on_several_devices(answers):
    llm = make_llm("llama3.1", tensor_parallel_size=2)
    runner = llm.runner
    assert runner.placement is not None
    assert tokens_of(llm.generate(PROMPTS[:1], GREEDY)) == answers[:1]

    def where():
        return jax.tree.map(lambda x: x.sharding, (runner.weights.params, runner.cache))

    before, shapes = where(), list(runner.steps._futures)
    runner.steps._futures.clear()
    llm.sleep()
    for shape in shapes:
        runner.steps(shape)
    llm.wake_up()
    assert where() == before
    assert tokens_of(llm.generate(PROMPTS[:1], GREEDY)) == answers[:1]


def test_no_sleep_and_no_new_weights_while_a_stream_is_open(llm, answers):
    params = llm.runner.weights.params
    stream = llm.stream(PROMPTS[0], GREEDY)
    first = next(stream)
    with refuses(naming="a stream is open"):
        llm.sleep()
    with refuses(naming="a stream is open"):
        llm.update_weights(params)
    tokens = first.token_ids + [token for update in stream for token in update.token_ids]
    assert tokens == answers[0]
    llm.sleep()
    with refuses("level", naming="got 0"):
        llm.sleep(0)


# --- calls that cross -------------------------------------------------------------------------------------------------


def test_generate_amid_a_stream_takes_none_of_its_tokens(llm, answers):
    tokens = []
    for i, update in enumerate(llm.stream(PROMPTS[0], GREEDY)):
        tokens += update.token_ids
        if i == 1:
            assert tokens_of(llm.generate(PROMPTS[1:3], GREEDY)) == answers[1:3]
    assert tokens == answers[0]


def test_an_interrupted_generate_leaves_no_requests(llm, answers):
    step, steps = llm.engine.step, iter(range(4))

    def interrupted(*how, **more):
        if next(steps, None) is None:
            raise KeyboardInterrupt
        return step(*how, **more)

    llm.engine.step = interrupted
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, GREEDY)
    llm.engine.step = step
    assert not llm.engine.scheduler.has_work and not llm.engine._requests
    llm.sleep()
    llm.wake_up()
    assert tokens_of(llm.generate(PROMPTS[:2], GREEDY)) == answers[:2]


# --- embeddings, seeds ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_embeddings_equal_a_direct_forward(shared, pooling):
    model = load(reference("llama3.1")[1])
    vectors = shared.embed(PROMPTS[:2], pooling)
    assert vectors.shape == (2, model.config.dim) and vectors.dtype == np.float32
    for prompt, vector in zip(PROMPTS, vectors, strict=False):
        tokens = np.asarray([prompt], np.int32)
        where = np.arange(len(prompt))[None]
        hidden = np.asarray(forward(model.params, model.config, tokens, where, Packed(np.ones_like(tokens)))[0])[0]
        want = hidden.mean(0) if pooling == "mean" else hidden[-1]
        np.testing.assert_allclose(vector, want / np.linalg.norm(want), atol=2e-5)


def test_bad_embeddings_are_refused(shared):
    assert shared.embed([]).shape == (0, shared.config.dim)
    with refuses("pooling", RequestError, naming="'max'"):
        shared.embed([[3]], "max")
    with refuses("prompt", RequestError, naming="1000"):
        shared.embed([[3], [1000]])
    with refuses("prompt", RequestError):
        shared.embed("text")


def test_requests_without_a_seed_repeat_only_where_the_engine_has_one(shared):
    asked = replace(GREEDY, temperature=1.5)

    def sampled(seed: int | None) -> list[list[int]]:
        llm = variant(shared)
        llm.engine = Engine(shared.runner, Scheduler(shared.engine.scheduler.config), None, seed)
        return tokens_of(llm.generate(PROMPTS[:2] * 2, asked))

    first = sampled(7)
    assert first == sampled(7) != sampled(8) and first[0] != first[2], "each request has a seed of its own"
    assert sampled(None) != sampled(None)


# --- numbers ----------------------------------------------------------------------------------------------------------


def test_stats_and_reset_prefix_cache(llm):
    prompts = PROMPTS[:3]
    size = sum(map(len, prompts))
    assert llm.stats().padding == llm.stats().prefix_hit_rate == 0
    llm.generate(prompts, GREEDY)
    stats = llm.stats()
    assert (stats.running, stats.waiting, stats.pages_used, stats.waste, stats.preemptions) == (0, 0, 0, 0.0, 0)
    assert (stats.prompt_tokens, stats.generated_tokens, stats.prefix_hit_tokens) == (size, 3 * NEW, 0)
    assert stats.pages_cached == sum((len(prompt) + NEW - 1) // PAGE for prompt in prompts)
    assert stats.computed_tokens == size + 3 * (NEW - 1), "the last token is never fed"
    assert stats.padding_tokens > 0 and 0 < stats.padding < 1
    prefill = -(-size // 64)
    assert NEW - 1 + prefill <= stats.steps <= NEW + prefill, "chunks of 64, and decoding beside them"

    outputs = llm.generate(prompts, GREEDY)
    found = [(len(prompt) - 1) // PAGE * PAGE for prompt in prompts]
    assert [output.num_cached_tokens for output in outputs] == found
    stats = llm.stats()
    assert (stats.prefix_query_tokens, stats.prefix_hit_tokens) == (2 * size, sum(found))
    assert stats.prefix_hit_rate == sum(found) / (2 * size)
    assert stats.computed_tokens == 2 * (size + 3 * (NEW - 1)) - sum(found)

    llm.reset_prefix_cache()
    assert llm.stats().pages_cached == 0
    assert [output.num_cached_tokens for output in llm.generate(prompts, GREEDY)] == [0] * 3


def test_stats_during_a_run(llm):
    engine = llm.engine
    engine.add("a", PROMPTS[0], replace(GREEDY, n=2))
    assert (llm.stats().waiting, llm.stats().running) == (2, 0)
    for _ in range(4):
        engine.step()
    stats, running = llm.stats(), engine.scheduler.running
    pages = len({page for seq in running for page in seq.pages})
    slots = pages * PAGE
    shared = len(running[0].pages) * 2 - pages
    tokens = sum(seq.computed for seq in running) - shared * PAGE
    assert (stats.running, stats.waiting, stats.pages_used) == (2, 0, pages) and shared > 0
    assert stats.waste == pytest.approx(1 - tokens / slots)
    assert stats.pages_share == pages / stats.pages_total
    engine.abort("a")
    engine.drain()
    assert llm.stats().pages_used == 0


def test_times(llm):
    outputs = llm.generate(PROMPTS, GREEDY)
    for output in outputs:
        times = output.outputs[0].times
        assert times.arrival <= times.scheduled <= times.first_token < times.finished
    engine = llm.engine
    engine.add("early", PROMPTS[0], GREEDY, arrival=1.0)
    (update,) = engine.abort("early")
    assert update.finish_reason == "abort"
    times = update.times
    assert (times.arrival, times.scheduled, times.first_token) == (1.0, None, None) and times.finished is not None


def test_a_request_is_added_whole_or_not_at_all(llm):
    engine, add = llm.engine, llm.engine.scheduler.add

    def fails_for_the_second(seq):
        if seq.index == 1:
            raise MemoryError
        add(seq)

    engine.scheduler.add = fails_for_the_second
    with pytest.raises(MemoryError):
        engine.add("a", PROMPTS[0], replace(GREEDY, n=2))
    assert not engine.has_work and not engine._requests


def test_idle_time_does_not_change_the_pace(llm, monkeypatch):
    """How many steps go in a dispatch depends on how long one takes; a pause between two requests is no step."""
    clock = SimpleNamespace(now=0.0, monotonic=time.monotonic)

    def tick():
        clock.now += 0.001
        return clock.now

    clock.perf_counter = tick
    monkeypatch.setattr("dovetail.engine.engine.time", clock)
    prompt = PROMPTS[0][: 2 * PAGE + 1]
    for _ in range(4):
        llm.generate(prompt, GREEDY)  # from the second time on one token is not cached: it looks like a decode step
        clock.now += 1000
    assert llm.engine.pace.decode_seconds < 0.1


@pytest.mark.parametrize(
    "name, value",
    [
        ("gpu_memory_utilization", 7), ("gpu_memory_utilization", 0.0), ("tensor_parallel_size", 0),
        ("max_num_batched_tokens", 0), ("max_num_seqs", 0), ("max_num_seqs", True), ("block_size", 0),
        ("kv_cache_memory_bytes", 0), ("max_decode_steps", 0), ("dtype", "float99"),
    ],
)  # fmt: skip
def test_values_out_of_range_are_refused(name, value):
    with refuses(name):
        make_llm("llama3.1", load_format="dummy", **{name: value})


def test_options_that_do_not_fit_the_model_are_refused_before_weights_are_read(monkeypatch, tmp_path):
    monkeypatch.setattr("dovetail.io.load.read_params", lambda *_, **__: pytest.fail("weights were read"))
    for options, param, kind in (
        (dict(max_model_len=10**6), "max_model_len", UserError),
        (dict(lora_modules={"a": str(tmp_path)}), None, CheckpointError),
        (dict(lora_modules={"a": str(tmp_path)}, max_loras=0), "max_loras", UserError),
        (dict(tensor_parallel_size=4096), "tensor_parallel_size", UserError),
        (dict(max_num_batched_tokens=1, max_num_seqs=5), "max_num_batched_tokens", UserError),
    ):
        with refuses(param, kind):
            make_llm("llama3.1", **options)


def test_the_names_of_dtypes_are_those_that_can_be_computed_in():
    assert {compute_of(name).name for name in DTYPES} == set(COMPUTES)


@pytest.mark.thorough
def test_dummy_weights_on_two_devices_answer_as_on_one():
    alone, split = (
        make_llm("llama3.1", load_format="dummy", tensor_parallel_size=n, kv_cache_memory_bytes=2**18) for n in (1, 2)
    )
    assert tokens_of(split.generate(PROMPTS, GREEDY)) == tokens_of(alone.generate(PROMPTS, GREEDY))
    # the same bytes of each device hold twice as many tokens
    assert split.engine.scheduler.config.num_pages == 2 * alone.engine.scheduler.config.num_pages
    assert held_bytes(split.runner.cache) == held_bytes(alone.runner.cache)


def test_a_share_of_memory_is_honoured_on_a_cpu_too():
    little, more = (pool_bytes(fraction, 0, 0) for fraction in (0.01, 0.5))
    assert little < more / 20


def test_the_pool_takes_what_is_free_on_the_fullest_device():
    """A trainer may hold most of a device, so that the requested share is more than is free."""
    GiB = 2**30

    def devices(*in_use: int):
        return [
            SimpleNamespace(memory_stats=lambda n=n: {"bytes_limit": 80 * GiB, "bytes_in_use": n * GiB}) for n in in_use
        ]

    def pool(fraction, *in_use: int) -> float:
        return (pool_bytes(fraction, 10 * GiB, 2 * GiB, devices(*in_use)) + SLACK) / GiB

    assert pool(0.5, 10) == 40 - 10 - 2, "the weights alone: its share"
    assert round(pool(None, 10), 3) == 77.6 - 10 - 2
    assert pool(0.9, 60) == 20 - 2, "what is free, less a step"
    assert pool(0.9, 10, 70) == 10 - 2
    with refuses(None, OutOfMemoryError, naming="gpu_memory_utilization"):
        num_pages(pool_bytes(0.9, 10 * GiB, 2 * GiB, devices(79)), 2**20, 16, most=100)


def test_options_are_checked_and_unknown_ones_refused_with_what_was_meant():
    with pytest.raises(UserError, match=r"no option 'max_num_seq'\. Did you mean 'max_num_seqs'\?"):
        make_llm("llama3.1", max_num_seq=3)
    for name, value, said in (
        ("scheduling_policy", "random", "must be one of fcfs, priority, got 'random'"),
        ("seed", -1, "must be an integer of at least 0, got -1"),
        ("gpu_memory_utilization", 0, "must be a number above 0 and at most 1, got 0"),
    ):
        with pytest.raises(UserError, match=said) as caught:
            EngineOptions.of({name: value})
        assert caught.value.param == name
    assert EngineOptions(dtype="f32") == EngineOptions.of({"dtype": "f32"})


def test_every_option_has_a_help_text_and_every_renamed_one_exists():
    assert all(each.help for each in options_of(EngineOptions).values())
    renamed, known = EngineOptions.RENAMED, set(options_of(EngineOptions))
    assert set(renamed.values()) <= known and not set(renamed) & known
