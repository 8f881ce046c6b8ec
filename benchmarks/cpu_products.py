"""Products of x [R, D] with a weight [F, D] on a CPU: XLA's, ours and NumPy's, in GFLOP/s of CPU time, in one run.

On one core, so that other work on the machine costs little: OPENBLAS_NUM_THREADS=1 taskset -c 1 python
benchmarks/cpu_products.py
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import jax
import numpy as np

from dovetail.ops.kernels.cpu.few_rows import few_rows_matmul
from dovetail.ops.kernels.cpu.many_rows import many_rows_matmul

SMOLLM2 = [(rows, 576, 1536) for rows in (1, 2, 4, 8, 16, 32, 64, 1024)]  # gate or up of a layer
SHAPES = [*SMOLLM2, (64, 1536, 576), (64, 576, 960), (64, 576, 49152), (1024, 1536, 576)]
KERNELS = {
    "XLA": jax.jit(lambda x, w: x @ w.T),
    "few_rows": jax.jit(few_rows_matmul),
    "many_rows": jax.jit(many_rows_matmul),
}
TURNS, SECONDS = 6, 0.04


def main() -> None:
    for R, D, F in SHAPES:
        dice = np.random.default_rng(0)
        x, w = (dice.normal(size=shape).astype(np.float32) for shape in ((R, D), (F, D)))
        given = jax.device_put(x), jax.device_put(w)
        calls = {name: functools.partial(_call, kernel, *given) for name, kernel in KERNELS.items()}
        calls["NumPy"] = functools.partial(np.matmul, x, w.T)
        best = dict.fromkeys(calls, 0.0)
        for _ in range(TURNS):
            for name, call in calls.items():
                best[name] = max(best[name], 2e-9 * R * D * F / _seconds(call))
        print(R, D, F, *(f"{name} {rate:.1f}" for name, rate in best.items()), flush=True)


def _call(kernel: Callable, x: jax.Array, w: jax.Array) -> None:
    kernel(x, w).block_until_ready()


def _seconds(call: Callable) -> float:
    """CPU time of a call, on average."""
    call()
    count, start = 0, time.process_time()
    while (spent := time.process_time() - start) < SECONDS:
        call()
        count += 1
    return spent / count


if __name__ == "__main__":
    main()
