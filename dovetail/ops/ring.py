"""Ring attention on one device of the ring: its queries stay and every slice of keys comes by once.

Both passes go through the blocks in the same order. In the backward pass the gradients of keys and values travel with
them around the ring, and end on the device that owns them. Of the forward pass only the output and the softmax's
denominators are saved (arXiv 2310.01889).

B rows, T tokens of a slice, N query heads, K key heads, H head dim.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from dovetail.ops.packed import MASKED, attend_block

BLOCK = 1024  # the most queries, and the most keys, whose scores exist at once


@dataclass(frozen=True)
class Ring:
    """Describe `count` devices along `axis`, each with a slice of the row.

    A query sees its own slice and `reach` before it.
    """

    axis: tuple[str, ...]
    count: int
    reach: int
    scale: float
    window: int | None = None
    softcap: float | None = None

    def shift(self, tree: Any, steps: int = 1) -> Any:
        """Send a tree of arrays `steps` devices along the ring."""
        to = [(i, (i + steps) % self.count) for i in range(self.count)]
        return jax.tree.map(lambda x: lax.ppermute(x, self.axis, to), tree)

    def attend(self, q, k, v, segments, positions) -> tuple[jax.Array, jax.Array]:
        """Attend a block of queries to a block of keys."""
        options = dict(scale=self.scale, window=self.window, softcap=self.softcap)
        return attend_block(q, k, v, segments, positions, **options)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def ring_attention(
    ring: Ring,
    q: jax.Array,  # [B, T, N, H]
    k: jax.Array,  # [B, T, K, H]
    v: jax.Array,  # [B, T, K, Hv]
    segments: jax.Array,  # [B, T]
    sinks: jax.Array | None,  # [N]
) -> jax.Array:
    """Attend a device's queries to all slices that they may see."""
    return _forward(ring, q, k, v, segments, sinks)[0].astype(v.dtype)


def _forward(ring: Ring, q, k, v, segments, sinks) -> tuple[jax.Array, jax.Array]:
    """Return (out [B, T, N, Hv], log of the softmax's denominator [B, T, N]), both f32."""

    def see(queries, keys, found, _, positions):
        (q, q_segments), (k, v, k_segments), (out, lse) = queries, keys, found
        more, more_lse = ring.attend(q, k, v, (q_segments, k_segments), positions)
        total = jnp.logaddexp(lse, more_lse)
        out = out * jnp.exp(lse - total)[..., None] + more * jnp.exp(more_lse - total)[..., None]
        return (out, total), ()

    nothing = jnp.zeros((*q.shape[:3], v.shape[-1]), jnp.float32), jnp.full(q.shape[:3], MASKED, jnp.float32)
    (out, lse), _ = _go_round(ring, (q, segments), (k, v, segments), nothing, (), see)
    if sinks is None:
        return out, lse
    total = jnp.logaddexp(lse, sinks.astype(jnp.float32))
    return out * jnp.exp(lse - total)[..., None], total


def _forward_keeping(ring: Ring, q, k, v, segments, sinks):
    out, lse = _forward(ring, q, k, v, segments, sinks)
    out = out.astype(v.dtype)
    return out, (q, k, v, segments, sinks, out, lse)


def _backward(ring: Ring, saved, d_out):
    q, k, v, segments, sinks, out, lse = saved
    d_out = d_out.astype(jnp.float32)
    drawn = (d_out * out).sum(axis=-1)  # [B, T, N]: what a larger denominator takes from all keys alike

    def see(queries, keys, dq, d_keys, positions):
        (q, q_segments, d_out, lse, drawn), (k, v, k_segments) = queries, keys
        attend = functools.partial(ring.attend, segments=(q_segments, k_segments), positions=positions)
        (out, own_lse), pull = jax.vjp(attend, q, k, v)
        # out is sum_j w_j out_j over the blocks j, with w_j = exp(lse_j - lse)
        weight = jnp.exp(own_lse - lse)
        d_lse = weight * ((d_out * out).sum(axis=-1) - drawn)
        more = pull((weight[..., None] * d_out, d_lse))
        return jax.tree.map(jnp.add, (dq, d_keys), (more[:1], more[1:]))

    queries = q, segments, d_out, lse, drawn
    zeros = [jnp.zeros(x.shape, jnp.float32) for x in (q, k, v)]
    (dq,), (dk, dv) = _go_round(ring, queries, (k, v, segments), (zeros[0],), (zeros[1], zeros[2]), see)
    d_sinks = None
    if sinks is not None:
        share = jnp.exp(sinks.astype(jnp.float32) - lse)
        d_sinks = -(share * drawn).sum(axis=(0, 1)).astype(sinks.dtype)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None, d_sinks


ring_attention.defvjp(_forward_keeping, _backward)


def _go_round(ring: Ring, queries: Any, keys: Any, per_query: Any, per_key: Any, see: Callable) -> tuple[Any, Any]:
    """Run a device's queries over everything they can see.

    `see` takes a block of queries and of keys, with what was accumulated for each, and returns the latter two updated.
    What is accumulated for keys travels with them.
    """

    def visit(step, keys, per_query, per_key):
        return _all_blocks(ring, step, queries, keys, per_query, per_key, see)

    per_query, per_key = visit(0, keys, per_query, per_key)

    def turn(state, step):
        per_query, keys, per_key = state
        keys, per_key = ring.shift((keys, per_key))
        per_query, per_key = visit(step, keys, per_query, per_key)
        return (per_query, keys, per_key), None

    state, _ = lax.scan(turn, (per_query, keys, per_key), jnp.arange(1, ring.reach + 1))
    return state[0], ring.shift(state[2], -ring.reach)


def _all_blocks(ring: Ring, step, queries, keys, per_query, per_key, see: Callable) -> tuple[Any, Any]:
    """Run over the blocks of the current slice, `step` slices before the queries'.

    Skip blocks that no query can see.
    """
    T = jax.tree.leaves(queries)[0].shape[1]
    size = next(b for b in range(min(BLOCK, T), 0, -1) if T % b == 0)
    count = T // size
    is_earlier = lax.axis_index(ring.axis) >= step  # or else it came round from the row's end

    def cut(tree, start):
        return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, size, axis=1), tree)

    def put(tree, blocks, start):
        return jax.tree.map(lambda x, b: lax.dynamic_update_slice_in_dim(x, b, start, axis=1), tree, blocks)

    def pair(state, index):
        q_start, k_start = index // count * size, index % count * size
        ahead = step * T + q_start - k_start
        is_seen = is_earlier & (ahead + size > 0)
        if ring.window:
            is_seen = is_seen & (ahead - size + 1 < ring.window)
        positions = ahead + jnp.arange(size), jnp.arange(size)
        old = cut(state[0], q_start), cut(state[1], k_start)
        new = lax.cond(
            is_seen, lambda old: see(cut(queries, q_start), cut(keys, k_start), *old, positions), lambda old: old, old
        )
        return (put(state[0], new[0], q_start), put(state[1], new[1], k_start)), None

    state, _ = lax.scan(pair, (per_query, per_key), jnp.arange(count * count))
    return state
