"""Write new keys and values into their pages, for CPUs (numba), in place.

XLA's scatter computes the places of the tokens in every layer again, in kernels of their own.

T tokens, S sequences, P pages, K key heads, H head dim.
"""

from __future__ import annotations

import jax
import numpy as np
from numba import cfunc, njit
from numba.np.numpy_support import carray

from dovetail.core.types import Paged
from dovetail.ops.kernels.cpu.ffi import FRAME, argument, data, dims, is_question, register, result

NAME = "dovetail_write_heads"


def write_heads(ctx: Paged, pages: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Write k and v [T, K, H] into pages [P, page, 2K, H] as ops.paged.write_heads does, in f32."""
    out = jax.ShapeDtypeStruct(pages.shape, pages.dtype)
    call = jax.ffi.ffi_call(NAME, out, input_output_aliases={0: 0})
    return call(pages, k, v, ctx.block_tables, ctx.kv_lens, ctx.cu_q_lens, ctx.num_seqs)


@njit(nogil=True, cache=True)
def _write(pages, k, v, tables, kv_lens, cu_q_lens, num_seqs):
    (P, size), (_, K, H), last = pages.shape[:2], k.shape, tables.shape[1] - 1
    for seq in range(num_seqs):
        past = kv_lens[seq] - cu_q_lens[seq + 1]  # a token's position is this and its index
        for token in range(cu_q_lens[seq], cu_q_lens[seq + 1]):
            page = tables[seq, min((past + token) // size, last)]
            if page < 0 or page >= P:  # dropped, as XLA's scatter does
                continue
            place = pages[page, (past + token) % size]
            for head in range(K):
                for h in range(H):
                    place[2 * head, h] = k[token, head, h]
                for h in range(H):
                    place[2 * head + 1, h] = v[token, head, h]


@cfunc(FRAME, cache=True)
def _handler(frame):
    if is_question(frame):
        return 0
    k, tables, pages = argument(frame, 1), argument(frame, 3), result(frame, 0)
    T, K, H = dims(k)[0], dims(k)[1], dims(k)[2]
    S, M = dims(tables)[0], dims(tables)[1]
    _write(
        carray(data(pages), (dims(pages)[0], dims(pages)[1], 2 * K, H), np.float32),
        carray(data(k), (T, K, H), np.float32),
        carray(data(argument(frame, 2)), (T, K, H), np.float32),
        carray(data(tables), (S, M), np.int32),
        carray(data(argument(frame, 4)), S, np.int32),
        carray(data(argument(frame, 5)), S + 1, np.int32),
        carray(data(argument(frame, 6)), 1, np.int32)[0],
    )  # fmt: skip
    return 0


register(NAME, _handler)  # at import: a program that was kept compiled traces nothing
