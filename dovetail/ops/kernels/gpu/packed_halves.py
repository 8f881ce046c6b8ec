"""Rows of bf16 tokens as two e4m3 numbers for each value, for the products of ops/kernels/gpu/packed_fp8.py."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dovetail.ops.kernels.gpu.mosaic.halves import STEP, TOP
from dovetail.ops.kernels.gpu.mosaic.halves import split_rows as split_by_kernel

E4M3 = jnp.float8_e4m3fn


def halves(x: jax.Array, name: str) -> tuple[jax.Array, jax.Array]:
    """Return bf16 rows [R, in] as e4m3 numbers [2, R, in] and the rows' greatest magnitudes, f32 [R].

    The sum of both numbers is the row times a power of two; `factor_of` is 1 / this.

    A row's power of two makes its greatest magnitude at least 2^7 and less than 2^8. The first number has 4 of bf16's 8
    significant bits, and the second one the others: the sum is exact for values down to 2^-9 of the greatest one, and
    otherwise within 2^-17 of it.
    """
    x = x.astype(jnp.float32)
    greatest = jnp.max(jnp.abs(x), axis=-1)
    x = x * _power_of_two(254 + TOP - _exponent_of_row(greatest))[:, None]
    # the least bit of an e4m3 number, 2^-9 for subnormal ones
    least = jnp.maximum(_exponent(x), 127 - 6) - 3
    first = lax.round(x * _power_of_two(254 - least), lax.RoundingMethod.TO_NEAREST_EVEN) * _power_of_two(least)
    both = jnp.stack([first, x - first])
    if name == "mxfp4":
        both = in_order(jnp.pad(both, ((0, 0), (0, 0), (0, -x.shape[-1] % STEP))))
    return both.astype(E4M3), greatest


def split_rows(x: jax.Array, source: tuple[jax.Array, jax.Array] | None, name: str) -> tuple[jax.Array, jax.Array]:
    """Return what `halves` does, by one kernel on a GPU.

    Args:
        x: The rows.
        source: Tokens [T, in] and the index of each row among them, from which it is gathered instead of x.
        name: The format of the weights.
    """
    tokens, index = source or (x, np.arange(len(x), dtype=np.int32))
    kernel = functools.partial(split_by_kernel, permutes=name == "mxfp4")
    otherwise = functools.partial(halves, name=name)
    return lax.platform_dependent(
        x, tokens, index, cuda=lambda _, tokens, index: kernel(tokens, index), default=lambda x, *_: otherwise(x)
    )


def factor_of(greatest: jax.Array) -> jax.Array:
    """Return what a row's numbers are to be multiplied by."""
    return _power_of_two(_exponent_of_row(greatest) - TOP)


def _exponent_of_row(greatest: jax.Array) -> jax.Array:
    return jnp.maximum(_exponent(greatest), TOP + 1)


def _exponent(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.int32) >> 23 & 0xFF


def _power_of_two(exponent: jax.Array) -> jax.Array:
    """Return 2^(exponent - 127)."""
    return lax.bitcast_convert_type(exponent << 23, jnp.float32)


def in_order(x: jax.Array) -> jax.Array:
    """Return x [.., in] with each 128 values in the order in which threads have them: a thread's are from one block.

    Of a product of 32 values, a thread has the values 4 t to 4 t + 3 and 16 more than these.
    """
    blocks = x.reshape(*x.shape[:-1], -1, 4, 4, 2, 4)  # thread, product, its half, value
    return jnp.moveaxis(blocks, -4, -2).reshape(x.shape)
