"""Residual add and RMS norm in one kernel for NVIDIA GPUs (Pallas, Triton): XLA takes up to four.

T tokens, D model dim, B the power of two at or above it.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu


@functools.partial(jax.jit, static_argnames=("eps", "offset", "interpret"))  # equal calls are traced and lowered once
def add_rms_norm(
    x: jax.Array,  # [T, D]
    delta: jax.Array | None,  # [T, D]
    weight: jax.Array,  # [D]
    eps: float,
    offset: float,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Return (x + delta, its norm), both [T, D]."""
    T, D = x.shape
    block = 1 << (D - 1).bit_length()
    given = [x] if delta is None else [x, delta]
    out = pl.pallas_call(
        functools.partial(_kernel, block=block, eps=eps, offset=offset),
        grid=(T,),
        out_shape=[jax.ShapeDtypeStruct((T, D), x.dtype)] * len(given),
        compiler_params=plgpu.CompilerParams(num_warps=min(8, max(1, block // 512)), num_stages=1),
        interpret=interpret,
        name="add_rms_norm" if delta is not None else "rms_norm",
    )(weight, *given)
    return (x, out[0]) if delta is None else (out[0], out[1])


def _kernel(weight_ref, x_ref, *refs, block: int, eps: float, offset: float):
    """Normalise one row; refs are the norm, or the delta, the sum and the norm."""
    row, lanes = pl.program_id(0), jnp.arange(block)
    inside = lanes < x_ref.shape[1]

    def read(ref):
        return plgpu.load(ref.at[row, lanes], mask=inside, other=0.0).astype(jnp.float32)

    x = read(x_ref)
    if len(refs) == 3:
        # rounded as it will be read again: the norm is of what the next layers see
        total = (x + read(refs[0])).astype(x_ref.dtype)
        plgpu.store(refs[1].at[row, lanes], total, mask=inside)
        x = total.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.sum(x * x) / x_ref.shape[1] + eps)
    weight = plgpu.load(weight_ref.at[lanes], mask=inside, other=0.0).astype(jnp.float32)
    plgpu.store(refs[-1].at[row, lanes], (x * scale * (offset + weight)).astype(x_ref.dtype), mask=inside)
