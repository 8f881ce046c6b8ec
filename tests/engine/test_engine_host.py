"""The engine's host work on a step's arrays, with a scripted device."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dovetail.engine.device.arrays import zeros_of
from dovetail.engine.engine import Engine
from dovetail.engine.request.params import SamplingParams
from dovetail.engine.schedule.scheduler import Scheduler, SchedulerConfig

EOS, TOP = 2, 3


class OnDevice:
    """An array that records whether it was copied or read."""

    def __init__(self, array):
        self.array, self.ndim, self.sent, self.read = np.asarray(array), np.ndim(array), False, False

    def copy_to_host_async(self) -> None:
        self.sent = True

    def __array__(self, dtype=None, copy=None):
        self.read = True
        return self.array


Unknown = SimpleNamespace(platform="none", device_kind="of a test")


class Device:
    """A runner that samples consecutive numbers, and EOS at the given (launch, step, row)."""

    def __init__(self, rows: int, ends=()):
        self.cfg = SimpleNamespace(vocab=1000, eos_ids=(EOS,), scored=False, vision=None)
        self.buckets, self.weights = SimpleNamespace(max_rows=rows, steps=(1, 4)), SimpleNamespace(version=0)
        self.programs, self.adapters = SimpleNamespace(everywhere=None, history_sharding=None, devices=[Unknown]), None
        self.compute, self.is_warm, self.is_compiling = None, True, False
        self.steps = SimpleNamespace(compilations=SimpleNamespace(begun=0, seconds=0.0))
        self.ends, self.rows = set(ends), rows
        self.launches, self.next = [], 10

    def steps_ready(self, rows: int, steps: int) -> int:
        return steps

    def propose(self, plan, sampler) -> None:
        """No draft model."""

    def launch(self, plan, sampler, keeps_hidden: bool = False, waits: bool = True):
        shape = plan.steps, self.rows
        tokens = np.arange(self.next, self.next + plan.steps * self.rows).reshape(shape)
        self.next += tokens.size
        for launch, step, row in self.ends:
            if launch == len(self.launches):
                tokens[step, row] = EOS
        values, ids = -tokens / 8, np.repeat(tokens[..., None], 5, 2)
        arrays = values.astype(np.float32), tokens * 2, -ids.astype(np.float32), ids
        launched = SimpleNamespace(
            plan=plan, tokens=OnDevice(tokens), logprobs=tuple(map(OnDevice, arrays)), hidden=None,
            version=self.weights.version, padded=self.rows, fetch=lambda: tokens, waited=False,
        )  # fmt: skip
        self.launches.append(launched)
        return launched


def make(rows: int, steps: int, ends=()) -> tuple[Engine, Device]:
    device = Device(rows, ends)
    engine = Engine(device, Scheduler(SchedulerConfig(rows, 64, 200, 4, 200)), None)  # type: ignore[arg-type]
    engine._steps_wanted = lambda: steps  # type: ignore[method-assign]
    return engine, device


def run(engine: Engine, **how):
    updates = []
    while engine.has_work:
        updates += engine.step(**how)
    return updates


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("asked", [None, 0, TOP])
def test_each_sequence_keeps_its_own_until_it_ends(steps, asked):
    ends = [(1, steps - 1, 1), (2, 0, 2)]  # of the second launch the second row, of the third the third
    engine, _ = make(3, steps, ends)
    engine.add("a", [5, 6], SamplingParams(n=3, max_tokens=10, logprobs=asked))
    updates = run(engine)
    completions = engine.output("a").outputs
    assert [each.finish_reason for each in completions] == ["length", "stop", "stop"]
    assert [len(each.token_ids) for each in completions] == [10, 1 + steps, 2 + steps]
    for each in completions:
        mine = [update for update in updates if update.index == each.index]
        assert tuple(token for update in mine for token in update.token_ids) == each.token_ids
        assert [update.finished for update in mine] == [False] * (len(mine) - 1) + [True]
        if asked is None:
            assert each.logprobs is None and {update.logprobs for update in mine} == {None}
            continue
        assert tuple(entry for update in mine for entry in update.logprobs) == each.logprobs
        for token, entry, value in zip(each.token_ids, each.logprobs, each.token_logprobs, strict=True):
            if token != EOS:
                assert entry == (token, -token / 8, token * 2, ((token, float(-token)),) * asked)
                assert value == entry.logprob
    assert engine.stats().generated_tokens == sum(len(each.token_ids) for each in completions)


@pytest.mark.parametrize(("asked", "copied"), [((None, None), 0), ((None, 0), 2), ((0, TOP), 4)])
def test_only_requested_logprobs_are_copied_to_the_host(asked, copied):
    engine, device = make(2, 4)
    for i, count in enumerate(asked):
        engine.add(str(i), [5, 6], SamplingParams(max_tokens=8, logprobs=count))
    run(engine)
    for launched in device.launches:
        assert launched.tokens.sent
        assert [array.sent for array in launched.logprobs] == [True] * copied + [False] * (4 - copied)
    read = [[array.read for array in launched.logprobs] for launched in device.launches[:2]]
    assert read == [[True] * copied + [False] * (4 - copied)] * 2
    first, second = (engine.output(str(i)).outputs[0] for i in range(2))
    for each, count in zip((first, second), asked, strict=True):
        assert (each.logprobs is None) == (count is None)
        assert count is None or {len(entry.top) for entry in each.logprobs} == {count}


def test_updates_of_those_that_ended_alone():
    engine, _ = make(2, 4, ends=[(2, 1, 0)])
    engine.add("a", [5, 6], SamplingParams(n=2, max_tokens=20))
    updates = run(engine, ended_only=True)
    assert [(update.index, update.finish_reason, len(update.token_ids)) for update in updates] == [
        (0, "stop", 2),
        (1, "length", 3),
    ]
    assert [len(each.token_ids) for each in engine.output("a").outputs] == [7, 20]


def test_versions_and_times_are_noted_when_they_change():
    engine, device = make(1, 1)
    engine.add("a", [5, 6], SamplingParams(max_tokens=6))
    engine.step(), engine.step(), engine.step()
    engine.drain()
    device.weights = SimpleNamespace(version=3)
    updates = run(engine)
    (completion,) = engine.output("a").outputs
    assert completion.weights_versions == ((0, 0), (3, 3)) and completion.weights_version == 3
    assert {update.weights_version for update in updates} == {3}
    times = completion.times
    assert times is not None and times.arrival <= times.scheduled <= times.first_token < times.finished  # type: ignore


def test_an_aborted_sequence_says_so_and_keeps_what_it_had():
    engine, _ = make(2, 1)
    engine.add("a", [5, 6], SamplingParams(n=2, max_tokens=20, logprobs=0))
    engine.step(), engine.step()
    (last,) = engine.abort("a", 1)
    assert (last.index, last.finish_reason, last.token_ids) == (1, "abort", []) and last.logprobs == ()
    run(engine)
    whole, cut = engine.output("a").outputs
    assert (len(whole.token_ids), len(cut.token_ids), len(cut.logprobs or ())) == (20, 1, 1)


def test_an_end_token_has_no_text():
    engine, _ = make(2, 4, ends=[(1, 2, 0)])
    letters = SimpleNamespace(push=lambda token: f"<{token}>", flush=lambda: "!")
    engine.tokenizer = SimpleNamespace(stream=lambda context: letters)  # type: ignore[assignment]
    engine.add("a", [5, 6], SamplingParams(n=2, max_tokens=7))
    updates = run(engine)
    for each in engine.output("a").outputs:
        tokens = each.token_ids[:-1] if each.finish_reason == "stop" else each.token_ids
        assert each.text == "".join(f"<{token}>" for token in tokens) + "!"
        assert each.text == "".join(update.text for update in updates if update.index == each.index)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux gives zeros for memory that was returned")
def test_a_pool_takes_a_cpus_memory_where_it_is_written():
    place = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])
    before = anonymous()
    (pool,) = zeros_of([jax.ShapeDtypeStruct((128, 1 << 18), jnp.float32, sharding=place)])
    assert anonymous() - before < pool.nbytes / 2
    pool = jax.jit(lambda pool: pool.at[3].set(1), donate_argnums=0)(pool)
    assert np.asarray(pool[1:5]).sum(axis=1).tolist() == [0, 0, 1 << 18, 0]


def anonymous() -> int:
    """Return the bytes of this process's memory that no file backs."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))
