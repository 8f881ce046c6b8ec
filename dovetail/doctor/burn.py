"""A burn-in: every chip computes the same chain of products for a while, and no bit may differ, between rounds or
between chips. A chip that corrupts data in silence shows itself here, by name."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dovetail.doctor.finding import Finding


def chain(side: int, depth: int = 8) -> Callable[[jax.Array], jax.Array]:
    """Products and what is not one, in f32 and bf16, kept near 1, as in a step of training."""

    def run(x: jax.Array) -> jax.Array:
        for _ in range(depth):
            x = jnp.tanh((x.astype(jnp.bfloat16) @ x.T.astype(jnp.bfloat16)).astype(jnp.float32) / side**0.5) + 0.1 * x
        return x

    return jax.jit(run)


def burn(seconds: float, side: int = 0, run: Any = None, devices: Sequence[Any] | None = None) -> list[Finding]:
    """`run` is what each device computes (a chain of its own making unless given)."""
    devices = list(devices or jax.local_devices())
    side = side or (128 if devices[0].platform == "cpu" else 4096)
    run = run or chain(side)
    start = np.random.default_rng(0).standard_normal((side, side)).astype(np.float32)
    inputs = [jax.device_put(start, device) for device in devices]
    digests: list[Counter[bytes]] = [Counter() for _ in devices]
    poisoned: Counter[int] = Counter()
    rounds, end = 0, time.monotonic() + seconds
    while rounds < 2 or time.monotonic() < end:
        results = [run(x) for x in inputs]  # all chips at once, as in a run
        for i, result in enumerate(results):
            host = np.asarray(result)
            digests[i][host.tobytes()] += 1
            poisoned[i] += not np.isfinite(host).all()
        rounds += 1
    return _verdicts(devices, digests, poisoned, rounds)


def _verdicts(devices: list[Any], digests: list[Counter[bytes]], poisoned: Counter[int], rounds: int) -> list[Finding]:
    right = sum(digests, Counter()).most_common(1)[0][0]
    found = []
    for i, device in enumerate(devices):
        wrong = rounds - digests[i][right]
        if wrong or poisoned[i]:
            nan = f", {poisoned[i]} with NaN or infinity" if poisoned[i] else ""
            found.append(Finding(
                "fault", f"burn-in of device {device.id}", f"{wrong} of {rounds} rounds gave other bits{nan}",
                f"take this chip out of use ({device}, process {device.process_index})",
            ))  # fmt: skip
    good = f"{rounds} rounds on {len(devices)} device{'s' * (len(devices) > 1)}, every bit the same"
    return found or [Finding("good", "burn-in", good)]
