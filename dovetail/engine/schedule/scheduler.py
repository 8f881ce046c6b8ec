"""Scheduler: which tokens of which sequences the next step computes, and what becomes of the tokens it sampled.

There is no prefill and no decode here: a sequence has `length` tokens of which `computed` are in pages, and a step
spends its token budget on closing that gap. A sequence whose gap closes samples one token, which opens it again by one.

Steps are planned ahead of their results. `schedule()` for step N+1 may be called before `commit()` of step N, so it
moves `computed` and `pending` itself; `commit` only turns pending tokens into known ones. The rules for the caller:
- every plan is run, in the order the plans were made (the device then writes and reads pages in that order);
- the runner reads a plan (pages, slots) before the next call to the scheduler changes them;
- plans are committed in order. One thread calls all of this.
"""

from __future__ import annotations

import heapq
import itertools
import time
from bisect import bisect_left, insort
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal

import numpy as np

from dovetail.core.errors import UserError
from dovetail.engine.request.sequence import Sequence, Status
from dovetail.engine.request.stops import Stops
from dovetail.engine.schedule.blocks import BlockPool
from dovetail.engine.schedule.plan import Demand, Gain, Limits, Row, StepPlan
from dovetail.engine.stats import Stats


@dataclass(frozen=True)
class SchedulerConfig:
    max_num_seqs: int
    max_num_batched_tokens: int  # of one device step, over all sequences
    max_model_len: int
    page_size: int
    num_pages: int
    enable_prefix_caching: bool = True
    policy: Literal["fcfs", "priority"] = "fcfs"
    max_decode_steps: int = 1  # the most device steps in one plan
    model: str = ""  # names the weights in the prefix cache's hashes

    def __post_init__(self):
        for name in ("max_num_seqs", "max_num_batched_tokens", "page_size", "num_pages", "max_decode_steps"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} must be at least 1; got {getattr(self, name)}")
        if self.max_model_len < 2:
            raise UserError(f"max_model_len must hold a prompt token and a sampled one; got {self.max_model_len}")
        if self.policy not in ("fcfs", "priority"):
            raise UserError(f"policy must be 'fcfs' or 'priority'; got {self.policy!r}")

    @property
    def context(self) -> int:
        """The most tokens of any sequence: the model's limit, or the pool's where that is smaller. The last one sampled
        is never fed, so it needs no slot in a page."""
        return min(self.max_model_len, self.num_pages * self.page_size + 1)

    def limit_of(self, seq: Sequence) -> int:
        """The most tokens the sequence may reach. Because of this limit a sequence alone always fits the pool, which is
        why preemption always helps."""
        size, asked, name = len(seq.tokens), seq.request.params.max_tokens, f"request {seq.request.id}"
        if not seq.request.prompt:
            raise UserError(f"{name}: the prompt is empty; give at least one token")
        if size >= self.max_model_len:
            raise UserError(
                f"{name}: a prompt of {size} tokens leaves no room for a sampled one within "
                f"max_model_len={self.max_model_len}; shorten the prompt or raise max_model_len"
            )
        if size >= self.context:
            raise UserError(
                f"{name}: a prompt of {size} tokens does not fit the KV pool of {self.num_pages} "
                f"pages x {self.page_size} tokens; shorten the prompt or give the KV cache more memory"
            )
        return self.context if asked is None else min(self.context, seq.prompt_len + asked)


_RANK = attrgetter("rank")
_FINISHED = Status.FINISHED  # read once: in a loop over rows, looking a member of an enum up costs


class Scheduler:
    def __init__(self, config: SchedulerConfig):
        self.config = config
        self.pool = BlockPool(config.num_pages, config.page_size, config.enable_prefix_caching, config.model)
        self.running: list[Sequence] = []  # both in the order of rank
        self.waiting: list[Sequence] = []
        self.preemptions = self.prompt_tokens = 0
        self._free_slots = list(range(config.max_num_seqs))  # a heap: low slots first keep the runner's tables dense
        self._by_request: dict[str, dict[int, Sequence]] = {}
        self._added = 0
        self._preempted: list[Sequence] = []  # since the last plan that went out
        # the sequence that found too few pages, and pool.releases at that time
        self._blocked: tuple[Sequence, int] | None = None

    # Coming and going

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def add(self, seq: Sequence) -> None:
        """Queue a sequence; the n of a request are added one by one."""
        siblings = self._by_request.get(seq.request.id, {})
        if seq.status is not Status.WAITING or seq.index in siblings:
            raise UserError(f"sequence {seq.id} was added before; a request's id must be its own while it lives")
        seq.limit = self.config.limit_of(seq)
        priority = seq.request.priority if self.config.policy == "priority" else 0
        seq.rank = (priority, seq.request.arrival, self._added)
        self._added += 1
        first = next((other for other in siblings.values() if other.status is Status.WAITING), None)
        if first is not None:  # one prompt, hashed once; a prompt alone is hashed when its turn comes
            self.pool.hash_known(first)
            seq.block_hashes = first.block_hashes[: seq.prompt_len // self.config.page_size]
        self._by_request.setdefault(seq.request.id, {})[seq.index] = seq
        insort(self.waiting, seq, key=_RANK)

    def abort(self, request_id: str) -> list[Sequence]:
        """End all sequences of a request, at any moment; what steps under way sample for them is ignored."""
        ended = list(self._by_request.get(request_id, {}).values())
        for seq in ended:
            self.finish(seq, "abort")
        return ended

    def finish(self, seq: Sequence, reason: str, stop_reason: int | str | None = None) -> None:
        """End one sequence now, whatever it is doing."""
        if seq.status is Status.FINISHED:
            return
        queue = self.running if seq.status is Status.RUNNING else self.waiting
        del queue[bisect_left(queue, seq.rank, key=_RANK)]  # no two have one rank
        if seq.status is Status.RUNNING:
            self._let_go(seq)
        seq.status, seq.finish_reason, seq.stop_reason, seq.pending = Status.FINISHED, reason, stop_reason, 0
        siblings = self._by_request[seq.request.id]
        del siblings[seq.index]
        if not siblings:
            del self._by_request[seq.request.id]

    def _let_go(self, seq: Sequence) -> None:
        """Pages and slot return at once, though a step that writes them may be under way or planned: the device runs
        steps in order, so the next sequence that is given them writes, and reads, after it. In a registered page that
        step writes nothing but what the hash names; what it writes past a stop lies in pages without one."""
        assert seq.slot is not None
        self.pool.release(seq.pages)
        heapq.heappush(self._free_slots, seq.slot)
        seq.pages, seq.slot = [], None

    # Planning a step

    def schedule(
        self, max_steps: int | None = None, prompts_first: bool = False, limits: Limits | None = None
    ) -> StepPlan | None:
        """Return the next step, or None when nothing can be computed before a commit (or there is no work). The plan
        takes `max_steps` device steps (config.max_decode_steps unless given) where it can, else one: each number is
        compiled. With `prompts_first` a step that prompts alone fill is left to them: more tokens per second, but
        decoding waits. `limits`: the config's unless given."""
        most = self.config.max_num_seqs
        limits = limits or Limits(self.config.max_num_batched_tokens, most, most)
        rows: list[Row] = []
        before = self.preemptions
        left, stalled = self._schedule_running(rows, limits, prompts_first and self._prompts_fill_a_step())
        # While the running ones are short of pages none is admitted: it would be the next to be preempted.
        short = stalled or self.preemptions > before
        admitted, must_wait = (0, False) if short else self._admit(rows, left)
        if not rows:  # no page was left for a prompt, perhaps
            return self.schedule(max_steps) if prompts_first else None
        plan = StepPlan(rows, preempted=self._preempted)
        self._preempted = []
        if max_steps is None:
            max_steps = self.config.max_decode_steps
        if max_steps > 1 and must_wait and not admitted:
            plan.steps += self._more_steps(rows, max_steps - 1)
        return plan

    def _prompts_fill_a_step(self) -> bool:
        budget = self.config.max_num_batched_tokens
        if self.waiting and self._free_slots:
            for seq in itertools.chain(self.waiting[: len(self._free_slots)], self.running):
                gap = len(seq.tokens) + seq.pending - seq.computed
                budget -= gap if gap > 1 else 0
                if budget <= 0:
                    return True
        return False

    def demand(self) -> Demand:
        """Return what a step without limits would take. Sequences that wait for their last step's token decode too."""
        gaps = [(seq, len(seq.tokens) + seq.pending - seq.computed) for seq in self.running]
        prompts = [(seq, gap) for seq, gap in gaps if gap > 1]
        coming = [(seq, len(seq.tokens)) for seq in self.waiting[: len(self._free_slots)]]
        prompts += coming
        scores = any(seq.request.params.prompt_logprobs is not None for seq, _ in prompts)
        decoding = len(gaps) + len(coming) - len(prompts)
        return Demand(decoding, len(prompts), sum(gap for _, gap in prompts), scores)

    def _schedule_running(self, rows: list[Row], limits: Limits, only_prompts: bool) -> tuple[Limits, bool]:
        """Add rows for the running sequences in order; -> what is left of the limits, and whether a sequence stood
        still for want of it or of pages. The loop a decoding batch spends its time in: kept flat."""
        running, size = self.running, self.config.page_size
        (budget, most, prompts), stalled = limits, False
        # Victims are popped off the end while this runs: they lie behind `seq`, so none with a row loses its pages.
        for i, seq in enumerate(running):
            start, known, pending = seq.computed, len(seq.tokens), seq.pending
            length = known + pending
            if length >= seq.limit:
                continue  # its last tokens are on their way; commit will end it
            if pending and seq.single_step:
                continue  # the host must see a token before the next is sampled (a grammar)
            count = length - start
            if count > 1:  # a prompt leaves those behind it a token each: it does not stop their decoding
                if not prompts:
                    stalled = True
                    continue
                prompts -= 1
                count = min(count, max(1, budget - (0 if only_prompts else len(running) - i - 1)))
            elif only_prompts and start >= seq.prompt_len:
                continue
            if count > budget or len(rows) == most:
                return Limits(0, 0, 0), True
            end = start + count
            if end > len(seq.pages) * size and not self._grow(seq, end):
                stalled = True
                continue
            rows.append(Row(seq, start, count, end == length))
            seq.computed = end
            if end == length:
                seq.pending = pending + 1
            if start < known:  # then they all are: only the newest token can be pending
                self._register(seq, start, end)
            budget -= count
        return Limits(budget, most - len(rows), prompts), stalled

    def _register(self, seq: Sequence, before: int, after: int) -> None:
        """The tokens both known and computed grew. Pages filled by known tokens are registered before the step that
        computes them has run: the device runs steps in order, and within one step every layer writes all new keys
        before it reads any, so even two sequences of one step may share."""
        if after // self.config.page_size > before // self.config.page_size:
            self.pool.register_range(seq, before, after)

    def _grow(self, seq: Sequence, end: int) -> bool:
        """Pages for `end` tokens, at the cost of those behind `seq`. The last one stands still and keeps what it
        has: nothing is gained by preempting itself."""
        need = -(-end // self.config.page_size) - len(seq.pages)
        while (pages := self.pool.allocate(need)) is None:
            if self.running[-1] is seq:
                return False
            self._preempt(self.running.pop())
        seq.pages += pages
        return True

    def _preempt(self, victim: Sequence) -> None:
        """Back to the queue, where its rank puts it in front of all that came later. Tokens still pending arrive at
        commit; until then it cannot start again, for its tokens are then fed from the host."""
        self._let_go(victim)
        victim.computed, victim.status = 0, Status.WAITING
        victim.preemptions += 1
        self._preempted.append(victim)
        self.preemptions += 1
        insort(self.waiting, victim, key=_RANK)

    def preempt_all(self) -> None:
        """All give up their pages and compute them again: the weights have changed, or the pool is put away."""
        while self.running:
            self._preempt(self.running.pop())

    def withdraw(self, plan: StepPlan) -> None:
        """The last plan will not run. What it would have computed is computed again, and since it may have registered
        pages that were never written, nothing of before is found again."""
        for row in plan.rows:
            if row.samples and row.seq.status is not Status.FINISHED:
                row.seq.pending -= plan.steps
        self.preempt_all()
        self.reset_prefix_cache()

    def _admit(self, rows: list[Row], left: Limits) -> tuple[int, bool]:
        """Add rows for waiting sequences in strict order; -> how many joined, and whether those that still wait (if
        any) cannot start before another ends."""
        admitted, budget, most = 0, left.tokens, min(left.rows, left.prompts)
        while self.waiting and self._free_slots:
            seq = self.waiting[0]
            if budget == 0 or admitted == most or seq.pending:
                return admitted, False
            cached = self._take_pages(seq, budget)
            if cached is None:
                break
            insort(self.running, self.waiting.pop(0), key=_RANK)
            seq.status, seq.slot = Status.RUNNING, heapq.heappop(self._free_slots)
            known = len(seq.tokens)
            end = min(known, cached + budget)
            rows.append(Row(seq, cached, end - cached, end == known))
            seq.computed, seq.pending = end, int(end == known)
            self._register(seq, cached, end)
            budget -= end - cached
            admitted += 1
        return admitted, True

    def _take_pages(self, seq: Sequence, budget: int) -> int | None:
        """Pages for a sequence's first chunk; -> how many of its tokens were found in the cache; None: no room."""
        pool, size, known = self.pool, self.config.page_size, len(seq.tokens)
        if self._blocked == (seq, pool.releases):
            return None  # only a release makes room: a long prompt is not looked up at every step
        hits = pool.find_cached(seq)
        # All its tokens must fit, not just this chunk, and a page must be left for each that runs and will soon need
        # one; else it would be preempted before it has given a token.
        room = pool.num_free - pool.num_idle(hits) - len(self.running)
        if -(-known // size) - len(hits) > room:
            self._blocked = (seq, pool.releases)
            return None
        pool.acquire(hits)  # first: allocate might evict them
        cached = len(hits) * size
        pages = pool.allocate(-(-min(known, cached + budget) // size) - len(hits))
        assert pages is not None, "a sequence alone fits the pool"
        seq.pages = hits + pages
        if seq.preemptions == 0:  # a victim finding its own pages again is no success of the cache
            seq.cached_tokens, seq.times.scheduled = min(cached, seq.prompt_len), time.monotonic()
            self.prompt_tokens += known
            pool.count_lookup(known, cached)
        return cached

    def _more_steps(self, rows: list[Row], more: int) -> int:
        """How many device steps beyond the first this plan takes: `more` if every row may go so far, pages last and
        no sequence starts later for it, else 0. One that ends on the way takes a few steps for nothing: better than to
        keep all at single steps whenever one is near its end."""
        size = self.config.page_size
        # Those without a row are ending, and one that waits can start right after this plan; or they wait for the host.
        rowless = len(rows) < len(self.running)
        if rowless and (self.waiting or any(seq.single_step for seq in self.running)):
            return 0
        furthest = min(self.config.max_model_len, self.config.num_pages * size) - more
        for row in rows:
            seq = row.seq
            # A first token is not made to wait for others'; a grammar needs the host at each step.
            if row.count > 1 or row.start < len(seq.request.prompt) or seq.single_step or seq.computed > furthest:
                return 0
        free = self.pool.num_free
        if len(rows) * -(-more // size) > free and free < sum(  # the first alone is cheap, and mostly enough
            -(-(row.seq.computed + more) // size) - len(row.seq.pages) for row in rows
        ):
            return 0
        for row in rows:
            seq = row.seq
            seq.computed += more
            seq.pending += more
            if seq.computed > len(seq.pages) * size:
                self._grow(seq, seq.computed)  # cannot fail, nor preempt: the pages were counted
        return more

    # Taking in a step's tokens

    def commit(self, plan: StepPlan, sampled: np.ndarray, stops: Stops) -> list[Gain]:
        """-> the sequences that gained tokens, with the tokens kept; those that ended are FINISHED now.

        `sampled` [steps, S] has a column for each of the plan's rows, also those that do not sample; more is padding.
        What comes after the token that ends a sequence is dropped."""
        steps, rows = plan.steps, plan.rows
        if len(sampled) != steps or sampled.shape[1] < len(rows):
            wanted = f"{steps} steps of {len(rows)} rows"
            raise UserError(f"the plan is of {wanted}, but the tokens that came are {list(sampled.shape)}")
        sampled = sampled[:, : len(rows)]
        ends, size = stops.find(sampled), self.config.page_size
        gains: list[Gain] = []
        for i, row, tokens in zip(range(len(rows)), rows, sampled.T.tolist(), strict=True):
            seq = row.seq
            if not row.samples or seq.status is _FINISHED:  # ended, or aborted, after this step had been planned
                continue
            seq.pending -= steps
            before, end = len(seq.tokens), None
            if seq.by_token:
                tokens, end = stops.append_each(seq, tokens)
            else:
                if before + steps >= seq.limit or i in ends:
                    tokens, end = stops.cut(seq, tokens, ends.get(i))
                seq.tokens += tokens
            gains.append((seq, tokens, i))
            # Before the pages are let go: a conversation's next turn begins with them. Not the very last token: a
            # device loop that ends when all have stopped does not compute it. (One preempted has computed 0.)
            if seq.computed // size > before // size:
                self._register(seq, before, min(seq.computed, before + len(tokens) - (end is not None)))
            if end is not None:
                self.finish(seq, *end)
        return gains

    # Metrics

    def reset_prefix_cache(self) -> None:
        """Nothing computed so far is found again: for new weights."""
        self.pool.reset_prefix_cache()
        self._blocked = None
        for seq in self.waiting:
            seq.block_hashes = []  # of the old epoch; made again when it is looked up

    def stats(self) -> Stats:
        """What the scheduler knows of them. From another thread, a sequence may be seen halfway through a step."""
        pool, size, running = self.pool, self.config.page_size, self.running.copy()
        unfilled = sum(max(0, len(seq.pages) * size - seq.computed) for seq in running)
        return Stats(
            len(running), len(self.waiting), pool.num_used, pool.num_cached, pool.num_pages, pool.waste(unfilled),
            self.preemptions, self.prompt_tokens, pool.query_tokens, pool.hit_tokens,
        )  # fmt: skip
