"""Residual add and layer norm in one kernel, forward and backward, for NVIDIA GPUs (Pallas, Triton).

XLA takes three passes over the residual stream for the backward, and writes the products of the weight's gradient in
f32. T tokens, D model dim, G programs of the backward.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

ROWS = 2  # tokens of a program of the forward
PROGRAMS = 2048  # of the backward, at most; each writes the sums over its rows


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def add_layer_norm(
    x: jax.Array,  # [..., D]
    delta: jax.Array | None,  # [..., D]
    weight: jax.Array,  # [D]
    bias: jax.Array,  # [D]
    eps: float,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Return (x + delta, its layer norm), both [..., D]."""
    return _forward(x, delta, weight, bias, eps, interpret)[0]


def _forward(x, delta, weight, bias, eps: float, interpret: bool):
    (T, D), inputs = _rows(x).shape, [_rows(y) for y in (x, delta) if y is not None]
    like, stat = jax.ShapeDtypeStruct((T, D), x.dtype), jax.ShapeDtypeStruct((T,), jnp.float32)
    *total, normed, mean, scale = pl.pallas_call(
        functools.partial(_forward_kernel, block=_block(D), eps=eps),
        grid=(pl.cdiv(T, ROWS),),
        out_shape=[*[like] * len(inputs), stat, stat],
        compiler_params=plgpu.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="add_layer_norm" if delta is not None else "layer_norm",
    )(weight, bias, *inputs)
    total = total[0].reshape(x.shape) if total else x
    return (total, normed.reshape(x.shape)), (total, delta is None, weight, bias, mean, scale)


def _forward_kernel(weight_ref, bias_ref, x_ref, *refs, block: int, eps: float):
    """Normalise some rows; refs are (delta, sum,) norm, mean and 1 / standard deviation."""
    T, D = x_ref.shape
    rows, lanes = pl.program_id(0) * ROWS + jnp.arange(ROWS), jnp.arange(block)
    here = (rows < T)[:, None] & (lanes < D)[None]
    at = (rows[:, None], lanes[None])
    *added, norm_ref, mean_ref, scale_ref = refs
    x = _read(x_ref, at, here)
    if added:
        # rounded as it will be read again: the norm is of what the next layers see
        total = (x + _read(added[0], at, here)).astype(x_ref.dtype)
        plgpu.store(added[1].at[at], total, mask=here)
        x = total.astype(jnp.float32)
    mean = jnp.sum(x, axis=1) / D
    centred = jnp.where(here, x - mean[:, None], 0.0)
    scale = jax.lax.rsqrt(jnp.sum(centred * centred, axis=1) / D + eps)
    weight, bias = (_read(ref, (lanes,), lanes < D) for ref in (weight_ref, bias_ref))
    plgpu.store(norm_ref.at[at], (centred * scale[:, None] * weight + bias).astype(x_ref.dtype), mask=here)
    plgpu.store(mean_ref.at[rows], mean, mask=rows < T)
    plgpu.store(scale_ref.at[rows], scale, mask=rows < T)


def _backward(eps: float, interpret: bool, saved, grads):
    total, alone, weight, bias, mean, scale = saved
    (T, D), inputs = _rows(total).shape, [_rows(y) for y in (total, grads[1], grads[0])]
    per = pl.cdiv(T, PROGRAMS)
    G = pl.cdiv(T, per)
    dx, sums = pl.pallas_call(
        functools.partial(_backward_kernel, block=_block(D), per=per),
        grid=(G,),
        out_shape=[jax.ShapeDtypeStruct((T, D), total.dtype), jax.ShapeDtypeStruct((G, 2, D), jnp.float32)],
        compiler_params=plgpu.CompilerParams(num_warps=1 if D <= 512 else 2, num_stages=1),
        interpret=interpret,
        name="layer_norm_backward",
    )(weight, mean, scale, *inputs)
    dx, (dweight, dbias) = dx.reshape(total.shape), sums.sum(axis=0)
    return dx, None if alone else dx, dweight.astype(weight.dtype), dbias.astype(bias.dtype)


def _backward_kernel(
    weight_ref, mean_ref, scale_ref, x_ref, dy_ref, residual_ref, dx_ref, sums_ref, *, block: int, per: int
):
    """Write the gradients of `per` rows, and the sums over them for weight and bias."""
    T, D = x_ref.shape
    program, lanes = pl.program_id(0), jnp.arange(block)
    inside = lanes < D
    weight = _read(weight_ref, (lanes,), inside)

    def load(row):
        tokens = (plgpu.load(ref.at[row, lanes], mask=inside & (row < T), other=0.0) for ref in token_refs)
        stats = (plgpu.load(ref.at[row], mask=row < T, other=0.0) for ref in (mean_ref, scale_ref))
        return *tokens, *stats

    def one(i, carry):
        row, (loaded, sums) = program * per + i, carry
        following = load(row + 1)  # in flight while this row is computed
        x, dy, residual = (each.astype(jnp.float32) for each in loaded[:3])
        mean, scale = loaded[3:]
        normed, scaled = jnp.where(inside, (x - mean) * scale, 0.0), dy * weight
        inner = scaled - jnp.sum(scaled) / D - normed * (jnp.sum(scaled * normed) / D)
        dx = (scale * inner + residual).astype(dx_ref.dtype)
        plgpu.store(dx_ref.at[row, lanes], dx, mask=inside & (row < T))
        return following, (sums[0] + dy * normed, sums[1] + dy)

    token_refs = (x_ref, dy_ref, residual_ref)
    zero = jnp.zeros(block, jnp.float32)
    _, sums = jax.lax.fori_loop(0, per, one, (load(program * per), (zero, zero)))
    for i, each in enumerate(sums):
        plgpu.store(sums_ref.at[program, i, lanes], each, mask=inside)


add_layer_norm.defvjp(_forward, _backward)


def _read(ref, at: tuple, mask) -> jax.Array:
    return plgpu.load(ref.at[at], mask=mask, other=0.0).astype(jnp.float32)


def _rows(x: jax.Array) -> jax.Array:
    return x.reshape(-1, x.shape[-1])


def _block(dim: int) -> int:
    return 1 << (dim - 1).bit_length()
