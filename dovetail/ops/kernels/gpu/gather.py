"""Gather whole rows on Hopper (Pallas, Mosaic GPU): copied to shared memory and on, without registers (TMA).

R rows, D columns, of which W are a line of a copy.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

ROWS = 8  # of a program
LINES = (256, 192, 128, 64)  # a copy has at most 256 columns
SHARED = 200 * 2**10  # bytes of shared memory that a program may take


def why_not_gather(rows: int, columns: int, dtype: Any) -> str | None:
    """Return why the kernel cannot gather `rows` rows of `columns`, or None."""
    if rows % ROWS:
        return f"{rows} rows, not a multiple of {ROWS}"
    if columns % LINES[-1]:
        return f"rows of {columns}, not a multiple of {LINES[-1]}"
    size = ROWS * columns * jnp.dtype(dtype).itemsize
    return f"rows of {columns}, too wide for shared memory" if size > SHARED else None


def gather_rows(x: jax.Array, index: jax.Array) -> jax.Array:
    """Return x[index] for x [T, D] and index [R], without its gradient."""
    T, D = x.shape
    line = next(line for line in LINES if D % line == 0)
    shape = (D // line, line)

    def body(index_ref: Any, x_ref: Any, out_ref: Any, buffer: Any, barrier: Any) -> None:
        first = lax.axis_index("program") * ROWS
        for i in range(ROWS):
            plgpu.copy_gmem_to_smem(x_ref.at[index_ref[first + i]], buffer.at[i], barrier)
        plgpu.barrier_wait(barrier)
        plgpu.copy_smem_to_gmem(buffer, out_ref.at[pl.ds(first, ROWS)])
        plgpu.wait_smem_to_gmem(0)

    gather = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((len(index), *shape), x.dtype),
        scratch_types=[plgpu.SMEM((ROWS, *shape), x.dtype), plgpu.Barrier(num_arrivals=ROWS)],
        grid=(len(index) // ROWS,),
        grid_names=("program",),
        kernel_name="gather_rows",
    )
    return gather(index.astype(jnp.int32), x.reshape(T, *shape)).reshape(len(index), D)
