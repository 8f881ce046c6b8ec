"""A training laid over an accelerator in every way that fits, the fastest first, with what each takes and costs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dovetail.core.accelerator import Accelerator
from dovetail.core.chips import GIB, Chip, cpu_chip
from dovetail.core.cloud import Rate
from dovetail.core.errors import UserError
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
    """Per chip and hour."""

    on_demand: Rate = UNPRICED
    spot: Rate = UNPRICED


@dataclass(frozen=True)
class TrainPlan:
    cfg: ModelConfig
    settings: Training  # the recipe with all that was open filled in
    accelerator: Accelerator
    chip: Chip
    plan: MeshPlan
    time: StepTime
    spans: tuple[AxisSpan, ...]
    limit: int  # bytes of a device to plan with
    prices: Prices = Prices()
    known: Fractions | None = None  # what a calibration found, where the times rest on one

    @property
    def mfu(self) -> tuple[float, float]:
        """(at least, at most), of the peak in bf16; causal attention, nothing recomputed is counted."""
        return self.mfu_of(causal=True)

    def mfu_of(self, causal: bool) -> tuple[float, float]:
        frozen = self.settings.adapter is not None
        each = train_flops_per_token(self.cfg, self.settings.length, causal, frozen)
        whole = each * self.settings.tokens_per_step / (self.accelerator.total_devices * peak(self.chip, self.settings))
        return whole / self.time.upper, whole / self.time.lower

    @property
    def tokens_per_second(self) -> tuple[float, float]:
        return self.settings.tokens_per_step / self.time.upper, self.settings.tokens_per_step / self.time.lower

    @property
    def costs(self) -> tuple[Cost, Cost]:
        """Of the whole run: at least, at most."""
        steps, chips = self.settings.total_steps, self.accelerator.total_chips
        low, high = (
            cost(steps * seconds, chips, self.prices.on_demand.dollars, self.prices.spot.dollars)
            for seconds in (self.time.lower, self.time.upper)
        )
        return low, high

    @property
    def seconds(self) -> tuple[float, float]:
        return self.costs[0].seconds, self.costs[1].seconds

    @property
    def days(self) -> tuple[float, float]:
        return self.costs[0].days, self.costs[1].days

    @property
    def dollars(self) -> tuple[float, float] | None:
        """On demand."""
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
    """All that fits, the best first (plan.search). What cannot be is refused with what could."""
    settings = over_slices(settings, accelerator)
    check(cfg, settings)
    chip, limit = chip_to_plan(accelerator), limit_of(cfg, settings, accelerator)
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
    """TPU slices are joined by data alone; GPUs' machines are joined by every axis, as devices come."""
    slices = accelerator.slices if accelerator.is_tpu else 1
    if settings.mesh.slices not in (1, slices):
        raise UserError(f"mesh.slices={settings.mesh.slices}, and {accelerator.name} has {slices}: leave it out")
    return replace(settings, mesh=replace(settings.mesh, slices=slices))


def chip_to_plan(accelerator: Accelerator) -> Chip:
    """Of a machine without accelerators: its CPU."""
    if accelerator.chip:
        return accelerator.chip
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cpu_chip(cores, host_memory() or 8 << 30)


def limit_of(cfg: ModelConfig, settings: Training, accelerator: Accelerator) -> int:
    """Bytes of a device that a plan may fill: what is left beside an engine, where one is there."""
    chip = chip_to_plan(accelerator)
    whole = int(chip.device_hbm * (PLANNED if accelerator.chip else PLANNED_HOST))
    return max(1, whole - sum(settings.beside(cfg, chip.device_hbm).values()))


def rows_of(batch: int, length: int, accelerator: Accelerator) -> int:
    """Rows of a batch of about so many tokens. What tensor and context cannot take of the devices (the slices, factors
    of their number other than two, and what is left of a slice by MOST_SPLIT) must divide it, and the higher the power
    of two in it, the more meshes are possible: the highest that keeps it within a tenth."""
    slices = accelerator.slices if accelerator.is_tpu else 1
    inside = accelerator.total_devices // slices
    twos = inside & -inside
    wanted, unit = batch / length, slices * (inside // twos) * max(1, twos // MOST_SPLIT)
    while unit < wanted and (nearest := round(wanted / (2 * unit)) * 2 * unit) and abs(nearest / wanted - 1) <= 0.1:
        unit *= 2
    return max(1, round(wanted / unit)) * unit


# --- why the others lose ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Loser:
    """The best plan of another kind, and what is wrong with it."""

    what: str  # "fsdp over NIC"
    why: str


def losers(found: Sequence[TrainPlan]) -> list[Loser]:
    """One for each other set of axes that fits, by how much longer it takes."""
    best, seen, lost = found[0], {_kind(found[0])}, []
    for one in found[1:]:
        if _kind(one) not in seen:
            seen.add(_kind(one))
            lost.append(Loser(describe(one), _why(one, best)))
    return lost


def _kind(one: TrainPlan) -> tuple[str, ...]:
    return tuple(span.axis for span in one.spans)


def describe(one: TrainPlan) -> str:
    """`data 2 over DCN x fsdp 256`: the slow networks are named."""
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
    """What of it takes most longer than in the best plan."""
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
    """Simple ways that do not fit, with what they would need."""
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


# What a pipeline would do: an estimate only, for our trainer has no such axis (its mesh is data, fsdp, expert, context
# and tensor).
#
# The layers are dealt out over P stages of equal size, each on its own P-th of the devices. Of M microbatches a stage
# works on M and waits for P - 1 (GPipe's bubble, (P - 1) / (M + P - 1) of the time); between stages only the hidden
# states travel, there and back.


MICROBATCHES = 4  # for each stage, where the batch has so many rows: the bubble is then a fifth


@dataclass(frozen=True)
class Staged:
    stages: int
    microbatches: int
    bubble: float  # the share of the time in which a stage waits
    sent: float  # seconds of hidden states between stages
    lower: float
    upper: float
    says: str


def staged(one: TrainPlan, stages: int) -> Staged:
    """The best plan with its data or fsdp axis cut by `stages`, and its layers dealt out over those devices."""
    mesh, layers = one.plan.mesh, len(one.cfg.layers)
    if layers % stages:
        raise UserError(f"--stages {stages} must divide the model's {layers} layers")
    cut = "data" if mesh.data % stages == 0 else "fsdp"
    if getattr(mesh, cut) % stages:
        raise UserError(f"--stages {stages} must divide data or fsdp of the best mesh, {axes_of(mesh)}")
    smaller = replace(mesh, **{cut: getattr(mesh, cut) // stages})
    rows = one.settings.batch // row_shards(smaller)
    micro = max(1, min(rows, MICROBATCHES * stages))
    bubble = (stages - 1) / (micro + stages - 1)
    tokens = rows * one.settings.length // mesh.context
    states = 2 * tokens * one.cfg.dim * BYTES[one.settings.precision.compute]
    link = min((span.far_bandwidth or span.bandwidth for span in one.spans), default=one.chip.bandwidth)
    sent = states / link
    # weights of a stage are gathered by fewer devices, each of which has as many of them as before
    lower, upper = one.time.lower / (1 - bubble), one.time.upper / (1 - bubble) + sent
    verdict = "slower" if lower + upper > one.time.lower + one.time.upper else "faster"
    says = (
        f"what if: {stages} stages of {layers // stages} layers, {micro} microbatches: {bubble:.0%} of the time is "
        f"bubble, {sent:.3g} s of a step go to hidden states between stages; a step takes {lower:.3g} - {upper:.3g} s, "
        f"{verdict} than the best above. Our trainer has no pipeline axis: this is an estimate to compare with others"
    )
    return Staged(stages, micro, bubble, sent, lower, upper, says)
