"""Streams continue while another request prefills a long prompt or compiles a program."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest
from engine.engines import GREEDY, make_llm, mixed_prompts, tokens_of

from dovetail.engine.device.batch import Shape
from dovetail.engine.device.programs import StepProgram, limits_of
from dovetail.engine.device.step import score
from dovetail.engine.engine import Engine
from dovetail.engine.llm import LLM
from dovetail.engine.request.params import SamplingParams
from dovetail.engine.request.sequence import Request, Sequence
from dovetail.engine.schedule.plan import PlanRow, StepDemand, StepLimits, StepPlan
from dovetail.engine.schedule.step_time import STEP_SECONDS, Pace

pytestmark = pytest.mark.slow

EVERY_PROGRAM = True

LONG = replace(GREEDY, max_tokens=120)
PROMPT = mixed_prompts(1, least=150, most=150)[0]


# --- programs that are not compiled -----------------------------------------------------------------------------------


@pytest.fixture
def llm() -> LLM:
    """Return an engine with the compiled programs of a server that has just become ready."""
    llm = make_llm("llama3.1", max_num_seqs=16, max_decode_steps=1, max_num_batched_tokens=None)
    llm.runner.steps._futures.clear()
    llm.prepare()
    return llm


class Compiler:
    """Hold up new compilations until they are released."""

    def __init__(self, monkeypatch):
        self.goes_on, self.asked = threading.Event(), []
        load_or_compile = StepProgram.load_or_compile

        def waits(program, *args):
            self.asked.append(program.shape)
            assert self.goes_on.wait(120)
            return load_or_compile(program, *args)

        monkeypatch.setattr(StepProgram, "load_or_compile", waits)


@pytest.fixture
def compiler(llm, monkeypatch):
    held = Compiler(monkeypatch)
    yield held
    held.goes_on.set()  # its threads end


def decode_alone(engine: Engine, id: str) -> None:
    """Take steps until the request decodes."""
    while not any(update.request_id == id for update in engine.step()):
        pass


def gained(engine: Engine, steps: int) -> dict[str, int]:
    """Take `count` steps and return the tokens that each request gained."""
    found: dict[str, int] = {}
    for _ in range(steps):
        for update in engine.step():
            found[update.request_id] = found.get(update.request_id, 0) + len(update.token_ids)
    return found


def test_streams_go_on_while_the_program_of_another_is_compiled(llm, compiler):
    """Return the parameters of a request that no compiled program serves: its step keeps hidden states."""
    engine = llm.engine
    engine.add("a", PROMPT[:8], LONG)
    decode_alone(engine, "a")
    engine.add("b", PROMPT, replace(GREEDY, prompt_logprobs=1))
    assert gained(engine, 20) == {"a": 20}
    deadline = time.monotonic() + 120
    while not any(shape.keeps_hidden for shape in compiler.asked):
        assert time.monotonic() < deadline, compiler.asked
        time.sleep(0.01)
    compiler.goes_on.set()
    for future in list(llm.runner.steps._futures.values()):
        future.result()
    programs = score._cache_size()
    while not engine.is_done("b"):
        engine.step()
    assert score._cache_size() == programs, "compiled with the step, not between two steps"
    scored = engine.output("b")
    engine.abort("a")
    engine.drain()
    (expected,) = llm.generate(PROMPT, replace(GREEDY, prompt_logprobs=1))
    assert tokens_of([scored]) == tokens_of([expected])
    assert len(scored.prompt_logprobs or ()) == len(PROMPT)


def test_requests_beyond_the_compiled_rows_wait_and_others_continue(llm, compiler):
    engine = llm.engine
    engine.add("a", PROMPT[:8], LONG)
    decode_alone(engine, "a")
    for i in range(12):
        engine.add(f"b{i}", PROMPT[i : i + 9], LONG)
    found = gained(engine, 20)
    assert found["a"] == 20, "with each step a token"
    assert len(found) == 8, "the one compiled step of prompts has 8 rows, and stands in for the decode step of 8"
    assert not llm.runner.steps.is_ready(llm.runner.buckets.decode(8)) and llm.runner.is_compiling
    compiler.goes_on.set()
    while engine.has_work:
        engine.step()
    together = [tokens_of([engine.output(id)])[0] for id in ("a", "b0", "b11")]
    alone = [tokens_of(llm.generate(PROMPT[i : i + n], LONG))[0] for i, n in ((0, 8), (0, 9), (11, 9))]
    assert together == alone


def test_a_request_alone_waits_for_its_program(llm, compiler):
    threading.Timer(0.5, compiler.goes_on.set).start()
    (found,) = llm.generate(PROMPT[:8], replace(GREEDY, prompt_logprobs=1))
    assert len(tokens_of([found])[0]) == GREEDY.max_tokens


def shape(tokens: int, rows: int, **more) -> Shape:
    return Shape(tokens, rows, 4, **more)


READY = [shape(1, 1), shape(64, 8)]


@pytest.mark.parametrize(
    ("demand", "budget", "wanted", "ready", "expected"),
    [
        # all of it, in a program with padding
        (StepDemand(1, 1, 20), 64, shape(32, 8), READY, StepLimits(64, 2, 1)),
        # a part of the prompts
        (StepDemand(1, 1, 900), 256, shape(256, 8), READY, StepLimits(64, 8, 7)),
        (StepDemand(3, 20, 400), 64, shape(64, 64), READY, StepLimits(64, 8, 5)),
        # prompts wait where a program for them has too few rows for all who decode, or none keeps what they need
        (StepDemand(8, 1, 20), 64, shape(64, 64), [*READY, shape(8, 8)], StepLimits(64, 8, 0)),
        (StepDemand(1, 1, 20, True), 64, shape(32, 8, keeps_hidden=True), READY, StepLimits(64, 8, 0)),
        # the last who decode wait where no program has a row for each
        (StepDemand(20), 64, shape(32, 32), READY, StepLimits(64, 8, 0)),
        # a step that takes much longer than the budget allows is not taken
        (StepDemand(1, 1, 20), 32, shape(32, 8), [shape(1, 1), shape(512, 8)], StepLimits(32, 8, 0)),
        # nothing can go on
        (StepDemand(0, 1, 20), 64, shape(32, 8), [shape(1, 1)], None),
        (StepDemand(2), 64, shape(2, 2), [], None),
    ],
)
def test_a_step_is_limited_to_compiled_shapes(demand, budget, wanted, ready, expected):
    assert limits_of(demand, budget, wanted, ready) == expected


# --- long prompts -----------------------------------------------------------------------------------------------------


def test_a_long_prompt_is_computed_in_steps_of_limited_time_and_streams_go_on_between_them(llm):
    engine, plans = llm.engine, []
    engine.pace = Pace(8192, STEP_SECONDS / 40)  # as on a machine that computes 40 tokens in the time of a step
    engine.pace.learn = lambda *_: None  # type: ignore[method-assign]
    launch = engine._launch

    def recorded(plan, **more):
        plans.append(plan)
        return launch(plan, **more)

    engine._launch = recorded  # type: ignore[method-assign]
    engine.add("a", PROMPT[:8], LONG)
    decode_alone(engine, "a")
    engine.add("b", PROMPT, GREEDY)
    plans.clear()
    updates = []
    while not any(update.request_id == "b" for update in updates):
        updates += engine.step()
    chunks = [plan for plan in plans if any(row.seq.request.id == "b" and row.count > 1 for row in plan.rows)]
    assert len(chunks) == -(-len(PROMPT) // 32) and max(plan.num_tokens for plan in chunks) <= 33
    assert all("a" in {row.seq.request.id for row in plan.rows} for plan in chunks), "a token with every chunk"
    assert sum(len(update.token_ids) for update in updates if update.request_id == "a") >= len(chunks)
    engine.abort("a")
    engine.abort("b")
    engine.drain()


def test_the_size_of_a_step_follows_from_what_tokens_take():
    pace = Pace(8192, 1e-3)
    assert pace.tokens == 256
    for seconds, expected in ((2e-3, 128), (0.1, 32), (9e-4, 256), (1e-6, 8192)):
        for _ in range(60):
            pace.learn(prompt_step(), 100, 100 * seconds)
        assert pace.tokens == expected
    assert Pace(64, 1e-6).tokens == 64, "no more than were given"
    assert Pace(4096).tokens == 4096, "as many as may be where it is not limited"


def test_the_size_of_a_step_does_not_oscillate():
    pace, sizes = Pace(8192, STEP_SECONDS / 256), set()
    for i in range(100):
        pace.learn(prompt_step(), 100, 100 * STEP_SECONDS / (250 if i % 2 else 262))
        sizes.add(pace.tokens)
    assert len(sizes) <= 2 and pace.tokens == 128, "once smaller, it stays so until there is room"


def test_a_decode_step_does_not_change_the_prompt_pace():
    pace = Pace(8192, 1e-3)
    seq = Sequence(Request("r", (1,), SamplingParams()), pages=[1])
    pace.learn(StepPlan([PlanRow(seq, 0, 1, True)]), 1, 5.0)
    assert pace.tokens == 256 and pace.decode_seconds > 1


def prompt_step() -> StepPlan:
    return StepPlan([PlanRow(Sequence(Request("r", (1,), SamplingParams()), pages=[1]), 0, 100, False)])


def test_one_prompt_takes_no_program_of_many_rows():
    """However long it is: each row costs a row of logits, and its sampling."""
    buckets = make_llm("llama3.1", max_num_seqs=256, max_num_batched_tokens=None, load_format="dummy").runner.buckets
    for tokens in (20, 600, 1400, 8000):
        assert buckets.mixed(tokens, 1).rows == buckets.mixed(tokens, 1, keeps_hidden=True).rows == 8
