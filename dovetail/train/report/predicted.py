"""A run's prediction beside what its steps take: in a remark once it is warm, and in its folder for the report."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

from dovetail.core.files import write_atomic
from dovetail.plan.prediction import FILE, Prediction

WARM = 2  # reports of this process that are left out: they compile, or wait for what does
ENOUGH = 5  # after which the median is told


class Predicted:
    """Of one process."""

    def __init__(self, prediction: Prediction):
        self.prediction = prediction
        self._took: list[float] = []
        self._told = False

    def took(self, seconds: float) -> str | None:
        """A step's, as measured. The remark that is due, which is due once."""
        self._took.append(seconds)
        return self.last_word() if len(self._took) == WARM + ENOUGH else None

    def last_word(self) -> str | None:
        """The same of a run that is shorter than that; None where there is nothing to tell, or it was told."""
        warm = self._took[WARM:]
        if self._told or not warm:
            return None
        self._told = True
        return self.prediction.beside(median(warm))


def save(folder: Path, prediction: Prediction) -> None:
    write_atomic(folder / FILE, json.dumps(prediction.plain(), indent=1) + "\n")


def read(folder: Path) -> Prediction | None:
    """None where a run left none, or that of another version."""
    try:
        return Prediction(**json.loads((folder / FILE).read_text()))
    except (OSError, ValueError, TypeError):
        return None
