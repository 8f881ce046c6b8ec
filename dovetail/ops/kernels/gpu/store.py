"""New keys and values into their pages, in place, for NVIDIA GPUs (Pallas, Triton): XLA's scatter takes several kernels
and, for a long prompt, eight times as long as the bytes do.

T tokens, K key heads, H head dim.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from dovetail.core.types import Paged
from dovetail.ops.paged import token_places


def write_heads(ctx: Paged, pages: jax.Array, k: jax.Array, v: jax.Array, interpret: bool = False) -> jax.Array:
    """As ops.paged.write_heads: pages [P, page, 2K, H] with k and v [T, K, H]."""
    T, K, H = k.shape
    flat = pages.reshape(-1, H)
    out = pl.pallas_call(
        functools.partial(_kernel, K=K),
        grid=(T,),
        out_shape=jax.ShapeDtypeStruct(flat.shape, flat.dtype),
        input_output_aliases={3: 0},
        compiler_params=plgpu.CompilerParams(num_warps=min(8, max(1, K * H // 256)), num_stages=1),
        interpret=interpret,
        name="write_pages",
    )(token_places(ctx, pages, T), k.reshape(T * K, H), v.reshape(T * K, H), flat)
    return out.reshape(pages.shape)


def _kernel(places_ref, k_ref, v_ref, _, pages_ref, *, K: int):
    token = pl.program_id(0)
    place = places_ref[token]
    head = jnp.arange(1 << (K - 1).bit_length())[:, None]
    lanes = jnp.arange(k_ref.shape[1])[None, :]
    real = (head < K) & (place * 2 * K < pages_ref.shape[0])  # padding has a place past the end
    row = jnp.where(real, (place * K + head) * 2, pages_ref.shape[0])
    for ref, which in ((k_ref, 0), (v_ref, 1)):
        values = plgpu.load(ref.at[token * K + head, lanes], mask=real, other=0.0)
        plgpu.store(pages_ref.at[row + which, lanes], values.astype(pages_ref.dtype), mask=real)
