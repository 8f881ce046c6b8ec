"""Every way to lay a recipe over so many devices, what each needs, and an estimate that ranks them.

The estimate ranks, it does not predict: FLOPs, with what is recomputed, against the bytes that weights, gradients and
experts' tokens send over the links.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from dovetail.core.chips import Chip
from dovetail.core.spec import matmul_flops
from dovetail.core.training import REMATS, Mesh, Training
from dovetail.models.config import ModelConfig
from dovetail.models.spec import flops_per_token, spec
from dovetail.plan.memory import BYTES, Memory, bytes_per_weight, memory

FLOPS_A_BYTE = 2500.0  # of a chip that is not in the table: its peak over its links, as on an H100 or a v5p
FLOPS_A_BYTE_HELD = 250.0  # the same for the bytes of its own memory
UTILISATION = 0.5  # of the peak, in the products
# Layers up to which each is compiled by itself. A loop over them compiles faster and copies all that is kept for the
# backward pass into stacked arrays and out of them: Qwen3-0.6B 16 x 4096 on an H200 ran at 37% with, at 48% without.
UNROLLED = 48
UNROLLED_ELSEWHERE = 16  # the same where that was not measured, or weights are split: a loop bounds how many are whole


@dataclass(frozen=True)
class Plan:
    mesh: Mesh  # complete
    scan: bool
    remat: str
    rows: int  # per device and microstep
    microsteps: int
    memory: Memory


def plans(
    cfg: ModelConfig, settings: Training, devices: int, limit: int | None, on_gpu: bool = False
) -> Iterator[Plan]:
    """Of each mesh and policy that the recipe allows, the plan with the most rows that fits into `limit` bytes.

    Without a limit (a CPU) rows are split over the devices and nothing is recomputed.
    """
    remats = (settings.remat,) if settings.remat else REMATS if limit else ("none",)
    for mesh in meshes(cfg, settings.mesh, devices, split_weights=limit is not None):
        laid = replace(settings, scan=is_loop(cfg, settings, mesh, on_gpu))
        for remat in remats:
            for rows, microsteps in row_splits(settings, row_shards(mesh)):
                counted = memory(cfg, laid, axes_of(mesh), remat, rows)
                if limit is None or counted.total <= limit:
                    yield Plan(mesh, bool(laid.scan), remat, rows, microsteps, counted)
                    break


def is_loop(cfg: ModelConfig, settings: Training, mesh: Mesh, on_gpu: bool) -> bool:
    """Whether equal layers are compiled as one."""
    return settings.scan if settings.scan is not None else longest_run(cfg) > most_unrolled(mesh, on_gpu)


def most_unrolled(mesh: Mesh, on_gpu: bool) -> int:
    return UNROLLED if on_gpu and mesh.fsdp * mesh.context == 1 else UNROLLED_ELSEWHERE


def longest_run(cfg: ModelConfig) -> int:
    """Equal layers in a row: what a scan can fold."""
    longest = run = 1
    for before, layer in zip(cfg.layers, cfg.layers[1:], strict=False):
        run = run + 1 if layer == before else 1
        longest = max(longest, run)
    return longest


def least_memory(cfg: ModelConfig, settings: Training, devices: int) -> int | None:
    """Bytes a device needs in the most frugal plan: the fewest rows at a time and the most recomputed. None where the
    recipe cannot be laid over so many devices at all."""
    remat = settings.remat or REMATS[-1]
    needs = []
    for mesh in meshes(cfg, settings.mesh, devices, split_weights=True):
        splits = [rows for rows, _ in row_splits(settings, row_shards(mesh))]
        # all rows at once need no sum of gradients, so either end may be the least
        ends = {splits[0], splits[-1]} if splits else set()
        needs += [memory(cfg, settings, axes_of(mesh), remat, rows).total for rows in ends]
    return min(needs, default=None)


def meshes(cfg: ModelConfig, given: Mesh, devices: int, split_weights: bool) -> Iterator[Mesh]:
    """All ways to fill the axes left open with exactly these devices."""
    for expert in [given.expert] if given.expert else _divisors(math.gcd(num_experts(cfg), devices)):
        left, rest = divmod(devices, expert * given.tensor * given.context)
        if rest or left % given.slices:
            continue
        for fsdp in _fsdp_sizes(given, left, split_weights):
            data = given.data or left // fsdp
            fits = data * fsdp == left and data % given.slices == 0
            if fits and (fsdp == 1 or cfg.dim % (fsdp * given.context) == 0):
                yield replace(given, data=data, fsdp=fsdp, expert=expert)


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


def num_experts(cfg: ModelConfig) -> int:
    return next((layer.moe.router.experts for layer in cfg.layers if layer.moe), 1)


def _divisors(n: int) -> list[int]:
    small = [i for i in range(1, math.isqrt(n) + 1) if n % i == 0]
    return small + [n // i for i in reversed(small) if i * i != n]


def cost(cfg: ModelConfig, settings: Training, plan: Plan, chip: Chip | None) -> float:
    """Estimated time of a step, in FLOPs of one device. Products and links overlap; experts wait for their tokens, and
    what is only copied waits for the memory."""
    mesh, micro = plan.mesh, plan.microsteps
    a_byte = UTILISATION * (chip.bf16 / chip.network if chip and chip.network else FLOPS_A_BYTE)
    tokens = plan.rows * settings.length // mesh.context
    products = tokens * micro * flops(cfg, settings.length, plan.remat) / mesh.tensor
    held = plan.memory.weights / bytes_per_weight(settings)  # weights on one device
    split = mesh.fsdp * mesh.context
    # forward and backward gather each weight in the compute dtype; its gradient is scattered in f32 or summed once
    gathers = micro * (2 * BYTES[settings.precision.compute] + 4) * held * (split - 1)
    sums = 2 * 4 * held * (mesh.data > 1)
    sparse = sum(layer.moe is not None for layer in cfg.layers)
    exchanged = micro * 3 * 2 * BYTES[settings.precision.compute] * tokens * cfg.dim * (mesh.expert - 1) * sparse
    links = (gathers + sums) * a_byte
    return max(products, links) + 0.1 * links + exchanged * a_byte + _copied(plan, chip)


def _copied(plan: Plan, chip: Chip | None) -> float:
    """What a loop over layers does besides its products, in FLOPs: on a GPU it copies what it keeps into stacked arrays
    and out of them, reading and writing it twice over. (On TPUs that was not measured.)"""
    if not plan.scan or (chip and chip.pod):
        return 0.0
    a_byte = UTILISATION * (chip.bf16 / chip.bandwidth if chip else FLOPS_A_BYTE_HELD)
    return plan.microsteps * 4 * plan.memory.activations * a_byte


def flops(cfg: ModelConfig, length: int, remat: str) -> float:
    """Of one token's training, with what is recomputed."""
    return flops_per_token(cfg, length // 2, train=True) + recomputed(cfg, length, remat)


def recomputed(cfg: ModelConfig, length: int, remat: str) -> float:
    """FLOPs per token that the backward pass does again. What is no product (norms, rotation, SiLU x up) is put at 6%
    of what is: on an H200 its bytes take about so long."""
    products = matmul_flops(spec(cfg))
    attention = flops_per_token(cfg, length // 2) - products
    again = {"none": 0.0, "dots": 0.0, "attention": products, "full": products + attention}[remat]
    return again + (0.06 * products if remat != "none" else 0.0)
