"""Enumerate the ways to lay a recipe over devices, with the memory of each (plan.train_time has the time of each)."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from dovetail.core.training import REMATS, Mesh, Training
from dovetail.models.config import ModelConfig
from dovetail.models.repeats import repeats
from dovetail.plan.train_memory import TrainMemory, memory

# Up to this many equal layers in a row, each is compiled separately. A loop over layers compiles faster, but copies all
# saved activations into stacked arrays and out of them: Qwen3-0.6B, 16 x 4096 on an H200, reached 37% MFU with the loop
# and 48% without.
UNROLLED = 48
MOST_SPLIT = 64  # the search tries at most this many devices along tensor and context together
# The same limit on other chips, and where weights are split: a loop bounds how many gathered weights exist at a time.
# Unrolled over 16 v6e, 16 layers of Llama 3.2 1B took 50% more memory than estimated, and Gemma's 34 layers did not
# compile in 15 minutes.
UNROLLED_ELSEWHERE = 8


@dataclass(frozen=True)
class MeshPlan:
    """Hold one way to run a recipe: mesh, remat policy and split of the batch, with the memory it needs."""

    mesh: Mesh  # without open axes
    scan: bool
    remat: str
    rows: int  # per device and microstep
    microsteps: int
    memory: TrainMemory


def plans(
    cfg: ModelConfig,
    settings: Training,
    devices: int,
    limit: int | None,
    *,
    on_gpu: bool = False,
    on_host: bool = False,
    on_tpu: bool = False,
) -> Iterator[MeshPlan]:
    """Yield, for each mesh and remat policy that the recipe allows, the plan with the most rows that fits.

    Args:
        cfg: The model.
        settings: The recipe.
        devices: The number of devices.
        limit: Bytes per device. None (a CPU): rows are split over the devices and nothing is recomputed.
        on_gpu: Whether the devices are GPUs.
        on_host: Whether memory is counted as XLA's CPU compiler allocates it.
        on_tpu: Whether the devices are TPUs.
    """
    remats = (settings.remat,) if settings.remat else REMATS if limit else ("none",)
    for mesh in meshes(cfg, settings, devices, split_weights=limit is not None):
        laid = replace(settings, scan=is_loop(cfg, settings, mesh, on_gpu))
        splits = list(row_splits(settings, row_shards(mesh)))
        for remat in remats if splits else ():
            count = functools.partial(memory, cfg, laid, axes_of(mesh), remat, on_host=on_host, on_tpu=on_tpu)
            found = _most_rows(splits, limit, count)
            if found:
                yield MeshPlan(mesh, bool(laid.scan), remat, *found)


def _most_rows(
    splits: list[tuple[int, int]], limit: int | None, count: Callable[[int], TrainMemory]
) -> tuple[int, int, TrainMemory] | None:
    """Return (rows, microsteps, memory) of the split with the most rows that fits, by bisection.

    The first split is separate: a single microstep needs no gradient accumulator. From the second on, fewer rows need
    less memory.
    """
    whole = count(splits[0][0])
    if limit is None or whole.total <= limit:
        return *splits[0], whole
    found, low, high = None, 1, len(splits)
    while low < high:
        middle = (low + high) // 2
        counted = count(splits[middle][0])
        if counted.total <= limit:
            found, high = (*splits[middle], counted), middle
        else:
            low = middle + 1
    return found


def is_loop(cfg: ModelConfig, settings: Training, mesh: Mesh, on_gpu: bool) -> bool:
    """Return whether equal layers are compiled as a loop."""
    return settings.scan if settings.scan is not None else layers_folded(cfg) > most_unrolled(mesh, on_gpu)


def most_unrolled(mesh: Mesh, on_gpu: bool) -> int:
    """Return up to how many equal layers in a row are compiled without a loop."""
    return UNROLLED if on_gpu and mesh.fsdp * mesh.context == 1 else UNROLLED_ELSEWHERE


@functools.lru_cache(maxsize=64)
def layers_folded(cfg: ModelConfig) -> int:
    """Return the most layers in a row that a scan folds into one layer, or into one group of layers."""
    return max(one.period * one.times if one.times > 1 else 1 for one in repeats(cfg))


def least_memory(cfg: ModelConfig, settings: Training, devices: int) -> int | None:
    """Return the bytes per device of the plan that needs the least memory, or None if the recipe cannot be split so.

    That plan has the fewest rows per microstep and recomputes the most.
    """
    remat = settings.remat or REMATS[-1]
    needs = []
    for mesh in meshes(cfg, settings, devices, split_weights=True):
        splits = [rows for rows, _ in row_splits(settings, row_shards(mesh))]
        # a single microstep needs no gradient accumulator, so either end may need the least
        ends = {splits[0], splits[-1]} if splits else set()
        needs += [memory(cfg, settings, axes_of(mesh), remat, rows).total for rows in ends]
    return min(needs, default=None)


def meshes(cfg: ModelConfig, settings: Training, devices: int, split_weights: bool) -> Iterator[Mesh]:
    """Yield every mesh that fills the open axes with exactly these devices.

    If weights need not be split (a CPU), tensor and context stay 1 too.
    """
    given = settings.mesh
    tensors = _open(given.tensor, num_heads(cfg), devices, split_weights)
    contexts = _open(given.context, settings.length, devices, split_weights)
    experts = [given.expert] if given.expert else _divisors(math.gcd(num_experts(cfg), devices))
    for tensor, context, expert in itertools.product(tensors, contexts, experts):
        left, rest = divmod(devices, expert * tensor * context)
        too_fine = tensor * context > MOST_SPLIT and not (given.tensor and given.context)
        if rest or left % given.slices or too_fine:
            continue
        for fsdp in _fsdp_sizes(given, left, split_weights):
            data = given.data or left // fsdp
            fits = data * fsdp == left and data % given.slices == 0
            if fits and (fsdp == 1 or cfg.dim % (fsdp * context) == 0):
                yield replace(given, data=data, fsdp=fsdp, expert=expert, tensor=tensor, context=context)


def _open(given: int, whole: int, devices: int, split_weights: bool) -> list[int]:
    """Return the sizes of an axis that divide `whole`: powers of two, as the sides of slices and machines are."""
    if given:
        return [given]
    most = math.gcd(whole, devices) if split_weights else 1
    return [size for size in _divisors(most) if size & (size - 1) == 0 and size <= MOST_SPLIT]


def _fsdp_sizes(given: Mesh, left: int, split_weights: bool) -> list[int]:
    if given.fsdp:
        return [given.fsdp]
    if given.data:
        return [left // given.data] if left % given.data == 0 else []
    return _divisors(left // given.slices) if split_weights else [1]


def row_splits(settings: Training, shards: int) -> Iterator[tuple[int, int]]:
    """Yield (rows per device and microstep, microsteps), the most rows first."""
    each, rest = divmod(settings.batch, shards)
    for microsteps in [] if rest else _divisors(each):
        rows = each // microsteps
        if settings.per_device in (0, rows) and settings.accumulate in (0, microsteps):
            yield rows, microsteps


def axes_of(mesh: Mesh) -> dict[str, int]:
    """Return the mesh as a mapping for core.mesh.make_mesh."""
    return {name: getattr(mesh, name) for name in ("data", "fsdp", "expert", "context", "tensor")}


def row_shards(mesh: Mesh) -> int:
    """Return the number of devices that hold different rows; devices along tensor and context share rows."""
    return mesh.data * mesh.fsdp * mesh.expert


@functools.lru_cache(maxsize=64)
def num_heads(cfg: ModelConfig) -> int:
    """Return the number that mesh.tensor must divide."""
    return math.gcd(*(layer.attn.heads for layer in cfg.layers))


def num_experts(cfg: ModelConfig) -> int:
    """Return the experts of the first MoE layer; 1 for a dense model."""
    return next((layer.moe.router.experts for layer in cfg.layers if layer.moe), 1)


def _divisors(n: int) -> list[int]:
    small = [i for i in range(1, math.isqrt(n) + 1) if n % i == 0]
    return small + [n // i for i in reversed(small) if i * i != n]
