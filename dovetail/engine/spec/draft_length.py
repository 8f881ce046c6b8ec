"""DraftLength: choose how many draft tokens a step verifies, from measured step times and observed acceptance.

A verify step of K draft tokens gains 1 + sum of P(the first k drafts are accepted) for k = 1..K tokens per row, and
takes longer than a decode step. Acceptance does not depend on the batch, so it is averaged over all rows; step times
are kept per number of rows, as steps are compiled for.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

SHARE = 0.2  # weight of the newest step time in its average
ROW_SHARE = 0.05  # weight of the newest row in the averages of acceptance
PRIOR = 0.8  # acceptance of a draft token before any was verified
LEAST_MEASURED = 4  # decode steps that are measured before the first verify step
PROBE_AFTER = 128  # decode steps after which speculation is tried again, because the text may have changed
PROBES = 4  # verify steps of such a trial
MARGIN = 1.05  # how much faster speculation must be


@dataclass
class _Rows:
    """Hold the measurements of steps with one number of rows."""

    seconds: dict[int, float] = field(default_factory=dict)  # of a step, by its draft tokens; 0: a decode step
    run: set[int] = field(default_factory=set)  # the draft tokens of verify steps that have run
    measured: int = 0  # decode steps
    since: int = 0  # decode steps since the last verify step
    probes: int = 0  # verify steps that are left of a trial


class DraftLength:
    """Choose among a few numbers of draft tokens, which steps are compiled for.

    Args:
        choices: Numbers of draft tokens, in ascending order.
    """

    def __init__(self, choices: tuple[int, ...]):
        self.choices = choices
        self.survival = self._prior()  # P(the first k drafts are accepted)
        self.saved_seconds = 0.0  # estimate: decode steps for the same tokens would have taken so much longer
        self._rows: dict[int, _Rows] = {}

    def forget_acceptance(self) -> None:
        """Expect the acceptance of a drafter of which nothing was verified, because it was replaced."""
        self.survival = self._prior()

    def _prior(self) -> list[float]:
        return [PRIOR**k for k in range(1, self.choices[-1] + 1)]

    def tokens(self, drafts: int) -> float:
        """Return the tokens per row that a step with so many draft tokens gains on average."""
        return 1 + sum(self.survival[:drafts])

    def choose(self, rows: int) -> int:
        """Return the number of draft tokens for the next step with `rows` rows; 0 for a decode step.

        A step that was never measured counts as one that takes as long as a decode step, so that each is tried.
        """
        known = self._rows.setdefault(rows, _Rows())
        if known.measured < LEAST_MEASURED:
            return 0
        best = self._best(known)
        tries = known.probes > 0 or known.since >= PROBE_AFTER
        return best if tries or self._gain(known, best) >= MARGIN else 0

    def _best(self, known: _Rows) -> int:
        return max(self.choices, key=lambda drafts: self._gain(known, drafts))

    def _gain(self, known: _Rows, drafts: int) -> float:
        """Return how many times as fast as decode steps a step with so many draft tokens is."""
        plain = known.seconds[0]
        return self.tokens(drafts) * plain / known.seconds.get(drafts, plain)

    def measured(self, rows: int, drafts: int, seconds: float, steps: int = 1) -> None:
        """Add a measured step, or `steps` decode steps of one dispatch.

        The first verify step of a program is not counted: it includes setting up, and a time that is too long would
        turn speculation off before it could be measured again.
        """
        known, each = self._rows.setdefault(rows, _Rows()), seconds / steps
        if drafts and drafts not in known.run:
            known.run.add(drafts)
            return
        before = known.seconds.get(drafts, each)
        known.seconds[drafts] = before + SHARE * (each - before)
        if drafts:
            known.probes = PROBES - 1 if known.since >= PROBE_AFTER else max(0, known.probes - 1)
            known.since = 0
        else:
            known.measured += steps
            known.since += steps

    def verified(self, accepted: Iterable[int], drafts: int) -> None:
        """Add the accepted draft tokens of each row of a step for which `drafts` were requested."""
        counts = list(accepted)
        for count in counts:
            for k in range(drafts):
                self.survival[k] += ROW_SHARE * ((count > k) - self.survival[k])
        self._save(counts, drafts)

    def _save(self, counts: list[int], drafts: int) -> None:
        """Add to `saved_seconds` what a verify step saved, by the average times of steps with as many rows."""
        rows = min((rows for rows in self._rows if rows >= len(counts)), default=0)
        seconds = self._rows[rows].seconds if rows else {}
        if counts and 0 in seconds and drafts in seconds:
            steps = 1 + sum(counts) / len(counts)  # decode steps for the same tokens
            self.saved_seconds += steps * seconds[0] - seconds[drafts]
