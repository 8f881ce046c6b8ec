"""Check whether a training recipe fits a model and its devices, and say what would fit.

Every suggestion is found by planning the changed recipe, not by a rule of thumb.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice

from dovetail.core.accelerator import Accelerator
from dovetail.core.chips import CHIPS, FAMILIES, GIB, Chip, usual_sides
from dovetail.core.errors import OutOfMemoryError, RecipeError, UserError
from dovetail.core.training import DERIVED, REMATS, Training
from dovetail.core.units import format_bytes
from dovetail.models.config import ModelConfig
from dovetail.plan.plans import axes_of, least_memory, meshes, num_experts, num_heads, row_shards, row_splits
from dovetail.plan.train_memory import PLANNED

OTHERS = ("v5e", "v6e", "v5p", "H100", "H200", "B200", "TPU7x")  # suggested when no slice of the same chip is enough
MOST_DEVICES = 16_384
MOST_REMEDIES = 4


# --- checks that do not depend on memory ------------------------------------------------------------------------------


def check(cfg: ModelConfig, settings: Training) -> None:
    """Refuse a recipe that this model cannot run on any number of devices.

    Raises:
        RecipeError: The length, or an axis of the mesh, does not match the model.
    """
    mesh, experts, heads = settings.mesh, num_experts(cfg), num_heads(cfg)
    if settings.length > cfg.max_len:
        raise RecipeError(
            f"`length` must be at most the model's {cfg.max_len} positions, got {settings.length}: lower it, or raise "
            "max_position_embeddings in the model's config.json",
            param="length",
        )
    if mesh.context and settings.length % mesh.context:
        raise RecipeError(
            f"mesh.context={mesh.context} must divide length, which is {settings.length}", param="mesh.context"
        )
    if mesh.expert > 1 and (experts == 1 or experts % mesh.expert):
        has = f"{experts} experts" if experts > 1 else "no experts"
        raise RecipeError(
            f"mesh.expert={mesh.expert} must divide the model's experts; it has {has}", param="mesh.expert"
        )
    if mesh.tensor and heads % mesh.tensor:
        raise RecipeError(
            f"mesh.tensor={mesh.tensor} must divide the model's {heads} attention heads", param="mesh.tensor"
        )
    split = mesh.fsdp * max(mesh.context, 1)
    if mesh.fsdp > 1 and cfg.dim % split:
        raise RecipeError(
            f"mesh.fsdp x mesh.context is {split} and must divide the model dim, {cfg.dim}: "
            "otherwise every device would hold every weight whole",
            param="mesh.fsdp",
        )


def shape_refusal(cfg: ModelConfig, settings: Training, devices: int, split_weights: bool) -> str | None:
    """Return why the mesh or the batch cannot be split over `devices`, or None if it can."""
    possible = list(meshes(cfg, settings, devices, split_weights))
    if not possible:
        given = " x ".join(f"{name} {size}" for name, size in axes_of(settings.mesh).items() if size > 1)
        slices = f" in {settings.mesh.slices} slices" if settings.mesh.slices > 1 else ""
        return (
            f"a mesh of {given or 'one device'} cannot be laid over {devices} devices{slices}: the sizes must multiply "
            "to that number, and data=0 and fsdp=0 are derived to fill it"
        )
    if not any(True for mesh in possible for _ in row_splits(settings, row_shards(mesh))):
        return _no_rows(settings, min(row_shards(mesh) for mesh in possible))
    return None


def _no_rows(settings: Training, shards: int) -> str:
    rows = settings.batch
    if rows % shards:
        more = -(-rows // shards) * shards
        share = f", or mesh.context={shards // rows} to share rows between devices" if shards % rows == 0 else ""
        return f"batch={rows} rows cannot be split evenly over {shards} devices: batch={more} can{share}"
    given = [f"{n}={getattr(settings, n)}" for n in ("per_device", "accumulate") if getattr(settings, n)]
    return (
        f"{' and '.join(given)} do not make up the batch: {rows} rows over {shards} devices are {rows // shards} per "
        "device, and per_device x accumulate must equal that; remove one of the two keys, or both"
    )


# --- memory -----------------------------------------------------------------------------------------------------------


def fits(cfg: ModelConfig, settings: Training, devices: int, limit: int) -> bool:
    """Return whether the plan that needs the least memory fits into `limit` bytes per device."""
    least = least_memory(cfg, settings, devices)
    return least is not None and least <= limit


def smallest(cfg: ModelConfig, settings: Training, chip: Chip) -> int | None:
    """Return the fewest chips, a power of two, on which the recipe fits, or None."""
    chips = 1
    while chips * chip.devices <= MOST_DEVICES and chips <= (chip.pod or MOST_DEVICES):
        if fits(cfg, settings, chips * chip.devices, int(chip.device_hbm * PLANNED)):
            return chips
        chips *= 2
    return None


def refuse_devices(
    cfg: ModelConfig, settings: Training, name: str, devices: int, limit: int | None, on_host: bool
) -> UserError:
    """Return the error for devices that no plan fits: a RecipeError or an OutOfMemoryError, with what would fit.

    Args:
        cfg: The model.
        settings: The recipe.
        name: The name of the device kind.
        devices: The number of devices.
        limit: Bytes of each device that the plan may fill; None if not known.
        on_host: Whether the devices are CPU devices, which share the memory of one host.
    """
    shape = shape_refusal(cfg, settings, devices, split_weights=limit is not None)
    least = least_memory(cfg, settings, devices)
    if shape or least is None or limit is None:
        return RecipeError(shape or "no plan is left")
    remat = settings.remat or REMATS[-1]
    remedies = _remedies(cfg, settings, devices, limit, more=not on_host)
    would = list(islice(remedies, 2)) or ["more memory" if on_host else "a device with more memory"]
    share = ", its share of the memory that this host, container or job has"
    return OutOfMemoryError(
        f"it does not fit: each of {devices} x {name} would need {format_bytes(least)} at least (remat={remat}) and "
        f"has {format_bytes(limit)} to plan with{share if on_host else ''}. What would do: {' or '.join(would)}"
    )


def _remedies(cfg: ModelConfig, settings: Training, devices: int, limit: int, more: bool) -> Iterator[str]:
    """Yield single changes that make the recipe fit. `more`: whether additional devices add memory."""
    mesh = settings.mesh
    changes = {
        "remat left open": replace(settings, remat=""),
        "per_device and accumulate left open": replace(settings, per_device=0, accumulate=0),
        "mesh.data and mesh.fsdp left open": replace(settings, mesh=replace(mesh, data=0, fsdp=0)),
        "mesh.expert=0 (derived)": replace(settings, mesh=replace(mesh, expert=0)),
    }
    wider = [n for n in (2, 4, 8) if 0 < mesh.tensor < n and num_heads(cfg) % n == 0]
    changes |= {f"mesh.tensor={n}": replace(settings, mesh=replace(mesh, tensor=n)) for n in wider}
    for what, changed in changes.items():
        if changed != settings and fits(cfg, changed, devices, limit):
            yield what
    count = 2 * devices
    while more and count <= MOST_DEVICES:
        if fits(cfg, settings, count, limit):
            yield f"{count} devices"
            return
        count *= 2


def refuse_accelerator(cfg: ModelConfig, settings: Training, accelerator: Accelerator, limit: int) -> UserError:
    """Return the error for an accelerator with `limit` bytes per device that no plan fits, with what would fit."""
    devices = accelerator.total_devices
    shape = shape_refusal(cfg, settings, devices, split_weights=True)
    if shape:
        return RecipeError(shape)
    least = least_memory(cfg, settings, devices) or 0
    would = [*_larger(cfg, settings, accelerator), *_smaller_recipes(cfg, settings, accelerator, limit)][:MOST_REMEDIES]
    remat = settings.remat or REMATS[-1]
    return OutOfMemoryError(
        f"{settings.model} does not fit on {accelerator.name}: a device needs {least / GIB:,.1f} GiB at least "
        f"(remat={remat}), {least / limit:.3g}x the {limit / GIB:,.1f} GiB to plan with. "
        + (f"What would do: {'; or '.join(would)}" if would else "None of the changes that were tried is enough")
    )


def _larger(cfg: ModelConfig, settings: Training, accelerator: Accelerator) -> Iterator[str]:
    """Yield the smallest slice of the same chip that is large enough; if there is none, slices of other chips."""
    if accelerator.chip is None:
        yield "an accelerator, such as --on v6e-8"
        return
    own = smallest_slice(cfg, settings, accelerator.chip, accelerator.slices if accelerator.is_tpu else 1)
    if own:
        yield f"it fits from {own.name}"
        return
    found = (smallest_slice(cfg, settings, CHIPS[name]) for name in OTHERS if name != accelerator.chip.name)
    names = [slice_.name for slice_ in found if slice_]
    if names:
        yield f"no slice of {accelerator.chip.name} is large enough; it fits from {', '.join(names[:3])}"


def smallest_slice(cfg: ModelConfig, settings: Training, chip: Chip, slices: int = 1) -> Accelerator | None:
    """Return the accelerator with the fewest chips, a power of two, that fits; None if a whole pod is too small."""
    limit, chips = int(chip.device_hbm * PLANNED), 1
    while chips <= min(chip.pod or MOST_DEVICES, MOST_DEVICES):
        one = _slices(chip, chips, slices)
        if one and _fits_accelerator(cfg, settings, one, limit):
            return one
        chips *= 2
    return None


def _slices(chip: Chip, chips: int, slices: int) -> Accelerator | None:
    """Return `slices` TPU slices of `chips` chips, or GPUs in NVLink domains whose size is a power of two."""
    if FAMILIES[chip.name].sides:
        sides = usual_sides(chip, chips)
        return Accelerator(chip, sides, slices) if sides else None
    near = min(chips, 1 << (chip.domain.bit_length() - 1))
    return Accelerator(chip, (near,), chips // near)


def _fits_accelerator(cfg: ModelConfig, settings: Training, accelerator: Accelerator, limit: int) -> bool:
    """Return whether any plan fits; if the batch has too few rows for the devices, rows are added."""
    slices = accelerator.slices if accelerator.is_tpu else 1
    mesh, devices = replace(settings.mesh, slices=slices), accelerator.total_devices
    if not mesh.data and not mesh.fsdp:  # the largest fsdp needs the least memory
        mesh = replace(mesh, data=slices)
    rows = max(settings.batch, devices) if settings.batch % devices else settings.batch
    return fits(cfg, replace(settings, mesh=mesh, batch=rows, accumulate=0), devices, limit)


def _smaller_recipes(cfg: ModelConfig, settings: Training, accelerator: Accelerator, limit: int) -> Iterator[str]:
    """Yield each recipe key that frees enough memory alone; if none does, two keys together."""
    mesh = settings.mesh
    given = ", ".join(f"mesh.{name}={size}" for name, size in axes_of(mesh).items() if size > 1)
    frugal = replace(
        settings,
        optimizer=replace(settings.optimizer, name="adafactor"),
        precision=replace(settings.precision, params="bf16"),
    )
    tried: Mapping[str, Training] = {
        f"the mesh left open in place of {given}": replace(settings, mesh=replace(DERIVED, slices=mesh.slices)),
        f"remat left open in place of {settings.remat}": replace(settings, remat=""),
        "per_device and accumulate left open": replace(settings, per_device=0, accumulate=0),
        "ema=0": replace(settings, ema=0.0),
        "optimizer.name=adafactor": replace(settings, optimizer=frugal.optimizer),
        "precision.params=bf16": replace(settings, precision=frugal.precision),
    }
    worked = False
    for what, changed in tried.items():
        if changed != settings and _fits_accelerator(cfg, changed, accelerator, limit):
            worked = True
            yield what
    if not worked and _fits_accelerator(cfg, frugal, accelerator, limit):
        yield "optimizer.name=adafactor with precision.params=bf16"
