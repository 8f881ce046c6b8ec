"""What would make an impossible training possible: found by trying, never by rule of thumb."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from dovetail.core.accelerator import Accelerator
from dovetail.core.chip_family import FAMILIES, usual_sides
from dovetail.core.chips import CHIPS, GIB, Chip
from dovetail.core.training import DERIVED, REMATS, Training
from dovetail.models.config import ModelConfig
from dovetail.plan.derive import PLANNED, shape_refusal
from dovetail.plan.plans import axes_of, least_memory

OTHERS = ("v5e", "v6e", "v5p", "H100", "H200", "B200", "TPU7x")  # that are named where this kind has no slice that does
MOST_CHIPS = 16_384
MOST_REMEDIES = 4


def refusal(cfg: ModelConfig, settings: Training, accelerator: Accelerator, limit: int) -> str:
    """Why no plan fits, and what would do."""
    devices = accelerator.total_devices
    shape = shape_refusal(cfg, settings, devices, split_weights=True)
    if shape:
        return shape
    least = least_memory(cfg, settings, devices) or 0
    would = [*_larger(cfg, settings, accelerator), *_changes(cfg, settings, accelerator, limit)][:MOST_REMEDIES]
    remat = settings.remat or REMATS[-1]
    return (
        f"{settings.model} does not fit on {accelerator.name}: a device needs {least / GIB:,.1f} GiB at least "
        f"(remat={remat}), {least / limit:.3g}x the {limit / GIB:,.1f} GiB to plan with. "
        + (f"What would do: {'; or '.join(would)}" if would else "Nothing that was tried would do")
    )


def _larger(cfg: ModelConfig, settings: Training, accelerator: Accelerator) -> Iterator[str]:
    """The smallest slice of the same chip that holds it; where there is none, of others."""
    if accelerator.chip is None:
        yield "an accelerator, such as --on v6e-8"
        return
    own = smallest_slice(cfg, settings, accelerator.chip, accelerator.slices if accelerator.is_tpu else 1)
    if own:
        yield f"it fits from {own.name}"
        return
    found = ((name, smallest_slice(cfg, settings, CHIPS[name])) for name in OTHERS if name != accelerator.chip.name)
    names = [slice_.name for _, slice_ in found if slice_]
    if names:
        yield f"{accelerator.chip.name} has no slice that holds it, and it fits from {', '.join(names[:3])}"


def smallest_slice(cfg: ModelConfig, settings: Training, chip: Chip, slices: int = 1) -> Accelerator | None:
    """The fewest chips, a power of two, in so many slices; None where a whole pod is too small."""
    limit, chips = int(chip.device_hbm * PLANNED), 1
    while chips <= min(chip.pod or MOST_CHIPS, MOST_CHIPS):
        one = _slices(chip, chips, slices)
        if one and fits(cfg, settings, one, limit):
            return one
        chips *= 2
    return None


def _slices(chip: Chip, chips: int, slices: int) -> Accelerator | None:
    """So many chips in each of so many slices; of GPUs, in NVLink domains of a power of two."""
    if FAMILIES[chip.name].sides:
        sides = usual_sides(chip, chips)
        return Accelerator(chip, sides, slices) if sides else None
    near = min(chips, 1 << (chip.domain.bit_length() - 1))
    return Accelerator(chip, (near,), chips // near)


def fits(cfg: ModelConfig, settings: Training, accelerator: Accelerator, limit: int) -> bool:
    """Whether any plan does, with rows for every device where the recipe has fewer."""
    slices = accelerator.slices if accelerator.is_tpu else 1
    mesh, devices = replace(settings.mesh, slices=slices), accelerator.total_devices
    if not mesh.data and not mesh.fsdp:  # what splits weights most needs least
        mesh = replace(mesh, data=slices)
    rows = max(settings.batch, devices) if settings.batch % devices else settings.batch
    least = least_memory(cfg, replace(settings, mesh=mesh, batch=rows, accumulate=0), devices)
    return least is not None and least <= limit


def _changes(cfg: ModelConfig, settings: Training, accelerator: Accelerator, limit: int) -> Iterator[str]:
    """Keys of the recipe that would make room, each alone; then the frugal ones together."""
    mesh = settings.mesh
    wide = replace(DERIVED, slices=mesh.slices)
    given = ", ".join(f"mesh.{name}={size}" for name, size in axes_of(mesh).items() if size > 1)
    frugal = replace(
        settings, optimizer=replace(settings.optimizer, name="adafactor"),
        precision=replace(settings.precision, params="bf16"),
    )  # fmt: skip
    tried = {
        f"the mesh left open in place of {given}": replace(settings, mesh=wide),
        f"remat left open in place of {settings.remat}": replace(settings, remat=""),
        "per_device and accumulate left open": replace(settings, per_device=0, accumulate=0),
        "ema=0": replace(settings, ema=0.0),
        "optimizer.name=adafactor": replace(settings, optimizer=frugal.optimizer),
        "precision.params=bf16": replace(settings, precision=frugal.precision),
    }
    worked = False
    for what, changed in tried.items():
        if changed != settings and fits(cfg, changed, accelerator, limit):
            worked = True
            yield what
    if not worked and fits(cfg, frugal, accelerator, limit):
        yield "optimizer.name=adafactor with precision.params=bf16"
