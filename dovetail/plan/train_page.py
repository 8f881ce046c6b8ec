"""Build the page of training plans: one step of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from dovetail.core.units import format_count, format_duration
from dovetail.plan.cost import unit_of
from dovetail.plan.operations import training_operations
from dovetail.plan.page import Choice, Page, Share
from dovetail.plan.plans import MeshPlan, axes_of, num_experts
from dovetail.plan.train_plan import TrainPlan
from dovetail.plan.train_time import peak

MOST = 6  # plans


def training_page(plans: Sequence[TrainPlan]) -> Page:
    """Return the page of `plans`, the best first. Of plans with the same mesh only the best is shown."""
    best, meshes = plans[0], {}
    for one in plans:
        meshes.setdefault(one.plan.mesh, one)
    settings, accelerator = best.settings, best.accelerator
    about = (
        f"Plan for training: {settings.batch:,} rows of {settings.length:,} tokens per step, computed in "
        f"{settings.precision.compute} with {settings.optimizer.name}"
    )
    choices = tuple(_choice(one) for one in list(meshes.values())[:MOST])
    title = f"{settings.model} on {accelerator.name}"
    return Page(title, about, accelerator, choices, chip=best.chip, peak=peak(best.chip, settings))


def _choice(one: TrainPlan) -> Choice:
    plan = one.plan
    return Choice(
        _title(plan), axes_of(plan.mesh), {kind.name: getattr(plan.memory, kind.name) for kind in fields(plan.memory)},
        one.limit, training_operations(one.cfg, one.settings, plan), one.time, len(one.cfg.layers), plan.microsteps,
        _shares(one), _figures(one), _recipe(one),
    )  # fmt: skip


def _title(plan: MeshPlan) -> str:
    axes = " x ".join(f"{name} {size}" for name, size in axes_of(plan.mesh).items() if size > 1)
    return f"{axes or 'one device'}, remat {plan.remat}"


def _shares(one: TrainPlan) -> tuple[Share, ...]:
    """Return what the devices share, as core.mesh.TRAIN splits it."""
    cfg, settings, experts = one.cfg, one.settings, num_experts(one.cfg)
    found = [
        Share("rows of a microstep", settings.batch // one.plan.microsteps, ("data", "fsdp", "expert")),
        Share("tokens of each row", settings.length, ("context",)),
        Share("model dim of each weight", cfg.dim, ("fsdp", "context")),
        Share("attention heads", cfg.layers[0].attn.heads, ("tensor",)),
        Share("vocabulary", cfg.vocab, ("tensor",)),
    ]
    return tuple(found + ([Share("experts", experts, ("expert",))] if experts > 1 else []))


def _figures(one: TrainPlan) -> tuple[tuple[str, str, str], ...]:
    time, plan, steps = one.time, one.plan, one.settings.total_steps
    kind = "bounds" if one.known is None else "bounds, calibrated"
    found = [
        ("step", f"{format_duration(time.lower)} to {format_duration(time.upper)}", kind),
        ("rate", f"{_range(one.tokens_per_second)} tok/s", f"{kind}, all devices"),
        ("MFU", f"{one.mfu[0]:.0%} to {one.mfu[1]:.0%}", f"{kind}, causal attention"),
        ("rows at a time", f"{plan.rows:,} per device", f"{plan.microsteps:,} microstep{'s'[: plan.microsteps > 1]}"),
    ]
    if steps > 1:
        unit, seconds = unit_of(one.seconds[1])
        tokens = format_count(float(steps * one.settings.tokens_per_step))
        time = _range((one.seconds[0] / seconds, one.seconds[1] / seconds))
        found.append(("run", f"{time} {unit}", f"{kind}, {steps:,} steps, {tokens} tokens"))
    if steps > 1 and one.dollars:
        found.append(("cost", f"${_range(one.dollars)}", f"{kind}, {one.prices.on_demand.says}"))
    return tuple(found)


def _range(ends: tuple[float, float]) -> str:
    low, high = sorted(ends)
    return f"{format_count(low)} to {format_count(high)}"


def _recipe(one: TrainPlan) -> str:
    """Return the lines of a recipe that the plan decides."""
    mesh = ", ".join(f"{name}: {size}" for name, size in axes_of(one.plan.mesh).items())
    lines = {
        "batch": one.settings.batch, "length": one.settings.length, "mesh": f"{{{mesh}}}", "remat": one.plan.remat,
        "scan": str(one.plan.scan).lower(), "per_device": one.plan.rows, "accumulate": one.plan.microsteps,
    }  # fmt: skip
    return "".join(f"{name}: {value}\n" for name, value in lines.items())
