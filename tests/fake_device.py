"""A device for the scheduler's tests that fails when a plan would compute a wrong value.

Each slot of a page holds the name of the whole history up to its token (root, tokens), because real keys and values
depend on all of it. Every row must continue where its sequence stood, read only its own history, and agree with the
host. The next token is a function of the history and the sample's index alone.
"""

import random
import zlib
from collections import deque
from itertools import pairwise

import numpy as np

from dovetail.engine.request.params import SamplingParams
from dovetail.engine.request.sequence import Request, Sequence, Status, Stops
from dovetail.engine.schedule.plan import REJECTED, UNKNOWN, StepPlan
from dovetail.engine.schedule.scheduler import Scheduler, SchedulerConfig

VOCAB, EOS = 30, 0
STOPS = Stops([EOS])


class History:
    """The tokens of one sequence as the device knows them, with a name for every prefix."""

    def __init__(self, seq: Sequence):
        # not hash(): it differs from process to process for strings
        self.root = zlib.crc32(repr((seq.request.adapter, seq.request.cache_salt)).encode())
        self.index, self.tokens, self.names = seq.index, [], []
        self.images = {span.start + i: (span.item.key, i) for span in seq.request.spans for i in range(span.count)}
        for token in seq.request.prompt:
            self.append(token)

    def append(self, token: int) -> None:
        image = self.images.get(len(self.tokens))
        self.tokens.append(token)
        self.names.append(hash((self.names[-1] if self.names else self.root, token, image)))

    def next(self, length: int) -> int:
        return hash((self.names[length - 1], self.index)) // 7 % VOCAB


def expected(seq: Sequence) -> list[int]:
    """All tokens of a sequence that is left alone until it ends."""
    history = History(seq)
    while len(history.tokens) < seq.limit:
        history.append(history.next(len(history.tokens)))
        if history.tokens[-1] == EOS and not seq.request.params.ignore_eos:
            break
    return history.tokens


class FakeDevice:
    def __init__(self, scheduler: Scheduler):
        cfg = scheduler.config
        self.scheduler, self.size = scheduler, cfg.page_size
        self.pages = [[0] * cfg.page_size for _ in range(cfg.num_pages)]
        self.histories: dict[Sequence, History] = {}
        self.stood: dict[Sequence, tuple[int, int]] = {}  # (preemptions, tokens computed)
        self.computed_tokens = 0
        self.features: dict[int, tuple[bytes, int]] = {}  # by row: an item's key, and which of its features
        self.right, self.random = 0.5, random.Random(0)  # how often the device's own draft tokens are right

    def run(self, plan: StepPlan) -> np.ndarray:
        """The tokens [steps, rows + 1]: the last column is padding, and what rows that do not sample have is noise."""
        for item, rows in plan.encode:
            self.features |= {row: (item.key, i) for i, row in enumerate(rows.tolist())}
        assert all(0 <= row < self.scheduler.config.encoder_rows for row in self.features)
        for row in plan.rows:
            self._check_start(row)
            self._check_images(row, plan)
        if plan.num_drafts:
            return self._verify(plan)
        sampled = np.full((plan.steps, len(plan.rows) + 1), EOS, np.int32)
        for step in range(plan.steps):
            for row in plan.rows:  # every row writes before any reads
                self._write(row.seq, row.start + step, row.count)
            for i, row in enumerate(plan.rows):
                self._read(row.seq, row.start + step + row.count)
                if row.samples:
                    sampled[step, i] = self._sample(row.seq, row.start + step + row.count)
        return sampled

    def _verify(self, plan: StepPlan) -> np.ndarray:
        """Run a verify step: every row writes its draft tokens, and samples after each of them."""
        sampled = np.full((1 + plan.num_drafts, len(plan.rows) + 1), EOS, np.int32)
        for i, row in enumerate(plan.rows):
            seq, truth = row.seq, self.histories[row.seq]
            start, assumed = self.stood[seq][1] if row.ahead else row.start, History(seq)
            for token in truth.tokens[seq.prompt_len :]:
                assumed.append(token)
            drafts = [self._draft(assumed) if token == UNKNOWN else token for token in row.drafts]
            assumed = History(seq)
            for token in (*truth.tokens[seq.prompt_len :], *drafts):
                assumed.append(token)
            for at in range(start, start + row.count):
                self.pages[seq.pages[at // self.size]][at % self.size] = assumed.names[at]
            self._read(seq, start + 1)
            column = [assumed.next(start + 1 + j) for j in range(row.count)]
            kept = 1 + next((j for j, draft in enumerate(drafts) if column[j] != draft), len(drafts))
            sampled[:kept, i], sampled[kept:, i] = column[:kept], REJECTED
            for token in column[:kept]:
                truth.append(token)
            self.stood[seq] = (seq.preemptions, start + kept)
            self.computed_tokens += row.count
        return sampled

    def _draft(self, assumed: History) -> int:
        """Return a draft token of the device's own, and assume it."""
        token = assumed.next(len(assumed.tokens)) if self.random.random() < self.right else self.random.randrange(30)
        assumed.append(token)
        return token

    def _check_start(self, row) -> None:
        seq = row.seq
        history = self.histories.setdefault(seq, History(seq))
        assert seq.status is Status.RUNNING and row.count > 0
        preemptions, stood = self.stood.get(seq, (-1, 0))
        if row.ahead:
            assert preemptions == seq.preemptions and stood <= row.start and row.samples and row.drafts
            return
        if preemptions == seq.preemptions:
            assert row.start == stood, f"{seq.id}: row from {row.start}, but {stood} tokens were computed"
        else:
            assert row.start % self.size == 0, f"{seq.id}: started inside a page"
            assert row.start <= seq.cached_tokens or seq.preemptions, "started past what was found in the cache"
        assert seq.tokens == history.tokens[: len(seq.tokens)], f"{seq.id}: host and device differ"
        assert row.samples == (row.start + row.count - len(row.drafts) == len(history.tokens))

    def _check_images(self, row, plan: StepPlan) -> None:
        images, end = self.histories[row.seq].images, row.start + row.count
        for at in range(row.start, end):
            if at in images:
                key, i = images[at]
                assert self.features[int(plan.images[key][i])] == images[at], f"{row.seq.id} reads another image"
        if self.scheduler.config.whole_images:
            assert not any(span.start < end < span.end for span in row.seq.request.spans), "an image is split"

    def _write(self, seq: Sequence, start: int, count: int) -> None:
        names = self.histories[seq].names
        for at in range(start, start + count):
            self.pages[seq.pages[at // self.size]][at % self.size] = names[at]
        self.stood[seq] = (seq.preemptions, start + count)
        self.computed_tokens += count

    def _read(self, seq: Sequence, end: int) -> None:
        names = self.histories[seq].names
        held = [name for page in seq.pages for name in self.pages[page]]
        assert held[:end] == names[:end], f"{seq.id} would read what is not its own"

    def _sample(self, seq: Sequence, length: int) -> int:
        history = self.histories[seq]
        token = history.next(length)
        history.append(token)
        return token


class Driver:
    """Runs a scheduler as the engine does: `ahead` plans under way before the first of them is committed."""

    def __init__(self, scheduler: Scheduler, ahead: int = 1, prompts_first: bool = False):
        self.scheduler, self.ahead, self.prompts_first = scheduler, ahead, prompts_first
        self.device = FakeDevice(scheduler)
        self.flying: deque[tuple[StepPlan, np.ndarray]] = deque()
        self.plans: list[StepPlan] = []

    def step(self) -> None:
        plan = self.launch()
        if self.flying and (plan is None or len(self.flying) > self.ahead):
            self.land()

    def launch(self, drafts: dict[Sequence, tuple[int, ...]] | None = None) -> StepPlan | None:
        ahead = any(UNKNOWN in each for each in (drafts or {}).values())
        if self.flying and self.flying[-1][0].num_drafts and not ahead:
            return None  # draft tokens of the host follow known tokens
        plan = self.scheduler.schedule(prompts_first=self.prompts_first, drafts=drafts)
        if plan is not None:
            self.flying.append((plan, self.device.run(plan)))
            self.plans.append(plan)
        else:
            assert self.flying or not self.scheduler.has_work, "work, but nothing planned and nothing under way"
        return plan

    def land(self):
        return self.scheduler.commit(*self.flying.popleft(), STOPS)

    def drain(self, limit: int = 5000) -> None:
        for _ in range(limit):
            if not self.scheduler.has_work and not self.flying:
                return
            self.step()
        raise AssertionError("starved: the work does not end")


def sequences(id: str, prompt, n: int = 1, max_tokens: int | None = 8, ignore_eos: bool = True, **request):
    params = SamplingParams(n=n, max_tokens=max_tokens, ignore_eos=ignore_eos)
    made = Request(id, tuple(prompt), params, **request)
    return [Sequence(made, index) for index in range(n)]


def make(max_num_seqs=8, budget=64, pages=64, size=4, max_model_len=200, **more) -> Scheduler:
    return Scheduler(SchedulerConfig(max_num_seqs, budget, max_model_len, size, pages, **more))


def add(scheduler: Scheduler, *args, **kw):
    seqs = sequences(*args, **kw)
    for seq in seqs:
        scheduler.add(seq)
    return seqs


def check_invariants(scheduler: Scheduler, device: FakeDevice | None = None) -> None:
    """What holds between any two calls."""
    pool, cfg = scheduler.pool, scheduler.config
    size = cfg.page_size
    holders: dict[int, list[tuple[Sequence, int]]] = {}
    for seq in scheduler.running:
        assert seq.status is Status.RUNNING and seq.computed <= min(cfg.max_model_len, pool.num_pages * size)
        # A dispatch of several steps may go past max_tokens, which is planned no further and never known to the host.
        assert len(seq.tokens) < seq.limit and seq.length < seq.limit + cfg.max_decode_steps
        most = seq.computed + seq.num_draft_tokens  # a page may be left of draft tokens that were rejected
        assert -(-seq.computed // size) <= len(seq.pages) <= -(-most // size), "pages cover what is computed"
        for i, page in enumerate(seq.pages):
            holders.setdefault(page, []).append((seq, i))
    for seq in scheduler.waiting:
        assert seq.status is Status.WAITING and seq.slot is None and not seq.pages and seq.computed == 0
    # No page is leaked: each is held as often as it is listed, or it is free, or cached.
    assert [len(holders.get(page, ())) for page in range(pool.num_pages)] == pool.refs
    idle = [*pool._free, *pool._cached]
    assert len(idle) == len(set(idle)) == pool.num_free and pool.num_used == len(holders)
    assert not holders.keys() & set(idle)
    assert all(pool.hash_of[page] is not None for page in pool._cached)
    assert all(pool.hash_of[page] is None for page in pool._free)
    assert all(pool.hash_of[page] == digest for digest, page in pool.page_of.items())
    slots = [seq.slot for seq in scheduler.running]
    assert len(set(slots)) == len(slots) <= cfg.max_num_seqs and set(slots) <= set(range(cfg.max_num_seqs))
    for queue in (scheduler.running, scheduler.waiting):
        assert all(a.rank < b.rank for a, b in pairwise(queue))
    for shared in holders.values():
        _check_shared(shared, cfg, device)


def _check_shared(shared, cfg, device) -> None:
    if len(shared) == 1:
        return
    (first, at), size = shared[0], cfg.page_size
    for seq, i in shared:
        assert i == at and seq.computed >= (i + 1) * size, "only full pages are shared, at one place in the sequence"
        assert cfg.enable_prefix_caching or seq.request.id == first.request.id
        if device is not None:
            end = (i + 1) * size - 1
            assert device.histories[seq].names[end] == device.histories[first].names[end]
