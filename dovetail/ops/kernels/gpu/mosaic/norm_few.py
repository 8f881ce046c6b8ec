"""Residual add and RMS norm of few tokens for Hopper (Pallas, Mosaic GPU): 16 warps per token, thread by thread.

A thread reads all it needs at once: what few tokens take is the time that their reads take one after the other.

T tokens, D model dim.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from dovetail.ops.kernels.gpu.mosaic.row_ops import THREADS, WARPGROUPS, WARPS, RowThreads, join_all
from dovetail.ops.kernels.gpu.mosaic.threads import launch

NUMBERS = 8  # bf16 that a thread reads at once
READS = 4  # per thread, at most


def why_not_few(x: Any) -> str | None:
    """Return why the kernel does not take x [T, D], or None."""
    if x.dtype != jnp.bfloat16:
        return f"{x.dtype}"
    dim, most = x.shape[-1], READS * THREADS * NUMBERS
    return f"rows of {dim:,}, not a multiple of {NUMBERS} up to {most:,}" if dim % NUMBERS or dim > most else None


@functools.partial(jax.jit, static_argnames=("eps", "offset"))  # equal calls are traced and lowered once
def add_rms_norm(
    x: jax.Array,  # [T, D] bf16
    delta: jax.Array | None,  # [T, D]
    weight: jax.Array,  # [D]
    eps: float,
    offset: float,
) -> tuple[jax.Array, jax.Array]:
    """Return (x + delta, its norm), both [T, D]."""
    (T, D), name = x.shape, "rms_norm" if delta is None else "add_rms_norm"
    if weight.dtype != x.dtype:
        weight = weight.astype(jnp.float32)
    given = [weight, x] if delta is None else [weight, x, delta]
    out = [jax.ShapeDtypeStruct((T, D), x.dtype)] * (len(given) - 1)
    program = functools.partial(normalize, D=D, eps=eps, offset=offset, is_wide=weight.dtype != x.dtype)
    results = launch(name, program, given, out, T, (WARPS,), RowThreads(), WARPGROUPS)
    return (x, results[0]) if delta is None else (results[0], results[1])


def normalize(
    on: Any, row: Any, weight: Any, x: Any, *refs: Any, D: int, eps: float, offset: float, is_wide: bool
) -> None:
    """Normalise a row; `refs` are the delta, if there is one, the sum with it, the norm, and shared memory.

    The weight is in f32 if it `is_wide`.
    """
    *others, norm, shared = refs
    places = [(on.thread + i * THREADS) * NUMBERS for i in range(-(-D // (THREADS * NUMBERS)))]
    is_whole = D % (THREADS * NUMBERS) == 0

    def read(ref: Any, number: Any) -> list[list[Any]]:
        found = [on.words(ref, number, 2 * D, on.at_most(at, D - NUMBERS) * 2, NUMBERS // 2) for at in places]
        return [[number for word in words for number in on.split(word)] for words in found]

    def write(ref: Any, pairs: list[list[Any]]) -> None:
        for at, words in zip(places, pairs, strict=True):
            on.store_all(ref, row * D + at, words, None if is_whole else at < D)

    def rounded(numbers: list[list[Any]]) -> list[list[Any]]:
        return [[on.pair(a, b, "bf16") for a, b in zip(each[::2], each[1::2], strict=True)] for each in numbers]

    def read_wide() -> list[list[Any]]:
        firsts = [on.at_most(at, D - NUMBERS) for at in places]
        return [[*on.floats(weight, at, 4), *on.floats(weight, at + 4, 4)] for at in firsts]

    total, weights = read(x, row), read_wide() if is_wide else read(weight, row * 0)
    pairs = None
    if others:
        # rounded as it will be read again: the norm is of what the next layers see
        sums = [[a + b for a, b in zip(*both, strict=True)] for both in zip(total, read(others[0], row), strict=True)]
        pairs = rounded(sums)
        total = [[number for word in words for number in on.split(word)] for words in pairs]
    squares = on.constant(0.0)
    for at, numbers in zip(places, total, strict=True):
        own = functools.reduce(lambda a, b: a + b, [a * a for a in numbers])
        squares = squares + on.select(at < D, own, 0.0)
    scale = on.rsqrt(join_all(on, squares, lambda a, b: a + b, shared) / float(D) + eps)
    if pairs is not None:
        write(others[1], pairs)  # after what threads exchange
    normed = [
        [a * scale * (w + offset) for a, w in zip(*both, strict=True)] for both in zip(total, weights, strict=True)
    ]
    write(norm, rounded(normed))
