"""Attention, the one place where training and serving differ.

`store` takes a layer's new keys and values, `attend` looks at what was stored. In a Packed context the store is the
keys and values themselves; in a Paged one it is the layer's pages with the new tokens written. Which implementation
runs is chosen in ops.dispatch. The output is named `attention`, for models.decoder.remember to keep, unless the kernel
names its own residuals: it would be kept twice.

T queries, N query heads, K key heads, H head dim.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from dovetail.core.errors import UnsupportedError
from dovetail.core.mesh import Placement
from dovetail.core.types import Packed, Paged
from dovetail.ops.context import context_attention, is_cut
from dovetail.ops.dispatch import (
    NAMES_ITSELF,
    choose_packed,
    choose_paged,
    packed_kernel,
    paged_kernel,
    rotate_store_kernel,
    store_kernel,
)
from dovetail.ops.packed import on_mesh


def store(ctx: Packed | Paged, entry: Any, k: jax.Array, v: jax.Array) -> Any:
    """Store a layer's new keys and values, and return what `attend` reads."""
    if isinstance(ctx, Packed):
        return k, v
    heads, pages = split_heads(ctx.placement, k.shape[1])
    return per_device(store_kernel(ctx, k, entry), ctx, (entry, k, v), (pages, heads, heads), pages)


def rotate_store(
    ctx: Packed | Paged,
    entry: Any,
    qkv: jax.Array,
    tables: tuple,
    norms: tuple[jax.Array, jax.Array] | None,
    eps: float,
    offset: float,
) -> tuple[jax.Array, Any]:
    """Normalise, rotate and store in one: qkv [T, N + 2K, H] -> (q [T, N, H], what was stored)."""
    assert isinstance(ctx, Paged), "see dispatch.rotates_and_stores"
    return rotate_store_kernel(qkv, entry.shape[2] // 2)(ctx, entry, qkv, tables, norms, eps, offset)


def attend(
    ctx: Packed | Paged,
    q: jax.Array,
    stored: Any,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    kv_heads: int | None = None,
) -> jax.Array:
    """Attend: q [..., N, H] -> [..., N, H of the values].

    Args:
        ctx: The attention context.
        q: Queries.
        stored: The result of `store`.
        scale: The factor of the scores.
        window: The sliding window; None for none.
        softcap: The soft cap of the scores; None for none.
        sinks: [N] logits that take weight and contribute nothing.
        kv_heads: K, if `stored` is pages: flat ones do not show it.
    """
    options: dict[str, Any] = dict(scale=scale, window=window, softcap=softcap, sinks=sinks)
    if isinstance(ctx, Paged):
        assert kv_heads is not None
        return _attend_pages(ctx, q, stored, kv_heads, **options)
    k, v = stored
    if is_cut(ctx.placement, q.shape[1]):
        if ctx.image_ids is not None:
            raise UnsupportedError("rows with images whose tokens see each other cannot be split over the context axis")
        return context_attention(q, k, v, ctx, **options)
    name = choose_packed(ctx.platform, q, v, softcap, sinks, ctx.image_ids is not None)
    run = packed_kernel(name)
    if name in NAMES_ITSELF:  # XLA splits the others itself
        return on_mesh(run, q, k, v, ctx, **options)
    out = run(q, k, v, ctx, **options)
    return out if name == "cudnn" else checkpoint_name(out, "attention")


def _attend_pages(ctx: Paged, q: jax.Array, stored: jax.Array, kv_heads: int, *, sinks, **options: Any) -> jax.Array:
    heads, pages = split_heads(ctx.placement, kv_heads)
    is_blocked = ctx.last_seen is not None
    name = choose_paged(ctx.platform, q, kv_heads, sinks, ctx.placement, ctx.block_tables, stored, is_blocked)
    here = kv_heads // ctx.placement.size("kv_heads") if ctx.placement and heads[1] else kv_heads
    run = functools.partial(paged_kernel(name, here if stored.ndim == 3 else None), **options)
    given, specs = ((q, stored), (heads, pages)) if sinks is None else ((q, stored, sinks), (heads, pages, P(heads[1])))
    return per_device(lambda ctx, q, stored, sinks=None: run(ctx, q, stored, sinks=sinks), ctx, given, specs, heads)


def split_heads(placement: Placement | None, num_kv_heads: int) -> tuple[P, P]:
    """Return the partitions of [T, heads, H] and of pages [P, page, 2K, H], or flat.

    By head, if key heads can be split.
    """
    fits = placement is not None and num_kv_heads % placement.size("kv_heads") == 0
    axis = placement.rules.axes_of("kv_heads") if fits and placement else None
    return P(None, axis, None), P(None, None, axis)


def per_device(run: Callable, ctx: Paged, arrays: tuple, specs: tuple[P, ...], out: P) -> jax.Array:
    """Call a function for one device on each device of a mesh, with its heads."""
    placement = ctx.placement
    if placement is None or placement.mesh.size == 1:
        return run(ctx, *arrays)
    alone = dataclasses.replace(ctx, placement=None)
    whole = jax.tree.map(lambda _: P(), alone)
    mapped = jax.shard_map(run, mesh=placement.mesh, in_specs=(whole, *specs), out_specs=out, check_vma=False)
    return mapped(alone, *arrays)
