"""The scheduler under random traffic from hypothesis, on a fake device that checks every plan."""

import random

import numpy as np
import pytest
from fake_device import EOS, Driver, check_invariants, expected, make, sequences
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from refusals import refuses

from dovetail.core.errors import RequestError
from dovetail.engine.request.sequence import Status
from dovetail.engine.schedule.plan import UNKNOWN
from dovetail.io.images.item import ImageItem, ImageSpan

pytestmark = pytest.mark.slow
LARGEST = 6  # image tokens of an item


def item(key: int, count: int) -> ImageItem:
    return ImageItem(np.zeros((count, 0), np.uint8), np.zeros((count, 2), np.int32), (1, count), bytes([key, count]))


def check_plan(driver: Driver, plan, before: list, waited: set) -> None:
    scheduler, cfg = driver.scheduler, driver.scheduler.config
    assert 0 < plan.num_tokens <= cfg.max_num_batched_tokens and len(plan.rows) <= cfg.max_num_seqs
    assert len({row.seq for row in plan.rows}) == len(plan.rows)
    assert plan.steps == 1 or (plan.is_decode and plan.steps == cfg.max_decode_steps), (
        "each number of steps is compiled"
    )
    assert all(row.start + row.count < row.seq.limit for row in plan.rows), "who is at his end is planned no further"
    assert all(row.seq.status is Status.RUNNING for row in plan.rows), "no sequence with a row was preempted"
    admitted = [row.seq for row in plan.rows if row.seq in waited]
    assert all(a.rank < b.rank for a in admitted for b in scheduler.waiting), "no sequence is overtaken in the queue"
    # No starvation: the first sequence always progresses, unless it waits for the host, or for prompts.
    decodes = any(row.count == 1 and row.start >= row.seq.prompt_len for row in plan.rows)
    first_moves = not driver.prompts_first or decodes
    if (
        first_moves
        and before
        and before[0].status is Status.RUNNING
        and before[0] not in [row.seq for row in plan.rows]
    ):
        assert before[0].length >= before[0].limit or before[0].single_step or before[0].verifying


class Traffic(RuleBasedStateMachine):
    """Requests come and go, steps are planned up to two ahead of their commit."""

    @initialize(
        max_num_seqs=st.integers(1, 5), budget=st.integers(1, 24), pages=st.integers(3, 20), size=st.integers(1, 4),
        max_model_len=st.integers(8, 40), caching=st.booleans(), policy=st.sampled_from(["fcfs", "priority"]),
        max_decode_steps=st.sampled_from([1, 4]), ahead=st.integers(0, 2), prompts_first=st.booleans(),
        encoder_rows=st.integers(LARGEST, 3 * LARGEST), whole_images=st.booleans(),
    )  # fmt: skip
    def start(
        self, max_num_seqs, budget, pages, size, max_model_len, caching, policy, max_decode_steps, ahead,
        prompts_first, encoder_rows, whole_images,
    ):  # fmt: skip
        budget = max(budget, LARGEST + max_num_seqs) if whole_images else budget
        self.scheduler = make(
            max_num_seqs, budget, pages, size, max_model_len,
            enable_prefix_caching=caching, policy=policy, max_decode_steps=max_decode_steps,
            encoder_rows=encoder_rows, whole_images=whole_images,
        )  # fmt: skip
        self.driver = Driver(self.scheduler, ahead, prompts_first)
        self.seqs, self.count, self.random = [], 0, random.Random(budget)

    @rule(
        base=st.integers(0, 1), shared=st.integers(0, 16), own=st.integers(0, 6), n=st.sampled_from([1, 1, 2, 4]),
        max_tokens=st.sampled_from([1, 3, 10, None]), ignore_eos=st.booleans(), priority=st.integers(0, 2),
        salt=st.sampled_from([None, None, "s"]), adapter=st.sampled_from([None, None, "a"]), single=st.booleans(),
        by_token=st.booleans(), images=st.lists(st.tuples(st.integers(1, 3), st.integers(1, LARGEST)), max_size=3),
    )  # fmt: skip
    def arrive(self, base, shared, own, n, max_tokens, ignore_eos, priority, salt, adapter, single, by_token, images):
        self.count += 1
        prompt, spans = [base] * shared, []
        for key, count in images:
            spans.append(ImageSpan(len(prompt), item(key, count)))
            prompt += [1] * count
        prompt = prompt + [2 + self.count % 20] * own or [1]
        cfg = self.scheduler.config
        seqs = sequences(
            str(self.count), prompt, n, max_tokens, ignore_eos,
            arrival=float(self.count), priority=priority, cache_salt=salt, adapter=adapter, spans=tuple(spans),
        )  # fmt: skip
        fits = len(prompt) < cfg.max_model_len and len(prompt) <= cfg.num_pages * cfg.page_size
        for seq in seqs:
            seq.single_step, seq.by_token = single and priority == 2, by_token
            if fits:
                self.scheduler.add(seq)
                self.seqs.append(seq)
            else:
                with refuses("prompt", RequestError, code="context_length_exceeded"):
                    self.scheduler.add(seq)

    @rule(times=st.integers(1, 6))
    def step(self, times):
        for _ in range(times):
            self._launch()
            if len(self.driver.flying) > self.driver.ahead:
                self._land()

    @rule(most=st.integers(1, 6), right=st.floats(0, 1))
    def speculate(self, most, right):
        """Verify draft tokens of any length, each of them right with a probability of `right`."""
        while self.driver.flying:
            self._land()
        if not self.scheduler.demand().prompts:
            self._launch({seq: self._drafts(seq, most, right) for seq in self.scheduler.running})

    @rule(most=st.integers(1, 6), right=st.floats(0, 1), times=st.integers(1, 4))
    def speculate_ahead(self, most, right, times):
        """Verify draft tokens that only the device knows, also while it is not known how many the last step accepts."""
        self.driver.device.right = right
        for _ in range(times):
            if self.scheduler.demand().prompts:
                return
            room = {seq: seq.limit - seq.length - 1 for seq in self.scheduler.running if not seq.single_step}
            drafts = {seq: (UNKNOWN,) * min(most, left) for seq, left in room.items() if left > 0}
            if not drafts:
                return
            self._launch(drafts)
            if len(self.driver.flying) > self.driver.ahead:
                self._land()

    def _drafts(self, seq, most, right):
        count = self.random.randint(0, max(0, min(most, seq.limit - len(seq.tokens) - 1)))
        truth = expected(seq)[len(seq.tokens) :]
        return tuple(
            truth[j] if j < len(truth) and self.random.random() < right else self.random.randrange(30)
            for j in range(count)
        )

    @precondition(lambda self: self.driver.flying)
    @rule()
    def commit(self):
        self._land()

    @precondition(lambda self: self.seqs)
    @rule(data=st.data())
    def abort(self, data):
        seq = data.draw(st.sampled_from(self.seqs))
        ended = self.scheduler.abort(seq.request.id)
        assert all(one.finish_reason == "abort" for one in ended)
        assert seq.status is Status.FINISHED

    @rule()
    def forget_prefixes(self):
        if self.count % 5 == 0:
            self.scheduler.reset_prefix_cache()

    def _launch(self, drafts=None):
        before, waited = list(self.scheduler.running), set(self.scheduler.waiting)
        plan = self.driver.launch(drafts)
        if plan is not None:
            check_plan(self.driver, plan, before, waited)
            check_invariants(self.scheduler, self.driver.device)

    def _land(self):
        plan, sampled = self.driver.flying[0]
        for seq, tokens, i in self.driver.land():
            assert plan.rows[i].seq is seq and tokens == sampled[: len(tokens), i].tolist()
            assert tokens == seq.tokens[len(seq.tokens) - len(tokens) :] and tokens
            assert len(seq.tokens) <= seq.limit
        check_invariants(self.scheduler, self.driver.device)

    @invariant()
    def holds(self):
        if hasattr(self, "scheduler"):
            check_invariants(self.scheduler, self.driver.device)
            assert 0 <= self.scheduler.stats().waste < 1

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        self.driver.drain()
        for seq in self.seqs:
            whole = expected(seq)
            assert seq.status is Status.FINISHED
            if seq.finish_reason == "abort":
                assert seq.tokens == whole[: len(seq.tokens)]
            else:
                assert seq.tokens == whole
                stopped = whole[-1] == EOS and not seq.request.params.ignore_eos
                assert seq.finish_reason == ("stop" if stopped else "length")
        check_invariants(self.scheduler, self.driver.device)
        assert self.scheduler.pool.num_used == 0 and not self.scheduler._by_request


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(
    max_examples=60, stateful_step_count=40, derandomize=True, deadline=None, database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)  # fmt: skip


@pytest.mark.parametrize("seed", range(12))
def test_draft_tokens_ahead_of_the_host(seed):
    """Steps with draft tokens that only the device knows, two in flight: all sequences get their own tokens."""
    rng = random.Random(seed)
    scheduler = make(rng.randint(1, 4), 40, rng.randint(12, 40), 4, 60)
    driver = Driver(scheduler, ahead=1)
    driver.device.right = rng.random()
    seqs = [s for i in range(6) for s in sequences(f"r{i}", range(1, rng.randint(2, 12)), 1, rng.randint(1, 25), False)]
    ahead = 0
    for seq in seqs:
        scheduler.add(seq)
    while scheduler.has_work or driver.flying:
        room = {seq: min(3, seq.limit - seq.length - 1) for seq in scheduler.running}
        drafts = {seq: (UNKNOWN,) * left for seq, left in room.items() if left > 0}
        before = list(scheduler.running)
        plan = driver.launch(drafts if drafts and not scheduler.demand().prompts else None)
        if plan is not None:
            check_plan(driver, plan, before, set())
            ahead += any(row.ahead for row in plan.rows)
        check_invariants(scheduler, driver.device)
        if plan is None or len(driver.flying) > 1:
            driver.land()
            check_invariants(scheduler, driver.device)
    assert [seq.tokens for seq in seqs] == [expected(seq) for seq in seqs] and ahead
