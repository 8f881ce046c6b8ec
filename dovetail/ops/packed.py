"""Packed attention: the exact reference, and how to run a kernel for one device on a mesh.

`MASKED`, `cap_and_mask` and `is_visible` are shared with paged attention and the kernels.

B rows, T queries, S keys, N query heads, K key heads, G = N / K, H head dim.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from dovetail.core.mesh import Placement
from dovetail.core.types import Packed

MASKED = -1e30  # not -inf: a row with nothing to see must give 0, never NaN


def cap_and_mask(scores: jax.Array, visible: jax.Array, softcap: float | None) -> jax.Array:
    """Return soft-capped f32 scores with invisible ones masked; `visible` broadcasts against them."""
    if softcap is not None:
        scores = jnp.tanh(scores / softcap) * softcap
    return jnp.where(visible, scores, MASKED)


def is_visible(q_pos: jax.Array, k_pos: jax.Array, window: int | None, also: jax.Array | None = None) -> jax.Array:
    """Return whether a key is causal, or in `also`, and within the sliding window (which includes the token itself)."""
    distance = q_pos - k_pos
    visible = distance >= 0 if also is None else (distance >= 0) | also
    return visible & (distance < window) if window else visible


def same_image(queries: jax.Array, keys: jax.Array) -> jax.Array:
    """Return [B, T, S] whether tokens with image ids [B, T] and [B, S] are of one image."""
    return (queries[:, :, None] == keys[:, None, :]) & (queries > 0)[:, :, None]


def packed_attention(
    q: jax.Array,  # [B, T, N, H]
    k: jax.Array,  # [B, S, K, H]; S is T without `key_segments`
    v: jax.Array,  # [B, S, K, Hv]
    ctx: Packed,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    key_segments: jax.Array | None = None,  # [B, S]
) -> jax.Array:
    """Attend exactly. Queries go in chunks that see only the keys they may reach, so that scores are never [T, T].

    With `key_segments` there are S >= T keys and the queries are the last T of them (ops.context). With image ids, the
    tokens of an image see each other (models.towers.vision).
    """
    T, images = q.shape[1], ctx.image_ids
    assert images is None or key_segments is None
    key_segments = ctx.segment_ids if key_segments is None else key_segments
    before = key_segments.shape[1] - T
    chunk = max(128, -(-T // 16))  # small enough for a core's cache, few enough to compile
    # A chunk's probabilities are computed again in the backward pass, not kept: memory stays linear in T.
    one = jax.checkpoint(functools.partial(_attend_chunk, scale=scale, window=window, softcap=softcap))
    outputs = []
    for start in range(0, T, chunk):
        rows = slice(start, min(start + chunk, T))
        last = before + rows.stop if images is None else min(T, rows.stop + (ctx.image_tokens or T) - 1)
        keys = slice(max(0, before + start - window + 1) if window else 0, last)
        positions = before + jnp.arange(rows.start, rows.stop), jnp.arange(keys.start, keys.stop)
        segments = ctx.segment_ids[:, rows], key_segments[:, keys]
        same = None if images is None else (images[:, rows], images[:, keys])
        outputs.append(one(q[:, rows], k[:, keys], v[:, keys], segments, positions, sinks, same))
    return jnp.concatenate(outputs, axis=1) if len(outputs) > 1 else outputs[0]


def _attend_chunk(q, k, v, segments, positions, sinks, images, **options):
    return attend_block(q, k, v, segments, positions, sinks, images, **options)[0].astype(v.dtype)


def attend_block(
    q, k, v, segments, positions, sinks=None, images=None, *, scale, window, softcap
) -> tuple[jax.Array, jax.Array]:
    """Attend some queries to some keys: (out [B, T, N, H], log of the softmax's denominator [B, T, N]), both f32.

    `segments` ([B, T], [B, S]), `positions` ([T], [S]) and `images` (as segments, or None) are those of queries and
    keys.
    """
    B, T, N, H = q.shape
    K, G = k.shape[2], N // k.shape[2]
    # a key head's queries are rows of one product, [T * G, H] @ [H, S]: many small products would be far slower
    q_rows = q.reshape(B, T, K, G, H).transpose(0, 2, 1, 3, 4).reshape(B, K, T * G, H)
    scores = jnp.einsum("bkrh,bskh->bkrs", q_rows, k, preferred_element_type=jnp.float32) * scale
    same = None if images is None else same_image(*images)
    visible = is_visible(positions[0][:, None], positions[1], window, same)
    visible = visible & (segments[0][:, :, None] == segments[1][:, None, :])  # [B, T, S]
    scores = cap_and_mask(scores.reshape(B, K, T, G, -1), visible[:, None, :, None], softcap)
    top = scores.max(axis=-1, keepdims=True)
    if sinks is not None:
        sinks = sinks.astype(jnp.float32).reshape(K, 1, G, 1)
        top = jnp.maximum(top, sinks)
    weights = jnp.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(sinks - top)
    rows = weights.reshape(B, K, T * G, -1).astype(v.dtype)
    out = jnp.einsum("bkrs,bskh->bkrh", rows, v, preferred_element_type=jnp.float32)
    # divided last: the output is smaller than the scores
    out = (out.reshape(B, K, T, G, -1) / total).transpose(0, 2, 1, 3, 4).reshape(B, T, N, -1)
    return out, (top + jnp.log(total))[..., 0].transpose(0, 2, 1, 3).reshape(B, T, N)


def on_mesh(
    run: Callable,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    ctx: Packed,
    *,
    sinks: jax.Array | None = None,
    **options: Any,
) -> jax.Array:
    """Run a packed kernel for one device on a mesh: each device gets its rows and its heads."""
    placement = ctx.placement
    if placement is None or placement.mesh.size == 1:
        return run(q, k, v, ctx, sinks=sinks, **options)
    axes = ("batch", None, "heads", None)
    k, v = keys_of_heads(placement, q, k, v)
    specs = [placement.partition(axes, x.shape) for x in (q, k, v)]

    def local(q, k, v, segment_ids, image_ids, sinks):
        return run(q, k, v, Packed(segment_ids, ctx.platform, image_ids=image_ids), sinks=sinks, **options)

    rows, heads = placement.partition(("batch", None), ctx.segment_ids.shape), P(specs[0][2])
    in_specs = (*specs, rows, rows if ctx.image_ids is not None else None, heads if sinks is not None else None)
    mapped = jax.shard_map(local, mesh=placement.mesh, in_specs=in_specs, out_specs=specs[0], check_vma=False)
    return mapped(q, k, v, ctx.segment_ids, ctx.image_ids, sinks)


def keys_of_heads(placement: Placement, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return k and v with their heads repeated if a device would not get the keys of its queries' heads."""
    if q.shape[2] % placement.size("heads") or k.shape[2] % placement.size("kv_heads") == 0:
        return k, v
    return jnp.repeat(k, q.shape[2] // k.shape[2], axis=2), jnp.repeat(v, q.shape[2] // v.shape[2], axis=2)
