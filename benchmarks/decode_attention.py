"""Paged attention of few tokens per sequence on a GPU: hold the kernels to the reference, then time them.

`python benchmarks/decode_attention.py [check] [time] [variants]`, or `quick [heads ..]`. `triton` is
ops/kernels/gpu/paged.py, `mosaic` ops/kernels/gpu/decode.py (Hopper), `reference` XLA's. `variants` times the latter
with other numbers of chunks under way and of parts. The rate
counts the bytes of keys and values that a step has to read, with the scales of int8. A variant that fails is printed
and left out. `quick` takes a minute: it checks some steps and prints the profiler's microseconds of attention, of the
join of its parts, and of the other kernels.

Layers share the metadata of a step, as in a model: each timed program attends LAYERS times, over pages of its own where
these would otherwise fit into the L2 cache.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from attention import PAGE, inputs, seconds, step_of

from dovetail.core.types import Paged
from dovetail.ops.kernels.gpu import decode, paged
from dovetail.ops.paged import is_rounded, round_rows
from dovetail.ops.paged import paged_attention as reference

LAYERS = 4
FLOOR = 4.17  # TB/s of an H200 that a copy reaches
LEAST_BYTES = 1 << 30  # of the pages of a program
DTYPES = ("bfloat16", "float8_e4m3fn", "int8")
HEADS = {"Llama 8B": (32, 8, 128), "Qwen3 0.6B": (16, 8, 128), "GPT-OSS": (64, 8, 64), "Qwen3 30B": (32, 4, 128)}
# new tokens of each sequence, and the length after them
STEPS = {
    "512 x 640": ([1] * 512, [640] * 512),
    "512 x 2048": ([1] * 512, [2048] * 512),
    "64 x 2048": ([1] * 64, [2048] * 64),
    "1 x 32768": ([1], [32768]),
    "64 x 2048, 3 tokens": ([3] * 64, [2048] * 64),
    "64 x 2048, 5 tokens": ([5] * 64, [2048] * 64),
    "16 of 32 x 7000": ([1] * 16 + [0] * 16, [7000] * 16 + [0] * 16),  # a batch with rows of padding
}
ALONE = "384 alone"  # in a batch of one row
QUICK_STEPS = {name: STEPS[name] for name in STEPS if "5 tokens" not in name} | {ALONE: ([1], [384])}
QUICK_HEADS = ("Llama 8B", "GPT-OSS", "Qwen3 30B")
QUICK_POOL, QUICK_RUNS = 65536, 3  # pages for all steps; runs of a program
VARIANTS: tuple[dict[str, Any], ...] = (
    *({"stages": stages} for stages in (2, 3, 4, 6)),
    *({"splits": splits} for splits in (1, 2, 4, 8, 16, 32, 64)),
)
RAGGED = {
    "decode": ([1] * 7, [1, 16, 63, 64, 65, 700, 2000]),
    "two each": ([2, 2, 1, 3], [2, 64, 1, 500]),
    "drafts": ([3, 1, 8, 5, 2], [3, 64, 200, 1029, 130]),
    "one long": ([1], [5000]),
    "one short": ([1], [130]),
}
OPTIONS: tuple[dict[str, Any], ...] = ({}, {"window": 128}, {"window": 300, "softcap": 30.0}, {"sinks": True})


def mosaic(ctx: Paged, q: jax.Array, pages: jax.Array, **options: Any) -> jax.Array:
    """Attend by the kernel for Hopper, or say why not."""
    if why := decode.why_not_decode(q, pages, ctx.kv_lens.shape[0], False):
        raise ValueError(why)
    return decode.paged_attention(ctx, q, pages, **options)


KERNELS: dict[str, Callable] = {
    "triton": paged.paged_attention,
    "mosaic": mosaic,
}


@functools.cache
def rounded(dtype: str) -> Callable:
    """Return the function from pages to those of a dtype."""
    plain = dtype == "bfloat16"
    return jax.jit(lambda pages: pages if plain else round_rows(pages, jnp.dtype(dtype)))


def attempt(name: str, run: Callable) -> float:
    """Return what `run` returns, or NaN and print why."""
    try:
        return run()
    except Exception as error:
        print(f"{name} FAILED {error!s:.300}", flush=True)
        return float("nan")


# --- correctness ------------------------------------------------------------------------------------------------------


def check() -> None:
    """Print the largest difference to the reference in f32, with NaN in unused slots of pages that can hold it."""
    print(f"{'heads':>14} {'step':>9} {'options':>34} {'pages':>14}", *(f"{name:>9}" for name in KERNELS))
    for heads in ((32, 8, 128), (64, 8, 64), (14, 2, 64), (8, 2, 256)):
        for step in RAGGED:
            for options in OPTIONS if heads == (64, 8, 64) else OPTIONS[:1]:
                for dtype in DTYPES:
                    found = [
                        attempt(name, functools.partial(_difference, run, heads, step, dtype, dict(options)))
                        for name, run in KERNELS.items()
                    ]
                    cells = " ".join(f"{x:9.5f}" for x in found)
                    print(f"{heads!s:>14} {step:>9} {options!s:>34} {dtype:>14} {cells}", flush=True)


def _difference(run: Callable, heads: tuple[int, int, int], step: str, dtype: str, options: dict[str, Any]) -> float:
    counts, lengths = RAGGED[step]
    ctx, num_pages = step_of(counts, lengths)
    q, pages = inputs(num_pages, sum(counts), heads)
    pages = rounded(dtype)(pages)
    options["scale"] = heads[2] ** -0.5
    if "sinks" in options:
        options["sinks"] = jax.random.normal(jax.random.key(9), (heads[0],))
    exact = pages if is_rounded(pages) else pages.astype(jnp.float32)
    with jax.default_matmul_precision("highest"):
        want = jax.jit(lambda q, pages: reference(ctx, q, pages, **options))(q.astype(jnp.float32), exact)
    if dtype != "int8":
        used = _used(ctx, lengths, num_pages)
        pages = jnp.where(used[:, :, None, None], pages.astype(jnp.float32), jnp.nan).astype(pages.dtype)
    got = jax.jit(lambda q, pages: run(ctx, q, pages, **options))(q, pages)
    return float(jnp.abs(got.astype(jnp.float32) - want).max())


def _used(ctx: Paged, lengths: Sequence[int], num_pages: int) -> np.ndarray:
    """Return which slots [P, page] hold a key."""
    used, tables = np.zeros((num_pages, PAGE), bool), np.asarray(ctx.block_tables)
    for row, length in enumerate(lengths):
        at = np.arange(length)
        used[tables[row, at // PAGE], at % PAGE] = True
    return used


# --- speed ------------------------------------------------------------------------------------------------------------


def read_bytes(lengths: Sequence[int], heads: tuple[int, int, int], dtype: str) -> int:
    """Return the bytes of the keys and values of a step."""
    row = jax.eval_shape(rounded(dtype), jax.ShapeDtypeStruct((1, 1, 1, heads[2]), jnp.bfloat16))
    return sum(lengths) * 2 * heads[1] * row.size * row.dtype.itemsize


def rate(run: Callable, heads: tuple[int, int, int], step: str, dtype: str, **options: Any) -> float:
    """Return TB/s."""
    counts, lengths = STEPS[step]
    ctx, num_pages = step_of(counts, lengths)
    nbytes = read_bytes(lengths, heads, dtype)
    copies = min(LAYERS, -(-LEAST_BYTES // nbytes))
    pages = rounded(dtype)(inputs(copies * num_pages, 1, heads)[1])
    qs = [inputs(1, max(sum(counts), len(counts)), heads, seed)[0] for seed in range(LAYERS)]
    options["scale"] = heads[2] ** -0.5

    @jax.jit
    def program(ctx: Paged, qs: list[jax.Array], pages: jax.Array) -> list[jax.Array]:
        own = [dataclasses.replace(ctx, block_tables=ctx.block_tables + i % copies * num_pages) for i in range(LAYERS)]
        return [run(each, q, pages, **options) for each, q in zip(own, qs, strict=True)]

    return LAYERS * nbytes / seconds(program, ctx, qs, pages) / 1e12


def measure() -> None:
    """Print the table of rates."""
    print(f"{'heads':>11} {'step':>20} {'pages':>14}", *(f"{name:>8}" for name in KERNELS), f" TB/s of {FLOOR}")
    for name, heads in HEADS.items():
        sinks = {"sinks": jnp.ones(heads[0])} if name == "GPT-OSS" else {}
        for step in STEPS:
            for dtype in DTYPES:
                found = [
                    attempt(kernel, functools.partial(rate, run, heads, step, dtype, **sinks))
                    for kernel, run in KERNELS.items()
                ]
                cells = " ".join(f"{x:8.2f}" for x in found)
                print(f"{name:>11} {step:>20} {dtype:>14} {cells}", flush=True)
    run = functools.partial(rate, reference, HEADS["Llama 8B"], "64 x 2048", "float8_e4m3fn")
    print(f"the reference, Llama 8B, 64 x 2048, fp8: {attempt('reference', run):.2f} TB/s")


def compare() -> None:
    """Print the rates of variants of the kernel for Hopper, those of each step one after the other."""
    for step in ("512 x 640", "512 x 2048", "64 x 2048", "1 x 32768", "16 of 32 x 7000"):
        for dtype in DTYPES[:2]:
            for options in ({}, *VARIANTS, {}):
                found = attempt(
                    str(options), functools.partial(rate, mosaic, HEADS["Llama 8B"], step, dtype, **options)
                )
                print(f"{step:>20} {dtype:>14} {options!s:>14} {found:8.2f}", flush=True)


# --- in a minute ------------------------------------------------------------------------------------------------------


def quick(names: Sequence[str]) -> None:
    """Check some steps, then print the times of both kernels for these heads."""
    with ThreadPoolExecutor(12) as pool:
        cases = [
            *itertools.product(((32, 8, 128), (64, 8, 64), (32, 4, 128)), ("decode", "drafts"), DTYPES[:2], (0,)),
            *itertools.product(((64, 8, 64),), ("one long", "one short"), DTYPES[:2], (3,)),
        ]
        checks = [
            pool.submit(_difference, mosaic, heads, step, dtype, dict(OPTIONS[i])) for heads, step, dtype, i in cases
        ]
        keys = list(itertools.product(names, DTYPES[:2], QUICK_STEPS, ("triton", "mosaic")))
        programs = [pool.submit(_compiled, *key) for key in keys]
        for case, check in zip(cases, checks, strict=True):
            found = attempt(f"check {case}", check.result)
            if not found < 0.02:
                print(f"WRONG by {found:.5f}: {case}", flush=True)
        print(f"{len(cases)} checks done", flush=True)
        for (name, dtype), own in itertools.groupby(zip(keys, programs, strict=True), lambda x: x[0][:2]):
            heads = HEADS[name]
            pages = rounded(dtype)(inputs(QUICK_POOL, 1, heads)[1])
            for step, pair in itertools.groupby(own, lambda x: x[0][2]):
                nbytes = read_bytes(QUICK_STEPS[step][1], heads, dtype)
                cells = [_profiled_cell(pages, nbytes, key, program) for key, program in pair]
                print(f"{name:>10} {dtype[:8]:>8} {step:>20}", *cells, flush=True)


def _quick_step(step: str) -> tuple[Paged, int]:
    """Return the context of a step and the number of its pages."""
    ctx, num_pages = step_of(*QUICK_STEPS[step])
    if step == ALONE:
        ctx = dataclasses.replace(
            ctx, block_tables=ctx.block_tables[:1, :288], kv_lens=ctx.kv_lens[:1], cu_q_lens=ctx.cu_q_lens[:2]
        )
    return ctx, num_pages


def _compiled(name: str, dtype: str, step: str, kernel: str) -> tuple[Callable, list]:
    """Return a compiled program of LAYERS attentions and what it is given beside the pages."""
    heads, (ctx, num_pages) = HEADS[name], _quick_step(step)
    copies = max(1, min(LAYERS, QUICK_POOL // num_pages))
    options: dict[str, Any] = {"sinks": jnp.ones(heads[0])} if name == "GPT-OSS" else {}
    tokens = max(sum(QUICK_STEPS[step][0]), ctx.kv_lens.shape[0])
    rng = np.random.default_rng(0)
    q = jnp.asarray(rng.standard_normal((LAYERS, tokens, heads[0], heads[2])), jnp.bfloat16)

    def program(ctx: Paged, q: jax.Array, pages: jax.Array) -> list[jax.Array]:
        own = [dataclasses.replace(ctx, block_tables=ctx.block_tables + i % copies * num_pages) for i in range(LAYERS)]
        return [KERNELS[kernel](each, q[i], pages, scale=heads[2] ** -0.5, **options) for i, each in enumerate(own)]

    pages = jax.ShapeDtypeStruct((QUICK_POOL, PAGE, 2 * heads[1], heads[2]), dtype)
    return jax.jit(program).lower(ctx, q, pages).compile(), [ctx, q]


def _profiled_cell(pages: jax.Array, nbytes: int, key: tuple, program: Any) -> str:
    """Return the TB/s of a kernel, and the microseconds of attention, of the join and of other kernels."""
    try:
        run, given = program.result()
        jax.block_until_ready(run(*given, pages))
        times = _kernel_times(lambda: jax.block_until_ready([run(*given, pages) for _ in range(QUICK_RUNS)]))
    except Exception as error:
        return f"| {key[-1]} FAILED {error!s:.200}"
    join = sum(us for name, us in times.items() if "join" in name)
    main = sum(us for name, us in times.items() if "attention" in name)
    rest = sum(times.values()) - main - join  # tiles and their parts: once for all layers
    found = nbytes / max(1e-9, main + join) / 1e6
    return f"| {key[-1]:>6} {found:5.2f} TB/s {main:7.1f} + {join:4.1f} + {rest:4.1f} us"


def _kernel_times(run: Callable) -> dict[str, float]:
    """Return the microseconds of each kernel of an attention."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        (path,) = Path(folder).glob("plugins/profile/*/*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(path))
    times: collections.Counter = collections.Counter()
    lines = [line for plane in data.planes if "GPU" in plane.name for line in plane.lines]
    for event in (event for line in lines if line.name.startswith("Stream") for event in line.events):
        times[event.name] += event.duration_ns / 1e3 / QUICK_RUNS / LAYERS
    return dict(times)


if __name__ == "__main__":
    wanted = sys.argv[1:] or ["check", "time"]
    if wanted[0] == "quick":
        quick(wanted[1:] or QUICK_HEADS)
    if "check" in wanted:
        check()
    if "time" in wanted:
        measure()
    if "variants" in wanted:
        compare()
