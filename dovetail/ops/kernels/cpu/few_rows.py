"""Products with few rows for CPUs (numba), as fast as the weights can be read.

XLA's product takes several times as long for two rows as for one: twelve times on an Arm Neoverse-N1, three times on a
Xeon. A thread takes some of the weight's rows, four at a time, with four rows of x: each number read from memory is
used by all rows of x, each of x by four of the weight.

R rows, D in, F out.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from numba import cfunc, njit
from numba.np.numpy_support import carray

from dovetail.ops.kernels.cpu.ffi import FRAME, argument, dims, is_question, pointer, register, result, words
from dovetail.ops.kernels.cpu.threads import (
    OWN,
    TASK,
    address_of,
    finish,
    new_job,
    release,
    run_job,
    take,
    task_symbol,
)  # fmt: skip

NAME = "dovetail_few_rows"
CHUNK = 64  # rows of the weight that a thread takes at a time
FAST = {"reassoc", "contract", "nsz", "arcp"}  # sums in any order, but NaN and infinity stay what they are


def few_rows_matmul(x: jax.Array, w: jax.Array) -> jax.Array:
    """Multiply x [R, D] by w [F, D], both f32 -> [R, F]."""
    out = jax.ShapeDtypeStruct((x.shape[0], w.shape[0]), jnp.float32)
    return jax.ffi.ffi_call(NAME, out, vmap_method="sequential")(x, w)


@njit(nogil=True, fastmath=FAST, cache=True)
def _four(x, w, y, r, f):
    """Compute y[r : r + 4, f : f + 4]."""
    a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = c0 = c1 = c2 = c3 = d0 = d1 = d2 = d3 = np.float32(0)
    x0, x1, x2, x3, w0, w1, w2, w3 = x[r], x[r + 1], x[r + 2], x[r + 3], w[f], w[f + 1], w[f + 2], w[f + 3]
    for i in range(x.shape[1]):
        a0, a1, a2, a3 = a0 + x0[i] * w0[i], a1 + x0[i] * w1[i], a2 + x0[i] * w2[i], a3 + x0[i] * w3[i]
        b0, b1, b2, b3 = b0 + x1[i] * w0[i], b1 + x1[i] * w1[i], b2 + x1[i] * w2[i], b3 + x1[i] * w3[i]
        c0, c1, c2, c3 = c0 + x2[i] * w0[i], c1 + x2[i] * w1[i], c2 + x2[i] * w2[i], c3 + x2[i] * w3[i]
        d0, d1, d2, d3 = d0 + x3[i] * w0[i], d1 + x3[i] * w1[i], d2 + x3[i] * w2[i], d3 + x3[i] * w3[i]
    y[r, f], y[r, f + 1], y[r, f + 2], y[r, f + 3] = a0, a1, a2, a3
    y[r + 1, f], y[r + 1, f + 1], y[r + 1, f + 2], y[r + 1, f + 3] = b0, b1, b2, b3
    y[r + 2, f], y[r + 2, f + 1], y[r + 2, f + 2], y[r + 2, f + 3] = c0, c1, c2, c3
    y[r + 3, f], y[r + 3, f + 1], y[r + 3, f + 2], y[r + 3, f + 3] = d0, d1, d2, d3


@njit(nogil=True, fastmath=FAST, cache=True)
def _two(x, w, y, r, f):
    """Compute y[r : r + 2, f : f + 4]."""
    a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = np.float32(0)
    x0, x1, w0, w1, w2, w3 = x[r], x[r + 1], w[f], w[f + 1], w[f + 2], w[f + 3]
    for i in range(x.shape[1]):
        a0, a1, a2, a3 = a0 + x0[i] * w0[i], a1 + x0[i] * w1[i], a2 + x0[i] * w2[i], a3 + x0[i] * w3[i]
        b0, b1, b2, b3 = b0 + x1[i] * w0[i], b1 + x1[i] * w1[i], b2 + x1[i] * w2[i], b3 + x1[i] * w3[i]
    y[r, f], y[r, f + 1], y[r, f + 2], y[r, f + 3] = a0, a1, a2, a3
    y[r + 1, f], y[r + 1, f + 1], y[r + 1, f + 2], y[r + 1, f + 3] = b0, b1, b2, b3


@njit(nogil=True, fastmath=FAST, cache=True)
def _one(x, w, y, r, f):
    """Compute y[r, f]."""
    total, x0, w0 = np.float32(0), x[r], w[f]
    for i in range(x.shape[1]):
        total += x0[i] * w0[i]
    y[r, f] = total


@njit(nogil=True, cache=True)
def _columns(x, w, y, start, end):
    """Compute y[:, start : end]."""
    R, whole = x.shape[0], start + (end - start) // 4 * 4
    for f in range(start, whole, 4):
        for r in range(0, R - 3, 4):
            _four(x, w, y, r, f)
        if R % 4 >= 2:
            _two(x, w, y, R // 4 * 4, f)
        if R % 2:
            for j in range(f, f + 4):
                _one(x, w, y, R - 1, j)
    for f in range(whole, end):
        for r in range(R):
            _one(x, w, y, r, f)


@njit(nogil=True, cache=True)
def _work(job):
    """Work on a job, whose own words are x, w, y, R, D, F."""
    own = words(job, OWN + 6)[OWN:]
    R, D, F = own[3], own[4], own[5]
    x, w = carray(pointer(own[0]), (R, D), np.float32), carray(pointer(own[1]), (F, D), np.float32)
    y = carray(pointer(own[2]), (R, F), np.float32)
    chunk = take(job)
    while chunk >= 0:
        _columns(x, w, y, chunk * CHUNK, min(F, (chunk + 1) * CHUNK))
        finish(job)
        chunk = take(job)


@cfunc(TASK, cache=True)
def _task(data):
    job = address_of(data)
    _work(job)
    release(job)
    return 0


_task_address = task_symbol("dovetail_few_rows_task", _task)


@cfunc(FRAME, cache=True)
def _handler(frame):
    if is_question(frame):
        return 0
    x, w, y = argument(frame, 0), argument(frame, 1), result(frame, 0)
    R, D, F = dims(x)[0], dims(x)[1], dims(w)[0]
    job = new_job((F + CHUNK - 1) // CHUNK, 6)
    own = words(job, OWN + 6)[OWN:]
    own[0], own[1], own[2], own[3], own[4], own[5] = x[3], w[3], y[3], R, D, F
    run_job(frame, job, _task_address())
    return 0


register(NAME, _handler)  # at import: a program that was kept compiled traces nothing
