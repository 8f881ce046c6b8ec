"""Paged attention of prompts on a GPU: hold the kernels to the reference, then time them beside cuDNN without pages.

`python benchmarks/attention.py [check] [time]`. Rates count the products of causal attention, 4 H per query head and
visible key. `triton` is ops/kernels/gpu/paged.py, `mosaic` ops/kernels/gpu/prompt.py.

Layers share the metadata of a step, as in a model: each timed program attends LAYERS times.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dovetail.core.types import Paged
from dovetail.ops.kernels.gpu import paged, prompt
from dovetail.ops.paged import paged_attention as reference

PAGE, LAYERS, REPEATS = 16, 8, 5
PEAK = 989.0  # TFLOP/s of an H100 or H200 in bf16
HEADS = {"8B": (32, 8, 128), "0.6B": (16, 8, 128), "GPT-OSS": (64, 8, 64), "MHA": (16, 16, 128)}
# new tokens of each sequence, and the length after them
STEPS = {
    "8 x 1024": ([1024] * 8, [1024] * 8),
    "2 x 4096": ([4096] * 2, [4096] * 2),
    "1 x 8192": ([8192], [8192]),
    "8192 after 8192": ([8192], [16384]),
}
MIXED = {
    "64 decode, 2 x 1024": ([1] * 64 + [1024] * 2, [640] * 64 + [1024] * 2),
    "verify 64 x 5": ([5] * 64, [640] * 64),
}
RAGGED = [300, 1, 0, 17, 129, 64, 5], [300, 700, 50, 17, 1000, 192, 133]


def step_of(counts: Sequence[int], lengths: Sequence[int], seed: int = 0) -> tuple[Paged, int]:
    """Return the context of a step whose pages are in random order, and the number of pages.

    Steps have the same shapes if they can: a program is compiled once for them.
    """
    room, width = max(8, len(counts)), max(1024, -(-max(lengths) // PAGE))
    each = [-(-length // PAGE) for length in lengths]
    num_pages = max(1024, sum(each))
    shuffled, tables = np.random.default_rng(seed).permutation(num_pages), np.zeros((room, width))
    for row, (end, count) in enumerate(zip(np.cumsum(each), each, strict=True)):
        tables[row, :count] = shuffled[end - count : end]
    kv_lens, cu = np.zeros(room), np.full(room + 1, sum(counts))
    kv_lens[: len(lengths)], cu[: len(counts) + 1] = lengths, np.cumsum([0, *counts])
    given = (jnp.asarray(x, jnp.int32) for x in (tables, kv_lens, cu, [len(counts)]))
    block_tables, lens, starts, num_seqs = given
    return Paged(block_tables, lens, starts, num_seqs), num_pages


def inputs(pages: int, tokens: int, heads: tuple[int, int, int], seed: int = 0) -> tuple[jax.Array, jax.Array]:
    """Return q [T, N, H] and pages [P, page, 2K, H]."""
    N, K, H = heads
    keys = jax.random.split(jax.random.key(seed), 2)
    q = jax.random.normal(keys[0], (tokens, N, H), jnp.bfloat16)
    return q, jax.random.normal(keys[1], (pages, PAGE, 2 * K, H), jnp.bfloat16)


# --- correctness ------------------------------------------------------------------------------------------------------


def check() -> None:
    """Print the largest difference to the reference in f32 for ragged steps, with NaN in unused slots of pages."""
    print(f"{'heads':>14} {'options':>34} {'max |difference|':>18}")
    for heads in ((32, 8, 128), (64, 8, 64), (8, 8, 128), (14, 2, 64), (8, 1, 128)):
        for options in ({}, {"window": 128}, {"window": 300, "softcap": 30.0}, {"sinks": True}):
            if options and heads not in ((32, 8, 128), (64, 8, 64)):
                continue
            try:
                print(f"{heads!s:>14} {options!s:>34} {_difference(heads, dict(options)):18.5f}", flush=True)
            except Exception as error:
                print(f"{heads!s:>14} {options!s:>34} FAILED {error!s:.300}", flush=True)


def _difference(heads: tuple[int, int, int], options: dict[str, Any]) -> float:
    ctx, num_pages = step_of(*RAGGED)
    count = sum(RAGGED[0])
    q, pages = inputs(num_pages, -(-count // 8) * 8, heads)
    used = np.zeros((num_pages, PAGE), bool)
    for row, length in enumerate(RAGGED[1]):
        at = np.arange(length)
        used[np.asarray(ctx.block_tables)[row, at // PAGE], at % PAGE] = True
    pages = jnp.where(used[:, :, None, None], pages, jnp.nan)
    options["scale"] = heads[2] ** -0.5
    if "sinks" in options:
        options["sinks"] = jax.random.normal(jax.random.key(9), (heads[0],))
    with jax.default_matmul_precision("highest"):
        expected = jax.jit(lambda q, pages: reference(ctx, q, pages, **options))(
            q.astype(jnp.float32), pages.astype(jnp.float32)
        )
    got = jax.jit(lambda q, pages: prompt.paged_attention(ctx, q, pages, **options))(q, pages)
    return float(jnp.abs(got[:count] - expected[:count]).max())


# --- speed ------------------------------------------------------------------------------------------------------------


def seconds(run: Callable, *given: Any) -> float:
    """Return the seconds of a call: the least of two times REPEATS queued ones."""
    jax.block_until_ready(run(*given))
    best = float("inf")
    for _ in range(2):
        start = time.perf_counter()
        jax.block_until_ready([run(*given) for _ in range(REPEATS)])
        best = min(best, (time.perf_counter() - start) / REPEATS)
    return best


def flops(counts: Sequence[int], lengths: Sequence[int], heads: tuple[int, int, int], window: int | None) -> float:
    """Return the FLOPs of a step."""
    keys = (np.arange(n - c + 1, n + 1) for c, n in zip(counts, lengths, strict=True))
    return 4.0 * heads[0] * heads[2] * sum(np.minimum(k, window or k).sum() for k in keys)


@functools.cache
def layers(kernel: Callable, **options: Any) -> Callable:
    """Return a program that attends once per layer."""
    return jax.jit(lambda ctx, qs, pages, sinks: [kernel(ctx, q, pages, sinks=sinks, **options) for q in qs])


def rates(heads: tuple[int, int, int], counts: Sequence[int], lengths: Sequence[int], **options: Any) -> dict:
    """Return TFLOP/s by kernel."""
    ctx, num_pages = step_of(counts, lengths)
    qs = [inputs(1, sum(counts), heads, seed)[0] for seed in range(LAYERS)]
    pages = inputs(num_pages, 1, heads)[1]
    options["scale"], sinks = heads[2] ** -0.5, options.pop("sinks", None)
    work = flops(counts, lengths, heads, options.get("window")) * LAYERS / 1e12
    found = {}
    for name, kernel in (("triton", paged.paged_attention), ("mosaic", prompt.paged_attention)):
        try:
            found[name] = work / seconds(layers(kernel, **options), ctx, qs, pages, sinks)
        except Exception as error:
            print(name, f"FAILED {error!s:.300}", flush=True)
    if len(set(counts)) == 1 and counts == lengths and sinks is None:
        try:
            found["cudnn"] = work / seconds(_cudnn(len(counts), counts[0], heads, options), qs, pages)
        except Exception as error:
            print("cudnn", f"FAILED {error!s:.300}", flush=True)
    return found


def _cudnn(rows: int, length: int, heads: tuple[int, int, int], options: dict[str, Any]) -> Callable:
    """Return cuDNN's attention for rows of the same length, with the keys where they are in no page."""
    window = options.get("window")
    more: dict[str, Any] = {"local_window_size": (window - 1, 0)} if window else {}

    @jax.jit
    def run(qs: list[jax.Array], pages: jax.Array) -> list[jax.Array]:
        k, v = (pages[: rows * length // PAGE, :, i::2].reshape(rows, length, heads[1], heads[2]) for i in (0, 1))
        attend = jax.nn.dot_product_attention
        cut = (q.reshape(rows, length, *q.shape[1:]) for q in qs)
        return [attend(q, k, v, scale=options["scale"], is_causal=True, implementation="cudnn", **more) for q in cut]

    return run


def measure() -> None:
    """Print the table of rates."""
    kernels = ("triton", "mosaic", "cudnn")
    print(
        f"{'heads':>8} {'step':>20} {'window':>7}", *(f"{kernel:>8}" for kernel in kernels), " TFLOP/s; share of peak"
    )
    for name, heads in HEADS.items():
        for what, (counts, lengths) in (STEPS | MIXED).items():
            for window in (None, 128) if name == "GPT-OSS" else (None,):
                sinks = {"sinks": jnp.ones(heads[0])} if name == "GPT-OSS" else {}
                found = rates(heads, counts, lengths, window=window, **sinks)
                cells = " ".join(f"{found.get(kernel, float('nan')):8.1f}" for kernel in kernels)
                share = found.get("mosaic", 0) / PEAK
                print(f"{name:>8} {what:>20} {window or '-':>7} {cells}  {share:.0%}", flush=True)


if __name__ == "__main__":
    wanted = sys.argv[1:] or ["check", "time"]
    if "check" in wanted:
        check()
    if "time" in wanted:
        measure()
