"""Bound the time of a training step, and rank the plans of a recipe by it.

In the lower bound products, memory and links are at the peaks of the chip's data sheet and overlap, so that the slowest
counts; only collectives that nothing can overlap with (tokens to experts) are added. In the upper bound nothing
overlaps, at the fractions that machines usually reach of their peaks. If runs on such a machine were measured
(plan.calibration), both bounds use the fractions that they reached.

`ranked` is the one search behind `dovetail plan train` and behind the keys that a recipe leaves open.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dovetail.core.accelerator import Accelerator
from dovetail.core.chips import GIB, Chip
from dovetail.core.training import Training
from dovetail.models.config import ModelConfig
from dovetail.plan.calibration import Fractions
from dovetail.plan.exchange import Exchange, by_axis, exchanges, total, whole_weights
from dovetail.plan.flops import computed_flops, forward_flops, mean_keys
from dovetail.plan.links import AxisSpan, layout, one_domain
from dovetail.plan.plans import MeshPlan, axes_of
from dovetail.plan.train_memory import BYTES, activations_of, mtp_layers

# The fractions of the peaks that a step reaches at least, without a calibration. Products, with the small operations
# around them: the slowest published run on GPUs, PyTorch's on an H200, is at 40%; MaxText's on TPUs are at 46 to 71%,
# links included. Memory: 4.17 of 4.8 TB/s measured on an H200. Links: 370 of 450 GB/s of an H100's NVLink, as measured
# in the book "How to Scale Your Model".
USUAL_GPU, USUAL_TPU = 0.4, 0.5
USUAL_MEMORY, USUAL_LINKS = 0.85, 0.8
# Time relative to bf16: f32 on an H100 has 67 of 989 TFLOP/s, TF32 495; a TPU computes them as six or three bf16
# products.
SLOWER_GPU = {"bf16": 1.0, "tf32": 2.0, "f32": 15.0}
SLOWER_TPU = {"bf16": 1.0, "tf32": 3.0, "f32": 6.0}


@dataclass(frozen=True)
class StepTime:
    """Hold the seconds of one step."""

    products: float  # at the peak, or at the calibrated fraction of it
    memory: float
    exchanges: tuple[Exchange, ...]
    lower: float  # everything that can overlap does
    upper: float  # nothing overlaps

    @property
    def links(self) -> float:
        """Return the seconds of all collectives, one after another."""
        return total(self.exchanges)

    @property
    def likely(self) -> float:
        """Return the time that plans are ranked by, between the bounds.

        Measured steps are about half-way between the bounds. Of two plans whose links overlap with products in the
        lower bound, the one that sends less is better. With twice the weight on the upper bound, the meshes that
        MaxText publishes for TPUs are within 10% of the best.
        """
        return (self.lower + 2 * self.upper) / 3

    @property
    def bound_by(self) -> str:
        """Return what the lower bound waits for: products, memory, or the axis of the slowest links."""
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
    reached: Fractions | None = None,
) -> StepTime:
    """Return the time of one step of a plan.

    Args:
        cfg: The model.
        settings: The recipe.
        plan: Its mesh, remat policy and rows.
        chip: The kind of chip.
        spans: plan.links.layout of the plan's mesh on the accelerator.
        reached: The calibrated fractions of this chip.
    """
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
    """Return the fraction of the peak that products reach without a calibration."""
    return USUAL_TPU if chip.pod else USUAL_GPU


def peak(chip: Chip, settings: Training) -> float:
    """Return the FLOP/s of a device in the compute dtype. A CPU's figure is for f32 already."""
    if not chip.kinds:
        return chip.device_bf16
    slower = SLOWER_TPU if chip.pod else SLOWER_GPU
    return chip.device_bf16 / slower[settings.precision.compute]


def product_flops(cfg: ModelConfig, settings: Training, plan: MeshPlan) -> float:
    """Return the FLOPs of one device in a step, recomputation included.

    If rows are split into n parts, the last part sees the most keys and the others wait for it: (2n - 1) / n times the
    mean (ops.context).
    """
    mesh, length = plan.mesh, settings.length
    tokens = plan.rows * length // mesh.context * plan.microsteps
    each = computed_flops(cfg, length, plan.remat)
    if mesh.context > 1:
        passes = 4 if plan.remat == "full" else 3
        attention = passes * (forward_flops(cfg, mean_keys(cfg, length)) - forward_flops(cfg))
        each += attention * ((2 * mesh.context - 1) / mesh.context - 1)
    if settings.step_models.adapter is not None:  # gradients of the frozen weights are not computed
        each -= forward_flops(cfg)
    return tokens * each / mesh.tensor


def moved_bytes(cfg: ModelConfig, settings: Training, plan: MeshPlan, chip: Chip) -> float:
    """Return the bytes that a device reads and writes in a step.

    They are the state once each, the weights in every pass, and the saved activations, twice if they are recomputed; on
    a GPU also the copies of a loop over layers.
    """
    mesh, memory, itemsize = plan.mesh, plan.memory, BYTES[settings.precision.compute]
    weights = whole_weights(cfg, settings, plan) * itemsize
    gathered = 2 * weights if mesh.fsdp * mesh.context > 1 else 0
    saved, _ = activations_of(cfg, mtp_layers(cfg, settings), mesh.tensor, mesh.expert, "none")
    tokens = plan.rows * settings.length // mesh.context
    values = 2 * tokens * itemsize * saved * (1 if plan.remat == "none" else 2)
    logits = 0 if cfg.scored or cfg.images else 2 * tokens * cfg.vocab // mesh.tensor * 4
    # measured on an H200: a loop copies saved activations into stacked arrays and out of them
    copied = 4 * memory.activations if plan.scan and not chip.pod else 0
    state = 2 * (memory.weights + memory.optimizer) + memory.gradients
    return state + plan.microsteps * (3 * weights + gathered + values + logits + copied)


# --- ranking ----------------------------------------------------------------------------------------------------------

# Stands for a chip that is not in the table: FLOPs per byte of memory and links as on an H100 or a v5p.
UNKNOWN = Chip("unknown", (), 1e15, 80 * GIB, 4e12, 4e11, source="none: the ratios of an H100, of no date (2023)")
AN_AXIS = 1.02  # factor per axis of a mesh: of two meshes within 2% the simpler one is preferred


@dataclass(frozen=True)
class Timed:
    """Hold a plan with its time and its links."""

    plan: MeshPlan
    time: StepTime
    spans: tuple[AxisSpan, ...]


def ranked(
    cfg: ModelConfig,
    settings: Training,
    plans: Iterable[MeshPlan],
    chip: Chip | None,
    accelerator: Accelerator | None,
    reached: Fractions | None = None,
) -> list[Timed]:
    """Return the plans with their times, the fastest first; a mesh with one more axis must be 2% faster.

    Args:
        cfg: The model.
        settings: The recipe.
        plans: The plans to rank.
        chip: The kind of chip; None if it is not in the table.
        accelerator: The devices; None if only their number is known.
        reached: The calibrated fractions of this chip.
    """
    known, found = chip or UNKNOWN, []
    for plan in plans:
        spans = spans_of(plan, known, accelerator)
        found.append(Timed(plan, step_time(cfg, settings, plan, known, spans, reached), spans))
    return sorted(found, key=lambda one: one.time.likely * AN_AXIS ** len(one.spans))


def spans_of(plan: MeshPlan, chip: Chip, accelerator: Accelerator | None) -> tuple[AxisSpan, ...]:
    """Return the links of a plan's mesh; behind one switch if the accelerator is not known."""
    return layout(accelerator, axes_of(plan.mesh)) if accelerator else one_domain(chip, axes_of(plan.mesh))
