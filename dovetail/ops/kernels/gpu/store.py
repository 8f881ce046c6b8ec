"""Write new keys and values into their pages, in place, for NVIDIA GPUs (Pallas, Triton).

XLA's scatter takes several kernels and, for a long prompt, eight times as long as the bytes need. `rotate_store` does
all from the product of one fused projection to attention's inputs in one kernel: the norm of each head, the rotation,
and the write; XLA takes five.

T tokens, N query heads, K key heads, H head dim.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from dovetail.core.types import Paged
from dovetail.ops.paged import is_rounded, round_rows, token_places


@functools.partial(jax.jit, static_argnames=("interpret",))  # equal calls are traced and lowered once
def write_heads(ctx: Paged, pages: jax.Array, k: jax.Array, v: jax.Array, interpret: bool = False) -> jax.Array:
    """Write as ops.paged.write_heads does: pages [P, page, 2K, H] with k and v [T, K, H].

    What rounded pages store is computed by XLA, whose fusion reads k and v once; the kernel copies it.
    """
    if is_rounded(pages):
        k, v = (round_rows(rows, pages.dtype) for rows in (k, v))
    T, K, H = k.shape
    flat = pages.reshape(-1, H)
    out = pl.pallas_call(
        functools.partial(_write_kernel, K=K),
        grid=(T,),
        out_shape=jax.ShapeDtypeStruct(flat.shape, flat.dtype),
        input_output_aliases={3: 0},
        compiler_params=plgpu.CompilerParams(num_warps=min(8, max(1, K * H // 256)), num_stages=1),
        interpret=interpret,
        name="write_pages",
    )(token_places(ctx, pages, T), k.reshape(T * K, H), v.reshape(T * K, H), flat)
    return out.reshape(pages.shape)


def _write_kernel(places_ref, k_ref, v_ref, _, pages_ref, *, K: int):
    token = pl.program_id(0)
    place = places_ref[token]
    head = jnp.arange(1 << (K - 1).bit_length())[:, None]
    H = k_ref.shape[1]
    lanes = jnp.arange(pl.next_power_of_2(H))[None, :]  # rows of int8 have 4 bytes more
    is_stored = place * 2 * K < pages_ref.shape[0]  # padding has a place past the end
    real = (head < K) & (lanes < H) & is_stored
    row = jnp.where((head < K) & is_stored, (place * K + head) * 2, pages_ref.shape[0])
    for ref, which in ((k_ref, 0), (v_ref, 1)):
        values = plgpu.load(ref.at[token * K + head, lanes], mask=real)
        plgpu.store(pages_ref.at[row + which, lanes], values.astype(pages_ref.dtype), mask=real)


HEADS = 8  # a program takes: few enough that one token fills some of the chip


@functools.partial(jax.jit, static_argnames=("eps", "offset", "interpret"))  # equal calls are traced and lowered once
def rotate_store(
    ctx: Paged,
    pages: jax.Array,  # [P, page, 2K, H]
    qkv: jax.Array,  # [T, N + 2K, H]
    tables: tuple,  # cos and sin [T, H / 2] f32
    norms: tuple[jax.Array, jax.Array] | None,  # weights [H] of the queries' and the keys' norm
    eps: float,
    offset: float,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Return the queries [T, N, H] and the pages."""
    T, heads, H = qkv.shape
    K = pages.shape[2] // 2
    N = heads - 2 * K
    flat = pages.reshape(-1, H)
    given = [token_places(ctx, pages, T), *tables, *(norms or ()), qkv.reshape(-1, H), flat]
    q, out = pl.pallas_call(
        functools.partial(_rotate_kernel, N=N, K=K, normed=norms is not None, eps=eps, offset=offset),
        grid=(T, pl.cdiv(heads, HEADS)),
        out_shape=[jax.ShapeDtypeStruct((T * N, H), qkv.dtype), jax.ShapeDtypeStruct(flat.shape, flat.dtype)],
        input_output_aliases={len(given) - 1: 1},
        compiler_params=plgpu.CompilerParams(num_warps=2, num_stages=1),
        interpret=interpret,
        name="rotate_store",
    )(*given)
    return q.reshape(T, N, H), out.reshape(pages.shape)


def _rotate_kernel(places_ref, cos_ref, sin_ref, *refs, N: int, K: int, normed: bool, eps: float, offset: float):
    *norm_refs, qkv_ref, _, q_ref, pages_ref = refs
    token, half = pl.program_id(0), qkv_ref.shape[1] // 2
    place = places_ref[token]
    head = (pl.program_id(1) * HEADS + jnp.arange(HEADS))[:, None]
    lanes = jnp.arange(half)[None, :]
    inside, turns = head < N + 2 * K, head < N + K
    row = token * (N + 2 * K) + head
    a, b = (plgpu.load(qkv_ref.at[row, lanes + at], mask=inside, other=0.0).astype(jnp.float32) for at in (0, half))
    if normed:
        scale = jax.lax.rsqrt((jnp.sum(a * a, axis=1) + jnp.sum(b * b, axis=1)) / (2 * half) + eps)[:, None]
        a, b = (
            jnp.where(turns, (x * scale * (offset + _weight(norm_refs, head < N, lanes + at))), x)
            for x, at in ((a, 0), (b, half))
        )
        # rounded as between two operations of the reference
        a, b = (x.astype(qkv_ref.dtype).astype(jnp.float32) for x in (a, b))
    cos, sin = (jnp.where(turns, ref[token, :][None, :], still) for ref, still in ((cos_ref, 1.0), (sin_ref, 0.0)))
    turned = a * cos - b * sin, b * cos + a * sin
    is_query = head < N
    stored = inside & (head >= N) & (place * 2 * K < pages_ref.shape[0])  # padding has a place past the end
    kv = head - N
    # what is not stored has a row past the end: no two may share one
    q_row = jnp.where(is_query, token * N + head, q_ref.shape[0])
    page_row = jnp.where(stored, (place * K + kv % K) * 2 + kv // K, pages_ref.shape[0])
    for x, at in zip(turned, (0, half), strict=True):
        plgpu.store(q_ref.at[q_row, lanes + at], x.astype(q_ref.dtype), mask=is_query)
        plgpu.store(pages_ref.at[page_row, lanes + at], x.astype(pages_ref.dtype), mask=stored)


def _weight(refs, is_query: jax.Array, lanes: jax.Array) -> jax.Array:
    query, key = (plgpu.load(ref.at[lanes]).astype(jnp.float32) for ref in refs)
    return jnp.where(is_query, query, key)
