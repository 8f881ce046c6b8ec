"""Measure the speed of the devices, compared with the peak of their chip: products, memory, links."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dovetail.core.chips import Chip, chip_of
from dovetail.core.units import format_number
from dovetail.doctor import Finding

POOR = 0.6  # of a peak: below this something is wrong (an H200 reaches 80% in products and 87% in copies)
UNEVEN = 0.9  # of the median of all devices: below this a device is slow


@dataclass(frozen=True)
class Size:
    """Hold the sizes of the operands: large enough for a chip to reach its speed, small on a CPU."""

    side: int  # of a square product
    copied: int  # bytes
    sent: int  # bytes of each device


ON_CPU, ON_CHIP = Size(512, 64 << 20, 4 << 20), Size(8192, 2 << 30, 256 << 20)


def speed(size: Size | None = None, busy: bool = False) -> list[Finding]:
    """Measure every local device, one after another; `busy` adds a note that other work slows them."""
    found = _measured(size)
    return (
        [
            replace(one, found=f"{one.found}; other work ran at the same time: an idle machine is faster")
            for one in found
        ]
        if busy
        else found
    )


def _measured(size: Size | None) -> list[Finding]:
    devices = jax.local_devices()
    size = size if size else ON_CPU if devices[0].platform == "cpu" else ON_CHIP
    side, copied, chip = size.side, size.copied, chip_of(devices[0])
    products = [_rate(lambda d=d: _product(d, side), 2.0 * side**3) for d in devices]
    copies = [_rate(lambda d=d: _copy(d, copied), 2.0 * copied) for d in devices]
    name = "f32" if devices[0].platform == "cpu" else "bf16"
    found = [
        _beside(f"products ({name}, {side} squared)", products, chip and chip.device_bf16, 1e12, "TFLOP/s"),
        _beside("memory (copy)", copies, chip and chip.bandwidth / chip.devices, 1e9, "GB/s"),
    ]
    return [*found, *_uneven("products", products), *_uneven("memory", copies), *_links(devices, chip, size)]


def _beside(about: str, rates: list[float], peak: float | None, unit: float, word: str) -> Finding:
    typical = statistics.median(rates)
    text = f"{format_number(typical / unit)} {word}" + (f" on each of {len(rates)} devices" if len(rates) > 1 else "")
    values = {"measured": typical, **({"peak": peak} if peak else {})}
    if not peak:
        return Finding("note", about, f"{text}; the peak of this device is not known", values=values)
    share = typical / peak
    text += f", {share:.0%} of the peak ({format_number(peak / unit)})"
    if share >= POOR:
        return Finding("good", about, text, values=values)
    return Finding(
        "warning", about, text,
        "look for another program on the chip (dovetail info --watch), a power or clock limit, or a shared machine",
        values,
    )  # fmt: skip


def _uneven(about: str, rates: list[float]) -> Iterator[Finding]:
    """Report slow devices: the slowest one determines the speed of a run."""
    typical = statistics.median(rates)
    for device, rate in zip(jax.local_devices(), rates, strict=True):
        if rate < UNEVEN * typical and device.platform != "cpu":  # CPU devices share cores
            yield Finding(
                "warning", f"{about} of device {device.id}", f"{rate / typical:.0%} of the median of all devices",
                f"exclude this host from jobs ({device})",
            )  # fmt: skip


# --- measurements -----------------------------------------------------------------------------------------------------


def _product(device: Any, side: int) -> Callable[[], Any]:
    dtype = jnp.float32 if device.platform == "cpu" else jnp.bfloat16
    a = jax.device_put(np.random.default_rng(0).standard_normal((side, side), np.float32), device).astype(dtype)
    multiply = jax.jit(lambda x: x @ x)
    return lambda: multiply(a)


def _copy(device: Any, size: int) -> Callable[[], Any]:
    a = jax.device_put(np.zeros(size // 4, np.float32), device)
    add = jax.jit(lambda x: x + 1)  # one read and one write
    return lambda: add(a)


def _rate(make: Callable[[], Callable[[], Any]], work: float, times: int = 5) -> float:
    """Return the rate of the fastest of a few calls: other work only makes a call slower."""
    call = make()
    jax.block_until_ready(call())
    best = float("inf")
    for _ in range(times):
        start = time.perf_counter()
        jax.block_until_ready(call())
        best = min(best, time.perf_counter() - start)
    return work / best


# --- links ------------------------------------------------------------------------------------------------------------


def _links(devices: list[Any], chip: Chip | None, size: Size) -> Iterator[Finding]:
    """Measure an all-gather and an all-reduce over all local devices, by the bytes that each sends in a ring."""
    n = len(devices)
    if n == 1:
        return
    mesh = Mesh(np.asarray(devices), ("all",))
    share = jax.device_put(np.ones(n * size.sent // 4, np.float32), NamedSharding(mesh, PartitionSpec("all")))
    peak = chip.network / chip.devices if chip and chip.network else None
    for kind, out, call, rounds in (
        ("all-gather", PartitionSpec(), lambda x: jax.lax.all_gather(x, "all", tiled=True), n - 1),
        ("all-reduce", PartitionSpec(), lambda x: jax.lax.psum(x, "all"), 2 * (n - 1) / n),
    ):
        whole = jax.jit(jax.shard_map(call, mesh=mesh, in_specs=PartitionSpec("all"), out_specs=out, check_vma=False))
        rate = _rate(lambda whole=whole: lambda: whole(share), rounds * size.sent)
        yield _beside(f"links ({kind} over {n} devices)", [rate], peak, 1e9, "GB/s")
