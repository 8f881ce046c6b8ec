"""All plans that fit, the fastest first: the one search behind `dovetail plan train` and what a recipe leaves open."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dovetail.core.accelerator import Accelerator
from dovetail.core.chips import GIB, Chip
from dovetail.core.training import Training
from dovetail.models.config import ModelConfig
from dovetail.plan.links import Span, layout, one_domain
from dovetail.plan.plans import Plan, axes_of
from dovetail.plan.steptime import Reached, StepTime, step_time

# A chip that is not in the table: FLOPs for each byte over its links and of its memory as on an H100 or a v5p.
UNKNOWN = Chip("unknown", (), 1e15, None, 80 * GIB, 4e12, 4e11, source="none: the ratios of an H100, of no date (2023)")


AN_AXIS = 1.02  # bounds are wide: of two meshes within 2% the simpler one is taken


@dataclass(frozen=True)
class Timed:
    plan: Plan
    time: StepTime
    spans: tuple[Span, ...]


def ranked(
    cfg: ModelConfig,
    settings: Training,
    plans: Iterable[Plan],
    chip: Chip | None,
    accelerator: Accelerator | None,
    reached: Reached | None = None,
) -> list[Timed]:
    """By StepTime.likely; what cuts along one axis more must be worth it. `accelerator`: None
    where only the number of devices is known."""
    known, found = chip or UNKNOWN, []
    for plan in plans:
        spans = spans_of(plan, known, accelerator)
        found.append(Timed(plan, step_time(cfg, settings, plan, known, spans, reached), spans))
    return sorted(found, key=lambda one: one.time.likely * AN_AXIS ** len(one.spans))


def spans_of(plan: Plan, chip: Chip, accelerator: Accelerator | None) -> tuple[Span, ...]:
    return layout(accelerator, axes_of(plan.mesh)) if accelerator else one_domain(chip, axes_of(plan.mesh))
