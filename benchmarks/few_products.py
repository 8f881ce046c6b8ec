"""Products of bf16 matrices with up to 8 tokens on a GPU: the kernel of ops/kernels/gpu/dense_few.py beside XLA's.

PYTHONPATH=. python benchmarks/few_products.py [--tokens 1 2 4 8] [--only 0.6B 8B]

Each program multiplies with several matrices of a shape, of more bytes than the L2 cache has, each after the one before
it. For each shape: the greatest difference of the results as a share of XLA's greatest, then for both the microseconds
of all kernels of a product, their number, and the share of the card's bandwidth (4.17 TB/s, an H200's copy).

Before that the products and norms of 28 layers of Qwen3-0.6B, with three small kernels for each attention:
microseconds per layer, by the clock, and the kernels of a layer.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import tempfile
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dovetail.ops.glu import Glu
from dovetail.ops.kernels.gpu.dense_few import few_product, plan
from dovetail.ops.kernels.gpu.mosaic.norm import add_rms_norm
from dovetail.ops.norm import rms_norm

RATE = 4.17e12
CACHE, MOST = 128 << 20, 24  # bytes of the matrices of a program, and their number at most
EPS = 1e-6


class Shape(NamedTuple):
    """Describe a product."""

    model: str
    name: str
    out: int
    size: int
    kind: str = ""  # gated, bias, residual or norm, or several


SHAPES = [
    Shape("0.6B", "qkv", 4096, 1024),
    Shape("0.6B", "o", 1024, 2048),
    Shape("0.6B", "gate, up", 6144, 1024, "gated"),
    Shape("0.6B", "down", 1024, 3072),
    Shape("0.6B", "o", 1024, 2048, "residual"),
    Shape("0.6B", "qkv", 4096, 1024, "norm"),
    Shape("0.6B", "gate, up", 6144, 1024, "norm gated"),
    Shape("8B", "qkv", 6144, 4096),
    Shape("8B", "o", 4096, 4096),
    Shape("8B", "gate, up", 28672, 4096, "gated"),
    Shape("8B", "down", 4096, 14336),
    Shape("8B", "down", 4096, 12288),
    Shape("8B", "qkv", 6144, 4096, "norm"),
    Shape("30B", "qkv", 5120, 2048),
    Shape("30B", "o", 2048, 4096),
    Shape("GPT-OSS", "qkv", 5120, 2880, "bias"),
    Shape("GPT-OSS", "o", 2880, 4096, "bias"),
]


def product(shape: Shape, ours: bool, x: jax.Array, w: jax.Array, bias: Any, residual: Any, norm: Any) -> jax.Array:
    """Return the product by our kernel or by XLA's."""
    glu = Glu() if "gated" in shape.kind else None
    bias, residual, norm = (
        each if name in shape.kind else None for name, each in (("bias", bias), ("residual", residual), ("norm", norm))
    )
    if ours:
        eps = None if norm is None else EPS
        return few_product(x, w, bias, residual=residual, norm=norm, glu=glu, eps=eps)
    y = (x if norm is None else rms_norm(x, norm, EPS)) @ w.T
    y = y if bias is None else y + bias
    y = glu(*jnp.split(y, 2, axis=1)) if glu else y
    return y if residual is None else residual + y


def program(shape: Shape, ours: bool) -> Callable:
    """Return the products with some matrices, one after the other."""
    once = functools.partial(product, shape, ours)

    def run(xs: list, ws: list, *added: jax.Array) -> list[jax.Array]:
        found: list = []
        for x, w in zip(xs, ws, strict=True):
            x = lax.optimization_barrier((x, found[-1]))[0] if found else x
            found.append(once(x, w, *added))
        return found

    return run


NUMBERS = np.random.default_rng(0).standard_normal(2**22, np.float32)


def normal(seed: int, scale: float, *shape: int) -> jax.Array:
    """Return numbers from the host: random numbers of many shapes take the device longer than the products."""
    return jax.device_put(np.resize((np.roll(NUMBERS, 12345 * seed) * scale).astype(jnp.bfloat16), shape))


def weights_of(shape: Shape) -> list[jax.Array]:
    """Return the matrices, of which two different ones are from the host."""
    count = min(MOST, max(2, -(-CACHE // (2 * shape.out * shape.size))))
    two = [normal(i, shape.size**-0.5, shape.out, shape.size) for i in range(2)]
    return two + [jnp.copy(two[i % 2]) for i in range(count - 2)]


def given_of(shape: Shape, tokens: int, ws: list) -> tuple:
    xs = [normal(i, 1.0, tokens, shape.size) for i in range(len(ws))]
    return xs, ws, normal(1, 1.0, shape.out), normal(2, 1.0, tokens, shape.out), normal(3, 1.0, shape.size)


def abstract(given: tuple) -> tuple:
    """Return the shapes alone, which another thread compiles for."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), given)


def compiled(shape: Shape, ours: bool, given: tuple) -> Any:
    """Return the compiled program, or the error's text."""
    try:
        return jax.jit(program(shape, ours)).lower(*given).compile()
    except Exception:
        return traceback.format_exc(limit=-2)


def profiled(run: Callable, given: tuple) -> tuple[float, float]:
    """Return the microseconds of the kernels of a product, and their number."""
    jax.block_until_ready(run(*given))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready([run(*given) for _ in range(2)])
        (path,) = Path(folder).glob("plugins/profile/*/*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(path))
    lines = [line for plane in data.planes if "GPU" in plane.name for line in plane.lines]
    times = [event.duration_ns / 1e3 for line in lines if line.name.startswith("Stream") for event in line.events]
    calls = 2 * len(given[1])
    return sum(times) / calls, len(times) / calls


def far(got: list, want: list) -> float:
    """Return the greatest difference as a share of the greatest wanted number; XLA may round between products."""
    pairs = [(np.asarray(a, np.float32), np.asarray(b, np.float32)) for a, b in zip(got, want, strict=True)]
    return max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in pairs)


def measure(shape: Shape, tokens: int, ours: Any, xla: Any, given: tuple) -> None:
    """Print a line."""
    label = f"{shape.model:7} {shape.name:8} {shape.out:5} x {shape.size:5} {shape.kind:10} {tokens} tokens"
    try:
        difference = far(ours(*given), xla(*given))
        found = [profiled(run, given) for run in (ours, xla)]
        moved = 2 * shape.out * shape.size
        times = ", ".join(
            f"{name} {us:6.2f} us in {kernels:.1f} ({moved / us / RATE * 1e6:4.0%})"
            for name, (us, kernels) in zip(("ours", "xla"), found, strict=True)
        )
        glu = Glu() if "gated" in shape.kind else None
        p = plan(tokens, (shape.out, shape.size), glu, EPS if "norm" in shape.kind else None)
        how = f"{p.programs} programs, {p.blocks} blocks, {p.slots} slots"
        print(f"{label}: {difference:.1e} {'' if difference < 0.02 else 'WRONG'} {times}; {how}", flush=True)
    except Exception as error:
        print(
            f"{label}: FAILED {ours if isinstance(ours, str) else xla if isinstance(xla, str) else error}", flush=True
        )


# --- a model's layers -------------------------------------------------------------------------------------------------

LAYERS = 28
KINDS = ("xla", "products", "with norms")
WEIGHTS = {"qkv": (4096, 1024), "o": (1024, 2048), "gate_up": (6144, 1024), "down": (1024, 3072)}


def layers(kind: str) -> Callable:
    """Return all layers: by XLA's products, or ours alone, or with norms and sums."""

    def times(x: jax.Array, w: jax.Array, **options: Any) -> jax.Array:
        if kind != "xla":
            return few_product(x, w, **options)
        return Glu()(*jnp.split(x @ w.T, 2, axis=1)) if options else x @ w.T

    def apart(x: jax.Array, pending: Any, w: dict, norm: jax.Array) -> tuple:
        x, h = add_rms_norm(x, pending, norm, EPS, 0.0)
        x, h = add_rms_norm(x, times(attention(times(h, w["qkv"])), w["o"]), norm, EPS, 0.0)
        return x, times(times(h, w["gate_up"], glu=Glu()), w["down"])

    def together(x: jax.Array, _: Any, w: dict, norm: jax.Array) -> tuple:
        options = dict(norm=norm, eps=EPS)
        heads = attention(few_product(x, w["qkv"], **options))
        x = few_product(heads, w["o"], residual=x)
        hidden = few_product(x, w["gate_up"], glu=Glu(), **options)
        return few_product(hidden, w["down"], residual=x), None

    def run(x: jax.Array, ws: list[dict], norm: jax.Array) -> jax.Array:
        pending = None
        for w in ws:
            x, pending = (apart if kind in KINDS[:2] else together)(x, pending, w, norm)
        return x if pending is None else x + pending

    return run


def attention(qkv: jax.Array) -> jax.Array:
    """Return numbers [T, 2048] after three small kernels."""
    x = lax.optimization_barrier(qkv[:, :2048] + qkv[:, 2048:])
    return lax.optimization_barrier(lax.optimization_barrier(x * 0.75) + 0.25)


def compiled_layers(kind: str, given: tuple) -> Any:
    try:
        return jax.jit(layers(kind)).lower(*given).compile()
    except Exception:
        return traceback.format_exc(limit=-2)


def measure_layers(tokens: int, programs: dict[str, Any], given: tuple) -> None:
    """Print a line for each program."""
    want = None
    for kind, run in programs.items():
        try:
            got = run(*given)
            want = got if want is None else want
            best = np.inf
            for _ in range(5):
                start = time.perf_counter()
                jax.block_until_ready([run(*given) for _ in range(8)])
                best = min(best, (time.perf_counter() - start) / 8)
            us, kernels = profiled(run, given)
            print(
                f"layers of 0.6B, {tokens} tokens, {kind:10}: {best / LAYERS * 1e6:6.2f} us a layer, of which kernels "
                f"{us:6.2f} us in {kernels:4.1f}; {far([got], [want]):.1e}",
                flush=True,
            )
        except Exception as error:
            print(f"layers, {kind}: FAILED {run if isinstance(run, str) else error}", flush=True)


def given_layers(tokens: int, ws: list) -> tuple:
    return normal(0, 1.0, tokens, 1024), ws, normal(3, 1.0, 1024)


def weights_of_layers() -> list[dict]:
    """Return the weights of all layers, of which two are from the host."""
    two = [{name: normal(i, 0.5 * b**-0.5, a, b) for name, (a, b) in WEIGHTS.items()} for i in range(2)]
    return two + [jax.tree.map(jnp.copy, two[i % 2]) for i in range(LAYERS - 2)]


def main() -> None:
    """Compile all programs, then check and measure each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--only", nargs="+", help="models")
    args = parser.parse_args()
    shapes = [shape for shape in SHAPES if args.only is None or shape.model in args.only]
    begin, cases = time.perf_counter(), [*itertools.product(args.tokens, shapes)]
    weights = {(out, size): weights_of(Shape("", "", out, size)) for out, size in {(s.out, s.size) for s in shapes}}
    programs: list[list[Future]] = []
    with ThreadPoolExecutor(14) as pool:  # all before the first is timed: compilers take the host's time
        for tokens, shape in cases:
            given = abstract(given_of(shape, tokens, weights[shape.out, shape.size]))
            programs.append([pool.submit(compiled, shape, ours, given) for ours in (True, False)])
        of_layers = weights_of_layers()
        chains = {
            tokens: {k: pool.submit(compiled_layers, k, abstract(given_layers(tokens, of_layers))) for k in KINDS}
            for tokens in args.tokens[:2]
        }
    print(f"compiled after {time.perf_counter() - begin:.0f} s", flush=True)
    for tokens, found in chains.items():
        done = {kind: each.result() for kind, each in found.items()}
        measure_layers(tokens, done, given_layers(tokens, of_layers))
    for (tokens, shape), both in zip(cases, programs, strict=True):
        ours, xla = (each.result() for each in both)
        measure(shape, tokens, ours, xla, given_of(shape, tokens, weights[shape.out, shape.size]))
    print(f"done after {time.perf_counter() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    main()
