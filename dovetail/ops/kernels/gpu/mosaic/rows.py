"""Rows of a matrix in the registers of a warpgroup: 128 threads hold a row, or a part of it, and reduce it at once."""

from __future__ import annotations

import inspect
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

THREADS = 128  # of a warpgroup
_TAKES_INDEX = "idx" in inspect.signature(plgpu.load).parameters


def layout(columns: int) -> Any:
    """Return the layout of a row; a thread's neighbouring numbers, up to 8, are loaded at once."""
    vector = next(n for n in (8, 4, 2, 1) if columns % (THREADS * n) == 0)
    return plgpu.Layout.WG_STRIDED((columns,), vec_size=vector)


def load(ref: Any, index: tuple, columns: int) -> jax.Array:
    """Return a row in f32."""
    return load_as(ref, index, layout(columns))


def load_as(ref: Any, index: tuple, layout: Any, optimized: bool = True) -> jax.Array:
    """Return a part of memory in f32, in this layout."""
    return load_raw(ref, layout, index, optimized).astype(jnp.float32)


def load_raw(ref: Any, layout: Any, index: tuple = (), optimized: bool = False) -> jax.Array:
    """Return a part of memory in its own dtype, in this layout."""
    read: Any = plgpu.load
    if _TAKES_INDEX:
        return read(ref, index, layout=layout, optimized=optimized)
    # jax 0.12 has no argument for the index
    return read(ref.at[index] if index else ref, layout=layout, optimized=optimized)


def store_raw(ref: Any, index: tuple, x: jax.Array) -> None:
    """Store an array to global memory, also in a layout whose rows are shorter than a sector."""
    store: Any = getattr(plgpu, "store", None)
    if store:  # jax 0.12, which refuses such a layout unless it is told
        store(ref.at[index], x, optimized=False)
    else:
        ref[index] = x


def filled(columns: int, value: float) -> jax.Array:
    """Return a row of one value, to be changed in a loop."""
    return plgpu.layout_cast(jnp.full(columns, value, jnp.float32), layout(columns))
