"""Where a run stands: its state after some update, and the batch that comes next."""

from __future__ import annotations

from dataclasses import dataclass

from dovetail.train.state import TrainState


@dataclass
class Position:
    state: TrainState
    step: int = 0  # the last update
    cursor: int = 0  # the number of the next batch
    saved: int | None = None  # the cursor of the last good checkpoint
