"""Drafter: the interface of what proposes draft tokens.

A draft token is accepted if the target samples it in its place (see device.step.run_verify), so a drafter changes how
fast an output comes and never the output.
"""

from __future__ import annotations

from typing import Protocol

from dovetail.engine.request.sequence import Sequence
from dovetail.engine.schedule.plan import UNKNOWN


class Drafter(Protocol):
    """Propose draft tokens for sequences."""

    @property
    def runs_ahead(self) -> bool:
        """Return whether it proposes before the tokens of the last step are known."""
        ...

    def propose(self, seq: Sequence, most: int) -> tuple[int, ...]:
        """Return up to `most` tokens that may follow the sequence's known tokens; none if nothing is likely."""
        ...

    def finish(self, seq: Sequence) -> None:
        """Learn from the output of a sequence that ended."""
        ...


class DeviceDrafter:
    """Leave the draft tokens to the draft model, which runs in the verify step.

    For a sequence whose masks depend on each token it runs before that (see Runner.propose).
    """

    runs_ahead = True

    def propose(self, seq: Sequence, most: int) -> tuple[int, ...]:
        """Return `most` unknown tokens; none while the host waits for a token that masks depend on (a grammar)."""
        return () if seq.single_step and seq.pending else (UNKNOWN,) * most

    def finish(self, seq: Sequence) -> None:
        """Do nothing: the weights are fixed."""
