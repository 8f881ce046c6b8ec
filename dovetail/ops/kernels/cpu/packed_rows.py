"""Products with quantised weights for CPUs (numba): weights are read as they are packed.

A thread takes some rows of the weight, unpacks a tile of them into its first cache (see packed_tile) and multiplies it
by all rows of x. So a decode step reads the packed bytes once, and a prompt unpacks a weight once. x is rounded to int8
in groups of 16 or 32 values, or used as it is.

M rows, E experts (1 for a matrix), D in, F out.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numba import cfunc, njit
from numba.np.numpy_support import carray

from dovetail.ops.kernels.cpu.ffi import FRAME, argument, data, dims, is_question, pointer, register, result, words
from dovetail.ops.kernels.cpu.packed_tile import BIAS, FORMATS, LANES, MOST, MULTIPLY, ROUND, table
from dovetail.ops.kernels.cpu.threads import (
    OWN,
    TASK,
    add,
    address_of,
    call_many,
    finish,
    let_others_run,
    new_job,
    release,
    run_job,
    take,
    task_symbol,
)  # fmt: skip

NAME = "dovetail_packed_rows"
KINDS = {name: i for i, name in enumerate(FORMATS)} | {"uint4": 1}  # places in packed_tile's table
INT8, SPREAD = 0, 2  # formats before SPREAD have their scales in arrays of their own
VALUES, BYTES = (np.asarray([form[i] for form in FORMATS.values()]) for i in (1, 2))  # of a block
SLICE = 1024  # of the input, at most: a tile of it stays in the first cache
CHUNK = 2  # tiles that a thread takes at a time
ROUNDED = 16  # rows of x that a thread rounds at a time
WORDS = 19


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def packed_rows_matmul(x: jax.Array, weight: Any, out_dtype: Any, exact: bool = False) -> jax.Array:
    """Multiply x [.., M, D], f32, by a quantised weight [F, D] (ops.quant.weight.Quantized) in a format of KINDS.

    Args:
        x: The activations.
        weight: The matrix.
        out_dtype: The dtype of the result; None for that of x.
        exact: Use x as it is; otherwise it is rounded to int8.
    """
    rows = x.reshape(-1, x.shape[-1])
    y = _call(rows, weight, weight.shape[0], np.asarray([len(rows)], np.int32), exact)
    return y.astype(out_dtype or x.dtype).reshape(*x.shape[:-1], -1)


def _forward(x: jax.Array, weight: Any, out_dtype: Any, exact: bool) -> tuple[jax.Array, Any]:
    return packed_rows_matmul(x, weight, out_dtype, exact), weight


def _backward(_out_dtype: Any, _exact: bool, weight: Any, g: jax.Array) -> tuple[jax.Array, None]:
    return weight.matmul_transposed(g, jnp.float32), None


packed_rows_matmul.defvjp(_forward, _backward)


def packed_grouped_matmul(rows: jax.Array, weight: Any, sizes: jax.Array, exact: bool = False) -> jax.Array:
    """Multiply rows [M, D] by quantised experts [E, F, D]: the first sizes[0] rows by the first, and so on."""
    return _call(rows, weight, weight.shape[1], sizes.astype(jnp.int32), exact)


def _call(x: jax.Array, weight: Any, out: int, sizes: Any, exact: bool) -> jax.Array:
    arrays, form, none = weight.arrays, weight.format, jnp.zeros((1, 1), jnp.float32)
    codes = arrays["blocks"] if "blocks" in arrays else arrays["codes"]
    scale, zero = (arrays[name].astype(jnp.float32) if name in arrays else none for name in ("scale", "zero"))
    size = x.shape[1]
    own = form.group or size
    group = 16 if form.name == "q6_k" or own % 32 else 32
    how = np.asarray([KINDS[form.name], own, group, exact], np.int32)
    call = jax.ffi.ffi_call(NAME, jax.ShapeDtypeStruct((x.shape[0], out), jnp.float32), vmap_method="sequential")
    return call(x, codes.reshape(-1, codes.shape[-1]), scale, zero, sizes, how)


@njit(nogil=True, cache=True)
def _spread(kind, scale, zero, first, last, start, size, own, group, scales, offsets):
    """Write the scales and offsets of a tile from arrays [rows, groups] in f32; `own` is the size of their groups."""
    for lane in range(LANES):
        row = first + min(lane, last)
        for i in range(size // group):
            at = (start + i * group) // own
            value = scale[row, at]
            scales[i, lane] = value
            if kind == INT8:
                offsets[i, lane] = value * np.float32(-BIAS)
            else:
                offsets[i, lane] = -value * (zero[row, at] if zero.shape[0] > 1 else np.float32(8))


@njit(nogil=True, cache=True)
def _round(x, D, group, codes, scales, start, end):
    """Round rows of x to int8 codes, with [scales, scales times sums of codes] of each row."""
    function, groups = words(table(), ROUND + 2)[ROUND + (group == 32)], D // group
    for r in range(start, end):
        at = scales + 8 * r * groups
        call_many(function, (x + 4 * r * D, groups, codes + r * D, at, at + 4 * groups))


@njit(nogil=True, cache=True)
def _multiply(count, group, exact, x, D, s, codes, scales, offsets, size, y, y_stride, adds):
    """Multiply `count` rows by a tile."""
    functions, total, r = words(table(), MULTIPLY + 12)[MULTIPLY + 6 * exact + 3 * (group == 32) :], D // group, 0
    x_stride = 4 * D if exact else D
    while r < count:
        step = MOST if count - r >= MOST else 2 if count - r >= 2 else 1
        function = functions[2 if step == MOST else step - 1]
        at, own, to = x + r * x_stride, s + 8 * r * total, y + r * y_stride
        call_many(
            function,
            (at, x_stride, own, 8 * total, 4 * total, codes, scales, offsets, size // group, to, y_stride, adds),
        )
        r += step


@njit(nogil=True, cache=True)
def _work(job):
    """Work on a job, whose own words `_handler` fills in."""
    chunk = take(job)
    if chunk < 0:
        return
    own = words(job, OWN + WORDS)[OWN:]
    M, D, F, stride, E, kind, own_group, group, exact = (
        own[8], own[9], own[10], own[11], own[12], own[13], own[14], own[15], own[16],
    )  # fmt: skip
    y = carray(pointer(own[4]), (M, F), np.float32)
    sizes, rounders = carray(pointer(own[5]), E, np.int32), own[17]
    scale = carray(pointer(own[2]), (E * F, D // own_group), np.float32)
    zero = carray(pointer(own[3]), (E * F if own[18] else 1, D // own_group), np.float32)
    codes = np.empty(LANES * SLICE + 64, np.uint8)
    codes = codes[-codes.ctypes.data % 64 :]  # as the lines of a cache lie
    scales, offsets = np.empty((SLICE // group, LANES), np.float32), np.empty((SLICE // group, LANES), np.float32)
    unpack = words(table(), ROUND)[kind]
    spare = np.empty((M if F % LANES else 1, LANES), np.float32)
    parts = (F + CHUNK * LANES - 1) // (CHUNK * LANES)
    while chunk >= 0:
        if chunk < rounders:
            _round(own[0], D, group, own[6], own[7], chunk * ROUNDED, min(M, (chunk + 1) * ROUNDED))
            finish(job)
            chunk = take(job)
            continue
        while add(job + 8, 0) < rounders:  # chunks are taken in order: others round the rest
            let_others_run()
        expert, part = (chunk - rounders) // parts, (chunk - rounders) % parts
        start = 0
        for e in range(expert):
            start += sizes[e]
        count = min(sizes[expert], M - start)
        for f in range(part * CHUNK * LANES, min(F, (part + 1) * CHUNK * LANES) if count > 0 else 0, LANES):
            last, row = min(LANES, F - f) - 1, expert * F + f
            to, to_stride = y.ctypes.data + 4 * (start * F + f), 4 * F
            if last < LANES - 1:
                to, to_stride = spare.ctypes.data, 4 * LANES
            for k in range(0, D, SLICE):
                size = min(SLICE, D - k)
                source = own[1] + row * stride + k // VALUES[kind] * BYTES[kind]
                tile, at, to_add = codes.ctypes.data, scales.ctypes.data, offsets.ctypes.data
                call_many(unpack, (source, stride, last, size // VALUES[kind], tile, at, to_add))
                if kind < SPREAD:
                    _spread(kind, scale, zero, row, last, k, size, own_group, group, scales, offsets)
                x, s = own[6] + start * D + k, own[7] + 8 * start * (D // group) + 4 * (k // group)
                if exact:
                    x = own[0] + 4 * (start * D + k)
                _multiply(count, group, exact, x, D, s, tile, at, to_add, size, to, to_stride, k)
            if last < LANES - 1:
                for r in range(count):
                    for lane in range(last + 1):
                        y[start + r, f + lane] = spare[r, lane]
        finish(job)
        chunk = take(job)


@cfunc(TASK, cache=True)
def _task(given):
    job = address_of(given)
    _work(job)
    release(job)
    return 0


_task_address = task_symbol("dovetail_packed_rows_task", _task)


@cfunc(FRAME, cache=True)
def _handler(frame):
    if is_question(frame):
        return 0
    x, codes, scale, zero, sizes, y = (
        argument(frame, 0), argument(frame, 1), argument(frame, 2), argument(frame, 3), argument(frame, 4),
        result(frame, 0),
    )  # fmt: skip
    how = carray(data(argument(frame, 5)), 4, np.int32)
    M, D, F, E, group, exact = dims(x)[0], dims(x)[1], dims(y)[1], dims(sizes)[0], how[2], how[3]
    rounders = (M + ROUNDED - 1) // ROUNDED if M > ROUNDED and not exact else 0
    rounded, scales = (
        np.empty(0 if exact else M * D, np.int8),
        np.empty(0 if exact else 2 * M * (D // group), np.float32),
    )
    job = new_job(rounders + E * ((F + CHUNK * LANES - 1) // (CHUNK * LANES)), WORDS)
    own = words(job, OWN + WORDS)[OWN:]
    own[0], own[1], own[2], own[3], own[4], own[5] = x[3], codes[3], scale[3], zero[3], y[3], sizes[3]
    own[6], own[7], own[8], own[9], own[10], own[11] = rounded.ctypes.data, scales.ctypes.data, M, D, F, dims(codes)[1]
    own[12], own[13], own[14], own[15], own[16], own[17] = E, how[0], how[1], group, exact, rounders
    own[18] = dims(zero)[0] > 1
    if not exact and not rounders:
        _round(x[3], D, group, rounded.ctypes.data, scales.ctypes.data, 0, M)
    run_job(frame, job, _task_address())
    return 0 if rounded.size + scales.size >= 0 else 1  # this use keeps both arrays alive


register(NAME, _handler)  # at import: a program that was kept compiled traces nothing
