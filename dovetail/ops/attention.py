"""Attention, the one place where training and serving differ.

`store` takes a layer's new keys and values, `attend` looks at what was stored. In a Packed context the store is the
keys and values themselves; in a Paged one it is the layer's pages with the new tokens written. Which implementation
runs is chosen here alone, by platform and shape; an implementation that fails, fails loudly.

B rows, T queries, S keys, N query heads, K key heads, G = N / K, H head dim.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dovetail.core.mesh import Placement
from dovetail.core.types import Packed, Paged
from dovetail.ops.paged import paged_attention, split_heads, write_heads
from dovetail.ops.softmax import cap_and_mask, is_visible

log = logging.getLogger(__name__)


def store(ctx: Packed | Paged, entry: Any, k: jax.Array, v: jax.Array) -> Any:
    return (k, v) if isinstance(ctx, Packed) else write_heads(ctx, entry, k, v)


def attend(
    ctx: Packed | Paged,
    q: jax.Array,
    stored: Any,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """q [..., N, H] -> [..., N, H of the values]. `sinks` [N] are logits that take weight and give nothing."""
    options: dict[str, Any] = dict(scale=scale, window=window, softcap=softcap, sinks=sinks)
    if isinstance(ctx, Paged):
        name = choose_paged(ctx.platform, q, ctx.placement)
        _log_once("paged", name)
        if name == "triton":
            from dovetail.ops.kernels.gpu.paged import paged_attention as kernel

            return kernel(ctx, q, stored, **options)
        return paged_attention(ctx, q, stored, split=split_heads, **options)
    k, v = stored
    name = choose_packed(ctx.platform, q, v, softcap, sinks)
    _log_once("packed", name)
    run = _packed_implementation(name)
    # XLA splits the others itself
    return on_mesh(run, q, k, v, ctx, **options) if name == "splash" else run(q, k, v, ctx, **options)


def on_mesh(run: Callable, q: jax.Array, k: jax.Array, v: jax.Array, ctx: Packed, **options: Any) -> jax.Array:
    """Run a packed kernel that knows one device on a mesh of them: each gets its rows and its heads."""
    placement = ctx.placement
    if placement is None or placement.mesh.size == 1:
        return run(q, k, v, ctx, **options)
    axes = ("batch", None, "heads", None)
    if q.shape[2] % placement.size("heads") == 0 and k.shape[2] % placement.size("kv_heads") != 0:
        k, v = (
            jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v)
        )  # so that a device has its queries' keys
    specs = [placement.partition(axes, x.shape) for x in (q, k, v)]

    def local(q, k, v, segment_ids):
        return run(q, k, v, Packed(segment_ids, ctx.platform), **options)

    rows = placement.partition(("batch", None), ctx.segment_ids.shape)
    mapped = jax.shard_map(local, mesh=placement.mesh, in_specs=(*specs, rows), out_specs=specs[0], check_vma=False)
    return mapped(q, k, v, ctx.segment_ids)


def choose_packed(
    platform: str | None, q: Any, v: Any, softcap: float | None = None, sinks: jax.Array | None = None
) -> str:
    """The packed implementation for these shapes: 'cudnn', 'splash' or 'reference'."""
    platform = platform or jax.default_backend()
    same_dim = q.shape[-1] == v.shape[-1]
    if platform in ("cuda", "gpu") and _has_cudnn():
        half = q.dtype in (jnp.bfloat16, jnp.float16)
        if half and same_dim and q.shape[-1] <= 128 and q.shape[-1] % 8 == 0 and softcap is None and sinks is None:
            return "cudnn"
    if platform == "tpu" and same_dim and q.shape[1] % 128 == 0 and sinks is None:
        return "splash"
    return "reference"


def choose_paged(platform: str | None, q: Any, placement: Placement | None = None) -> str:
    """The paged implementation for these shapes: 'triton' or 'reference'. The kernel knows one device; XLA splits the
    reference over a mesh."""
    H = q.shape[-1]
    alone = placement is None or placement.mesh.size == 1
    if (platform or jax.default_backend()) in ("cuda", "gpu") and alone and H >= 16 and H & (H - 1) == 0:
        return "triton"
    return "reference"


def describe() -> list[tuple[str, str, str]]:
    """(context, platform, implementation) for a usual shape, as `dovetail info` shows it."""
    q = jax.ShapeDtypeStruct((1, 1024, 32, 128), jnp.bfloat16)
    rows = [("Packed", platform, choose_packed(platform, q, q)) for platform in ("cpu", "cuda", "tpu")]
    return rows + [("Paged", platform, choose_paged(platform, q)) for platform in ("cpu", "cuda", "tpu")]


def _packed_implementation(name: str):
    if name == "cudnn":
        from dovetail.ops.kernels.gpu.packed import packed_attention as implementation
    elif name == "splash":
        from dovetail.ops.kernels.tpu.packed import packed_attention as implementation
    else:
        implementation = packed_attention
    return implementation


@functools.cache
def _has_cudnn() -> bool:
    """cuDNN's call is built against the library that is loaded: it cannot be lowered where there is none."""
    return any(device.platform == "gpu" for device in jax.devices())


@functools.cache
def _log_once(context: str, name: str) -> None:
    log.info("%s attention: %s", context, name)


def packed_attention(
    q: jax.Array,  # [B, T, N, H]
    k: jax.Array,  # [B, T, K, H]
    v: jax.Array,  # [B, T, K, Hv]
    ctx: Packed,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """The exact reference. Queries go in chunks that see only the keys they may reach, so scores are never [T, T]."""
    T = q.shape[1]
    chunk = max(128, -(-T // 16))  # small enough for a core's cache, few enough to compile
    # A chunk's probabilities are computed again in the backward pass, not kept: memory stays linear in T.
    one = jax.checkpoint(functools.partial(_attend_chunk, scale=scale, window=window, softcap=softcap))
    outputs = []
    for start in range(0, T, chunk):
        rows = slice(start, min(start + chunk, T))
        keys = slice(max(0, start - window + 1) if window else 0, rows.stop)
        positions = jnp.arange(rows.start, rows.stop), jnp.arange(keys.start, keys.stop)
        segments = ctx.segment_ids[:, rows], ctx.segment_ids[:, keys]
        outputs.append(one(q[:, rows], k[:, keys], v[:, keys], segments, positions, sinks))
    return jnp.concatenate(outputs, axis=1) if len(outputs) > 1 else outputs[0]


def _attend_chunk(q, k, v, segments, positions, sinks, *, scale, window, softcap):
    B, T, N, H = q.shape
    K, G = k.shape[2], N // k.shape[2]
    # a key head's queries are rows of one product, [T * G, H] @ [H, S]: many small products would be far slower
    q_rows = q.reshape(B, T, K, G, H).transpose(0, 2, 1, 3, 4).reshape(B, K, T * G, H)
    scores = jnp.einsum("bkrh,bskh->bkrs", q_rows, k, preferred_element_type=jnp.float32) * scale
    visible = is_visible(positions[0][:, None], positions[1], window)
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
    out = (out.reshape(B, K, T, G, -1) / total).astype(v.dtype)
    return out.transpose(0, 2, 1, 3, 4).reshape(B, T, N, -1)
