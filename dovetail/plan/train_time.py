"""How long one step takes: bounds between everything at once and one thing after another.

The lower bound is the chip's data sheet: products, memory and links at their peaks, all of them at the same time, so
that the slowest counts; only what must be waited for (an expert's tokens) comes on top. The upper bound has each wait
for the others, at what machines usually reach of their peaks. Where runs on such a machine were measured
(plan.calibration), what they reached stands in both.

Plans are ranked by a point between the bounds (StepTime.likely).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from dovetail.core.accelerator import Accelerator
from dovetail.core.chips import GIB, Chip
from dovetail.core.training import Training
from dovetail.models.config import ModelConfig
from dovetail.plan.exchange import Exchange, by_axis, exchanges, total, whole_weights
from dovetail.plan.flops import computed_flops, forward_flops
from dovetail.plan.links import AxisSpan, layout, one_domain
from dovetail.plan.plans import MeshPlan, axes_of
from dovetail.plan.train_memory import BYTES, activations_of, mtp_layers

# What a step reaches of the peaks at least, where nobody measured. Products, with all the small things around them: of
# the published runs on GPUs the slowest, PyTorch's on an H200, is at 40%; MaxText's on TPUs are at 46 to 71%, links
# included. Memory: 4.17 of 4.8 TB/s measured on an H200. Links: 370 of 450 GB/s of an H100's NVLink, as measured in the
# book "How to Scale Your Model".
USUAL_GPU, USUAL_TPU = 0.4, 0.5
USUAL_MEMORY, USUAL_LINKS = 0.85, 0.8
# Times as long as in bf16: f32 on an H100 (67 of 989 TFLOP/s; TF32 495), and on a TPU as three or six products in bf16.
SLOWER_GPU = {"bf16": 1.0, "tf32": 2.0, "f32": 15.0}
SLOWER_TPU = {"bf16": 1.0, "tf32": 3.0, "f32": 6.0}


class Reached(Protocol):
    """The shares of a chip's peaks that were measured: plan.calibration.Fractions."""

    @property
    def products(self) -> float | None: ...
    @property
    def memory(self) -> float | None: ...
    @property
    def links(self) -> float | None: ...


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step."""

    products: float  # at the peak, or at the fraction of it that a calibration found
    memory: float
    exchanges: tuple[Exchange, ...]
    lower: float  # all that may overlap does
    upper: float  # nothing does

    @property
    def links(self) -> float:
        """All that is sent, one after another."""
        return total(self.exchanges)

    @property
    def likely(self) -> float:
        """What plans are ranked by: measured steps lie about half-way between the bounds, and of two plans whose links
        hide behind products in the lower bound, the one that sends less is the better. With the upper bound counted
        twice, the meshes that MaxText publishes for TPUs are within 10% of the best."""
        return (self.lower + 2 * self.upper) / 3

    @property
    def bound_by(self) -> str:
        """What the lower bound waits for: products, memory, or the axis whose links do."""
        parts = {"products": self.products, "memory": self.memory, **by_axis(self.exchanges, True)}
        waits = by_axis(self.exchanges, False)
        longest = max(parts, key=lambda name: parts[name])
        return longest if parts[longest] >= sum(waits.values()) else max(waits, key=lambda axis: waits[axis])


def step_time(
    cfg: ModelConfig,
    settings: Training,
    plan: MeshPlan,
    chip: Chip,
    spans: tuple[AxisSpan, ...],
    reached: Reached | None = None,
) -> StepTime:
    """`spans`: plan.links.layout of the plan's mesh over the accelerator."""
    products = product_flops(cfg, settings, plan) / peak(chip, settings)
    memory = moved_bytes(cfg, settings, plan, chip) * chip.devices / chip.bandwidth
    sent = exchanges(cfg, settings, plan, spans)
    shares = {name: getattr(reached, name, None) for name in ("products", "memory", "links")}
    products, memory = products / (shares["products"] or 1.0), memory / (shares["memory"] or 1.0)
    slower = 1 / (shares["links"] or 1.0)
    waits, hidden = by_axis(sent, False), by_axis(sent, True)
    lower = max(products, memory, slower * max(hidden.values(), default=0.0)) + slower * sum(waits.values())
    upper = (
        products / (1.0 if shares["products"] else usual_products(chip))
        + memory / (1.0 if shares["memory"] else USUAL_MEMORY)
        + total(sent) * (slower if shares["links"] else 1 / USUAL_LINKS)
    )
    return StepTime(products, memory, sent, lower, upper)


def usual_products(chip: Chip) -> float:
    return USUAL_TPU if chip.pod else USUAL_GPU


def peak(chip: Chip, settings: Training) -> float:
    """FLOP/s of a device in the dtype of the products; a CPU's table is of f32 already."""
    if not chip.kinds:
        return chip.device_bf16
    slower = SLOWER_TPU if chip.pod else SLOWER_GPU
    return chip.device_bf16 / slower[settings.precision.compute]


def product_flops(cfg: ModelConfig, settings: Training, plan: MeshPlan) -> float:
    """Of one device in a step, with what is recomputed. Of rows cut into n slices the last one sees the most keys, and
    the others wait for it: (2n - 1) / n times the mean (ops.context)."""
    mesh, length = plan.mesh, settings.length
    tokens = plan.rows * length // mesh.context * plan.microsteps
    each = computed_flops(cfg, length, plan.remat)
    if mesh.context > 1:
        passes = 4 if plan.remat == "full" else 3
        attention = passes * (forward_flops(cfg, length // 2) - forward_flops(cfg))
        each += attention * ((2 * mesh.context - 1) / mesh.context - 1)
    if settings.adapter is not None:  # the frozen weights' own gradients are not made
        each -= forward_flops(cfg)
    return tokens * each / mesh.tensor


def moved_bytes(cfg: ModelConfig, settings: Training, plan: MeshPlan, chip: Chip) -> float:
    """Bytes that a device reads and writes in a step: the state once each, weights in every pass, what is kept for the
    backward pass, twice over where it is made again; on a GPU also what a loop over layers copies."""
    mesh, memory, itemsize = plan.mesh, plan.memory, BYTES[settings.precision.compute]
    weights = whole_weights(cfg, settings, plan) * itemsize
    gathered = 2 * weights if mesh.fsdp * mesh.context > 1 else 0
    saved, _ = activations_of(cfg, mtp_layers(cfg, settings), mesh.tensor, mesh.expert, "none")
    tokens = plan.rows * settings.length // mesh.context
    values = 2 * tokens * itemsize * saved * (1 if plan.remat == "none" else 2)
    logits = 0 if cfg.scored else 2 * tokens * cfg.vocab // mesh.tensor * 4
    # measured on an H200: a loop copies what it keeps into stacked arrays and out of them, reading and writing it
    copied = 4 * memory.activations if plan.scan and not chip.pod else 0
    state = 2 * (memory.weights + memory.optimizer) + memory.gradients
    return state + plan.microsteps * (3 * weights + gathered + values + logits + copied)


# All plans that fit, the fastest first: the one search behind `dovetail plan train` and what a recipe leaves open.


# A chip that is not in the table: FLOPs for each byte over its links and of its memory as on an H100 or a v5p.
UNKNOWN = Chip("unknown", (), 1e15, None, 80 * GIB, 4e12, 4e11, source="none: the ratios of an H100, of no date (2023)")


AN_AXIS = 1.02  # bounds are wide: of two meshes within 2% the simpler one is taken


@dataclass(frozen=True)
class Timed:
    plan: MeshPlan
    time: StepTime
    spans: tuple[AxisSpan, ...]


def ranked(
    cfg: ModelConfig,
    settings: Training,
    plans: Iterable[MeshPlan],
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


def spans_of(plan: MeshPlan, chip: Chip, accelerator: Accelerator | None) -> tuple[AxisSpan, ...]:
    return layout(accelerator, axes_of(plan.mesh)) if accelerator else one_domain(chip, axes_of(plan.mesh))
