"""Plan training on an accelerator: every plan that fits, the fastest first, with its time and cost."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dovetail.core.accelerator import Accelerator
from dovetail.core.chips import GIB, Chip, cpu_chip
from dovetail.core.cloud import Rate
from dovetail.core.errors import RecipeError, UserError
from dovetail.core.host import host_memory
from dovetail.core.training import Mesh, Training
from dovetail.models.config import ModelConfig
from dovetail.plan.calibration import Fractions
from dovetail.plan.cost import Cost, cost
from dovetail.plan.flops import train_flops_per_token
from dovetail.plan.links import AxisSpan
from dovetail.plan.plans import MOST_SPLIT, MeshPlan, axes_of, least_memory, plans, row_shards
from dovetail.plan.refusal import check, refuse_accelerator
from dovetail.plan.train_memory import BYTES, PLANNED, PLANNED_HOST
from dovetail.plan.train_time import USUAL_LINKS, USUAL_MEMORY, StepTime, peak, ranked, usual_products

UNPRICED = Rate(None, "no price was looked up")


@dataclass(frozen=True)
class Prices:
    """Hold the dollars per chip and hour."""

    on_demand: Rate = UNPRICED
    spot: Rate = UNPRICED


@dataclass(frozen=True)
class TrainPlan:
    """Hold one plan of a recipe on an accelerator."""

    cfg: ModelConfig
    settings: Training  # the recipe with the derived keys filled in
    accelerator: Accelerator
    chip: Chip
    plan: MeshPlan
    time: StepTime
    spans: tuple[AxisSpan, ...]
    limit: int  # bytes of a device that the plan may fill
    prices: Prices = Prices()
    known: Fractions | None = None  # the calibrated fractions that the times use

    @property
    def mfu(self) -> tuple[float, float]:
        """Return the MFU (at least, at most), with causal attention."""
        return self.mfu_of(causal=True)

    def mfu_of(self, causal: bool) -> tuple[float, float]:
        """Return the MFU (at least, at most). `causal`: which convention to count attention by (plan.flops)."""
        frozen = self.settings.step_models.adapter is not None
        each = train_flops_per_token(self.cfg, self.settings.length, causal, frozen)
        whole = each * self.settings.tokens_per_step / (self.accelerator.total_devices * peak(self.chip, self.settings))
        return whole / self.time.upper, whole / self.time.lower

    @property
    def tokens_per_second(self) -> tuple[float, float]:
        """Return the rate of all devices (at least, at most)."""
        return self.settings.tokens_per_step / self.time.upper, self.settings.tokens_per_step / self.time.lower

    @property
    def costs(self) -> tuple[Cost, Cost]:
        """Return the cost of the whole run (at least, at most)."""
        steps, chips = self.settings.total_steps, self.accelerator.total_chips
        low, high = (
            cost(steps * seconds, chips, self.prices.on_demand.dollars, self.prices.spot.dollars)
            for seconds in (self.time.lower, self.time.upper)
        )
        return low, high

    @property
    def seconds(self) -> tuple[float, float]:
        """Return the seconds of the whole run (at least, at most)."""
        return self.costs[0].seconds, self.costs[1].seconds

    @property
    def days(self) -> tuple[float, float]:
        """Return the days of the whole run (at least, at most)."""
        return self.costs[0].days, self.costs[1].days

    @property
    def dollars(self) -> tuple[float, float] | None:
        """Return the on-demand dollars of the whole run (at least, at most); None if there is no price."""
        low, high = (each.dollars for each in self.costs)
        return None if low is None or high is None else (low, high)


def plan_training(
    cfg: ModelConfig,
    settings: Training,
    accelerator: Accelerator,
    *,
    prices: Prices = Prices(),
    known: Fractions | None = None,
) -> list[TrainPlan]:
    """Return every plan that fits, the best first.

    Args:
        cfg: The model.
        settings: The recipe.
        accelerator: The devices.
        prices: Dollars per chip and hour.
        known: The calibrated fractions of this chip.

    Raises:
        RecipeError: The recipe does not match the model or the devices.
        OutOfMemoryError: No plan fits; the message says what would.
    """
    settings = over_slices(settings, accelerator)
    check(cfg, settings)
    chip, limit = chip_to_plan(accelerator), limit_of(accelerator)
    kind = dict(on_gpu=bool(accelerator.chip) and not accelerator.is_tpu, on_tpu=accelerator.is_tpu)
    found = list(plans(cfg, settings, accelerator.total_devices, limit, **kind, on_host=accelerator.chip is None))
    if not found:
        raise refuse_accelerator(cfg, settings, accelerator, limit)
    return [
        TrainPlan(
            cfg, _filled(settings, one.plan), accelerator, chip, one.plan, one.time, one.spans, limit, prices, known
        )
        for one in ranked(cfg, settings, found, chip, accelerator, known)
    ]


def _filled(settings: Training, plan: MeshPlan) -> Training:
    return replace(
        settings, mesh=plan.mesh, scan=plan.scan, remat=plan.remat, per_device=plan.rows, accumulate=plan.microsteps
    )


def over_slices(settings: Training, accelerator: Accelerator) -> Training:
    """Return the recipe with the accelerator's slices in its mesh.

    Only the data axis crosses TPU slices. Machines with GPUs are not slices: every axis may cross them.
    """
    slices = accelerator.slices if accelerator.is_tpu else 1
    if settings.mesh.slices not in (1, slices):
        raise RecipeError(
            f"`mesh.slices` must be the {slices} of {accelerator.name}, got {settings.mesh.slices}: remove it",
            param="mesh.slices",
        )
    return replace(settings, mesh=replace(settings.mesh, slices=slices))


def chip_to_plan(accelerator: Accelerator) -> Chip:
    """Return the accelerator's chip; for a machine without accelerators, its CPU."""
    if accelerator.chip:
        return accelerator.chip
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cpu_chip(cores, host_memory() or 8 << 30)


def limit_of(accelerator: Accelerator) -> int:
    """Return the bytes of a device that a plan may fill."""
    return int(chip_to_plan(accelerator).device_hbm * (PLANNED if accelerator.chip else PLANNED_HOST))


def rows_of(batch: int, length: int, accelerator: Accelerator) -> int:
    """Return the rows of a batch with about `batch` tokens that can be split over the accelerator.

    The devices that tensor and context cannot use must divide the rows: the slices, the odd factor of a slice, and what
    MOST_SPLIT leaves of it. The higher the power of two in the rows, the more meshes are possible, so the highest that
    keeps the batch within a tenth is chosen.
    """
    slices = accelerator.slices if accelerator.is_tpu else 1
    inside = accelerator.total_devices // slices
    twos = inside & -inside
    wanted, unit = batch / length, slices * (inside // twos) * max(1, twos // MOST_SPLIT)
    while unit < wanted and (nearest := round(wanted / (2 * unit)) * 2 * unit) and abs(nearest / wanted - 1) <= 0.1:
        unit *= 2
    return max(1, round(wanted / unit)) * unit


# --- why the other plans are slower -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Loser:
    """Hold a plan of another kind, and why it is not the best."""

    what: str  # "fsdp over NIC"
    why: str


def losers(found: Sequence[TrainPlan]) -> list[Loser]:
    """Return the best plan of every other set of axes, with why it is slower than the best of all."""
    best, seen, lost = found[0], {_kind(found[0])}, []
    for one in found[1:]:
        if _kind(one) not in seen:
            seen.add(_kind(one))
            lost.append(Loser(describe(one), _why(one, best)))
    return lost


def _kind(one: TrainPlan) -> tuple[str, ...]:
    return tuple(span.axis for span in one.spans)


def describe(one: TrainPlan) -> str:
    """Return the plan's axes with the slow networks that they cross, such as `data 2 over DCN x fsdp 256`."""
    names = (f"{span.axis} {span.size}" + (f" over {span.over}" if span.far > 1 else "") for span in one.spans)
    return " x ".join(names) or "one device"


def _why(one: TrainPlan, best: TrainPlan) -> str:
    times = one.time.likely / best.time.likely
    longer = f"{times:.1f}x the time" if times >= 1.05 else f"{times - 1:.0%} slower" if times >= 1.005 else "no faster"
    bound = one.time.bound_by
    if bound not in ("products", "memory"):
        over = next((span.over for span in one.spans if span.axis == bound), "")
        waits = f"{one.time.lower / one.time.products:.1f}x communication-bound by {bound}"
        return f"{longer}, {waits}{f' over {over}' if over else ''}"
    return f"{longer}: {_most(one, best)}"


def _most(one: TrainPlan, best: TrainPlan) -> str:
    """Return the part of the step that takes longest compared with the best plan."""
    more = {
        "products": (one.time.products - best.time.products) / usual_products(one.chip),
        "links": (one.time.links - best.time.links) / USUAL_LINKS,
        "memory": (one.time.memory - best.time.memory) / USUAL_MEMORY,
    }
    worst = max(more, key=lambda name: more[name])
    if worst == "products":
        return f"{one.time.products / best.time.products - 1:.0%} more FLOPs (remat {one.plan.remat})"
    doing = {"links": "sends", "memory": "reads and writes memory"}[worst]
    here, there = getattr(one.time, worst), getattr(best.time, worst)
    return f"{doing} for {here:.2g} s of a step, {there:.2g} s in the best"


def misfits(best: TrainPlan) -> list[Loser]:
    """Return the simple meshes that do not fit, with the memory that they would need."""
    settings, devices, found = best.settings, best.accelerator.total_devices, []
    slices = settings.mesh.slices
    ways = {
        "weights whole on each device": Mesh(data=devices, fsdp=1, slices=slices),
        "fsdp alone": Mesh(data=slices, fsdp=devices // slices, slices=slices),
    }
    left_open = replace(settings, remat="", per_device=0, accumulate=0)
    for what, mesh in ways.items():
        least = least_memory(best.cfg, replace(left_open, mesh=mesh), devices)
        if least is not None and least > best.limit:
            sizes = f"{least / GIB:,.0f} GiB on a device, {best.limit / GIB:,.1f} to plan with"
            found.append(Loser(what, f"does not fit: {sizes}"))
    return found


# --- an estimate of a pipeline ----------------------------------------------------------------------------------------

MICROBATCHES = 4  # per stage, if the batch has enough rows: the bubble is then a fifth of the time


@dataclass(frozen=True)
class Staged:
    """Hold the estimate of a pipeline."""

    stages: int
    microbatches: int
    bubble: float  # the share of the time in which a stage waits
    sent: float  # seconds of hidden states between stages
    lower: float
    upper: float
    says: str


def staged(one: TrainPlan, stages: int) -> Staged:
    """Estimate a plan with its layers split into pipeline stages, along a part of its data or fsdp axis.

    This is an estimate only: the trainer has no pipeline axis. The layers are split into P stages of equal size, each
    on 1/P of the devices. With M microbatches a stage waits for P - 1 of them (GPipe's bubble, (P - 1) / (M + P - 1) of
    the time). Only hidden states and their gradients are sent between stages.

    Raises:
        UserError: `stages` does not divide the layers, or neither data nor fsdp.
    """
    mesh, layers = one.plan.mesh, len(one.cfg.layers)
    if layers % stages:
        raise UserError(f"--stages must divide the model's {layers} layers, got {stages}", param="--stages")
    cut = "data" if mesh.data % stages == 0 else "fsdp"
    if getattr(mesh, cut) % stages:
        raise UserError(
            f"--stages must divide data or fsdp of the best mesh, {axes_of(mesh)}, got {stages}", param="--stages"
        )
    smaller = replace(mesh, **{cut: getattr(mesh, cut) // stages})
    rows = one.settings.batch // row_shards(smaller)
    micro = max(1, min(rows, MICROBATCHES * stages))
    bubble = (stages - 1) / (micro + stages - 1)
    tokens = rows * one.settings.length // mesh.context
    states = 2 * tokens * one.cfg.dim * BYTES[one.settings.precision.compute]
    link = min((span.far_bandwidth or span.bandwidth for span in one.spans), default=one.chip.bandwidth)
    sent = states / link
    # fewer devices gather the weights of a stage, and each holds as many of them as before
    lower, upper = one.time.lower / (1 - bubble), one.time.upper / (1 - bubble) + sent
    verdict = "slower" if lower + upper > one.time.lower + one.time.upper else "faster"
    says = (
        f"what if: {stages} stages of {layers // stages} layers, {micro} microbatches: the bubble is {bubble:.0%} of "
        f"the time, sending hidden states between stages takes {sent:.3g} s of a step; a step takes {lower:.3g} - "
        f"{upper:.3g} s, {verdict} than the best above. Dovetail's trainer has no pipeline axis: this is an estimate "
        "to compare with other trainers"
    )
    return Staged(stages, micro, bubble, sent, lower, upper, says)
