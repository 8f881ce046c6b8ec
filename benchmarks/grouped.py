"""Check and time the grouped products of experts on an NVIDIA GPU: forward, gradient to rows, gradient to weights.

    python benchmarks/grouped.py [--check] [--time] [--tiles] [--only train]

`--check` compares product and gradients with XLA's `ragged_dot_general` over ragged sizes, with one weight and with two
whose gradients to the rows are one kernel, and the rows dealt to experts with those that XLA gathers. `--time` prints
the TFLOP/s of the kernels for Hopper (Mosaic GPU) and of those for other GPUs (Triton), with their share of the peak,
and how long rows take to reach their experts. `--tiles` times the kernels for Hopper with other tiles.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dovetail.ops.kernels.gpu import grouped as triton
from dovetail.ops.kernels.gpu import grouped_hopper as hopper
from dovetail.ops.kernels.gpu.mosaic.dealing import deal_rows

PEAK, BANDWIDTH = 989e12, 4.17e12  # bf16 FLOP/s of an H200, bytes/s as measured
# what: rows, experts, out, in
SHAPES = {
    "train, gate and up": (262144, 64, 1024, 2048),
    "train, down": (262144, 64, 2048, 1024),
    "Qwen3-30B-A3B 8192, gate and up": (65536, 128, 768, 2048),
    "Qwen3-30B-A3B 8192, down": (65536, 128, 2048, 768),
    "GPT-OSS-20B 8192": (32768, 32, 2880, 2880),
    "Mixtral 8192, gate and up": (16384, 8, 14336, 4096),
    "Qwen3-30B-A3B 512, gate and up": (4096, 128, 768, 2048),
}
M, E = 1000, 6
SIZES = {
    "uneven": [333, 1, 200, 160, 7, 299],
    "whole tiles": [128, 256, 128, 128, 256, 104],
    "empty groups": [0, 0, 871, 0, 129, 0],
    "rows in no group": [7, 0, 300, 0, 65, 3],
    "no rows at all": [0] * 6,
}
TILES = [
    hopper.OutputTiles(cols, stages, swizzle) for cols, stages in ((256, 4), (192, 4), (128, 6)) for swizzle in (4, 16)
]


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.jit(lambda key: jax.random.normal(key, shape, jnp.bfloat16))(jax.random.key(seed))


def ragged(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
    """Multiply by XLA; the rows in no group give 0."""
    numbers = lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), [0], [0])
    real = jnp.arange(len(x)) < sizes.sum()
    product = lax.ragged_dot_general(x, w, sizes, numbers, preferred_element_type=jnp.float32)
    return jnp.where(real[:, None], product, 0).astype(x.dtype)


@functools.partial(jax.jit, static_argnames="multiply")
def product_and_gradients(multiply: Callable, x, w, sizes, dy) -> list[jax.Array]:
    y, back = jax.vjp(lambda x, w: multiply(x, w, sizes), x, w)
    return [y, *back(dy)]


def check() -> None:
    for N, K in ((256, 320), (2880, 192)):
        x, w, dy = normal(0, M, K), normal(1, E, N, K), normal(2, M, N)
        for name, sizes in SIZES.items():
            args = x, w, jnp.asarray(sizes, jnp.int32), dy
            ours, theirs = (product_and_gradients(run, *args) for run in (hopper.grouped_matmul, ragged))
            errors = []
            for a, b in zip(ours, theirs, strict=True):
                a, b = (np.asarray(each, np.float32) for each in (a, b))
                errors.append(np.abs(a - b).max() / max(np.abs(b).max(), 1))
            verdict = "ok" if max(errors) < 8e-3 else "DIFFERS"
            print(f"check {N} x {K}, {name:18s} forward, to_x, to_w: {np.array(errors)} {verdict}", flush=True)


def check_two() -> None:
    N, K = 256, 320
    ws, dys = (normal(1, E, N, K), normal(2, E, N, K)), (normal(3, M, N), normal(4, M, N))
    for name, each in SIZES.items():
        sizes = jnp.asarray(each, jnp.int32)
        ours = jax.jit(hopper.rows_products, static_argnames="transposed")(dys, ws, sizes, transposed=False)
        theirs = sum(ragged(dy, w.mT, sizes).astype(jnp.float32) for dy, w in zip(dys, ws, strict=True))
        error = float(jnp.abs(ours.astype(jnp.float32) - theirs).max() / jnp.maximum(jnp.abs(theirs).max(), 1))
        print(f"check two of {N} x {K}, {name:18s} to_x: {error} {'ok' if error < 8e-3 else 'DIFFERS'}", flush=True)


def time_skewed(name: str, args: tuple, flops: float, size: float) -> None:
    """Time the gradient to the weights with groups of very different sizes, as training has them."""
    x, w, dy, _ = args
    rng = np.random.default_rng(1)
    sizes = jnp.asarray(rng.multinomial(len(x), rng.dirichlet(np.ones(len(w)))), jnp.int32)
    runs = {"to_w": functools.partial(hopper.weights_product, dtype=w.dtype)}
    timed(name, "hopper, skewed", runs, (dy, x, sizes), flops, size)


def check_deal() -> None:
    """Compare the rows that the kernel deals with those that XLA gathers: they are equal."""
    for T, D, k in ((1000, 2048, 8), (333, 2880, 4), (77, 8, 3)):
        x, back = normal(0, T, D), jax.random.permutation(jax.random.key(1), T * k).astype(jnp.int32)
        equal = bool(jnp.all(deal_rows(x, back, k) == x[jnp.argsort(back) // k]))
        print(f"check dealt rows {T} x {D}, {k} times: {'ok' if equal else 'DIFFERS'}", flush=True)


def time_deal(name: str, rows: int, groups: int, D: int, k: int = 8) -> None:
    """Time how rows of tokens reach the places of their pairs of token and expert."""
    x, chosen = normal(0, rows // k, D), jax.random.randint(jax.random.key(1), (rows,), 0, groups)
    order = jnp.argsort(chosen, stable=True).astype(jnp.int32)
    back = jnp.argsort(order).astype(jnp.int32)
    runs = {"kernel": lambda x, order, back: deal_rows(x, back, k), "gather": lambda x, order, back: x[order // k]}
    timed(name, "rows to experts", runs, (x, order, back), 0, 2 * D * (rows // k + rows))


def ragged_sizes(rows: int, groups: int) -> jax.Array:
    """Return sizes as of a router: uneven, with all rows in a group."""
    rng = np.random.default_rng(0)
    return jnp.asarray(rng.multinomial(rows, rng.dirichlet(np.full(groups, 20.0))), jnp.int32)


def seconds(run: Callable, *args: Any, calls: int = 10) -> float:
    jitted = jax.jit(run)
    jax.block_until_ready([jitted(*args) for _ in range(2)])
    best = float("inf")
    for _ in range(2):
        start = time.perf_counter()
        jax.block_until_ready([jitted(*args) for _ in range(calls)])
        best = min(best, (time.perf_counter() - start) / calls)
    return best


def products(kernels, **options) -> dict[str, Callable]:
    """Return the products of x, w, dy and sizes."""
    return {
        "forward": lambda x, w, dy, sizes: kernels.rows_product(x, w, sizes, transposed=True, **options),
        "to_x": lambda x, w, dy, sizes: kernels.rows_product(dy, w, sizes, transposed=False, **options),
        "to_w": lambda x, w, dy, sizes: kernels.weights_product(dy, x, sizes, dtype=w.dtype, **options),
    }


def time_two(name: str, args: tuple, flops: float, size: float) -> None:
    """Time the gradient to the rows of two weights, in one kernel and in two."""
    _, w, dy, sizes = args
    each = (dy, w), (normal(3, *dy.shape), normal(4, *w.shape))
    pairs = tuple(zip(*each, strict=True))
    one = lambda pairs, sizes: hopper.rows_products(*pairs, sizes, transposed=False)  # noqa: E731
    two = lambda pairs, sizes: sum(  # noqa: E731
        hopper.rows_product(dy, w, sizes, transposed=False) for dy, w in zip(*pairs, strict=True)
    )
    timed(name, "hopper, two weights", {"to_x, one": one, "to_x, two": two}, (pairs, sizes), flops, size)


def timed(name: str, label: str, runs: dict[str, Callable], args: tuple, flops: float, size: float) -> None:
    for product, run in runs.items():
        try:
            took = seconds(run, *args)
        except Exception as error:
            print(f"| {name} | {product} | {label} | {type(error).__name__}: {str(error)[:150]}", flush=True)
            continue
        of_peak, of_bandwidth = flops / took / PEAK, size / took / BANDWIDTH
        print(
            f"| {name} | {product} | {label} | {took * 1e3:.3f} ms | {flops / took / 1e12:.0f} TFLOP/s | "
            f"{of_peak:.1%} of peak | {of_bandwidth:.1%} of bandwidth |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--tiles", action="store_true")
    parser.add_argument("--only", default="", help="shapes whose name contains this")
    chosen = parser.parse_args()
    print(jax.devices(), jax.__version__)
    if chosen.check:
        check()
        check_two()
        check_deal()
    for name, (rows, groups, N, K) in SHAPES.items():
        if chosen.only not in name or not (chosen.time or chosen.tiles):
            continue
        args = normal(0, rows, K), normal(1, groups, N, K), normal(2, rows, N), ragged_sizes(rows, groups)
        flops, size = 2 * rows * N * K, 2 * (rows * (N + K) + groups * N * K)
        if chosen.time:
            timed(name, "triton", products(triton), args, flops, size)
            timed(name, "hopper", products(hopper), args, flops, size)
            time_two(name, args, 2 * flops, 2 * size)
            if K > N:
                time_deal(name, rows, groups, K)
            time_skewed(name, args, flops, size)
        for tiles in TILES if chosen.tiles else []:
            label = f"{tiles.cols} x {tiles.stages}, swizzle {tiles.swizzle}"
            timed(name, label, products(hopper, tiles=tiles), args, flops, size)


if __name__ == "__main__":
    main()
