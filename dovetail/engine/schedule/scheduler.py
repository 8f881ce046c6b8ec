"""Scheduler: choose which tokens of which sequences the next step computes, and take in the tokens it sampled.

There is no prefill and no decode here: a sequence has `length` tokens of which `computed` are in pages, and a step
spends its token budget on closing that gap. A sequence whose gap closes samples one token, which opens it again by one.

Steps are planned ahead of their results: `schedule()` for step N+1 may be called before `commit()` of step N, so it
moves `computed` and `pending` itself, and `commit` turns pending tokens into known ones. The rules for the caller:
- every plan is run, in the order the plans were made (the device then writes and reads pages in that order);
- the runner reads a plan (pages, slots) before the next call to the scheduler changes them;
- the items of images that a plan names are encoded before its step;
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

from dovetail.core.errors import RequestError, UserError
from dovetail.engine.interface import EngineStats
from dovetail.engine.request.sequence import Sequence, Status, Stops
from dovetail.engine.schedule.blocks import BlockPool
from dovetail.engine.schedule.encoder_cache import EncoderCache
from dovetail.engine.schedule.plan import REJECTED, UNKNOWN, Drafts, Gain, PlanRow, StepDemand, StepLimits, StepPlan

_RANK = attrgetter("rank")
_FINISHED = Status.FINISHED  # a constant, because an enum's attribute lookup is slow in a loop over rows


@dataclass(frozen=True)
class SchedulerConfig:
    """Hold the scheduler's limits."""

    max_num_seqs: int
    max_num_batched_tokens: int  # of one device step, over all sequences
    max_model_len: int
    page_size: int
    num_pages: int
    enable_prefix_caching: bool = True
    policy: Literal["fcfs", "priority"] = "fcfs"
    max_decode_steps: int = 1  # most device steps of a plan
    encoder_rows: int = 0  # of the buffer for features of images; 0: the model does not see images
    whole_images: bool = False  # whether the image tokens of an item are computed in one step (a block mask)

    def __post_init__(self):
        for name in ("max_num_seqs", "max_num_batched_tokens", "page_size", "num_pages", "max_decode_steps"):
            if getattr(self, name) < 1:
                raise UserError(f"`{name}` must be at least 1, got {getattr(self, name)}", param=name)
        if self.max_model_len < 2:
            raise UserError(
                f"`max_model_len` must be at least 2 (a prompt token and a sampled one), got {self.max_model_len}",
                param="max_model_len",
            )
        if self.policy not in ("fcfs", "priority"):
            raise UserError(f"`policy` must be 'fcfs' or 'priority', got {self.policy!r}", param="policy")

    @property
    def context(self) -> int:
        """Return the most tokens of a sequence: the model's limit, or the pool's where that is smaller.

        The last sampled token is never fed, so it needs no slot in a page.
        """
        return min(self.max_model_len, self.num_pages * self.page_size + 1)

    def limit_of(self, seq: Sequence) -> int:
        """Return the most tokens that the sequence may reach.

        With this limit a sequence alone always fits the pool, which is why preemption always helps.
        """
        size, wanted = len(seq.tokens), seq.request.params.max_tokens
        if not seq.request.prompt:
            raise RequestError("`prompt` must have at least one token, got none", param="prompt")
        if size >= self.context:
            limit = f"max_model_len={self.max_model_len}"
            if size < self.max_model_len:
                limit = f"a KV pool of {self.num_pages} pages x {self.page_size} tokens"
            raise RequestError(
                f"`prompt` must have at most {self.context - 1} tokens with {limit}, got {size}",
                param="prompt",
                code="context_length_exceeded",
            )
        return self.context if wanted is None else min(self.context, seq.prompt_len + wanted)


class Scheduler:
    """Schedule sequences in the order of their rank, preempting the last ones when pages run out."""

    def __init__(self, config: SchedulerConfig):
        self.config = config
        self.pool = BlockPool(config.num_pages, config.page_size, config.enable_prefix_caching)
        self.encoder = EncoderCache(config.encoder_rows)
        self.running: list[Sequence] = []  # both lists are in the order of rank
        self.waiting: list[Sequence] = []
        self.preemptions = self.prompt_tokens = 0
        self._free_slots = list(range(config.max_num_seqs))  # a heap: low slots first keep the runner's tables dense
        self._by_request: dict[str, dict[int, Sequence]] = {}
        self._added = 0
        self._preempted: list[Sequence] = []  # since the last plan
        # the sequence that found too few pages, and pool.releases at that time
        self._blocked: tuple[Sequence, int] | None = None

    # --- adding and ending --------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Return whether a sequence is running or waiting."""
        return bool(self.running or self.waiting)

    def add(self, seq: Sequence) -> None:
        """Queue a sequence; the n of a request are added one by one."""
        siblings = self._by_request.get(seq.request.id, {})
        if seq.status is not Status.WAITING or seq.index in siblings:
            raise RequestError(f"sequence {seq.id} was already added: request ids must be unique", param="request_id")
        seq.limit = self.config.limit_of(seq)
        priority = seq.request.priority if self.config.policy == "priority" else 0
        seq.rank = (priority, seq.request.arrival, self._added)
        self._added += 1
        first = next((other for other in siblings.values() if other.status is Status.WAITING), None)
        if first is not None:  # the n share one prompt, hashed once; a prompt alone is hashed when it is looked up
            self.pool.hash_known(first)
            seq.block_hashes = first.block_hashes[: seq.prompt_len // self.config.page_size]
        self._by_request.setdefault(seq.request.id, {})[seq.index] = seq
        insort(self.waiting, seq, key=_RANK)

    def abort(self, request_id: str) -> list[Sequence]:
        """End all sequences of a request at any time; tokens that launched steps sample for them are ignored."""
        ended = list(self._by_request.get(request_id, {}).values())
        for seq in ended:
            self.finish(seq, "abort")
        return ended

    def finish(self, seq: Sequence, reason: str, stop_reason: int | str | None = None) -> None:
        """End one sequence now, whatever its state."""
        if seq.status is Status.FINISHED:
            return
        queue = self.running if seq.status is Status.RUNNING else self.waiting
        del queue[bisect_left(queue, seq.rank, key=_RANK)]  # ranks are unique
        if seq.status is Status.RUNNING:
            self._release(seq)
        seq.status, seq.finish_reason, seq.stop_reason, seq.pending = Status.FINISHED, reason, stop_reason, 0
        siblings = self._by_request[seq.request.id]
        del siblings[seq.index]
        if not siblings:
            del self._by_request[seq.request.id]

    def _release(self, seq: Sequence) -> None:
        """Release the pages and the slot of a running sequence.

        A step that writes these pages may be launched or planned: the device runs steps in order, so the next holder
        writes and reads after it. In a registered page that step writes only what the hash names; what it writes after
        a stop is in pages without a hash.
        """
        assert seq.slot is not None
        self.pool.release(seq.pages)
        heapq.heappush(self._free_slots, seq.slot)
        seq.pages, seq.slot = [], None

    # --- planning a step ----------------------------------------------------------------------------------------------

    def schedule(
        self,
        max_steps: int | None = None,
        prompts_first: bool = False,
        limits: StepLimits | None = None,
        drafts: Drafts | None = None,
    ) -> StepPlan | None:
        """Plan the next step.

        Args:
            max_steps: Device steps of the plan where possible, else one (each number is compiled); by default the
                config's.
            prompts_first: Whether a step that prompts alone can fill has only prompts: more tokens per second, but
                decoding waits.
            limits: The most that the step may have; by default the config's.
            drafts: Draft tokens of sequences that decode, for a step in which no sequence has a prompt to compute. If
                they are UNKNOWN, the step before may be in flight.

        Returns:
            The plan, or None if nothing can be computed before a commit or there is no work.
        """
        most = self.config.max_num_seqs
        limits = limits or StepLimits(self.config.max_num_batched_tokens, most, most)
        rows: list[PlanRow] = []
        before = self.preemptions
        self.encoder.begin()
        only_prompts = prompts_first and self._prompts_fill_a_step()
        left, stalled = self._schedule_running(rows, limits, only_prompts, drafts)
        # While running sequences are short of pages none is admitted: it would be the next one to be preempted.
        short = stalled or self.preemptions > before
        admitted, must_wait = (0, False) if short else self._admit(rows, left)
        if not rows:  # perhaps no page was left for a prompt
            return self.schedule(max_steps) if prompts_first else None
        plan = StepPlan(rows, preempted=self._preempted)
        self._preempted = []
        if self.config.encoder_rows:
            plan.images, plan.encode = self.encoder.take()
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

    def demand(self) -> StepDemand:
        """Return what a step without limits would take; sequences that wait for their last token count as decoding."""
        gaps = [(seq, len(seq.tokens) + seq.pending - seq.computed) for seq in self.running]
        prompts = [(seq, gap) for seq, gap in gaps if gap > 1 or seq.computed < seq.images_end]
        coming = [(seq, len(seq.tokens)) for seq in self.waiting[: len(self._free_slots)]]
        prompts += coming
        scores = any(seq.request.params.prompt_logprobs is not None for seq, _ in prompts)
        decoding = len(gaps) + len(coming) - len(prompts)
        images = [seq for seq, _ in prompts if seq.computed < seq.images_end]
        least = max(map(self._whole_image, images), default=0) if self.config.whole_images else 0
        return StepDemand(decoding, len(prompts), sum(gap for _, gap in prompts), scores, bool(images), least)

    @staticmethod
    def _whole_image(seq: Sequence) -> int:
        """Return the tokens that the next image of a sequence leaves to compute."""
        span = next(span for span in seq.request.spans if span.end > seq.computed)
        return span.end - max(span.start, seq.computed)

    def _schedule_running(
        self, rows: list[PlanRow], limits: StepLimits, only_prompts: bool, drafts: Drafts | None
    ) -> tuple[StepLimits, bool]:
        """Add rows for the running sequences in order.

        A decoding batch spends its host time in this loop, so it is kept flat.

        Returns:
            What is left of the limits, and whether a sequence could not go on for lack of budget or pages.
        """
        running, size = self.running, self.config.page_size
        (budget, most, prompts), stalled = limits, False
        # Victims are popped off the end meanwhile: they are behind `seq`, so no sequence with a row loses its pages.
        for i, seq in enumerate(running):
            start, known, pending = seq.computed, len(seq.tokens), seq.pending
            length = known + pending
            if length >= seq.limit:
                continue  # its last tokens are being computed; commit will end it
            if pending and (seq.single_step or seq.verifying) and not self._may_run_ahead(seq, drafts):
                continue  # the host must see a token before the next is sampled (a grammar, draft tokens)
            count, drafted = 1 if seq.verifying else length - start, ()
            if count > 1:  # a prompt leaves a token each for the sequences behind it, so that they keep decoding
                if not prompts:
                    stalled = True
                    continue
                prompts -= 1
                count = min(count, max(1, budget - (0 if only_prompts else len(running) - i - 1)))
            elif only_prompts and start >= seq.prompt_len:
                continue
            elif drafts:
                drafted = drafts.get(seq, ())
                count += len(drafted)
            if count > budget or len(rows) == most:
                return StepLimits(0, 0, 0), True
            if start < seq.images_end and not (count := self._count_with_images(seq, start, count)):
                stalled = True
                continue
            end = start + count
            if end > len(seq.pages) * size and not self._grow(seq, end):
                stalled = True
                continue
            rows.append(PlanRow(seq, start, count, end >= length, drafted, ahead=seq.verifying > 0))
            seq.computed = end
            if end >= length:
                seq.pending = pending + 1
            if drafted:
                seq.verifying += 1
            if start < known:  # then all but draft tokens are known: only the newest token can be pending
                self._register(seq, start, min(end, length))
            budget -= count
        return StepLimits(budget, most - len(rows), prompts), stalled

    @staticmethod
    def _may_run_ahead(seq: Sequence, drafts: Drafts | None) -> bool:
        """Return whether a draft model may go on from tokens of a step in flight, however many of them are accepted."""
        drafted = drafts.get(seq, ()) if drafts else ()
        return drafted[:1] == (UNKNOWN,) and seq.computed + len(drafted) + 2 <= seq.limit

    def _count_with_images(self, seq: Sequence, start: int, count: int) -> int:
        """Hold the images of `count` tokens from `start` on; return how many of these tokens the step can compute.

        They end before an image that does not fit the encoder's buffer beside the step's other images, and before one
        that they would split although its tokens see each other.
        """
        for span in seq.request.spans:
            if span.start >= start + count:
                break
            if span.end > start:
                is_split = self.config.whole_images and span.end > start + count
                if is_split or not self.encoder.hold(span.item, span.count):
                    return max(0, span.start - start)
        return count

    def _register(self, seq: Sequence, before: int, after: int) -> None:
        """Register pages that filled when the known and computed tokens grew from `before` to `after`.

        Pages filled by known tokens are registered before the step that computes them has run: the device runs steps in
        order, and within one step every layer writes all new keys before it reads any, so even two sequences of one
        step may share pages.
        """
        if after // self.config.page_size > before // self.config.page_size:
            self.pool.register_range(seq, before, after)

    def _grow(self, seq: Sequence, end: int) -> bool:
        """Allocate pages for `end` tokens, preempting sequences behind `seq` if needed.

        Return False if `seq` is the last one: it waits and keeps its pages, since preempting itself gains nothing.
        """
        need = -(-end // self.config.page_size) - len(seq.pages)
        while (pages := self.pool.allocate(need)) is None:
            if self.running[-1] is seq:
                return False
            self._preempt(self.running.pop())
        seq.pages += pages
        return True

    def _preempt(self, victim: Sequence) -> None:
        """Put a sequence back into the queue, where its rank puts it before all later arrivals.

        Its pending tokens arrive at commit; until then it cannot start again, because the host then feeds its tokens.
        """
        self._release(victim)
        victim.computed, victim.status = 0, Status.WAITING
        victim.preemptions += 1
        self._preempted.append(victim)
        self.preemptions += 1
        insort(self.waiting, victim, key=_RANK)

    def preempt_all(self) -> None:
        """Make all sequences compute their tokens again: the weights changed, or the pool is freed."""
        while self.running:
            self._preempt(self.running.pop())

    def withdraw(self, plan: StepPlan) -> None:
        """Undo the last plan, which will not run.

        Its tokens are computed again. It may have registered pages that were never written, so the prefix cache is
        emptied.
        """
        for row in plan.rows:
            if row.samples and row.seq.status is not Status.FINISHED:
                row.seq.pending -= plan.steps
                row.seq.verifying -= bool(row.drafts)
        self.preempt_all()
        self.reset_prefix_cache()

    def _admit(self, rows: list[PlanRow], left: StepLimits) -> tuple[int, bool]:
        """Add rows for waiting sequences in strict order.

        Returns:
            How many were admitted, and whether those that still wait (if any) cannot start before another one ends.
        """
        admitted, budget, most = 0, left.tokens, min(left.rows, left.prompts)
        while self.waiting and self._free_slots:
            seq = self.waiting[0]
            if budget == 0 or admitted == most or seq.pending:
                return admitted, False
            chunk = self._take_pages(seq, budget)
            if chunk is None:
                break
            cached, end = chunk
            if end == cached:  # its image must wait for the next step
                return admitted, False
            insort(self.running, self.waiting.pop(0), key=_RANK)
            seq.status, seq.slot = Status.RUNNING, heapq.heappop(self._free_slots)
            known = len(seq.tokens)
            rows.append(PlanRow(seq, cached, end - cached, end == known))
            seq.computed, seq.pending = end, int(end == known)
            self._register(seq, cached, end)
            budget -= end - cached
            admitted += 1
        return admitted, True

    def _take_pages(self, seq: Sequence, budget: int) -> tuple[int, int] | None:
        """Give a sequence pages for its first chunk; return where the chunk begins and ends, or None without room.

        The chunk begins after the cached tokens. It is empty, and the sequence gets no pages, if it would begin with an
        image that cannot be computed in this step.
        """
        pool, size, known = self.pool, self.config.page_size, len(seq.tokens)
        if self._blocked == (seq, pool.releases):
            return None  # only a release makes room: a long prompt is not looked up at every step
        hits = pool.find_cached(seq)
        # All its tokens must fit, not just this chunk, and a page must be left for each running sequence, which will
        # soon need one; otherwise it would be preempted before it has sampled a token.
        room = pool.num_free - pool.num_idle(hits) - len(self.running)
        if -(-known // size) - len(hits) > room:
            self._blocked = (seq, pool.releases)
            return None
        cached = len(hits) * size
        end = min(known, cached + budget)
        if cached < seq.images_end:
            end = cached + self._count_with_images(seq, cached, end - cached)
            if end == cached:
                return cached, end
        pool.acquire(hits)  # first: allocate might evict them
        pages = pool.allocate(-(-end // size) - len(hits))
        assert pages is not None, "a sequence alone fits the pool"
        seq.pages = hits + pages
        if seq.preemptions == 0:  # a preempted sequence that finds its own pages is not a cache hit
            seq.cached_tokens, seq.times.scheduled = min(cached, seq.prompt_len), time.monotonic()
            self.prompt_tokens += known
            pool.count_lookup(known, cached)
        return cached, end

    def _more_steps(self, rows: list[PlanRow], more: int) -> int:
        """Return how many device steps the plan takes beyond the first, and reserve the pages for them.

        That is `more` if every row may go that far, the pages suffice and no waiting sequence starts later for it, else
        0. A sequence that ends on the way computes a few steps for nothing, which is better than single steps for all
        whenever one is near its end.
        """
        size = self.config.page_size
        # Sequences without a row are ending, so that a waiting one can start right after this plan, or need the host.
        rowless = len(rows) < len(self.running)
        if rowless and (self.waiting or any(seq.single_step or seq.verifying for seq in self.running)):
            return 0
        furthest = min(self.config.max_model_len, self.config.num_pages * size) - more
        for row in rows:
            seq = row.seq
            # A first token does not wait for later ones; a grammar needs the host at each step.
            if row.count > 1 or row.start < len(seq.request.prompt) or seq.single_step or seq.computed > furthest:
                return 0
        free = self.pool.num_free
        if len(rows) * -(-more // size) > free and free < sum(  # the first test is cheap and usually enough
            -(-(row.seq.computed + more) // size) - len(row.seq.pages) for row in rows
        ):
            return 0
        for row in rows:
            seq = row.seq
            seq.computed += more
            seq.pending += more
            if seq.computed > len(seq.pages) * size:
                self._grow(seq, seq.computed)  # neither fails nor preempts: the pages were counted
        return more

    # --- committing a step's tokens -----------------------------------------------------------------------------------

    def commit(self, plan: StepPlan, sampled: np.ndarray, stops: Stops) -> list[Gain]:
        """Append the tokens that a step sampled; sequences that end become FINISHED.

        Args:
            plan: The oldest plan that was not committed.
            sampled: [steps, S] tokens with a column for each of the plan's rows, also for rows that do not sample;
                further columns are padding. Tokens after the one that ends a sequence are dropped. A verify step has
                [1 + drafts, S]: the tokens sampled after the newest token and after each draft token, REJECTED after a
                draft token that is not the token sampled in its place.
            stops: Finds where sequences end.

        Returns:
            The sequences that gained tokens, with the tokens they kept.
        """
        steps, rows = plan.steps, plan.rows
        fits = len(sampled) > plan.num_drafts if plan.num_drafts else len(sampled) == steps
        if not fits or sampled.shape[1] < len(rows):
            wanted = f"{steps} steps of {len(rows)} rows"
            raise RuntimeError(f"expected the tokens of {wanted}, got an array {list(sampled.shape)}")
        sampled = sampled[:, : len(rows)]
        ends, size = stops.find(sampled), self.config.page_size
        gains: list[Gain] = []
        for i, row, tokens in zip(range(len(rows)), rows, sampled.T.tolist(), strict=True):
            seq = row.seq
            if not row.samples or seq.status is _FINISHED:  # it ended or was aborted after this step was planned
                continue
            seq.pending -= steps
            if plan.num_drafts:
                tokens = self._verified(row, tokens)
            before, end = len(seq.tokens), None
            if seq.by_token:
                tokens, end = stops.append_each(seq, tokens)
            else:
                if before + len(tokens) >= seq.limit or i in ends:
                    tokens, end = stops.cut(seq, tokens, ends.get(i))
                seq.tokens += tokens
            gains.append((seq, tokens, i))
            # Before the pages are released: a conversation's next turn begins with them. Not the very last token: a
            # device loop that ends when all have stopped does not compute it. (A preempted one has computed 0.)
            if seq.computed // size > before // size:
                self._register(seq, before, min(seq.computed, before + len(tokens) - (end is not None)))
            if end is not None:
                self.finish(seq, *end)
        return gains

    def _verified(self, row: PlanRow, tokens: list[int]) -> list[int]:
        """Return the tokens that a row of a verify step gains, and take back what it computed for rejected drafts.

        Their keys and values are overwritten by the next step, whose tokens start at the first rejected position.
        """
        seq, tokens = row.seq, [token for token in tokens if token != REJECTED]
        if seq.computed:  # not preempted since
            seq.computed -= row.count - len(tokens)
        if row.drafts:
            seq.verifying -= 1
            seq.count_drafts(len(row.drafts), len(tokens) - 1)
        return tokens

    # --- state --------------------------------------------------------------------------------------------------------

    def reset_prefix_cache(self) -> None:
        """Make all cached prefixes and features of images unfindable, for new weights."""
        self.pool.reset_prefix_cache()
        self.encoder.clear()
        self._blocked = None
        for seq in self.waiting:
            seq.block_hashes = []  # of the old epoch; computed again when the sequence is looked up

    def stats(self) -> EngineStats:
        """Return the scheduler's part of the stats; another thread may see a sequence halfway through a step."""
        pool, size, running = self.pool, self.config.page_size, self.running.copy()
        unfilled = sum(max(0, len(seq.pages) * size - seq.computed) for seq in running)
        return EngineStats(
            len(running), len(self.waiting), pool.num_used, pool.num_cached, pool.num_pages, pool.waste(unfilled),
            self.preemptions, self.prompt_tokens, pool.query_tokens, pool.hit_tokens,
            encoded_items=self.encoder.encoded, encoder_hits=self.encoder.hits, encoder_rows=self.encoder.num_used,
        )  # fmt: skip
