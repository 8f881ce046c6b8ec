"""Speculator: what an engine asks when it plans a step, a drafter and how many of its tokens to verify."""

from __future__ import annotations

from collections.abc import Iterable

from dovetail.engine.device.batch import MOST_VERIFIED, Buckets
from dovetail.engine.request.sequence import Sequence, Status
from dovetail.engine.schedule.plan import Drafts, Gain, StepDemand, StepPlan
from dovetail.engine.spec.config import SpeculativeConfig
from dovetail.engine.spec.counts import SpeculationCounts
from dovetail.engine.spec.draft_length import DraftLength
from dovetail.engine.spec.drafter import DeviceDrafter, Drafter
from dovetail.engine.spec.ngram import NgramDrafter
from dovetail.engine.spec.suffix import SuffixDrafter


class Speculator:
    """Propose draft tokens for the sequences of a step, and learn from what is accepted."""

    def __init__(self, drafter: Drafter, length: DraftLength):
        self.drafter, self.length = drafter, length
        self.counts = SpeculationCounts(accepted_per_pos=[0] * length.choices[-1])

    def wanted(self, demand: StepDemand, buckets: Buckets, most_tokens: int) -> int:
        """Return the draft tokens per row of the next step; 0 for a step without any.

        Args:
            demand: The work that waits for a step.
            buckets: The shapes that steps are compiled for.
            most_tokens: The most tokens of a step.
        """
        if demand.prompts or not 0 < demand.decoding <= MOST_VERIFIED:
            return 0
        most = self.length.choose(buckets.decode(demand.decoding).rows)
        return most if demand.decoding * (1 + most) <= most_tokens else 0

    def must_wait(self, most: int, last: StepPlan) -> bool:
        """Return whether a step with `most` draft tokens is planned only when the tokens of the last one are known."""
        return not self.drafter.runs_ahead if most else last.requested > 0

    def propose(self, running: Iterable[Sequence], most: int) -> Drafts:
        """Return up to `most` draft tokens for each of the sequences.

        All their tokens are known, unless the drafter runs ahead.
        """
        found = {}
        for seq in running:
            room = min(most, seq.limit - seq.length - 1)  # the last token of a sequence is sampled, never fed
            if room > 0 and seq.request.params.speculation and (drafts := self.drafter.propose(seq, room)):
                found[seq] = drafts
        return found

    def learn(self, plan: StepPlan, rows: int, gains: list[Gain], seconds: float | None) -> None:
        """Measure a step, count what its draft tokens gained, and learn from sequences that ended with it.

        Args:
            plan: The step's plan.
            rows: The rows that it was padded to.
            gains: The tokens that each sequence gained.
            seconds: How long the step took, if it was measured.
        """
        if seconds is not None and (plan.requested or plan.is_decode):
            self.length.measured(rows, plan.requested, seconds, plan.steps)
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
