"""The parts of a router that have a gradient of their own: its product, and the choice of the greatest scores.

D model dim, E experts, k of them per token.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from dovetail.ops.linear import ARRAYS, matmul
from dovetail.ops.quant.weight import is_quantized

MANY_SCORES = 1024 * 128  # from which on all pairs are more work than a sort's kernel takes to compile

# --- logits -----------------------------------------------------------------------------------------------------------


def router_logits(x: jax.Array, router: Any, bias: jax.Array | None = None) -> jax.Array:
    """Map x [..., D] to logits [..., E] with a router's weights [E, D]; summed in f32, for scores may be very close."""
    if is_quantized(router) or router.dtype != x.dtype:
        x, router = x.astype(jnp.float32), router.astype(jnp.float32)
    if not isinstance(router, ARRAYS) or router.dtype != jnp.bfloat16:
        return matmul(x, router, bias, out_dtype=jnp.float32)
    logits: Any = _half_logits(x, jnp.asarray(router))
    return logits if bias is None else logits + bias.astype(logits.dtype)


@jax.custom_vjp
def _half_logits(x: jax.Array, router: jax.Array) -> jax.Array:
    """Multiply bf16 factors to f32; their gradients are products of bf16 too.

    jax would multiply the f32 gradient by f32 copies of both factors. XLA keeps the copy of x from the forward pass.
    """
    return matmul(x, router, out_dtype=jnp.float32)


def _half_logits_forward(x: jax.Array, router: jax.Array):
    return _half_logits(x, router), (x, router)


def _half_logits_backward(saved: tuple[jax.Array, jax.Array], g: jax.Array):
    x, router = saved
    parts = _halves(g)  # [..., 2, E]
    both = jnp.broadcast_to(router, (2, *router.shape))
    dx = jnp.einsum("...se,sed->...d", parts, both, preferred_element_type=x.dtype)
    tokens = tuple(range(x.ndim - 1))
    drouter = jnp.tensordot(parts, x, (tokens, tokens), preferred_element_type=jnp.float32)  # [2, E, D]
    return dx, drouter.sum(axis=0).astype(router.dtype)


_half_logits.defvjp(_half_logits_forward, _half_logits_backward)


def _halves(g: jax.Array) -> jax.Array:
    """Return g [..., E] as the sum of two in bf16 [..., 2, E]: 16 bits of fraction, where TF32 has 11."""
    high = lax.reduce_precision(g, 8, 7)  # XLA may drop a conversion to bf16 and back, but not this
    return jnp.stack([high, g - high], axis=-2).astype(jnp.bfloat16)


# --- the greatest scores ----------------------------------------------------------------------------------------------


def top_k(scores: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """Return the greatest scores [..., k] of [..., E] and their places, as lax.top_k does.

    On a GPU that is a sort, of which XLA compiles one or two kernels for every layer: half the compile time of a step.
    """
    found: Any = _top_k(scores, k)
    return found


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _top_k(scores: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:

    def sort(scores: jax.Array) -> tuple[jax.Array, jax.Array]:
        values, places = lax.top_k(scores, k)
        return values, places

    if scores.size >= MANY_SCORES:
        return sort(scores)
    return lax.platform_dependent(scores, cuda=functools.partial(top_k_by_rank, k=k), default=sort)


def _top_k_forward(scores: jax.Array, k: int):
    values, places = top_k(scores, k)
    return (values, places), (places, _columns_of(scores))


def _top_k_backward(_k: int, saved: tuple[jax.Array, jax.Array], g: tuple[jax.Array, Any]):
    return _at_backward(saved, g[0])[:1]


_top_k.defvjp(_top_k_forward, _top_k_backward)


def scores_at(scores: jax.Array, places: jax.Array) -> jax.Array:
    """Return the scores [..., k] of [..., E] at these places.

    The gradient compares every expert with the k places. jax's is a scatter: on a GPU, an atomic addition per choice.
    """
    found: Any = _at(scores, places)
    return found


@jax.custom_vjp
def _at(scores: jax.Array, places: jax.Array) -> jax.Array:
    return jnp.take_along_axis(scores, places, axis=-1)


def _at_forward(scores: jax.Array, places: jax.Array):
    return _at(scores, places), (places, _columns_of(scores))


def _at_backward(saved: tuple[jax.Array, jax.Array], g: jax.Array) -> tuple[jax.Array, None]:
    places, columns = saved
    chosen = places[..., None] == jnp.arange(columns.shape[-1], dtype=places.dtype)
    return jnp.where(chosen, g[..., None], 0).sum(axis=-2), None


def _columns_of(scores: jax.Array) -> jax.Array:
    """Return an array without elements that has the columns of scores."""
    return jnp.zeros((0, scores.shape[-1]), scores.dtype)


_at.defvjp(_at_forward, _at_backward)


def top_k_by_rank(scores: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """Return what lax.top_k does, by comparing all pairs of scores [..., E] in f32. With NaN, places are in range."""
    place = jnp.arange(scores.shape[-1], dtype=jnp.int32)
    own, other = scores[..., :, None], scores[..., None, :]
    precedes = jnp.where(place < place[:, None], other >= own, other > own)
    rank = precedes.sum(axis=-1, dtype=jnp.int32)
    is_it = rank[..., None, :] == jnp.arange(k, dtype=jnp.int32)[:, None]
    found = jnp.where(is_it, scores[..., None, :], -jnp.inf), jnp.where(is_it, place, 0)
    most = lambda a, b: (jnp.maximum(a[0], b[0]), jnp.maximum(a[1], b[1]))  # noqa: E731
    return lax.reduce(found, (jnp.float32(-jnp.inf), jnp.int32(0)), most, (scores.ndim,))  # one kernel for both
