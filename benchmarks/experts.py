"""Check and time the experts of decode steps on a GPU: the kernel for few tokens and the sorted path, per layer.

    python benchmarks/experts.py                    # Qwen3-30B-A3B, GPT-OSS-20B, Mixtral-8x7B, DeepSeek-V2-Lite
    python benchmarks/experts.py --model qwen3-30b-a3b --tokens 1 8 64

Both are compared with `experts_reference` in f32, on random weights and choices. `LAYERS` of them run in a row, each
with other choices, so that weights come from memory and not from the L2 cache. The floor is the bytes of the weights of
the experts in use over the card's bandwidth. `--paths kernel` leaves out the sorted path.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dovetail.ops import moe
from dovetail.ops.glu import Glu
from dovetail.ops.kernels.gpu.experts import few_token_experts

LAYERS, CALLS = 8, 10
PATHS = ("sorted", "kernel")
BANDWIDTH = 4.17e12  # bytes per second that a copy reaches on an H200


class Shape(NamedTuple):
    """Describe the experts of a layer."""

    dim: int
    width: int
    experts: int
    top_k: int
    glu: Glu = Glu()
    biases: bool = False


SHAPES = {
    "qwen3-30b-a3b": Shape(2048, 768, 128, 8),
    "gpt-oss-20b": Shape(2880, 2880, 32, 4, Glu(limit=7.0), biases=True),
    "mixtral-8x7b": Shape(4096, 14336, 8, 2),
    "deepseek-v2-lite": Shape(2048, 1408, 64, 6),
    "gemma-4-26b-a4b": Shape(2816, 704, 128, 8, Glu("gelu_tanh")),
}


def some_weights(s: Shape) -> moe.ExpertWeights:
    """Return random weights in bf16."""
    E, F, D = s.experts, s.width, s.dim
    shapes = {"gate": (E, F, D), "up": (E, F, D), "down": (E, D, F)}
    shapes |= {"gate_bias": (E, F), "up_bias": (E, F), "down_bias": (E, D)} if s.biases else {}
    keys = jax.random.split(jax.random.key(0), len(shapes))
    draw = jax.jit(lambda key, shape: jax.random.normal(key, shape, jnp.bfloat16) * shape[-1] ** -0.5, static_argnums=1)
    return {name: draw(key, shape) for key, (name, shape) in zip(keys, shapes.items(), strict=True)}


def some_choices(s: Shape, tokens: int) -> tuple[jax.Array, jax.Array]:
    """Return weights and experts [LAYERS, T, k]: experts are equally likely, and a token's are distinct."""
    rng = np.random.default_rng(tokens)
    chosen = rng.random((LAYERS, tokens, s.experts)).argsort(axis=-1)[..., : s.top_k]
    weights = rng.random((LAYERS, tokens, s.top_k))
    weights /= weights.sum(axis=-1, keepdims=True)
    return jnp.asarray(weights, jnp.float32), jnp.asarray(chosen, jnp.int32)


def floor(s: Shape, chosen: jax.Array) -> float:
    """Return the seconds in which the weights of the experts in use can be read, per layer."""
    used = float(np.mean([len(np.unique(layer)) for layer in np.asarray(chosen)]))
    return used * 3 * s.dim * s.width * 2 / BANDWIDTH


def timed(run: Callable, x: jax.Array, weights: jax.Array, chosen: jax.Array, params: moe.ExpertWeights):
    """Return the output of the first layer, and the seconds of a layer in a program of LAYERS of them."""

    @jax.jit
    def layers(x, weights, chosen, params):
        outs = []
        for i in range(LAYERS):
            outs.append(run(x, weights[i], chosen[i], params))
            x = x + outs[-1]
        return outs[0], x

    first, y = jax.block_until_ready(layers(x, weights, chosen, params))
    begin = time.perf_counter()
    for _ in range(CALLS):
        _, y = layers(x, weights, chosen, params)
    jax.block_until_ready(y)
    return first, (time.perf_counter() - begin) / CALLS / LAYERS


def error(got: jax.Array, expected: jax.Array) -> float:
    """Return the greatest difference as a share of the greatest value."""
    return float(jnp.max(jnp.abs(got.astype(jnp.float32) - expected)) / jnp.max(jnp.abs(expected)))


def rows(name: str, tokens: list[int], paths: list[str]):
    """Yield a line of the table for each number of tokens."""
    s = SHAPES[name]
    params = some_weights(s)
    runs = {
        "sorted": lambda x, w, c, p: moe._grouped(x, w, c, p, s.glu, "cuda"),
        "kernel": lambda x, w, c, p: few_token_experts(x, w, c, p, s.glu),
    }
    in_f32 = jax.jit(lambda x, w, c, p: moe.experts_reference(_f32(x), w, c, jax.tree.map(_f32, p), s.glu))
    for T in tokens:
        x = jax.random.normal(jax.random.key(T), (T, s.dim), jnp.bfloat16)
        weights, chosen = some_choices(s, T)
        expected = in_f32(x, weights[0], chosen[0], params)
        best = floor(s, chosen)
        line = f"{name:18} {T:5} {best * 1e6:8.1f}"
        for path in paths:
            try:
                first, took = timed(runs[path], x, weights, chosen, params)
                line += f" {took * 1e6:9.1f} {best / took:6.0%} {error(first, expected):9.1e}"
            except Exception as problem:  # the other lines are still wanted
                line += f" failed: {str(problem)[:300]}"
        yield line


def _f32(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, nargs="+", default=list(SHAPES)[:4])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--paths", choices=PATHS, nargs="+", default=PATHS)
    args = parser.parse_args()
    columns = "".join(f" {path + ' us':>9} {'share':>6} {'error':>9}" for path in args.paths)
    print(f"{'model':18} {'T':>5} {'floor us':>8}{columns}")
    for name in args.model:
        for line in rows(name, args.tokens, args.paths):
            print(line, flush=True)


if __name__ == "__main__":
    main()
