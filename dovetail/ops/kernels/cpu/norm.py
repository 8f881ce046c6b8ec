"""Add to the residual stream and normalise it, for CPUs (numba), in one call.

XLA makes four kernels of it, twice a layer: half of those of a decode program, which takes memory for each.

T tokens, D model dim.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from numba import cfunc, njit
from numba.np.numpy_support import carray

from dovetail.ops.kernels.cpu.ffi import FRAME, argument, data, dims, is_question, register, result

NAME = "dovetail_add_rms_norm"
FAST = {"reassoc", "contract", "nsz", "arcp"}  # sums in any order, but NaN and infinity stay what they are


def add_rms_norm(
    x: jax.Array, delta: jax.Array | None, weight: jax.Array, eps: float, offset: float
) -> tuple[jax.Array, jax.Array]:
    """Return (x + delta, its norm) for x and delta [T, D] in f32, as ops.norm.add_rms_norm."""
    numbers = np.asarray([eps, offset], np.float32)
    delta = jnp.zeros((0, x.shape[1]), jnp.float32) if delta is None else delta
    out = jax.ShapeDtypeStruct(x.shape, jnp.float32)
    total, normed = jax.ffi.ffi_call(NAME, [out, out])(x, delta, weight.astype(jnp.float32), numbers)
    return total, normed


@njit(nogil=True, fastmath=FAST, cache=True)
def _add_and_normalise(x, delta, weight, numbers, total, normed):
    T, D = x.shape
    for t in range(T):
        squares = np.float32(0)
        for d in range(D):
            value = x[t, d] + delta[t, d] if delta.shape[0] > 0 else x[t, d]
            total[t, d] = value
            squares += value * value
        scale = np.float32(1) / np.sqrt(squares / np.float32(D) + numbers[0])
        for d in range(D):
            normed[t, d] = total[t, d] * scale * (numbers[1] + weight[d])


@cfunc(FRAME, cache=True)
def _handler(frame):
    if is_question(frame):
        return 0
    x, delta = argument(frame, 0), argument(frame, 1)
    T, D = dims(x)[0], dims(x)[1]
    _add_and_normalise(
        carray(data(x), (T, D), np.float32),
        carray(data(delta), (dims(delta)[0], D), np.float32),
        carray(data(argument(frame, 2)), D, np.float32),
        carray(data(argument(frame, 3)), 2, np.float32),
        carray(data(result(frame, 0)), (T, D), np.float32),
        carray(data(result(frame, 1)), (T, D), np.float32),
    )
    return 0


register(NAME, _handler)  # at import: a program that was kept compiled traces nothing
