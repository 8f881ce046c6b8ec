"""Residual add and RMS norm in one kernel for Hopper (Pallas, Mosaic GPU): a warpgroup per token.

T tokens, D model dim.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from dovetail.ops.kernels.gpu.mosaic.rows import load


@functools.partial(jax.jit, static_argnames=("eps", "offset", "interpret"))  # equal calls are traced and lowered once
def add_rms_norm(
    x: jax.Array,  # [T, D]
    delta: jax.Array | None,  # [T, D]
    weight: jax.Array,  # [D]
    eps: float,
    offset: float,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Return (x + delta, its norm), both [T, D]."""
    T, D = x.shape
    given = [x] if delta is None else [x, delta]

    def body(weight_ref: Any, x_ref: Any, *refs: Any) -> None:
        row = lax.axis_index("row")
        total = load(x_ref, (row,), D)
        weight = load(weight_ref, (slice(None),), D)
        if delta is not None:
            # rounded as it will be read again: the norm is of what the next layers see
            rounded = (total + load(refs[0], (row,), D)).astype(x_ref.dtype)
            refs[1][row] = rounded
            total = rounded.astype(jnp.float32)
        scale = lax.rsqrt(jnp.sum(total * total) / D + eps)
        refs[-1][row] = (total * scale * (offset + weight)).astype(x_ref.dtype)

    body.__name__ = "add_rms_norm" if delta is not None else "rms_norm"
    out = plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct((T, D), x.dtype)] * len(given),
        grid=(T,),
        grid_names=("row",),
        interpret=interpret,
    )(weight, *given)
    return (x, out[0]) if delta is None else (out[0], out[1])
