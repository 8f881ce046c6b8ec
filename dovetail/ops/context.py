"""Packed attention over rows that are split along their length over the mesh's context axis.

Queries stay; keys and values come to them, and with a sliding window only the slices within it. There are two exact
ways:

- gather: the slices that a query may see are concatenated and a packed kernel runs over them.
- ring: slices pass from neighbour to neighbour while the softmax is accumulated (arXiv 2310.01889), so that a device
  never holds more than two of them. Used if the gathered keys and values would take more than GATHER_BYTES.

Slices are contiguous and attention is causal, so the last device has the most keys and the others wait for it: of n
devices' time in attention, n / (2n - 1) is useful. That is the price of keeping rows in order.

B rows, T tokens of a slice, S keys, N query heads, K key heads, H head dim.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from dovetail.core.mesh import Placement
from dovetail.core.types import Packed
from dovetail.ops.dispatch import NAMES_ITSELF, choose_packed, log_once, packed_kernel
from dovetail.ops.packed import keys_of_heads
from dovetail.ops.ring import Ring, ring_attention

GATHER_BYTES = 512 << 20  # of keys and values per device; their gradients are as much again
NOWHERE = -1  # the segment of keys that no query is in
HEADS = ("batch", "length", "heads", None)
KEYS = ("batch", "length", "kv_heads", None)


@dataclass(frozen=True)
class Slices:
    """Describe a row in `count` slices of `length` tokens; a query sees its own slice and `reach` before it."""

    axis: tuple[str, ...]
    count: int
    length: int
    reach: int


def is_cut(placement: Placement | None, length: int) -> bool:
    """Return whether rows of this length are split over the mesh's context axis."""
    return placement is not None and placement.partition(("length",), (length,))[0] is not None


def slices_of(placement: Placement, length: int, window: int | None = None) -> Slices:
    """Return the slices of rows of this length."""
    axis, count = placement.rules.axes_of("length"), placement.size("length")
    each = length // count
    return Slices(axis, count, each, min(count - 1, -(-(window - 1) // each)) if window else count - 1)


def context_attention(
    q: jax.Array,  # [B, whole row, N, H]
    k: jax.Array,
    v: jax.Array,
    ctx: Packed,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Attend as ops.packed.packed_attention does, for rows that are split (is_cut)."""
    placement = ctx.placement
    assert placement is not None
    k, v = keys_of_heads(placement, q, k, v)
    slices = slices_of(placement, q.shape[1], window)
    options: dict[str, Any] = dict(scale=scale, window=window, softcap=softcap)
    if choose_way(placement, k, v, window) == "ring":
        log_once("packed attention", "ring over context")
        ring = Ring(slices.axis, slices.count, slices.reach, **options)
        run = lambda *given: checkpoint_name(ring_attention(ring, *given), "attention")  # noqa: E731
    else:
        run = lambda q, k, v, *more: gather_and_run(slices, ctx.platform, options, q, (k, v), *more)  # noqa: E731
    arrays, axes = (q, k, v, ctx.segment_ids), (HEADS, KEYS, KEYS, HEADS[:2])
    if sinks is None:
        return per_slice(lambda *given: run(*given, None), placement, arrays, axes)
    return per_slice(run, placement, (*arrays, sinks), (*axes, HEADS[2:3]))


def choose_way(placement: Placement, k: Any, v: Any, window: int | None = None) -> str:
    """Return 'gather' while a device's share of k and v [B, row, K, H] is then small, else 'ring'."""
    slices = slices_of(placement, k.shape[1], window)
    rows, heads = (
        n // placement.size(axis) if n % placement.size(axis) == 0 else n
        for n, axis in ((k.shape[0], "batch"), (k.shape[2], "kv_heads"))
    )
    tokens = rows * (slices.reach + 1) * slices.length
    size = tokens * heads * (k.shape[3] + v.shape[3]) * jnp.dtype(k.dtype).itemsize
    return "gather" if size <= GATHER_BYTES else "ring"


def per_slice(run: Callable, placement: Placement, arrays: Sequence[jax.Array], axes: Sequence[tuple]) -> jax.Array:
    """Call `run` on each device with its parts; the output is laid out as the first array."""
    specs = tuple(placement.partition(a, x.shape) for a, x in zip(axes, arrays, strict=True))
    return jax.shard_map(run, mesh=placement.mesh, in_specs=specs, out_specs=specs[0], check_vma=False)(*arrays)


def gather_and_run(
    slices: Slices,
    platform: str | None,
    options: dict[str, Any],
    q: jax.Array,
    stored: tuple[jax.Array, ...],
    segments: jax.Array,
    sinks: jax.Array | None = None,
    expand: Callable[..., tuple[jax.Array, jax.Array]] = lambda k, v: (k, v),
) -> jax.Array:
    """Gather what a device's queries may see of `stored`, `expand` it to k and v, and attend."""
    name = choose_packed(platform, q, jax.eval_shape(expand, *stored)[1], options["softcap"], sinks)

    # The backward pass gathers again: kept, a layer's gathered keys would take the memory that the cut has saved.
    @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names("attention"))
    def run(q, stored, segments, sinks):
        k, v = expand(*(seen(slices, x) for x in stored))
        first = lax.axis_index(slices.axis) - slices.reach
        is_there = first + jnp.arange(k.shape[1]) // slices.length >= 0
        key_segments = jnp.where(is_there, seen(slices, segments), NOWHERE)
        kernel = packed_kernel(name, gathered=True)
        return kernel(q, k, v, Packed(segments), **options, sinks=sinks, key_segments=key_segments)

    out = run(q, stored, segments, sinks)
    return out if name in NAMES_ITSELF else checkpoint_name(out, "attention")


def seen(slices: Slices, x: jax.Array) -> jax.Array:
    """Return the slices before a device's own, and its own, in order: x [B, T, ...] -> [B, (reach + 1) T, ...].

    Slices before the row's start have undefined contents.
    """
    if slices.reach == slices.count - 1:
        whole = lax.all_gather(x, slices.axis, axis=1, tiled=True)
        return jnp.roll(whole, -(lax.axis_index(slices.axis) + 1) * slices.length, axis=1)
    steps = range(slices.reach, 0, -1)
    before = [lax.ppermute(x, slices.axis, [(i, i + s) for i in range(slices.count - s)]) for s in steps]
    return jnp.concatenate([*before, x], axis=1)
