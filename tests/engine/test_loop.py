"""EngineLoop: every request gets the tokens of LLM.generate, whatever controls run between steps."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from engine.engines import GREEDY, NEW, make_llm, mixed_prompts, tokens_of, variant
from reference_models import reference
from refusals import refuses

from dovetail.core.errors import CheckpointError, MissingFileError, RequestError, UserError
from dovetail.engine.engine import Engine
from dovetail.engine.interface import CONTROLS, EngineDied
from dovetail.engine.llm import LLM
from dovetail.engine.loop import MOST_FAULTS, EngineLoop
from dovetail.engine.request.outputs import OutputDelta, RequestOutput
from dovetail.engine.request.params import SamplingParams
from dovetail.engine.request.sequence import Times
from dovetail.io.load import load

pytestmark = pytest.mark.slow

PROMPTS = mixed_prompts(16, most=60)
SAMPLED = SamplingParams(temperature=1.2, seed=7, presence_penalty=0.5, max_tokens=NEW, ignore_eos=True)
SECONDS = 60  # a test that hangs fails


@pytest.fixture(scope="module")
def llm() -> LLM:
    return make_llm("llama3.1")


@pytest.fixture(scope="module")
def answers(llm) -> list[list[int]]:
    return tokens_of(variant(llm).generate(PROMPTS, GREEDY, progress=False))


@pytest.fixture
def weights(llm):
    """Return other weights; the engine's own are restored after the test."""
    own, params = llm.runner.weights, load(reference("llama3.1")[1]).params
    yield {**params, "embed": params["embed"][::-1]}
    llm.runner.weights = own


class Asking:
    """A client of a loop that keeps each request's updates until its last or the engine's death."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.updates: dict[str, list[OutputDelta]] = defaultdict(list)
        self.died: EngineDied | None = None
        self._news = threading.Condition()
        self.outputs: dict[str, RequestOutput] = {}
        self._ended: dict[str, RequestOutput] = {}  # whose last deltas have not come yet
        engine.output = self._output(engine.output)  # type: ignore[method-assign]
        self.loop = EngineLoop(engine, self._on_updates, self._on_end)

    def _output(self, output):
        def kept(id: str) -> RequestOutput:
            self._ended[id] = output(id)
            return self._ended[id]

        return kept

    def add(self, id: str, prompt, params=GREEDY, **more) -> None:
        request = self.engine.intake.request(id, prompt, params, **more)
        self.do(lambda engine: engine.enqueue(request))

    def read(self, id: str) -> tuple[list[int], RequestOutput]:
        """Return a request's tokens as they arrived, and its output."""
        updates = self.updates[id]
        with self._news:
            assert self._news.wait_for(lambda: self.died or id in self.outputs, SECONDS)
        if self.died:
            raise self.died
        return [token for update in updates for token in update.token_ids], self.outputs.pop(id)

    def wait_for_end(self, id: str) -> OutputDelta:
        """Return the last update of a request with n=1."""
        updates = self.updates[id]
        with self._news:
            assert self._news.wait_for(lambda: self.died or (updates and updates[-1].finished), SECONDS)
        return updates[-1]

    def control(self, name: str, *args):
        return self.loop.control(name, *args).result(SECONDS)

    def do(self, function, idle: bool = False):
        return self.loop.submit(function, idle).result(SECONDS)

    def take_steps(self, count: int) -> None:
        """Take exactly this many steps of a paused engine."""

        def step(engine: Engine) -> None:
            engine.resume()
            self.loop._hand_on(engine.close(engine.step()))
            engine.pause()

        for _ in range(count):
            self.do(step)

    def holds_nothing(self) -> bool:
        stats = self.engine.stats()
        return (stats.running, stats.waiting, stats.pages_used) == (0, 0, 0)

    def _on_updates(self, updates: list[OutputDelta]) -> None:
        with self._news:
            for update in updates:
                self.updates[update.request_id].append(update)
            self.outputs |= self._ended
            self._ended.clear()
            self._news.notify_all()

    def _on_end(self, died: EngineDied) -> None:
        with self._news:
            self.died = died
            self._news.notify_all()


@contextmanager
def asking(llm: LLM, **options) -> Iterator[Asking]:
    asked = Asking(variant(llm, **options).engine)
    try:
        yield asked
    finally:
        asked.loop.stop()


@contextmanager
def paused_with(llm: LLM, ids: str, params=GREEDY, steps: int = 6) -> Iterator[Asking]:
    """Yield a paused engine that is in the middle of PROMPTS[0], PROMPTS[1], ... under these ids."""
    with asking(llm) as asked:
        asked.control("pause")
        for id, prompt in zip(ids, PROMPTS, strict=False):
            asked.add(id, prompt, params)
        asked.take_steps(steps)
        yield asked


# --- requests ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 4])
def test_16_requests_together(llm, answers, steps):
    with asking(llm, steps=steps) as asked:
        began = time.monotonic()
        for i, prompt in enumerate(PROMPTS):
            asked.add(str(i), prompt)
        for i, expected in enumerate(answers):
            tokens, output = asked.read(str(i))
            (completion,) = output.outputs
            times = completion.times
            assert tokens == expected and completion.token_ids == tuple(tokens)
            assert (completion.finish_reason, completion.weights_versions) == ("length", ((0, 0),))
            assert began <= times.arrival <= times.scheduled <= times.first_token < times.finished
        assert asked.holds_nothing() and asked.engine.stats().generated_tokens == 16 * NEW


def test_n_samples_and_logprobs_among_others(llm):
    params = replace(SAMPLED, n=3, logprobs=2)
    (expected,) = variant(llm).generate(PROMPTS[0], params)
    with asking(llm) as asked:
        asked.add("it", PROMPTS[0], params)
        for i, prompt in enumerate(PROMPTS[1:6]):
            asked.add(str(i), prompt)
        _, output = asked.read("it")
        assert output == replace(expected, request_id="it", outputs=output.outputs)
        for completion, ours in zip(expected.outputs, output.outputs, strict=True):
            assert completion.token_ids == ours.token_ids and len(ours.logprobs) == NEW
            updates = [update for update in asked.updates["it"] if update.index == ours.index]
            assert [update.finish_reason for update in updates] == [None] * (len(updates) - 1) + ["length"]
            parts = [pair for update in updates for pair in zip(update.token_ids, update.logprobs, strict=True)]
            assert parts == list(zip(ours.token_ids, ours.logprobs, strict=True))


def test_updates_are_records_that_join():
    times = Times(1.0)
    first = OutputDelta("a", 1, [5], "x", times, 4, 0, [])
    later = OutputDelta("a", 1, [6, 7], "y", times, 4, 1, [], "stop", 7)
    joined = first.then(later)
    assert joined == later._replace(token_ids=[5, 6, 7], text="xy")
    assert joined.finished and not first.finished


def test_an_abort_frees_the_pages_at_once(llm, answers):
    with paused_with(llm, "abc") as asked:
        held = {seq.request.id: len(seq.pages) for seq in asked.engine.scheduler.running}
        assert asked.engine.stats().pages_used == sum(held.values()) and held["a"] > 0
        asked.loop.abort("a").result(SECONDS)
        asked.loop.abort("no such request").result(SECONDS)
        assert asked.engine.stats().pages_used == held["b"] + held["c"], "not a step later"
        tokens, output = asked.read("a")
        (completion,) = output.outputs
        assert completion.finish_reason == "abort" and completion.token_ids == tuple(tokens)
        assert tokens and tokens == answers[0][: len(tokens)] and completion.times.finished
        asked.control("resume")
        assert [asked.read(id)[0] for id in "bc"] == answers[1:3]
        assert asked.holds_nothing()


def test_an_id_left_and_used_again_gets_its_own_tokens(llm, answers):
    with asking(llm) as asked:
        for expected, prompt in zip(answers[:4], PROMPTS, strict=False):
            asked.add("a", PROMPTS[5])
            asked.loop.abort("a").result(SECONDS)
            asked.updates["a"].clear()
            asked.outputs.clear()
            asked.add("a", prompt)
            assert asked.read("a")[0] == expected
            asked.updates["a"].clear()


BAD = [
    (dict(prompt=[]), "prompt", None),
    (dict(prompt="text"), "prompt", None),
    (dict(prompt=[5] * 300), "prompt", "context_length_exceeded"),
    (dict(prompt=[5, 160]), "prompt", None),
    (dict(params=replace(GREEDY, stop="x")), "stop", None),
    (dict(id="good-0"), "request_id", None),
    (dict(id=7), "request_id", None),
    (dict(priority=1), "priority", None),
    (dict(priority="high"), "priority", None),
    (dict(cache_salt=3), "cache_salt", None),
]


def test_bad_requests_among_good_ones(llm, answers):
    with asking(llm) as asked:
        asked.control("pause")
        for i in range(8):
            asked.add(f"good-{i}", PROMPTS[i])
        asked.take_steps(2)
        for options, param, code in BAD:
            with refuses(param, RequestError, code=code):
                asked.add(**({"id": "bad", "prompt": PROMPTS[0]} | options))
        asked.control("resume")
        assert [asked.read(f"good-{i}")[0] for i in range(8)] == answers[:8]
        assert asked.holds_nothing() and asked.loop.is_alive


# --- failures ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["_launch", "_commit"])
def test_an_engine_death_fails_every_open_request(llm, where):
    with asking(llm) as asked:
        work, left = getattr(asked.engine, where), iter(range(6))

        def breaks(*args, **more):
            if next(left, None) is None:
                raise OSError("the device is gone")
            return work(*args, **more)

        asked.control("pause")
        setattr(asked.engine, where, breaks)
        for i, prompt in enumerate(PROMPTS[:12]):
            asked.add(str(i), prompt, replace(GREEDY, max_tokens=100))
        asked.loop.check_health()
        asked.control("resume")
        for i in range(12):
            with pytest.raises(EngineDied, match="the device is gone") as caught:
                asked.read(str(i))
            assert isinstance(caught.value.__cause__, OSError)
        assert not asked.loop.is_alive
        for refused in (asked.loop.check_health, lambda: asked.loop.abort("a"), lambda: asked.loop.control("wake_up")):
            with pytest.raises(EngineDied, match="the device is gone"):
                refused()


def test_an_engine_death_during_a_drain_fails_the_pending_controls(llm):
    with paused_with(llm, "ab") as asked:

        def breaks(*_, **__):
            raise OSError("gone")

        asked.engine._commit = breaks
        held = threading.Event()
        asked.loop.submit(lambda _: held.wait(SECONDS))  # so that all three are asked before the engine's end
        futures = [asked.loop.control(name) for name in ("sleep", "pause", "reset_prefix_cache")]
        held.set()
        for future in futures:
            died = future.exception(SECONDS)
            assert isinstance(died, EngineDied) and isinstance(died.__cause__, OSError)
        for id in "ab":
            with pytest.raises(EngineDied, match="gone"):
                asked.read(id)


@pytest.mark.parametrize("fault", [RuntimeError("a bug"), ValueError("operands could not be broadcast")])
@pytest.mark.parametrize("where", ["schedule", "commit", "demand"])
def test_a_fault_in_the_scheduler_fails_its_requests_and_the_next_one_is_answered(llm, answers, caplog, where, fault):
    with paused_with(llm, "ab") as asked:
        broken = asked.engine.scheduler

        def breaks(*_, **__):
            raise fault

        setattr(broken, where, breaks)
        asked.control("resume")
        for id in "ab":
            assert asked.wait_for_end(id).finish_reason == "error"
        assert asked.updates["a"][-1].error == f"internal error in the engine: {type(fault).__name__}"
        assert str(fault) in caplog.text and "Traceback" in caplog.text
        assert asked.loop.is_alive and asked.engine.scheduler is not broken and asked.holds_nothing()
        for id, prompt in (("a", PROMPTS[2]), ("d", PROMPTS[3])):
            asked.updates[id].clear()
            asked.add(id, prompt)
        assert [asked.read("a")[0], asked.read("d")[0]] == answers[2:4]


@pytest.mark.parametrize("fault", [RuntimeError("a bug"), ValueError("operands could not be broadcast")])
@pytest.mark.parametrize("where", ["encode", "enqueue"])
def test_a_fault_in_intake_fails_that_request_alone(llm, answers, monkeypatch, where, fault):
    with paused_with(llm, "ab") as asked:

        def breaks(*_, **__):
            raise fault

        with monkeypatch.context() as patched:
            target = (asked.engine.intake, "encode") if where == "encode" else (asked.engine.scheduler, "add")
            patched.setattr(*target, breaks)
            with pytest.raises(type(fault), match=str(fault)) as caught:
                asked.add("bad", PROMPTS[2])
            assert not isinstance(caught.value, UserError), "the server answers it with 500"
        asked.control("resume")
        asked.add("next", PROMPTS[2])
        assert [asked.read(id)[0] for id in ("a", "b", "next")] == answers[:3]
        assert asked.holds_nothing() and asked.loop.is_alive


def test_faults_in_a_row_end_the_engine(llm):
    with asking(llm) as asked:

        def breaks(*_, **__):
            raise RuntimeError("a bug")

        asked.engine.step = breaks
        for i in range(MOST_FAULTS - 1):
            asked.add(str(i), PROMPTS[0])
            assert asked.wait_for_end(str(i)).finish_reason == "error"
        asked.add("last", PROMPTS[0])
        with pytest.raises(EngineDied, match="a bug"):
            asked.read("last")


def test_an_error_of_a_control_reaches_its_caller_only(llm, answers, weights, tmp_path):
    with paused_with(llm, "a") as asked:
        with refuses("embed", CheckpointError, naming="[160, 48], got [160, 8]"):
            asked.do(lambda engine: engine.update_weights({**weights, "embed": weights["embed"][:, :8]}), idle=True)
        with refuses("embed", CheckpointError):
            asked.do(lambda engine: engine.update_weights({"a": 1}), idle=True)
        with refuses("path", MissingFileError, naming="config.json"):
            asked.control("update_weights", str(tmp_path))
        with refuses("level"):
            asked.control("sleep", 3)
        asked.control("resume")
        assert asked.read("a")[0] == answers[0]
        assert asked.engine.stats().weights_version == 0


def test_stopping_ends_open_requests(llm):
    with paused_with(llm, "a", steps=0) as asked:
        asked.loop.stop()
        asked.loop.stop()
        with pytest.raises(EngineDied, match="was stopped"):
            asked.read("a")
        assert not asked.loop.is_alive and not asked.loop._thread.is_alive()
        with pytest.raises(EngineDied, match="was stopped"):
            asked.loop.submit(lambda _: None)


def test_an_idle_loop_does_not_spin(llm, answers, monkeypatch):
    turns, do_calls = [], EngineLoop._do_calls
    monkeypatch.setattr(EngineLoop, "_do_calls", lambda self: (turns.append(1), do_calls(self)))
    with asking(llm) as asked:
        asked.add("a", PROMPTS[0])
        assert asked.read("a")[0] == answers[0]
        asked.do(lambda _: None)
        before = len(turns)
        time.sleep(0.1)
        assert len(turns) == before


# --- weights and memory -----------------------------------------------------------------------------------------------


def test_every_control_is_the_engines():
    for control in CONTROLS.values():
        assert all(callable(getattr(Engine, name)) for name in (control.method, control.prepare) if name is not None)


def test_new_weights_in_flight(llm, answers, weights):
    """Tokens after the change equal those of a new engine given the prompt and the tokens so far."""
    with paused_with(llm, "abcd") as asked:
        assert asked.do(lambda engine: engine.update_weights(weights), idle=True) == 1
        stats = asked.engine.stats()
        assert (stats.weights_version, stats.running, stats.waiting, stats.pages_used) == (1, 0, 4, 0)
        asked.control("resume")
        done = [asked.read(id) for id in "abcd"]
        assert asked.engine.stats().preemptions == 4
    for (tokens, output), old, prompt in zip(done, answers, PROMPTS, strict=False):
        completion = output.outputs[0]
        (_, first), (changed, second) = completion.weights_versions
        assert (first, second, completion.weights_version) == (0, 1, 1) and 0 < changed < NEW
        assert tokens[:changed] == old[:changed]
        rest = replace(GREEDY, max_tokens=NEW - changed)
        assert [tokens[changed:]] == tokens_of(variant(llm).generate(prompt + tokens[:changed], rest))
    assert [tokens for tokens, _ in done] != answers[:4]


def test_new_weights_that_keep_the_cache(llm, weights):
    with paused_with(llm, "ab") as asked:
        used = asked.engine.stats().pages_used
        asked.do(lambda engine: engine.update_weights(weights, keep_cache=True), idle=True)
        assert (asked.engine.stats().running, asked.engine.stats().pages_used) == (2, used)
        asked.control("resume")
        for id in "ab":
            (completion,) = asked.read(id)[1].outputs
            assert [version for _, version in completion.weights_versions] == [0, 1]
        assert asked.engine.stats().preemptions == 0
        asked.add("c", PROMPTS[0])
        tokens, output = asked.read("c")
        assert output.num_cached_tokens == 0
    assert [tokens] == tokens_of(variant(llm).generate(PROMPTS[0], GREEDY))


def test_requests_wait_while_the_engine_sleeps(llm, answers):
    expected = tokens_of(variant(llm).generate(PROMPTS[:2], SAMPLED))
    with paused_with(llm, "ab", SAMPLED) as asked:
        asked.control("resume")
        asked.control("sleep")
        asked.control("sleep", 1)
        assert asked.engine.stats().sleeping == 1
        asked.add("late", PROMPTS[2])
        steps = asked.engine.stats().steps
        time.sleep(0.05)
        stats = asked.engine.stats()
        assert (stats.steps, stats.running, stats.pages_used) == (steps, 0, 0) and stats.waiting >= 1
        asked.control("wake_up")
        asked.control("wake_up")
        assert [asked.read(id)[0] for id in "ab"] == expected
        assert asked.read("late")[0] == answers[2]
        assert asked.engine.stats().sleeping == 0


@pytest.mark.parametrize("weights_first", [True, False])
def test_after_sleep_level_2_requests_wait_for_weights(llm, answers, weights, weights_first):
    folder = str(reference("llama3.1")[1])
    with paused_with(llm, "a", steps=0) as asked:
        asked.control("sleep", 1)
        asked.control("resume")
        asked.control("sleep", 2)
        assert asked.engine.stats().sleeping == 2
        if weights_first:
            assert asked.control("update_weights", folder) == 1
        asked.control("wake_up")
        if not weights_first:
            time.sleep(0.02)
            assert asked.engine.stats().waiting == 1 and asked.loop.is_alive
            assert asked.control("update_weights", folder, False, 1) == 1
        tokens, output = asked.read("a")
        assert (tokens, output.outputs[0].weights_version) == (answers[0], 1)


def test_pause_and_resume(llm, answers):
    with paused_with(llm, "ab") as asked:
        asked.add("late", PROMPTS[2])
        before = asked.engine.stats()
        time.sleep(0.05)
        stats = asked.engine.stats()
        assert (stats.steps, stats.pages_used, stats.running) == (before.steps, before.pages_used, 2)
        assert stats.waiting == 1
        with refuses(naming="resume()"):
            asked.do(lambda engine: engine.step())
        asked.control("reset_prefix_cache")
        asked.control("resume")
        assert [asked.read(id)[0] for id in "ab"] == answers[:2]
        assert asked.read("late")[0] == answers[2] and asked.engine.stats().preemptions == 0
