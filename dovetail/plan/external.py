"""Derive the mesh of a training whose model has no known layers (models.external).

Rows are split over all devices. Weights and optimizer state are split over as few of them as the memory requires.
"""

from __future__ import annotations

from dataclasses import replace

from dovetail.core.errors import OutOfMemoryError, RecipeError
from dovetail.core.spec import leaves
from dovetail.core.training import Mesh, Training
from dovetail.core.units import format_bytes
from dovetail.models.config import ModelConfig
from dovetail.models.spec import spec
from dovetail.plan.plans import axes_of
from dovetail.plan.train_memory import TrainMemory, bytes_per_weight, local_size, moments_of, placement_of

STATE_SHARE = 0.5  # of a device: activations, which are not known, need the rest


def external_plan(
    cfg: ModelConfig, settings: Training, devices: int, limit: int | None
) -> tuple[Training, TrainMemory, tuple[tuple[str, str, str], ...]]:
    """Return the recipe with its open keys decided, the memory of its state, and the reasons.

    Raises:
        RecipeError: The mesh or the batch cannot be split over the devices.
        OutOfMemoryError: The state does not fit, even split over all devices.
    """
    mesh, memory = _mesh(cfg, settings, devices, limit)
    each, rest = divmod(settings.batch, mesh.data * mesh.fsdp)
    if rest:
        raise RecipeError(
            f"batch={settings.batch} rows cannot be split evenly over {mesh.data * mesh.fsdp} devices", param="batch"
        )
    microsteps = settings.accumulate or (each // settings.per_device if settings.per_device else 1)
    if each % microsteps or settings.per_device not in (0, each // microsteps):
        raise RecipeError(
            f"per_device x accumulate must be the {each} rows of a device, got {settings.per_device} and "
            f"{settings.accumulate}: leave one out",
            param="per_device",
        )
    rows = each // microsteps
    filled = replace(settings, mesh=mesh, remat="none", scan=False, per_device=rows, accumulate=microsteps)
    shown = " x ".join(f"{name} {size}" for name, size in axes_of(mesh).items() if size > 1)
    why = (
        ("mesh", shown or "1 device", "rows over all devices; weights over fsdp"),
        ("per_device", str(rows), f"rows of a device and microstep, of which a step has {microsteps}"),
    )
    return filled, memory, why


def _mesh(cfg: ModelConfig, settings: Training, devices: int, limit: int | None) -> tuple[Mesh, TrainMemory]:
    given, slices = settings.mesh, settings.mesh.slices
    sizes = [given.fsdp] if given.fsdp else [n for n in range(1, devices + 1) if devices % n == 0]
    laid = [replace(given, data=given.data or devices // n, fsdp=n, expert=1, tensor=1, context=1) for n in sizes]
    laid = [mesh for mesh in laid if mesh.data * mesh.fsdp == devices and mesh.data % slices == 0]
    if not laid:
        raise RecipeError(f"mesh.data x mesh.fsdp must be the {devices} devices", param="mesh.fsdp")
    for mesh in laid:
        memory = _state(cfg, settings, mesh)
        if not limit or memory.total <= limit * STATE_SHARE or given.fsdp:
            return mesh, memory
    mesh = laid[-1]
    memory = _state(cfg, settings, mesh)
    if limit and memory.total > limit:
        raise OutOfMemoryError(
            f"it does not fit: the state alone needs {format_bytes(memory.total)} of each of {devices} devices, and "
            f"there are {format_bytes(limit)} to plan with"
        )
    return mesh, memory


def _state(cfg: ModelConfig, settings: Training, mesh: Mesh) -> TrainMemory:
    placement = placement_of(axes_of(mesh))
    shapes = [(one.shape, one.axes) for _, one in leaves(spec(cfg))]
    local = [local_size(shape, placement) for shape in shapes]
    moments = sum(moments_of(settings.optimizer.name, *each) for each in zip(shapes, local, strict=True))
    return TrainMemory(sum(local) * bytes_per_weight(settings), 0, 4 * moments, 4 * sum(local), 0, 0, 0)
