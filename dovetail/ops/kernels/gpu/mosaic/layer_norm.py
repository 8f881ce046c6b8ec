"""Residual add and layer norm in one kernel, forward and backward, for Hopper (Pallas, Mosaic GPU).

A warpgroup takes one token in the forward pass and a run of them in the backward pass, where it also sums the gradients
of weight and bias over its run. T tokens, D model dim, G programs of the backward.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dovetail.ops.kernels.gpu.mosaic.rows import filled, load

PROGRAMS = 2048  # of the backward, at most; each writes the sums over its rows


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def add_layer_norm(
    x: jax.Array,  # [..., D]
    delta: jax.Array | None,  # [..., D]
    weight: jax.Array,  # [D]
    bias: jax.Array,  # [D]
    eps: float,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Return (x + delta, its layer norm), both [..., D]."""
    return _forward(x, delta, weight, bias, eps, interpret)[0]


def _forward(x, delta, weight, bias, eps: float, interpret: Any):
    (T, D), inputs = _rows(x).shape, [_rows(y) for y in (x, delta) if y is not None]

    def body(weight_ref: Any, bias_ref: Any, x_ref: Any, *refs: Any) -> None:
        *added, norm_ref, mean_ref, scale_ref = refs
        row = lax.axis_index("row")
        total = load(x_ref, (row,), D)
        weight, bias = (load(ref, (slice(None),), D) for ref in (weight_ref, bias_ref))
        if added:
            # rounded as it will be read again: the norm is of what the next layers see
            rounded = (total + load(added[0], (row,), D)).astype(x_ref.dtype)
            added[1][row] = rounded
            total = rounded.astype(jnp.float32)
        mean = jnp.sum(total) / D
        centred = total - mean
        scale = lax.rsqrt(jnp.sum(centred * centred) / D + eps)
        norm_ref[row] = (centred * scale * weight + bias).astype(x_ref.dtype)
        mean_ref[row] = mean
        scale_ref[row] = scale

    body.__name__ = "add_layer_norm" if delta is not None else "layer_norm"
    like, stat = jax.ShapeDtypeStruct((T, D), x.dtype), jax.ShapeDtypeStruct((T,), jnp.float32)
    *total, normed, mean, scale = plgpu.kernel(
        body, out_type=[*[like] * len(inputs), stat, stat], grid=(T,), grid_names=("row",), interpret=interpret
    )(weight, bias, *inputs)
    total = total[0].reshape(x.shape) if total else x
    return (total, normed.reshape(x.shape)), (total, delta is None, weight, bias, mean, scale)


def _backward(eps: float, interpret: Any, saved, grads):
    total, alone, weight, bias, mean, scale = saved
    (T, D), inputs = _rows(total).shape, [_rows(y) for y in (total, grads[1], grads[0])]
    per = pl.cdiv(T, PROGRAMS)
    G = pl.cdiv(T, per)

    def body(weight_ref: Any, mean_ref: Any, scale_ref: Any, *refs: Any) -> None:
        *token_refs, dx_ref, sums_ref = refs
        first = lax.axis_index("program") * per
        weight = load(weight_ref, (slice(None),), D)

        def one(i: Any, sums: tuple) -> tuple:
            row = first + i
            x, dy, residual = (load(ref, (row,), D) for ref in token_refs)
            scale = scale_ref[row]
            normed, scaled = (x - mean_ref[row]) * scale, dy * weight
            inner = scaled - jnp.sum(scaled) / D - normed * (jnp.sum(scaled * normed) / D)
            dx_ref[row] = (scale * inner + residual).astype(dx_ref.dtype)
            return sums[0] + dy * normed, sums[1] + dy

        sums = lax.fori_loop(0, jnp.minimum(per, T - first), one, (filled(D, 0.0), filled(D, 0.0)))
        for i, each in enumerate(sums):
            sums_ref[lax.axis_index("program"), i] = each

    body.__name__ = "layer_norm_backward"
    dx, sums = plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct((T, D), total.dtype), jax.ShapeDtypeStruct((G, 2, D), jnp.float32)],
        grid=(G,),
        grid_names=("program",),
        interpret=interpret,
    )(weight, mean, scale, *inputs)
    dx, (dweight, dbias) = dx.reshape(total.shape), sums.sum(axis=0)
    return dx, None if alone else dx, dweight.astype(weight.dtype), dbias.astype(bias.dtype)


add_layer_norm.defvjp(_forward, _backward)


def _rows(x: jax.Array) -> jax.Array:
    return x.reshape(-1, x.shape[-1])
