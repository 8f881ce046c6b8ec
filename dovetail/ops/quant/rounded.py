"""Products whose activations are rounded as well, each row by its own scale: twice the arithmetic of bf16.

The scales of rows and columns multiply the sums, so that the product itself is one that XLA gives to cuBLAS. A weight
is an ops.quant.weight.Quantized, which finds these functions by ops.dispatch_products.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

INT8, FP8 = 127, 448  # the largest numbers
ROWS = 16  # cuBLAS multiplies fp8 numbers only in multiples of so many rows; XLA would unpack the weight for fewer


def int8_matmul(x: jax.Array, weight: Any, out_dtype: Any) -> jax.Array:
    """Multiply x [..., in] in int8 by a matrix [out, in] in the format w8a8, with sums in int32."""
    scale = _scales(x, INT8)
    codes = jnp.round(x.astype(jnp.float32) / scale).astype(jnp.int8)
    return _product(codes, scale, weight, jnp.int32, out_dtype or x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def fp8_matmul(x: jax.Array, weight: Any, out_dtype: Any) -> jax.Array:
    """Multiply x [..., in] in e4m3 by a matrix [out, in] in fp8 with a scale per row, with sums in f32.

    A product that is differentiated keeps its activations as they are: rounded ones have no gradient.
    """
    rows = x.reshape(-1, x.shape[-1])
    rows = jnp.pad(rows, ((0, -len(rows) % ROWS), (0, 0)))
    scale = _scales(rows, FP8)
    codes = (rows.astype(jnp.float32) / scale).astype(jnp.float8_e4m3fn)
    y = _product(codes, scale, weight, jnp.float32, out_dtype or x.dtype)
    return y[: x.size // x.shape[-1]].reshape(*x.shape[:-1], -1)


def _fp8_forward(x: jax.Array, weight: Any, out_dtype: Any):
    return jax.vjp(lambda x, weight: weight.unpacked_matmul(x, out_dtype), x, weight)


def _fp8_backward(_out_dtype: Any, gradient: Any, g: jax.Array):
    return gradient(g)


fp8_matmul.defvjp(_fp8_forward, _fp8_backward)


def _scales(x: jax.Array, largest: int) -> jax.Array:
    """Return the scale of each row [..., 1] in f32; 1 for a row of zeros."""
    top = jnp.max(jnp.abs(x.astype(jnp.float32)), axis=-1, keepdims=True)
    return jnp.where(top == 0, 1.0, top / largest)


def _product(codes: jax.Array, scale: jax.Array, weight: Any, sums: Any, out_dtype: Any) -> jax.Array:
    y = jnp.einsum("...d,fd->...f", codes, weight.arrays["codes"], preferred_element_type=sums)
    return (y.astype(jnp.float32) * scale * weight.arrays["scale"][:, 0].astype(jnp.float32)).astype(out_dtype)
