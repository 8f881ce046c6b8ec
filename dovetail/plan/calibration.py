"""What machines reached of their peaks, learnt from runs and kept in a small file that later plans read and name.

A run leaves what was predicted for it (the seconds of its products, its memory and its links at the chips' peaks) and
what was measured. From one run only the share of what bounds it can be told; where runs on the same kind of chip are
bound by different things, each thing gets a share of its own.
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
    """A step (of training, or of decoding) on one kind of chip: seconds at the peaks, and as measured."""

    run: str  # its folder
    chip: str  # a name of core.chips
    devices: int
    products: float
    memory: float
    links: float  # 0 where nothing is sent
    measured: float
    date: str = ""

    @property
    def bound_by(self) -> str:
        return max(("products", "memory", "links"), key=lambda name: getattr(self, name))


@dataclass(frozen=True)
class Fractions:
    """The shares of a chip's peaks that were reached; None: not known, for no run was bound by it."""

    chip: str
    products: float | None = None
    memory: float | None = None
    links: float | None = None
    runs: tuple[str, ...] = ()

    def describe(self) -> str:
        """`calibrated on runs/a: 55% of peak in products`."""
        parts = [
            f"{getattr(self, name):.0%} of peak in {name}"
            for name in ("products", "memory", "links")
            if getattr(self, name) is not None
        ]
        last = f"{self.runs[-1]}" + (f" and {len(self.runs) - 1} more" if len(self.runs) > 1 else "")
        return f"calibrated on {last}: {', '.join(parts) or 'nothing could be told apart'}"


def fit(observations: Sequence[Observation]) -> Fractions:
    """Of one kind of chip. A product's share holds all that goes on beside it, the small operations too."""
    if not observations:
        raise UserError("a calibration needs one run at least; got none")
    chips = {one.chip for one in observations}
    if len(chips) > 1:
        raise UserError(f"a calibration is of one kind of chip; got runs on {', '.join(sorted(chips))}")
    alone = [one for one in observations if not one.links]
    products = _share(alone, "products") or _share(observations, "products")
    memory = _share(alone, "memory") or _share(observations, "memory")
    runs = tuple(dict.fromkeys(one.run for one in observations))
    return Fractions(chips.pop(), products, memory, _links(observations, products, memory), runs)


def _share(observations: Iterable[Observation], name: str) -> float | None:
    """Of those bound by it; the median, for one slow run is no rule."""
    found = [min(1.0, getattr(one, name) / one.measured) for one in observations if one.bound_by == name]
    return median(found) if found else None


def _links(observations: Iterable[Observation], products: float | None, memory: float | None) -> float | None:
    """What a run over several devices takes longer than its own work would, is its links'. Told only where that work's
    share is known from elsewhere, or the links themselves bound the run."""
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
    """$DOVETAIL_HOME, else the user's data directory."""
    if os.environ.get("DOVETAIL_HOME"):
        return Path(os.environ["DOVETAIL_HOME"]).expanduser() / FILE
    return Path(os.environ.get("XDG_DATA_HOME") or "~/.local/share").expanduser() / "dovetail" / FILE


def stored(path: Path | None = None) -> list[Observation]:
    """All runs that were learnt from. A file of another version is as good as none."""
    path = path or calibration_file()
    try:
        found = json.loads(path.read_text())["runs"]
        return [Observation(**_known(each)) for each in found]
    except FileNotFoundError:
        return []
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"{path} is no calibration ({error!r}): delete it and calibrate anew") from error


def fractions(chip: str, path: Path | None = None) -> Fractions | None:
    """What is known of a kind of chip; None: nothing."""
    found = [one for one in stored(path) if one.chip == chip]
    return fit(found) if found else None


def store(one: Observation, path: Path | None = None) -> Fractions:
    """Keep it, in the place of what the same run said before; what is known of its chip now."""
    path = path or calibration_file()
    kept = [*(other for other in stored(path) if (other.run, other.chip) != (one.run, one.chip)), one]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json.dumps({"runs": [asdict(each) for each in kept]}, indent=1) + "\n")
    return fit([each for each in kept if each.chip == one.chip])


def _known(each: dict[str, Any]) -> dict[str, Any]:
    names = {field.name for field in fields(Observation)}
    return {name: value for name, value in each.items() if name in names}
