"""Norm, rotate-and-store, layer norm and cross entropy on a GPU: Triton, Mosaic GPU and XLA, against each other.

PYTHONPATH=. python benchmarks/small_kernels.py [--only norm store loss layer_norm]

For each shape and implementation: microseconds per call, the share of the card's bandwidth that the bytes of inputs and
outputs need (4.17 TB/s, measured on an H200 as a copy), and the greatest difference from XLA's results as a share of
their greatest (-1: they are too large to compare). Calls are chained, eight in each turn of a loop on the device.
"""

from __future__ import annotations

import argparse
import functools
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dovetail.core.types import Paged
from dovetail.ops.kernels.gpu import cross_entropy, layer_norm, norm, store
from dovetail.ops.kernels.gpu.mosaic import cross_entropy as mosaic_cross_entropy
from dovetail.ops.kernels.gpu.mosaic import layer_norm as mosaic_layer_norm
from dovetail.ops.kernels.gpu.mosaic import norm as mosaic_norm
from dovetail.ops.kernels.gpu.mosaic import norm_few, store_few
from dovetail.ops.kernels.gpu.mosaic import store as mosaic_store
from dovetail.ops.norm import layer_norm as xla_layer_norm
from dovetail.ops.norm import rms_norm
from dovetail.ops.paged import write_heads
from dovetail.ops.rope import Rope, rotate

RATE = 4.17e12
TURNS, UNROLL = 10, 8
BF16, F32 = jnp.bfloat16, jnp.float32


NUMBERS = np.random.default_rng(0).standard_normal(2**20, np.float32)


def normal(seed: int, *shape: int, dtype: Any = BF16) -> jax.Array:
    """Return numbers from the host: random numbers of many shapes take the device longer to compile than to measure."""
    return jax.device_put(np.resize(np.roll(NUMBERS, 12345 * seed).astype(dtype), shape))


class Case:
    """One shape: `runs` are functions of `given`; each result's first leaves feed the next call where `chain` says."""

    def __init__(self, name: str, runs: dict[str, Callable], given: tuple, moved: int, chain: Callable | None):
        self.name, self.runs, self.given, self.moved, self.chain = name, runs, given, moved, chain

    def repeated(self, run: Callable) -> Callable:
        if self.chain is None:
            return run

        once = jax.jit(run)  # lowered once

        def turn(_, given):
            for _ in range(UNROLL):
                # without the barrier XLA computes several calls in one pass
                given = self.chain(given, lax.optimization_barrier(once(*given)))
            return given

        return lambda *given: lax.fori_loop(0, TURNS, turn, given)

    def seconds(self, compiled: Callable) -> float:
        calls = 1 if self.chain is None else TURNS * UNROLL
        jax.block_until_ready(compiled(*self.given))
        best = np.inf
        for _ in range(3):
            start = time.perf_counter()
            outs = [compiled(*self.given) for _ in range(4)]
            jax.block_until_ready(outs)
            best = min(best, (time.perf_counter() - start) / 4 / calls)
        return best


def norms() -> list[Case]:
    runs = {
        "triton": lambda x, d, w: norm.add_rms_norm(x, d, w, 1e-6, 0.0),
        "mosaic": lambda x, d, w: mosaic_norm.add_rms_norm(x, d, w, 1e-6, 0.0),
        "mosaic few": lambda x, d, w: norm_few.add_rms_norm(x, d, w, 1e-6, 0.0),
        "xla": lambda x, d, w: (x + d, rms_norm(x + d, w, 1e-6)),
    }
    return [
        Case(f"norm {T} x {D}", {name: run for name, run in runs.items() if name != "mosaic" or D % 128 == 0},
             (normal(0, T, D), normal(1, T, D), normal(2, D)), 8 * T * D,
             lambda given, out: (out[0], out[1], given[2]))
        for D, tokens in ((1024, (1, 64, 8192)), (2880, (1, 64)), (4096, (1, 64, 256, 8192))) for T in tokens
    ]  # fmt: skip


def stores() -> list[Case]:
    return [_store(N, 8, 128, T) for N, T in ((16, 1), (32, 1), (16, 64), (16, 8192), (32, 64), (32, 8192))]


def _store(N: int, K: int, H: int, T: int) -> Case:
    page, rope = 16, Rope(1e6, H)
    rows = max(1, T // 128) if T > 512 else T
    per = T // rows
    pages_per_row = -(-(per + 100) // page)
    table = np.arange(rows * pages_per_row, dtype=np.int32).reshape(rows, -1)
    ends, lengths = np.arange(rows + 1, dtype=np.int32) * per, np.full(rows, per + 100, np.int32)
    ctx = Paged(*jax.device_put((table, lengths, ends, np.array([rows], np.int32))))
    pages, qkv = normal(0, rows * pages_per_row + 1, page, 2 * K, H), normal(1, T, N + 2 * K, H)
    angles = np.arange(T)[:, None] * np.asarray(rope.inv_freq())
    tables = jax.device_put((np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)))
    weights = normal(2, H), normal(3, H)

    def xla(pages, qkv, *tables):
        q, k, v = jnp.split(qkv, [N, N + K], axis=1)
        q, k = (rotate(rms_norm(x, w, 1e-6), rope, tables) for x, w in ((q, weights[0]), (k, weights[1])))
        return q, write_heads(ctx, pages, k, v)

    def ours(kernel, pages, qkv, *tables):
        return kernel(ctx, pages, qkv, tables, weights, 1e-6, 0.0)

    runs = {
        "triton": functools.partial(ours, store.rotate_store),
        "mosaic": functools.partial(ours, mosaic_store.rotate_store),
        "mosaic few": functools.partial(ours, store_few.rotate_store),
        "xla": xla,
    }
    # the product of the next layer depends on these queries
    return Case(f"store {T} x ({N}, {K}) x {H}", runs, (pages, qkv, *tables), 4 * T * (N + 2 * K) * H,
                lambda given, out: (out[1], lax.optimization_barrier((given[1], out[0]))[0], *given[2:]))  # fmt: skip


def losses() -> list[Case]:
    return [_loss(R, V, dtype) for R, V, dtype in ((1024, 151936, BF16), (1024, 151936, F32))]


def _loss(R: int, V: int, dtype: Any) -> Case:
    targets, weight = jax.device_put(np.arange(R, dtype=np.int32) * 97 % V), jax.device_put(np.ones(R, np.float32))
    options = dict(z=1e-4, softcap=None, dtype=BF16)

    def xla(logits, targets, weight):
        logits = logits.astype(F32)
        top = jnp.max(logits, axis=-1)
        lse = top + jnp.log(jnp.sum(jnp.exp(logits - top[..., None]), axis=-1))
        is_target = targets[:, None] == jnp.arange(V)
        chosen = jnp.sum(jnp.where(is_target, logits, 0.0), axis=-1)
        grad = jnp.exp(logits - lse[:, None]) * (1 + 2e-4 * lse)[:, None] - is_target
        return chosen - lse, lse, chosen >= top, (grad * weight[:, None]).astype(BF16)

    runs = {"triton": functools.partial(cross_entropy.cross_entropy_rows, **options), "xla": xla}
    for width, loads in ((1024, 4), (1024, 8)):
        name = "mosaic" if (width, loads) == (1024, 4) else f"mosaic {width} x {loads}"
        runs[name] = functools.partial(mosaic_cross_entropy.cross_entropy_rows, **options, width=width, loads=loads)
    moved = R * V * (jnp.dtype(dtype).itemsize + 2)
    return Case(f"loss {R} x {V} {jnp.dtype(dtype).name}", runs, (normal(0, R, V, dtype=dtype), targets, weight), moved,
                None)  # fmt: skip


def layer_norms() -> list[Case]:
    return [_layer_norm(65536, 1152, back) for back in (False, True)]


def _layer_norm(T: int, D: int, back: bool) -> Case:
    def xla(x, d, w, b):
        return x + d, xla_layer_norm(x + d, w, b, 1e-6)

    def both(run):
        def gradient(x, d, w, b):
            out, pull = jax.vjp(run, x, d, w, b)
            return pull((out[0] * 0.5, out[1]))

        return gradient

    runs = {
        "triton": lambda *given: layer_norm.add_layer_norm(*given, 1e-6),
        "mosaic": lambda *given: mosaic_layer_norm.add_layer_norm(*given, 1e-6),
        "xla": xla,
    }
    given = normal(0, T, D), normal(1, T, D), normal(2, D), normal(3, D)
    if back:
        runs = {name: both(run) for name, run in runs.items()}
    return Case(f"layer norm {T} x {D}{', with gradient' if back else ''}", runs, given, (8 + 12 * back) * T * D, None)


def compiled(case: Case, run: Callable) -> Any:
    """Return the program that is timed, or why there is none."""
    try:
        return jax.jit(case.repeated(run)).lower(*case.given).compile()
    except Exception:
        return traceback.format_exc(limit=-2)


def small_results(program: Callable, case: Case) -> list[np.ndarray]:
    """Return the results that are quickly compared on the host; of a chain, those of its last call."""
    return [np.asarray(x).astype(np.float32) for x in jax.tree.leaves(program(*case.given)) if x.size < 2**22]


def measure(case: Case, programs: dict[str, Any]) -> None:
    want = small_results(programs["xla"], case)
    for name, program in programs.items():
        try:
            got = small_results(program, case)
            far = max(
                (float(np.abs(a - b).max() / np.abs(b).max()) for a, b in zip(got, want, strict=True)), default=-1
            )
            seconds = case.seconds(program)
            share = case.moved / RATE / seconds
            print(f"{case.name:36} {name:16} {seconds * 1e6:9.2f} us {share:6.1%}  {far:.2g}", flush=True)
        except Exception as error:
            print(f"{case.name:36} {name:16} {program if isinstance(program, str) else error}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    groups = {"norm": norms, "store": stores, "loss": losses, "layer_norm": layer_norms}
    parser.add_argument("--only", nargs="+", choices=[*groups], default=[*groups])
    cases = [case for name in parser.parse_args().only for case in groups[name]()]
    pairs = [(case, run) for case in cases for run in case.runs.values()]
    with ThreadPoolExecutor(14) as pool:  # all before the first is timed: compilers take the host's time
        programs = iter([*pool.map(lambda pair: compiled(*pair), pairs)])
    for case in cases:
        measure(case, {name: next(programs) for name in case.runs})


if __name__ == "__main__":
    main()
