"""Bidirectional attention of vision towers: every patch of an item, or of a window of it, sees every other.

N items, P patches of an item, D width, K heads, H head dim.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from dovetail.core.mesh import Placement
from dovetail.core.types import Params
from dovetail.ops.dispatch import choose_bidirectional, choose_self_attention, log_once
from dovetail.ops.linear import ARRAYS, matmul, matmuls
from dovetail.ops.packed import attend_block


def self_attention(
    p: Params,
    x: jax.Array,
    names: Mapping[str, int],
    *,
    lengths: jax.Array | None = None,
    placement: Placement | None = None,
) -> jax.Array:
    """Let the patches of x [N, P, D] attend to each other, and return [N, P, D].

    Args:
        p: The weights: q, k and v [K, H, D] as `names` has them, o [D, K, H], and their biases.
        x: The patches.
        names: The products of x, each with its heads.
        lengths: [N] int32: the patches of each item, if padding follows them.
        placement: The mesh and its rules; None for one device.
    """
    if all(isinstance(w, ARRAYS) for w in p.values()) and all(name in p for name in names):
        heads = jax.ShapeDtypeStruct((*x.shape[:2], *p["q"].shape[:2]), x.dtype)
        if choose_self_attention(placement, heads, lengths) == "split":
            log_once("bidirectional attention", "mosaic")
            return _split_self_attention(p, x, tuple(names.items()))
    return _self_attention(p, x, names, lengths, placement.platform if placement else None)


def _self_attention(
    p: Params, x: jax.Array, names: Mapping[str, int], lengths: jax.Array | None, platform: str | None
) -> jax.Array:
    if all(isinstance(p.get(name), ARRAYS) for name in names):
        q, k, v = _biased_products(x, tuple((p[name], p[f"{name}_bias"]) for name in names))
    else:
        q, k, v = matmuls(x, p, names)
    h = bidirectional_attention(q, k, v, scale=q.shape[-1] ** -0.5, lengths=lengths, platform=platform)
    return matmul(h, p["o"], p["o_bias"], dims=2)


@jax.custom_vjp
def _biased_products(x: jax.Array, weights: tuple[tuple[jax.Array, jax.Array], ...]) -> Any:
    """Multiply x by each weight and add its bias; cuBLAS adds up the gradients by x inside its products.

    XLA fuses a product that is the first operand of an addition. JAX's own gradient has the partial sum there.
    """
    return tuple(matmul(x, w, bias) for w, bias in weights)


def _products_forward(x: jax.Array, weights: tuple) -> tuple[Any, Any]:
    return _biased_products(x, weights), (x, weights)


def _products_backward(saved: Any, gradients: tuple[jax.Array, ...]) -> tuple[jax.Array, tuple]:
    (x, weights), total, found = saved, None, []
    for (w, bias), g in zip(weights, gradients, strict=True):
        dx, *own = jax.vjp(matmul, x, w, bias)[1](g)
        total = dx if total is None else dx + total
        found.append(tuple(own))
    assert total is not None
    return total, tuple(found)


_biased_products.defvjp(_products_forward, _products_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _split_self_attention(p: Params, x: jax.Array, names: tuple[tuple[str, int], ...]) -> jax.Array:
    """Compute `_self_attention` with our kernel, for whose columns the weights are arranged here."""
    from dovetail.ops.kernels.gpu.bidirectional import split_attention, split_columns

    heads, dim = p["q"].shape[:2]
    weights, biases = (jnp.concatenate([split_columns(p[f"{n}{end}"], 0) for n, _ in names]) for end in ("", "_bias"))
    out = split_attention(matmul(x, weights, biases), heads=heads, scale=dim**-0.5)
    return matmul(out, split_columns(p["o"], 1), p["o_bias"])


def _split_forward(p: Params, x: jax.Array, names: tuple[tuple[str, int], ...]) -> tuple[jax.Array, Any]:
    """Return the output and its gradient, both by cuDNN: our kernel has no backward pass."""
    return jax.vjp(lambda p, x: _self_attention(p, x, dict(names), None, None), p, x)


def _split_backward(_: tuple, gradient_of: Any, g: jax.Array) -> tuple[Params, jax.Array]:
    return gradient_of(g)


_split_self_attention.defvjp(_split_forward, _split_backward)


def bidirectional_attention(
    q: jax.Array,  # [N, P, K, H]
    k: jax.Array,  # [N, P, K, H]
    v: jax.Array,  # [N, P, K, H]
    *,
    scale: float,
    lengths: jax.Array | None = None,  # [N] int32: the patches of each item; padding follows them
    platform: str | None = None,
) -> jax.Array:
    """Return [N, P, K, H]; the rows of padding are undefined."""
    name = choose_bidirectional(platform, q)
    log_once("bidirectional attention", name)
    if name == "cudnn":
        out = jax.nn.dot_product_attention(
            q, k, v, scale=scale, query_seq_lengths=lengths, key_value_seq_lengths=lengths, implementation="cudnn"
        )
        return out.astype(q.dtype)
    return reference(q, k, v, scale=scale, lengths=lengths)


def reference(q: jax.Array, k: jax.Array, v: jax.Array, *, scale: float, lengths: jax.Array | None) -> jax.Array:
    """Attend exactly, some queries at a time, so that scores are never [P, P]."""
    N, P = q.shape[:2]
    patch = jnp.arange(P)
    real = jnp.ones((N, P), bool) if lengths is None else patch < lengths[:, None]
    chunk = max(256, -(-P // 16))
    one = jax.checkpoint(functools.partial(attend_block, scale=scale, window=None, softcap=None))
    outputs = []
    for start in range(0, P, chunk):
        rows = q[:, start : start + chunk]
        last, every = jnp.full(rows.shape[1], P - 1), jnp.ones(rows.shape[:2], bool)
        outputs.append(one(rows, k, v, (every, real), (last, patch))[0].astype(v.dtype))
    return jnp.concatenate(outputs, axis=1) if len(outputs) > 1 else outputs[0]


def window_attention(
    q: jax.Array,  # [N, P, K, H]
    k: jax.Array,  # [N, P, K, H]
    v: jax.Array,  # [N, P, K, H]
    *,
    scale: float,
    windows: jax.Array,  # [N, P] int32: the window of each patch; the patches of a window follow each other
    most: int,
) -> jax.Array:
    """Return [N, P, K, H]: patches attend to those of their window, which has `most` patches or fewer.

    Patches are cut into blocks of `most`: those of a window are in one block or in two neighbours, so that a block
    attends to itself, the block before and the block after.
    """
    N, P, *heads = q.shape
    blocks = -(-P // most)

    def cut(x: jax.Array, fill: int = 0) -> jax.Array:
        padded = jnp.pad(x, ((0, 0), (0, blocks * most - P), *((0, 0),) * (x.ndim - 2)), constant_values=fill)
        return padded.reshape(N, blocks, most, *x.shape[2:])

    def near(x: jax.Array, fill: int = 0) -> jax.Array:
        ends = jnp.pad(x, ((0, 0), (1, 1), *((0, 0),) * (x.ndim - 2)), constant_values=fill)
        wide = jnp.concatenate([ends[:, :-2], x, ends[:, 2:]], axis=2)
        return wide.reshape(N * blocks, 3 * most, *x.shape[3:])

    ids = cut(windows, fill=-1)
    segments = ids.reshape(N * blocks, most), near(ids, fill=-2)
    every = jnp.full(most, 3 * most), jnp.arange(3 * most)  # all keys are at or before a query
    rows = cut(q).reshape(N * blocks, most, *heads)
    options: dict = dict(scale=scale, window=None, softcap=None)
    out, _ = attend_block(rows, near(cut(k)), near(cut(v)), segments, every, **options)
    return out.astype(v.dtype).reshape(N, blocks * most, *heads)[:, :P]
