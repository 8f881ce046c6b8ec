"""The scheduler alone, case by case, on a fake device that checks every plan."""

import random
import time

import numpy as np
import pytest
from fake_device import EOS, STOPS, Driver, add, check_invariants, expected, make
from refusals import refuses

from dovetail.core.errors import RequestError
from dovetail.engine.request.sequence import Status


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("caching", [True, False])
def test_preemption_happens_and_recomputes(ahead, caching):
    scheduler = make(pages=12, size=4, budget=32, enable_prefix_caching=caching)
    seqs = [add(scheduler, str(i), [i] * 9, max_tokens=20)[0] for i in range(3)]
    driver = Driver(scheduler, ahead)
    driver.drain()
    assert scheduler.stats().preemptions >= 1
    assert [seq.tokens for seq in seqs] == [expected(seq) for seq in seqs]
    assert seqs[0].preemptions == 0, "the first to come is the last to be preempted"
    assert {seq for plan in driver.plans for seq in plan.preempted} == {s for s in seqs if s.preemptions}
    assert driver.device.computed_tokens > sum(len(s.tokens) - 1 for s in seqs)


def test_a_preempted_sequence_restarts_after_its_tokens_are_known():
    scheduler = make(pages=6, size=4)
    _, (victim,) = (add(scheduler, i, [ord(i)] * 8, max_tokens=12) for i in "ab")
    driver = Driver(scheduler)
    while not scheduler.preemptions:
        driver.launch()
        if len(driver.flying) > 2:
            driver.land()
    assert victim.status is Status.WAITING and victim.pending > 0 and victim.slot is None
    scheduler.abort("a")
    assert scheduler.schedule() is None, "there is room now, but its newest token is still on the device"
    while victim.pending:
        driver.land()
    driver.drain()
    assert victim.tokens == expected(victim)


def test_reset_prefix_cache_affects_running_and_waiting_requests():
    scheduler = make(max_num_seqs=1)
    driver = Driver(scheduler, 0)
    add(scheduler, "a", range(10), max_tokens=8)
    driver.step()
    (waiting,) = add(scheduler, "b", range(10))
    scheduler.reset_prefix_cache()
    (later,) = add(scheduler, "c", range(10))
    driver.drain()
    assert (waiting.cached_tokens, later.cached_tokens) == (0, 8)


def test_the_victim_is_of_the_worst_priority():
    scheduler = make(pages=8, size=4, policy="priority")
    (low,), (high,) = (add(scheduler, i, [ord(i)] * 8, max_tokens=16, priority=p) for i, p in (("a", 9), ("b", 1)))
    Driver(scheduler).drain()
    assert (high.preemptions, low.preemptions > 0) == (0, True)


def test_a_sequence_alone_ends_with_length_when_the_pool_is_full():
    scheduler = make(pages=3, size=4)
    (seq,) = add(scheduler, "a", [1] * 5, max_tokens=None)
    Driver(scheduler).drain()
    assert seq.finish_reason == "length" and len(seq.tokens) == 3 * 4 + 1  # the last is never fed
    assert scheduler.stats().preemptions == 0


@pytest.mark.parametrize("before", range(6))
def test_abort_in_flight(before):
    scheduler = make(budget=8)
    driver = Driver(scheduler)
    doomed, (other,) = add(scheduler, "a", range(20), n=3, max_tokens=20), add(scheduler, "b", range(9))
    for _ in range(before):
        driver.launch()
        if len(driver.flying) > 1:
            driver.land()
    assert scheduler.abort("a") == doomed and scheduler.abort("a") == []
    check_invariants(scheduler)
    lengths = [len(seq.tokens) for seq in doomed]
    driver.drain()
    assert [len(seq.tokens) for seq in doomed] == lengths, "what comes after an abort is ignored"
    assert other.tokens == expected(other)


def test_prefix_hits_are_counted_in_tokens():
    scheduler = make()
    driver = Driver(scheduler)
    add(scheduler, "a", range(10), max_tokens=3)
    driver.drain()
    (again,) = add(scheduler, "b", range(10), max_tokens=3)
    (salted,) = add(scheduler, "c", range(10), max_tokens=3, cache_salt="s")
    driver.drain()
    assert (again.cached_tokens, salted.cached_tokens) == (8, 0)
    stats = scheduler.stats()
    assert (stats.prefix_query_tokens, stats.prefix_hit_tokens) == (30, 8)


def test_the_next_turn_of_a_conversation_reuses_the_answers_pages():
    scheduler = make()
    driver = Driver(scheduler)
    (seq,) = add(scheduler, "a", range(6), max_tokens=11)
    driver.drain()
    (turn,) = add(scheduler, "b", [*seq.tokens, 7, 8], max_tokens=1)
    driver.drain()
    assert turn.cached_tokens == 16  # of 17


@pytest.mark.parametrize("caching", [True, False])
def test_the_samples_of_a_request_share_its_prompt_within_one_step(caching):
    scheduler = make(enable_prefix_caching=caching)
    seqs = add(scheduler, "a", range(17), n=4)
    (twin,) = add(scheduler, "b", range(17))
    driver = Driver(scheduler)
    plan = driver.launch()
    assert plan is not None and [row.count for row in plan.rows] == [17, 1, 1, 1, 1 if caching else 17]
    assert len({tuple(seq.pages[:4]) for seq in seqs}) == 1 and len({seq.pages[4] for seq in seqs}) == 4
    driver.drain()
    assert all(seq.tokens == expected(seq) for seq in [*seqs, twin])


def test_a_long_prompt_is_cut_at_the_budget_and_does_not_stop_decoding():
    scheduler = make(budget=8, policy="priority")
    driver = Driver(scheduler, 0)
    (short,) = add(scheduler, "a", [1, 2], max_tokens=30, priority=5)
    driver.step()
    (long,) = add(scheduler, "b", range(30), priority=0)
    for _ in range(3):
        driver.step()
        rows = {row.seq: row.count for row in driver.plans[-1].rows}
        assert rows == {short: 1, long: 7}
    driver.drain()
    assert long.tokens == expected(long) and short.tokens == expected(short)


@pytest.mark.parametrize("by_token", [False, True])
def test_tokens_past_a_stop_are_dropped(by_token):
    scheduler = make(max_decode_steps=8)
    driver = Driver(scheduler)
    seqs = [add(scheduler, str(i), [i, 3], max_tokens=60, ignore_eos=False)[0] for i in range(8)]
    for seq in seqs:
        seq.by_token = by_token
    driver.drain()
    assert max(plan.steps for plan in driver.plans) > 1
    assert any(seq.finish_reason == "stop" for seq in seqs)
    assert {seq.tokens[-1] == EOS for seq in seqs if seq.finish_reason == "stop"} == {True}
    assert [seq.tokens for seq in seqs] == [expected(seq) for seq in seqs]


@pytest.mark.parametrize("ahead", [0, 1])
def test_multi_step_drops_tokens_after_an_end(ahead):
    scheduler = make(max_decode_steps=8)
    seqs = [add(scheduler, "a", [1, 2], max_tokens=12)[0], add(scheduler, "b", [3, 4], max_tokens=20)[0]]
    driver = Driver(scheduler, ahead)
    driver.drain()
    assert [plan.steps for plan in driver.plans] == [1, 8, 8, 8], "all the steps that are compiled, or one"
    assert [seq.tokens for seq in seqs] == [expected(seq) for seq in seqs]
    assert [seq.finish_reason for seq in seqs] == ["length"] * 2
    check_invariants(scheduler, driver.device)
    assert scheduler.pool.num_used == 0
    assert make(max_decode_steps=1).schedule(8) is None


@pytest.mark.parametrize(
    ("config", "steps"),
    [
        (dict(max_model_len=14), [1, 8, 1, 1, 1]),  # 10 are in pages after the second, and 18 would be too many
        (dict(pages=4), [1, 8, 1, 1, 1, 1, 1, 1]),  # 16 slots; the last token is never fed
        (dict(max_model_len=18), [1, 8, 8]),  # the ninth would be past the model: it is dropped
    ],
)
def test_multi_step_never_goes_past_the_model_or_the_pool(config, steps):
    scheduler = make(max_decode_steps=8, size=4, **config)
    (seq,) = add(scheduler, "a", [1, 2], max_tokens=None)
    driver = Driver(scheduler, 0)
    while scheduler.has_work:
        driver.step()
        check_invariants(scheduler, driver.device)
    assert [plan.steps for plan in driver.plans] == steps
    assert seq.tokens == expected(seq) and seq.finish_reason == "length"


def test_multi_step_preempts_no_sequence():
    scheduler = make(max_decode_steps=8, size=4, pages=8)
    seqs = [add(scheduler, i, [ord(i)] * 8, max_tokens=5)[0] for i in "ab"]
    driver = Driver(scheduler)
    driver.drain()
    assert [plan.steps for plan in driver.plans[:2]] == [1, 8], "two pages each for 8 more, and four are left"
    assert scheduler.preemptions == 0 and [seq.tokens for seq in seqs] == [expected(seq) for seq in seqs]
    tight = make(max_decode_steps=8, size=4, pages=7)
    for i in "ab":
        add(tight, i, [ord(i)] * 8, max_tokens=5)
    driver = Driver(tight)
    driver.drain()
    assert {plan.steps for plan in driver.plans} == {1} and tight.preemptions == 0


def test_multi_step_is_not_shortened_without_a_free_slot():
    scheduler = make(max_decode_steps=4, max_num_seqs=2)
    driver = Driver(scheduler, 0)
    for id in "abc":
        add(scheduler, id, [1], max_tokens=20)
    driver.step()
    driver.step()
    assert driver.plans[-1].steps == 4, "c has no slot before a sequence ends, however short the steps"
    scheduler.abort("a")
    driver.step()
    assert len(driver.plans[-1].rows) == 2 and driver.plans[-1].steps == 1, "c begins at once"
    (grammar,) = add(scheduler, "d", [1], max_tokens=5)
    grammar.single_step = True
    scheduler.abort("b")
    driver.drain()
    assert all(plan.steps == 1 for plan in driver.plans if grammar in [row.seq for row in plan.rows])


def test_a_sequence_that_needs_the_host_is_not_planned_ahead():
    scheduler = make(max_decode_steps=4)
    (grammar,), (free,) = add(scheduler, "a", [1], max_tokens=4), add(scheduler, "b", [2], max_tokens=8)
    grammar.single_step = True
    driver = Driver(scheduler)
    while scheduler.has_work:
        pending = grammar.pending
        plan = driver.launch()
        assert not (plan and pending and grammar in [row.seq for row in plan.rows])
        if len(driver.flying) > 1 or plan is None:
            driver.land()
    assert grammar.tokens == expected(grammar) and free.tokens == expected(free)


def test_first_come_first_served():
    scheduler = make(max_num_seqs=2, budget=6)
    seqs = [add(scheduler, str(i), [i] * (12 if i == 1 else 3), max_tokens=4)[0] for i in range(12)]
    driver = Driver(scheduler)
    driver.drain()
    starts = list(dict.fromkeys(row.seq for plan in driver.plans for row in plan.rows))
    assert starts == seqs


@pytest.mark.slow
def test_waste_stays_below_4_percent_on_mixed_lengths():
    rng = random.Random(0)
    scheduler = make(64, 2048, pages=4096, size=16, max_model_len=2048)
    for i in range(64):
        add(scheduler, str(i), [rng.randrange(100) for _ in range(rng.randint(100, 1000))], max_tokens=100)
    driver = Driver(scheduler)
    worst = 0.0
    for _ in range(60):
        driver.step()
        worst = max(worst, scheduler.stats().waste)
    assert 0 < worst < 0.04


@pytest.mark.parametrize(
    ("prompt", "code", "naming"),
    [
        ([], None, ""),
        ([1] * 200, "context_length_exceeded", "max_model_len=200"),
        ([1] * 41, "context_length_exceeded", "10 pages x 4 tokens"),
    ],
)
def test_a_prompt_that_can_never_run_is_refused(prompt, code, naming):
    scheduler = make(pages=10)
    with refuses("prompt", RequestError, code=code, naming=naming):
        add(scheduler, "a", prompt)
    assert not scheduler.has_work
    (seq,) = add(scheduler, "a", [1] * 40)
    with refuses("request_id", RequestError, naming="a/0"):
        scheduler.add(seq)


@pytest.mark.parametrize(
    ("bad", "param"),
    [
        ({"policy": "lifo"}, "policy"),
        ({"budget": 0}, "max_num_batched_tokens"),
        ({"max_model_len": 1}, "max_model_len"),
        ({"max_decode_steps": 0}, "max_decode_steps"),
    ],
)
def test_bad_config(bad, param):
    with refuses(param):
        make(**bad)


def test_a_step_that_prompts_fill_may_be_left_to_them():
    """Decoding waits while prompts fill whole steps, and continues beside those that do not."""
    scheduler = make(budget=16, max_num_seqs=4)
    add(scheduler, "a", [1] * 8, max_tokens=20)
    driver = Driver(scheduler, ahead=0, prompts_first=True)
    driver.step()
    for i in range(3):
        add(scheduler, f"b{i}", [2 + i] * 12)  # 36 tokens: two steps, and four are left
    for _ in range(4):
        driver.step()
    counts = [[row.count for row in plan.rows] for plan in driver.plans]
    assert counts == [[8], [12, 4], [8, 8], [1, 1, 1, 4], [1, 1, 1, 1]]


def test_commit_wants_tokens_for_every_row():
    scheduler = make()
    add(scheduler, "a", [1])
    plan = scheduler.schedule()
    assert plan is not None
    for shape in ((1, 0), (0, 1), (2, 1)):
        with pytest.raises(RuntimeError, match=f"1 steps of 1 rows.*{shape[0]}, {shape[1]}"):
            scheduler.commit(plan, np.zeros(shape, np.int32), STOPS)


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 8])
def test_512_sequences_are_scheduled_in_little_time(steps, capsys):
    scheduler = make(512, 8192, pages=60000, size=16, max_model_len=4096, max_decode_steps=steps)
    for i in range(512):
        add(scheduler, str(i), range(i, i + 40), max_tokens=3000)
    plan, times = scheduler.schedule(), []
    for _ in range(60):
        begin = time.process_time()  # not the wall: others use this machine
        ahead = scheduler.schedule()
        middle = time.process_time()
        assert plan is not None and ahead is not None
        tokens = np.full((plan.steps, len(plan.rows)), 7, np.int32)
        start = time.process_time()
        scheduler.commit(plan, tokens, STOPS)
        times.append((middle - begin, time.process_time() - start))
        plan = ahead
    schedule, commit = (sorted(part)[len(times) // 2] * 1e3 for part in zip(*times, strict=True))
    with capsys.disabled():
        print(f" {steps} steps: schedule {schedule:.2f} ms, commit {commit:.2f} ms ", end="")
    assert schedule < 5 and commit < 5 + steps
