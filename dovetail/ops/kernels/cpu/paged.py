"""Ragged paged attention for CPUs: numba and BLAS instead of XLA's gathers and small batched products.

A tile of a sequence's queries walks its keys, a block at a time, while the softmax is accumulated. A block is copied
out of its pages once for all of the tile's queries and heads, while it is in the cache. A layer is one call, and XLA's
threads take parts of its tokens (see threads): with a call for each part, a program took several times the memory.

T tokens, S sequences, N query heads, K key heads, G = N / K, H head dim; R rows of a tile, which are queries x G.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from numba import cfunc, njit
from numba.np.numpy_support import carray

from dovetail.core.types import Paged
from dovetail.ops.kernels.cpu.ffi import FRAME, argument, data, dims, is_question, register, result, words
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

BLOCK = 64  # keys at a time
TILE = 16  # queries that share a block, at most
CHUNKS = 96  # of a call, at most
LEAST = 8  # tokens of a prompt in a chunk: they share what is read
ALONE = 1 << 18  # multiplications up to which OpenBLAS stays on its caller's thread: others are XLA's
NAME = "dovetail_paged_attention"
EMPTY = np.float32(-1e30)  # the maximum of no scores


def paged_attention(
    ctx: Paged, q: jax.Array, pages: jax.Array, *, scale: float, window: int | None = None, softcap=None, sinks=None
) -> jax.Array:
    """Attend as ops.paged.paged_attention does, in f32."""
    (T, N, H), K = q.shape, pages.shape[2] // 2
    logits = jnp.zeros(0, jnp.float32) if sinks is None else sinks.astype(jnp.float32)
    last_seen = jnp.zeros(0, jnp.int32) if ctx.last_seen is None else ctx.last_seen
    how = np.asarray([chunk_of(T, K, decoding=ctx.kv_lens.shape[0] >= T), window or 0], np.int32)
    numbers = np.asarray([scale, softcap or 0.0], np.float32)
    given = q, pages, ctx.block_tables, ctx.kv_lens, ctx.cu_q_lens, ctx.num_seqs, how, numbers, logits, last_seen
    return jax.ffi.ffi_call(NAME, jax.ShapeDtypeStruct((T * K, N // K, H), jnp.float32))(*given).reshape(q.shape)


def chunk_of(T: int, K: int, decoding: bool) -> int:
    """Return how many of the T * K units (a token with a key head each) a thread takes at a time.

    They are whole tokens, or a token's heads if few tokens decode.
    """
    if decoding and T * K <= CHUNKS:
        return 1
    return K * max(1 if decoding else LEAST, -(-T // CHUNKS))


FAST = {"reassoc", "contract", "nsz", "arcp"}  # sums in any order, but NaN and infinity stay what they are


@njit(nogil=True, fastmath=FAST, cache=True)
def _weigh(scores, low, high, softcap, top, bits):
    """Turn a row's scores between low and high into exp(score - maximum), the others into 0.

    Returns the maximum (or top if that is greater), and the sum.
    """
    if softcap > 0:
        for j in range(low, high):
            scores[j] = softcap * np.tanh(scores[j] / softcap)
    for j in range(low, high):
        top = max(top, scores[j])
    # exp written out so that it becomes vectors: 2^n by its bits, times a polynomial of the rest
    powers = bits.view(np.float32)
    for j in range(low, high):
        x = max(scores[j] - top, np.float32(-87.0))
        n = np.floor(x * np.float32(1.44269504) + np.float32(0.5))
        f = x - n * np.float32(0.693359375) + n * np.float32(2.12194440e-4)
        p = np.float32(1.9875691e-4)
        p = p * f + np.float32(1.3981999e-3)
        p = p * f + np.float32(8.3334519e-3)
        p = p * f + np.float32(4.1665796e-2)
        p = p * f + np.float32(1.6666666e-1)
        p = p * f + np.float32(0.5)
        scores[j] = p * f * f + f + np.float32(1.0)
        bits[j] = (np.int32(n) + np.int32(127)) << np.int32(23)
    total = np.float32(0.0)
    for j in range(low, high):
        scores[j] *= powers[j]
        total += scores[j]
    scores[:low], scores[high:] = 0.0, 0.0
    return top, total


@njit(nogil=True, cache=True)
def _walk(rows, pages, table, first, position, last, G, window, softcap, tops, totals, out, keys, values):
    """Attend a tile's rows [heads, R, H], the first at `position`, to the keys that they see; write out [heads, R, H].

    `last` has the last position that each token sees. The key heads start at `first`. All heads of a block are copied
    at once, so that memory is read in order.
    """
    size, (heads, R, H) = pages.shape[1], rows.shape
    scores, new = np.empty((R, BLOCK), np.float32), np.empty((R, H), np.float32)
    bits = np.empty(BLOCK, np.int32)
    end = 0  # no key at or behind it is seen, nor written yet
    for i in range(R // G):  # last.max() takes seconds to compile
        end = max(end, last[i] + 1)
    earliest = max(0, position - window + 1) if window > 0 else 0
    for start in range(earliest // BLOCK * BLOCK, end, BLOCK):
        for j in range(min(BLOCK, end - start)):
            place = pages[table[(start + j) // size], (start + j) % size]
            for k in range(heads):
                for h in range(H):
                    keys[k, j, h] = place[2 * (first + k), h]
                for h in range(H):
                    values[k, j, h] = place[2 * (first + k) + 1, h]
        for j in range(end - start, BLOCK):  # what an earlier sequence left there may be NaN, and 0 * NaN is not 0
            keys[:heads, j], values[:heads, j] = 0.0, 0.0
        for k in range(heads):
            np.dot(rows[k], keys[k].T, scores)
            for r in range(R):
                at = position + r // G - start
                low = min(BLOCK, max(0, at - window + 1)) if window > 0 else 0
                high = max(low, min(BLOCK, last[r // G] - start + 1))
                top, total = _weigh(scores[r], low, high, softcap, tops[k, r], bits)
                shrink = np.exp(tops[k, r] - top)
                tops[k, r], totals[k, r] = top, totals[k, r] * shrink + total
                for h in range(H):
                    out[k, r, h] *= shrink
            np.dot(scores, values[k], new)
            for r in range(R):
                for h in range(H):
                    out[k, r, h] += new[r, h]


@njit(nogil=True, cache=True)
def _place(pages, table, j):
    return pages[table[j // pages.shape[1]], j % pages.shape[1]]


@njit(nogil=True, cache=True)
def _four(pages, table, j, end):
    """Return the entries of four positions; past the end the last is repeated, with weight 0."""
    last = end - 1
    return (
        _place(pages, table, j), _place(pages, table, min(j + 1, last)),
        _place(pages, table, min(j + 2, last)), _place(pages, table, min(j + 3, last)),
    )  # fmt: skip


@njit(nogil=True, fastmath=FAST, cache=True)
def _score(rows, pages, table, first, start, end, scores):
    """Multiply rows [heads, G, H] by the keys from start to end, four at a time, into scores [heads, G, BLOCK]."""
    heads, G, H = rows.shape
    for j in range(start, end, 4):
        p0, p1, p2, p3 = _four(pages, table, j, end)
        for k in range(heads):
            at = 2 * (first + k)
            k0, k1, k2, k3 = p0[at], p1[at], p2[at], p3[at]
            for g in range(G):
                query, out = rows[k, g], scores[k, g, j - start : j - start + 4]
                a = b = c = d = np.float32(0)
                for h in range(H):
                    a, b, c, d = a + query[h] * k0[h], b + query[h] * k1[h], c + query[h] * k2[h], d + query[h] * k3[h]
                out[0], out[1], out[2], out[3] = a, b, c, d


@njit(nogil=True, fastmath=FAST, cache=True)
def _mix(weights, pages, table, first, start, end, out):
    """Multiply weights [heads, G, BLOCK] by the values from start to end and add to out [heads, G, H]."""
    heads, G, H = out.shape
    for j in range(start, end, 4):
        p0, p1, p2, p3 = _four(pages, table, j, end)
        for k in range(heads):
            at = 2 * (first + k) + 1
            v0, v1, v2, v3 = p0[at], p1[at], p2[at], p3[at]
            for g in range(G):
                sums, own = out[k, g], weights[k, g, j - start : j - start + 4]
                a, b, c, d = own[0], own[1], own[2], own[3]
                for h in range(H):
                    sums[h] += a * v0[h] + b * v1[h] + c * v2[h] + d * v3[h]


@njit(nogil=True, cache=True)
def _walk_one(rows, pages, table, first, position, last, window, softcap, tops, totals, out):
    """Attend one query [heads, G, H], as _walk does.

    What is read once is not worth a copy, nor BLAS for so few rows.
    """
    heads, G, H = rows.shape
    scores, bits = np.empty((heads, G, BLOCK), np.float32), np.empty(BLOCK, np.int32)
    earliest = max(0, position - window + 1) if window > 0 else 0
    for start in range(earliest, last + 1, BLOCK):
        end = min(last + 1, start + BLOCK)
        _score(rows, pages, table, first, start, end, scores)
        for k in range(heads):
            for g in range(G):
                top, total = _weigh(scores[k, g], 0, end - start, softcap, tops[k, g], bits)
                shrink = np.exp(tops[k, g] - top)
                tops[k, g], totals[k, g] = top, totals[k, g] * shrink + total
                for h in range(H):
                    out[k, g, h] *= shrink
        _mix(scores, pages, table, first, start, end, out)


@njit(nogil=True, cache=True)
def _attend(
    q, pages, tables, kv_lens, cu_q_lens, num_seqs, begin, window, scale, softcap, sinks, last_seen, out, keys, values
):
    """Attend the units from `begin` on, as many as `out` [units, G, H] holds: a token with a key head each.

    `keys` and `values` [K, BLOCK, H] hold the block of a tile.
    """
    K, (_, N, H) = pages.shape[2] // 2, q.shape
    G, end = N // K, begin + out.shape[0]
    whole = begin % K == 0 and end % K == 0  # no token is shared with another chunk
    tile = max(1, min(TILE, ALONE // (BLOCK * G * H))) if whole else 1
    seen = np.empty(tile, np.int32)
    out[:] = 0.0  # what is padding
    for seq in range(num_seqs):
        last = min(cu_q_lens[seq + 1], (end + K - 1) // K)
        past = kv_lens[seq] - cu_q_lens[seq + 1]  # a token's position is this and its index
        for token in range(max(cu_q_lens[seq], begin // K), last, tile):
            first, R = max(0, begin - token * K), min(tile, last - token) * G
            heads = min(K, end - token * K) - first
            rows, done = np.empty((heads, R, H), np.float32), np.zeros((heads, R, H), np.float32)
            for i in range(R // G):
                seen[i] = last_seen[token + i] if last_seen.shape[0] > 0 else past + token + i
            tops, totals = np.full((heads, R), EMPTY), np.zeros((heads, R), np.float32)
            for k in range(heads):
                for r in range(R):
                    n = (first + k) * G + r % G
                    if sinks.shape[0] > 0:
                        tops[k, r], totals[k, r] = sinks[n], 1.0
                    for h in range(H):
                        rows[k, r, h] = q[token + r // G, n, h] * scale
            if R == G:
                _walk_one(rows, pages, tables[seq], first, past + token, seen[0], window, softcap, tops, totals, done)
            else:
                _walk(
                    rows, pages, tables[seq], first, past + token, seen, G, window, softcap, tops, totals, done, keys,
                    values,
                )  # fmt: skip
            for k in range(heads):
                for r in range(R):
                    share = np.float32(1.0) / max(totals[k, r], np.float32(1e-30))
                    for h in range(H):
                        out[(token + r // G) * K + first + k - begin, r % G, h] = done[k, r, h] * share


@njit(nogil=True, cache=True)
def _work(job):
    """Work on a job, whose own word is the address of the frame of XLA's call."""
    chunk = take(job)
    if chunk < 0:  # the call may be over, and its frame gone
        return
    chunks, frame = words(job, OWN)[3], words(words(job, OWN + 1)[OWN], 15)
    tables, sinks, last_seen, out = argument(frame, 2), argument(frame, 8), argument(frame, 9), result(frame, 0)
    (T, N, H), (P, size, heads) = _three(argument(frame, 0)), _three(argument(frame, 1))
    S, M, count, G = dims(tables)[0], dims(tables)[1], dims(out)[0], dims(out)[1]
    how, numbers = carray(data(argument(frame, 6)), 2, np.int32), carray(data(argument(frame, 7)), 2, np.float32)
    attended = carray(data(out), (count, G, H), np.float32)
    keys, values = np.zeros((heads // 2, BLOCK, H), np.float32), np.zeros((heads // 2, BLOCK, H), np.float32)
    while chunk >= 0:
        begin = (chunks - 1 - chunk) * how[0]  # from the back: of a long prompt, the later has the more to do
        _attend(
            carray(data(argument(frame, 0)), (T, N, H), np.float32),
            carray(data(argument(frame, 1)), (P, size, heads, H), np.float32),
            carray(data(tables), (S, M), np.int32),
            carray(data(argument(frame, 3)), S, np.int32),
            carray(data(argument(frame, 4)), S + 1, np.int32),
            carray(data(argument(frame, 5)), 1, np.int32)[0],
            begin, how[1], numbers[0], numbers[1],
            carray(data(sinks), dims(sinks)[0], np.float32),
            carray(data(last_seen), dims(last_seen)[0], np.int32),
            attended[begin : begin + how[0]], keys, values,
        )  # fmt: skip
        finish(job)
        chunk = take(job)


@njit(nogil=True, cache=True)
def _three(buffer):
    """Return the first three dims of a buffer."""
    return dims(buffer)[0], dims(buffer)[1], dims(buffer)[2]


@cfunc(TASK, cache=True)
def _task(given):
    job = address_of(given)
    _work(job)
    release(job)
    return 0


_task_address = task_symbol("dovetail_paged_attention_task", _task)


@cfunc(FRAME, cache=True)
def _handler(frame):
    """Run what XLA calls, with the arguments of `paged_attention` above."""
    if is_question(frame):
        return 0
    count, chunk = dims(result(frame, 0))[0], carray(data(argument(frame, 6)), 2, np.int32)[0]
    job = new_job((count + chunk - 1) // chunk, 1)
    words(job, OWN + 1)[OWN] = address_of(frame)
    run_job(frame, job, _task_address())
    return 0


register(NAME, _handler)  # at import: a program that was kept compiled traces nothing
