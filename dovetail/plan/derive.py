"""Derive what a recipe leaves open from the model and the hardware: mesh, remat, rows per device, accumulation, scan.

The fastest of all plans that fit is chosen (plan.plans, plan.train_memory, plan.train_time). Keys that the recipe sets
are kept. If nothing fits, the error says what would (plan.refusal).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace

from dovetail.core.accelerator import of_devices
from dovetail.core.chips import Chip
from dovetail.core.errors import RecipeError
from dovetail.core.training import REMATS, Mesh, Training
from dovetail.core.units import format_bytes
from dovetail.models.config import ModelConfig
from dovetail.models.repeats import repeats
from dovetail.models.spec import flops_per_token
from dovetail.plan.external import external_plan
from dovetail.plan.flops import mean_keys, recomputed
from dovetail.plan.plans import MeshPlan, axes_of, layers_folded, most_unrolled, plans, row_shards
from dovetail.plan.refusal import check, refuse_devices
from dovetail.plan.train_memory import PLANNED, PLANNED_HOST, TrainMemory, memory
from dovetail.plan.train_time import ranked


@dataclass(frozen=True)
class Derived:
    """Hold a recipe with every open key decided, and the reasons."""

    settings: Training  # the recipe with the derived keys filled in
    devices: int
    hardware: str
    limit: int | None  # bytes of a device that the plan may fill; None: not known
    memory: TrainMemory
    why: tuple[tuple[str, str, str], ...]  # (key, its value, the reason)
    beside: Mapping[str, int] = field(default_factory=dict)  # bytes of something else on each device, by name
    is_state_only: bool = False  # whether `memory` counts no activations (models.external)

    @property
    def axes(self) -> dict[str, int]:
        """Return the mesh's axes, for core.mesh.make_mesh."""
        return axes_of(self.settings.mesh)

    def explain(self) -> list[str]:
        """Return the lines to print: each value with its reason, then the memory table."""
        wide = max(len(value) for _, value, _ in self.why)
        lines = [f"derived for {self.hardware}"]
        lines += [f"  {what:<12}{value:<{wide}}  {reason}" for what, value, reason in self.why]
        counted = "for the state, without activations" if self.is_state_only else "at the peak of a step, estimated"
        lines.append(f"memory of one device {counted}")
        parts = {f.name: getattr(self.memory, f.name) for f in fields(self.memory)} | dict(self.beside)
        parts = {name: size for name, size in parts.items() if size} if self.is_state_only else parts
        wide = max(12, *(len(name) + 2 for name in parts))
        lines += [f"  {name:<{wide}}{format_bytes(size):>10}" for name, size in parts.items()]
        share = f"  of {format_bytes(self.limit)} to plan with" if self.limit else ""
        return [*lines, f"  {'total':<{wide}}{format_bytes(sum(parts.values())):>10}{share}"]


def derive(
    cfg: ModelConfig,
    settings: Training,
    chip: Chip | None = None,
    devices: int = 1,
    slices: int = 1,
    hbm: int | None = None,
    on_host: bool = False,
    beside: Mapping[str, int] | None = None,
) -> Derived:
    """Return the recipe with every open key decided for this hardware.

    Args:
        cfg: The model.
        settings: The recipe.
        chip: The kind of chip; None if it is not in the table (core.chips).
        devices: The number of jax devices, over all slices.
        slices: The number of slices that the devices come from.
        hbm: Bytes of memory per device where that is known better than from the chip's table
            (core.chips.usable_bytes); for CPU devices, the device's share of the host's memory. Without `hbm` and
            `chip`, memory is assumed to be sufficient.
        on_host: Whether the devices are CPU devices.
        beside: Bytes per device that something else than the training needs, by name.

    Raises:
        RecipeError: The recipe does not match the model or the devices.
        OutOfMemoryError: No plan fits; the message says what would.
    """
    settings = replace(settings, mesh=_with_slices(settings.mesh, slices))
    if on_host:  # CPU devices share one memory: splitting layers or rows between them saves nothing
        mesh = settings.mesh
        settings = replace(settings, mesh=replace(mesh, tensor=mesh.tensor or 1, context=mesh.context or 1))
    hbm = hbm or (chip.device_hbm if chip else None)
    whole, others = int(hbm * (PLANNED_HOST if on_host else PLANNED)) if hbm else None, dict(beside or {})
    limit = whole and max(1, whole - sum(others.values()))
    hardware = _hardware(_name(chip, hbm, on_host), devices, settings.mesh.slices, hbm)
    if cfg.external:
        filled, needed, why = external_plan(cfg, settings, devices, limit)
        return Derived(filled, devices, hardware, whole, needed, why, others, is_state_only=True)
    check(cfg, settings)
    on_gpu = chip.pod is None if chip else bool(hbm) and not on_host  # a chip not in the table is a GPU
    on_tpu = chip is not None and chip.pod is not None
    found = list(plans(cfg, settings, devices, limit, on_gpu=on_gpu, on_tpu=on_tpu))
    if on_host:  # the estimate of links and recomputation does not hold for CPUs: avoid both if that fits
        found = [plan for plan in plans(cfg, settings, devices, None) if plan in found] or found
    if not found:
        raise refuse_devices(cfg, settings, _name(chip, hbm, on_host), devices, limit, on_host)
    machine = of_devices(chip, devices, settings.mesh.slices) if chip else None
    best = ranked(cfg, settings, found, chip, machine)[0].plan
    filled = replace(
        settings, mesh=best.mesh, scan=best.scan, remat=best.remat, per_device=best.rows, accumulate=best.microsteps
    )
    why = _reasons(cfg, settings, best, limit, on_gpu, on_tpu)
    return Derived(filled, devices, hardware, whole, best.memory, why, others)


def _with_slices(mesh: Mesh, slices: int) -> Mesh:
    """Return the mesh with the slices of the hardware, or the recipe's own number if the hardware has one slice."""
    if mesh.slices not in (1, slices) and slices > 1:
        raise RecipeError(
            f"`mesh.slices` must be {slices}, the number of slices that the devices come from, got {mesh.slices}: "
            "remove it",
            param="mesh.slices",
        )
    return replace(mesh, slices=max(slices, mesh.slices))


# --- reasons ----------------------------------------------------------------------------------------------------------


def _reasons(
    cfg: ModelConfig, settings: Training, plan: MeshPlan, limit: int | None, on_gpu: bool, on_tpu: bool
) -> tuple[tuple[str, str, str], ...]:
    shown = [f"{name} {size}" for name, size in axes_of(plan.mesh).items() if size > 1]
    return (
        ("mesh", " x ".join(shown) or "1 device", _why_mesh(cfg, settings, plan, limit)),
        ("remat", plan.remat, _why_remat(cfg, settings, plan, limit, on_tpu)),
        ("per_device", str(plan.rows), _why_rows(settings, plan)),
        ("accumulate", str(plan.microsteps), _why_accumulate(settings, plan)),
        ("scan", str(plan.scan).lower(), _why_scan(cfg, settings, plan, on_gpu)),
    )


def _why_scan(cfg: ModelConfig, settings: Training, plan: MeshPlan, on_gpu: bool) -> str:
    if settings.scan is not None:
        return "given"
    if plan.scan:
        group = max(repeats(cfg), key=lambda one: one.period * one.times)
        one = "one" if group.period == 1 else f"a group of {group.period}"
        return f"{layers_folded(cfg)} layers in a row compile as {one}"
    return f"no more than {most_unrolled(plan.mesh, on_gpu)} layers in a row are alike"


def _why_mesh(cfg: ModelConfig, settings: Training, plan: MeshPlan, limit: int | None) -> str:
    given = _given_axes(settings.mesh)
    state, whole = (
        m.weights + m.optimizer
        for m in (plan.memory, memory(cfg, settings, {"data": row_shards(plan.mesh)}, plan.remat, plan.rows))
    )
    if state < whole:
        return given + f"the state ({format_bytes(whole)}) is split: each device holds {format_bytes(state)} of it"
    if plan.mesh.context > 1:
        return given + "each row is split over devices, and weights are whole on each"
    if row_shards(plan.mesh) == 1:
        return given + "nothing is split"
    fits = (
        f"the state ({format_bytes(state)}) fits on each, so no weight travels"
        if limit
        else "weights are whole on each"
    )
    return given + f"rows are split over the devices; {fits}"


def _given_axes(mesh: Mesh) -> str:
    """Return which axes of the mesh the recipe sets, as the start of a sentence."""
    if mesh.data and mesh.fsdp and mesh.expert:
        return "given; "
    names = [name for name, size in axes_of(mesh).items() if size > (name not in ("data", "fsdp"))]
    return f"{', '.join(names)} given; " if names else ""


def _why_remat(cfg: ModelConfig, settings: Training, plan: MeshPlan, limit: int | None, on_tpu: bool) -> str:
    extra = recomputed(cfg, settings.length, plan.remat) / flops_per_token(
        cfg, mean_keys(cfg, settings.length), train=True
    )
    if settings.remat:
        return f"given; {extra:.0%} more FLOPs"
    if plan.remat == "none":
        return "nothing is recomputed: all activations fit" if limit else "nothing is recomputed"
    before = REMATS[REMATS.index(plan.remat) - 1]
    laid = replace(settings, scan=plan.scan)
    needed = memory(cfg, laid, axes_of(plan.mesh), before, plan.rows, on_tpu=on_tpu).total
    if limit and needed <= limit:
        return f"{extra:.0%} more FLOPs; the loop over layers would copy all that {before} saves"
    return f"{extra:.0%} more FLOPs; {before} with as many rows would need {format_bytes(needed)}"


def _why_rows(settings: Training, plan: MeshPlan) -> str:
    if settings.per_device:
        return "given"
    shared = plan.mesh.tensor * plan.mesh.context
    over = f"{_count(row_shards(plan.mesh), 'group')} of {shared} devices" if shared > 1 else ""
    over = over or _count(row_shards(plan.mesh), "device")
    return f"{settings.batch} rows = {over} x {_count(plan.rows, 'row')} x {_count(plan.microsteps, 'microstep')}"


def _why_accumulate(settings: Training, plan: MeshPlan) -> str:
    if settings.accumulate:
        return "given"
    if plan.microsteps == 1:
        return "all rows at once"
    return f"follows from per_device={plan.rows}" if settings.per_device else "more rows at a time do not fit"


def _count(n: int, what: str) -> str:
    return f"{n} {what}" + ("s" if n != 1 else "")


def _name(chip: Chip | None, hbm: int | None, on_host: bool) -> str:
    return chip.name if chip else "device of a kind not in the table" if hbm and not on_host else "CPU device"


def _hardware(name: str, devices: int, slices: int, hbm: int | None) -> str:
    size = f", {format_bytes(hbm)} each" if hbm else ""
    return f"{devices} x {name}{size}" + (f", in {slices} slices" if slices > 1 else "")
