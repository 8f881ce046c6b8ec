"""Learn from runs which fractions of their peaks machines reach, and keep them in a file that later plans read.

Each run records its prediction (the seconds of its products, memory traffic and links at the chips' peaks) and the
measured time. One run gives only the fraction of what bounds it; runs on the same kind of chip that are bound by
different things give a fraction for each.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any

from dovetail.core.errors import UserError
from dovetail.core.files import write_atomic

FILE = "calibration.json"


@dataclass(frozen=True)
class Observation:
    """Hold the seconds of one step, of training or of decoding, at the chip's peaks and as measured."""

    run: str  # the run's folder
    chip: str  # a name of core.chips
    devices: int
    products: float
    memory: float
    links: float  # 0 if nothing is sent
    measured: float
    date: str = ""

    @property
    def bound_by(self) -> str:
        """Return which of products, memory and links takes the longest."""
        return max(("products", "memory", "links"), key=lambda name: getattr(self, name))


@dataclass(frozen=True)
class Fractions:
    """Hold the fractions of a chip's peaks that runs reached; None if no run was bound by that part."""

    chip: str
    products: float | None = None
    memory: float | None = None
    links: float | None = None
    runs: tuple[str, ...] = ()

    def describe(self) -> str:
        """Return a phrase such as `calibrated on runs/a: 55% of peak in products`."""
        parts = [
            f"{getattr(self, name):.0%} of peak in {name}"
            for name in ("products", "memory", "links")
            if getattr(self, name) is not None
        ]
        last = f"{self.runs[-1]}" + (f" and {len(self.runs) - 1} more" if len(self.runs) > 1 else "")
        return f"calibrated on {last}: {', '.join(parts) or 'no fraction could be determined'}"


def fit(observations: Sequence[Observation]) -> Fractions:
    """Return the fractions that runs on one kind of chip reached.

    The fraction of products includes the small operations between them.

    Raises:
        UserError: There are no observations, or they are of several kinds of chip.
    """
    if not observations:
        raise UserError("a calibration needs at least one run, got none")
    chips = {one.chip for one in observations}
    if len(chips) > 1:
        raise UserError(f"a calibration needs runs on one kind of chip, got runs on {', '.join(sorted(chips))}")
    alone = [one for one in observations if not one.links]
    products = _share(alone, "products") or _share(observations, "products")
    memory = _share(alone, "memory") or _share(observations, "memory")
    runs = tuple(dict.fromkeys(one.run for one in observations))
    return Fractions(chips.pop(), products, memory, _links(observations, products, memory), runs)


def _share(observations: Iterable[Observation], name: str) -> float | None:
    """Return the median fraction over the runs that `name` bounds; None if there are none."""
    found = [min(1.0, getattr(one, name) / one.measured) for one in observations if one.bound_by == name]
    return median(found) if found else None


def _links(observations: Iterable[Observation], products: float | None, memory: float | None) -> float | None:
    """Return the fraction that links reached; None if it cannot be determined.

    The time of a run over several devices beyond that of its computation is attributed to the links. That needs runs
    that are bound by links, or a fraction for the computation from other runs.
    """
    found = []
    for one in observations:
        if not one.links:
            continue
        share = products if one.products >= one.memory else memory
        if one.bound_by == "links":
            found.append(min(1.0, one.links / one.measured))
        elif share and (left := one.measured - max(one.products, one.memory) / share) > 0:
            found.append(min(1.0, one.links / left))
    return median(found) if found else None


# --- the file ---------------------------------------------------------------------------------------------------------


def calibration_file() -> Path:
    """Return the path of the calibration file: in $DOVETAIL_HOME, or else in the user's data directory."""
    if os.environ.get("DOVETAIL_HOME"):
        return Path(os.environ["DOVETAIL_HOME"]).expanduser() / FILE
    return Path(os.environ.get("XDG_DATA_HOME") or "~/.local/share").expanduser() / "dovetail" / FILE


def stored(path: Path | None = None) -> list[Observation]:
    """Return the observations of all runs in the file; none if there is no file.

    Raises:
        UserError: The file is not a calibration file.
    """
    path = path or calibration_file()
    try:
        found = json.loads(path.read_text())["runs"]
        return [Observation(**_known(each)) for each in found]
    except FileNotFoundError:
        return []
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"{path} is not a calibration file ({error!r}): delete it and calibrate again") from error


def fractions(chip: str, path: Path | None = None) -> Fractions | None:
    """Return the fractions of a kind of chip; None if no run on it was observed."""
    found = [one for one in stored(path) if one.chip == chip]
    return fit(found) if found else None


def store(one: Observation, path: Path | None = None) -> Fractions:
    """Add an observation, or replace the one of the same run, and return the new fractions of its chip."""
    path = path or calibration_file()
    kept = [*(other for other in stored(path) if (other.run, other.chip) != (one.run, one.chip)), one]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json.dumps({"runs": [asdict(each) for each in kept]}, indent=1) + "\n")
    return fit([each for each in kept if each.chip == one.chip])


def _known(each: dict[str, Any]) -> dict[str, Any]:
    names = {field.name for field in fields(Observation)}
    return {name: value for name, value in each.items() if name in names}
