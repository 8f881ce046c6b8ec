"""Products with many rows for CPUs (numba), on XLA's threads: nearer to an Arm CPU's peak than XLA's own.

A thread takes some rows of x, which it copies in the tiles' order, with some rows of the weight, which it reads in
place, in slices of the input that fit a cache. Every number is summed in the order of the input, whatever the shape.

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
from dovetail.ops.kernels.cpu.tile import COLUMNS, ROWS, add_tile, turn

NAME = "dovetail_many_rows"
BLOCK = 64  # rows of x at a time: their slice stays in the second cache
SLICE = 640  # of the input, at most: a tile's rows of x and of the weight stay in the first
LEAST = 32  # rows of the weight that a thread takes at a time
CHUNKS = 256  # about as many are made, where there is enough to do


def many_rows_matmul(x: jax.Array, w: jax.Array) -> jax.Array:
    """Multiply x [R, D] by w [F, D], both f32 -> [R, F]."""
    out = jax.ShapeDtypeStruct((x.shape[0], w.shape[0]), jnp.float32)
    return jax.ffi.ffi_call(NAME, out, vmap_method="sequential")(x, w)


@njit(nogil=True, cache=True)
def _slice_of(D):
    """Return how much of the input to take at a time: even slices of whole vectors."""
    slices = (D + SLICE - 1) // SLICE
    return (D + 4 * slices - 1) // (4 * slices) * 4


@njit(nogil=True, cache=True)
def _copy(x, start, rows, packed):
    """Copy x[start : start + rows] as [slices, tiles, slice, ROWS], with zeros after the last row."""
    D, tiles = x.shape[1], (rows + ROWS - 1) // ROWS
    size = _slice_of(D)
    for k in range(0, D, size):
        depth = min(size, D - k)
        for r in range(0, tiles * ROWS, 4):
            at = (k * tiles + r // ROWS * depth) * ROWS + r % ROWS
            whole = depth // 4 if r + 4 <= rows else 0
            if whole:
                turn(x.ctypes.data + 4 * ((start + r) * D + k), 4 * D, packed.ctypes.data + 4 * at, whole)
            for d in range(4 * whole, depth):
                for i in range(4):
                    packed[at + d * ROWS + i] = x[start + r + i, k + d] if r + i < rows else np.float32(0)


@njit(nogil=True, cache=True)
def _multiply(packed, w, y, start, rows, first, end, edge, spare):
    """Compute y[start : start + rows, first : end] from copied rows."""
    (F, D), tiles = w.shape, (rows + ROWS - 1) // ROWS
    size = _slice_of(D)
    for r in range(start, start + rows):
        y[r, first:end] = 0.0
    for k in range(0, D, size):
        depth = min(size, D - k)
        for f in range(first, end, COLUMNS):
            columns, strip, stride = min(COLUMNS, end - f), w.ctypes.data + 4 * (f * D + k), 4 * D
            if columns < COLUMNS:
                edge[:columns, :depth] = w[f:end, k : k + depth]
                strip, stride = edge.ctypes.data, 4 * edge.shape[1]
            for tile in range(tiles):
                r, panel = tile * ROWS, packed.ctypes.data + 4 * (k * tiles + tile * depth) * ROWS
                if columns == COLUMNS and r + ROWS <= rows:
                    add_tile(panel, strip, stride, y.ctypes.data + 4 * ((start + r) * F + f), 4 * F, depth)
                    continue
                spare[:] = 0.0
                add_tile(panel, strip, stride, spare.ctypes.data, 4 * COLUMNS, depth)
                for i in range(min(ROWS, rows - r)):
                    for j in range(columns):
                        y[start + r + i, f + j] += spare[i, j]


@njit(nogil=True, cache=True)
def _work(job):
    """Work on a job, whose own words are x, w, y, R, D, F, rows of the weight in a chunk."""
    chunk = take(job)
    if chunk < 0:
        return
    own = words(job, OWN + 7)[OWN:]
    R, D, F, share = own[3], own[4], own[5], own[6]
    x, w = carray(pointer(own[0]), (R, D), np.float32), carray(pointer(own[1]), (F, D), np.float32)
    y = carray(pointer(own[2]), (R, F), np.float32)
    packed, copied = np.empty(min(BLOCK, R + ROWS) // ROWS * ROWS * D + 16, np.float32), -1
    packed = packed[(-packed.ctypes.data // 4) % 16 :]  # as the lines of a cache lie
    edge, spare = np.zeros((COLUMNS, _slice_of(D)), np.float32), np.empty((ROWS, COLUMNS), np.float32)
    shares = (F + share - 1) // share
    while chunk >= 0:
        block, first = chunk // shares, chunk % shares * share
        start, rows = block * BLOCK, min(BLOCK, R - block * BLOCK)
        if block != copied:
            _copy(x, start, rows, packed)
            copied = block
        _multiply(packed, w, y, start, rows, first, min(F, first + share), edge, spare)
        finish(job)
        chunk = take(job)


@cfunc(TASK, cache=True)
def _task(data):
    job = address_of(data)
    _work(job)
    release(job)
    return 0


_task_address = task_symbol("dovetail_many_rows_task", _task)


@cfunc(FRAME, cache=True)
def _handler(frame):
    if is_question(frame):
        return 0
    x, w, y = argument(frame, 0), argument(frame, 1), result(frame, 0)
    R, D, F = dims(x)[0], dims(x)[1], dims(w)[0]
    blocks = (R + BLOCK - 1) // BLOCK
    share = max(LEAST, F * blocks // CHUNKS // COLUMNS * COLUMNS)
    job = new_job(blocks * ((F + share - 1) // share), 7)
    own = words(job, OWN + 7)[OWN:]
    own[0], own[1], own[2], own[3], own[4], own[5], own[6] = x[3], w[3], y[3], R, D, F, share
    run_job(frame, job, _task_address())
    return 0


register(NAME, _handler)  # at import: a program that was kept compiled traces nothing
