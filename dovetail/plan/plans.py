"""Every way to lay a recipe over so many devices, and the memory that each needs. How long each takes is another
question: plan.steptime."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from dovetail.core.training import REMATS, Mesh, Training
from dovetail.models.config import ModelConfig
from dovetail.models.repeats import repeats
from dovetail.models.spec import flops_per_token
from dovetail.plan.memory import Memory, memory

# Layers up to which each is compiled by itself. A loop over them compiles faster and copies all that is kept for the
# backward pass into stacked arrays and out of them: Qwen3-0.6B 16 x 4096 on an H200 ran at 37% with, at 48% without.
UNROLLED = 48
MOST_SPLIT = 64  # devices along tensor and context together that a search tries
# The same where that was not measured, or weights are split: a loop bounds how many are whole. Unrolled over 16 v6e, 16
# layers of Llama 3.2 1B took half as much memory again as was estimated; Gemma's 34 did not compile in 15 minutes.
UNROLLED_ELSEWHERE = 8


@dataclass(frozen=True)
class Plan:
    mesh: Mesh  # complete
    scan: bool
    remat: str
    rows: int  # per device and microstep
    microsteps: int
    memory: Memory


def plans(
    cfg: ModelConfig,
    settings: Training,
    devices: int,
    limit: int | None,
    *,
    on_gpu: bool = False,
    on_host: bool = False,
    on_tpu: bool = False,
) -> Iterator[Plan]:
    """Of each mesh and policy that the recipe allows, the plan with the most rows that fits into `limit` bytes.

    Without a limit (a CPU) rows are split over the devices and nothing is recomputed.
    """
    remats = (settings.remat,) if settings.remat else REMATS if limit else ("none",)
    for mesh in meshes(cfg, settings, devices, split_weights=limit is not None):
        laid = replace(settings, scan=is_loop(cfg, settings, mesh, on_gpu))
        splits = list(row_splits(settings, row_shards(mesh)))
        for remat in remats if splits else ():
            count = functools.partial(memory, cfg, laid, axes_of(mesh), remat, on_host=on_host, on_tpu=on_tpu)
            found = _most_rows(splits, limit, count)
            if found:
                yield Plan(mesh, bool(laid.scan), remat, *found)


def _most_rows(
    splits: list[tuple[int, int]], limit: int | None, count: Callable[[int], Memory]
) -> tuple[int, int, Memory] | None:
    """The split with the most rows that fits. All at once need no sum over microsteps; with that, fewer need less."""
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
    """Whether equal layers are compiled as one."""
    return settings.scan if settings.scan is not None else layers_folded(cfg) > most_unrolled(mesh, on_gpu)


def most_unrolled(mesh: Mesh, on_gpu: bool) -> int:
    return UNROLLED if on_gpu and mesh.fsdp * mesh.context == 1 else UNROLLED_ELSEWHERE


@functools.lru_cache(maxsize=64)
def layers_folded(cfg: ModelConfig) -> int:
    """Of how many layers a scan makes one, or one group: the most in a row."""
    return max(one.period * one.times if one.times > 1 else 1 for one in repeats(cfg))


def least_memory(cfg: ModelConfig, settings: Training, devices: int) -> int | None:
    """Bytes a device needs in the most frugal plan: the fewest rows at a time and the most recomputed. None where the
    recipe cannot be laid over so many devices at all."""
    remat = settings.remat or REMATS[-1]
    needs = []
    for mesh in meshes(cfg, settings, devices, split_weights=True):
        splits = [rows for rows, _ in row_splits(settings, row_shards(mesh))]
        # all rows at once need no sum of gradients, so either end may be the least
        ends = {splits[0], splits[-1]} if splits else set()
        needs += [memory(cfg, settings, axes_of(mesh), remat, rows).total for rows in ends]
    return min(needs, default=None)


def meshes(cfg: ModelConfig, settings: Training, devices: int, split_weights: bool) -> Iterator[Mesh]:
    """All ways to fill the axes left open with exactly these devices. Where weights need not be split (a CPU), tensor
    and context are not either."""
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
    """The sizes of an axis that must divide `whole`: powers of two, as the sides of slices and machines are."""
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
    """(rows per device and microstep, microsteps), the most rows first."""
    each, rest = divmod(settings.batch, shards)
    for microsteps in [] if rest else _divisors(each):
        rows = each // microsteps
        if settings.per_device in (0, rows) and settings.accumulate in (0, microsteps):
            yield rows, microsteps


def axes_of(mesh: Mesh) -> dict[str, int]:
    """For core.mesh.make_mesh."""
    return {name: getattr(mesh, name) for name in ("data", "fsdp", "expert", "context", "tensor")}


def row_shards(mesh: Mesh) -> int:
    """Devices with different rows; tensor and context share theirs."""
    return mesh.data * mesh.fsdp * mesh.expert


@functools.lru_cache(maxsize=64)
def num_heads(cfg: ModelConfig) -> int:
    """What tensor must divide."""
    return math.gcd(*(layer.attn.heads for layer in cfg.layers))


def num_experts(cfg: ModelConfig) -> int:
    return next((layer.moe.router.experts for layer in cfg.layers if layer.moe), 1)


def _divisors(n: int) -> list[int]:
    small = [i for i in range(1, math.isqrt(n) + 1) if n % i == 0]
    return small + [n // i for i in reversed(small) if i * i != n]


@functools.lru_cache(maxsize=256)
def forward_flops(cfg: ModelConfig, context: int = 0) -> float:
    """Of one token, kept: a search asks for it thousands of times."""
    return flops_per_token(cfg, context)


def flops(cfg: ModelConfig, length: int, remat: str) -> float:
    """Of one token's training, with what is recomputed."""
    return 3 * forward_flops(cfg, length // 2) + recomputed(cfg, length, remat)


def recomputed(cfg: ModelConfig, length: int, remat: str) -> float:
    """FLOPs per token that the backward pass does again. What is no product (norms, rotation, SiLU x up) is put at 6%
    of what is: on an H200 its bytes take about so long."""
    products = forward_flops(cfg)
    attention = forward_flops(cfg, length // 2) - products
    again = {"none": 0.0, "dots": 0.0, "attention": products, "full": products + attention}[remat]
    return again + (0.06 * products if remat != "none" else 0.0)
