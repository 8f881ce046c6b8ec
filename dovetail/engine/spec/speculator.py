"""Speculator: choose and propose the draft tokens of the steps that an engine plans, and learn from their results."""

from __future__ import annotations

import time
from collections.abc import Iterable

from dovetail.engine.device.batch import MOST_VERIFIED
from dovetail.engine.device.runner import LaunchedStep, Runner
from dovetail.engine.request.sequence import Sequence, Status
from dovetail.engine.schedule.plan import UNKNOWN, Drafts, Gain, StepPlan
from dovetail.engine.schedule.scheduler import Scheduler
from dovetail.engine.spec.config import SpeculativeConfig
from dovetail.engine.spec.counts import SpeculationCounts
from dovetail.engine.spec.draft_length import DraftLength
from dovetail.engine.spec.drafter import DeviceDrafter, Drafter
from dovetail.engine.spec.ngram import NgramDrafter
from dovetail.engine.spec.suffix import SuffixDrafter


class Speculator:
    """Propose draft tokens for the sequences of a step, and learn from what is accepted.

    For each step, an engine calls `wanted`, `must_wait` and `propose` when it plans the step and `learn` when it
    commits it.
    """

    def __init__(self, drafter: Drafter, length: DraftLength):
        self.drafter, self.length = drafter, length
        self.counts = SpeculationCounts(accepted_per_pos=[0] * length.choices[-1])

    def wanted(self, scheduler: Scheduler, runner: Runner) -> int:
        """Return the draft tokens per row of the next step; 0 for a step without any, or until it is compiled."""
        demand = scheduler.demand()
        if demand.prompts or not 0 < demand.decoding <= MOST_VERIFIED:
            return 0
        most = self.length.choose(runner.buckets.decode(demand.decoding).rows)
        fits = demand.decoding * (1 + most) <= scheduler.config.max_num_batched_tokens
        return most if most and fits and runner.drafts_ready(demand.decoding, most) else 0

    def must_wait(self, most: int, last: StepPlan) -> bool:
        """Return whether a step with `most` draft tokens is planned only when the tokens of the last one are known."""
        return not self.drafter.runs_ahead if most else last.requested > 0

    def propose(self, running: list[Sequence], most: int, runner: Runner) -> Drafts:
        """Return up to `most` draft tokens for each of the sequences.

        All their tokens are known, unless the drafter runs ahead. Draft tokens that the host must see before the verify
        step are left out until the program that proposes them is compiled.
        """
        found = {seq: drafts for seq in running if (drafts := self._drafts(seq, most))}
        if any(_reach_host(*each) for each in found.items()) and not runner.proposal_ready(len(running), most):
            return {seq: drafts for seq, drafts in found.items() if not _reach_host(seq, drafts)}
        return found

    def _drafts(self, seq: Sequence, most: int) -> tuple[int, ...]:
        room = min(most, seq.limit - seq.length - 1)  # the last token of a sequence is sampled, never fed
        return self.drafter.propose(seq, room) if room > 0 and seq.request.params.speculation else ()

    def learn(
        self, launched: LaunchedStep, gains: list[Gain], seconds: float | None, is_last: bool, runner: Runner
    ) -> None:
        """Measure a step, count what its draft tokens gained, and learn from sequences that ended with it.

        Args:
            launched: The step.
            gains: The tokens that each sequence gained.
            seconds: How long the step took, if steps before and after it were in flight.
            is_last: Whether no later step is in flight.
            runner: The runner of the step.
        """
        plan = launched.plan
        if plan.requested or plan.is_decode:
            alone = is_last and not launched.waited and not runner.is_compiling
            if seconds is None and alone and launched.began is not None:
                seconds = time.perf_counter() - launched.began
            if seconds is not None:
                self.length.measured(runner.buckets.decode(len(plan.rows)).rows, plan.requested, seconds, plan.steps)
        if plan.requested:
            self._count(plan, {seq: len(tokens) for seq, tokens, _ in gains})
        self.finish(seq for seq, _, _ in gains)

    def _count(self, plan: StepPlan, gained: dict[Sequence, int]) -> None:
        found = [(row, gained[row.seq] - 1) for row in plan.rows if row.seq in gained]  # others have ended before
        self.length.verified([accepted for _, accepted in found], plan.requested)
        counts = self.counts
        for row, accepted in found:
            counts.drafts += bool(row.drafts)
            counts.draft_tokens += len(row.drafts)
            counts.accepted_tokens += accepted
            for position in range(accepted):
                counts.accepted_per_pos[position] += 1

    def finish(self, sequences: Iterable[Sequence]) -> None:
        """Let the drafter learn from those of these sequences that have ended."""
        for seq in sequences:
            if seq.status is Status.FINISHED:
                self.drafter.finish(seq)


def _reach_host(seq: Sequence, drafts: tuple[int, ...]) -> bool:
    """Return whether the host computes masks from draft tokens that a draft model proposes (see Runner.propose)."""
    return seq.single_step and UNKNOWN in drafts


def speculator_of(config: SpeculativeConfig | None, choices: tuple[int, ...]) -> Speculator | None:
    """Return the speculator of a config; `choices` are the numbers of draft tokens that steps are compiled for."""
    return Speculator(_drafter(config), DraftLength(choices)) if config else None


def _drafter(config: SpeculativeConfig) -> Drafter:
    if config.has_weights:
        return DeviceDrafter()
    if config.method == "ngram":
        return NgramDrafter(config.prompt_lookup_min, config.prompt_lookup_max)
    return SuffixDrafter(
        config.suffix_decoding_max_tree_depth,
        config.suffix_decoding_max_cached_requests,
        config.suffix_decoding_max_spec_factor,
        config.suffix_decoding_min_token_prob,
    )
