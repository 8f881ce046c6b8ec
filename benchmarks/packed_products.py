"""Check and time products with packed weights on a Hopper GPU: matrices and experts, few tokens.

    python benchmarks/packed_products.py [--check] [--time] [--only int4] [--tokens 1 8 64] [--plans]

`--check` compares the kernel with unpack-then-multiply in f32, for every format and for shapes with odd numbers of
tokens, tiles that end past the rows, and parts of the input. `--time` prints the microseconds of the kernels of a
product, as a profile has them (without launches), and the share of the card's bandwidth at which the packed bytes alone
are read, beside bf16: the matrices of Llama 8B, the experts of Qwen3-30B-A3B and GPT-OSS-20B. Several weights are used
in turn, so that they come from memory and not from the L2 cache. A variant that fails is printed, and the others go on.
`--plans` adds lines of other plans of products in integers (packed_integer.py), for one token.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from dovetail.core.formats import Format
from dovetail.ops import moe
from dovetail.ops.glu import Glu
from dovetail.ops.kernels.gpu import packed_few
from dovetail.ops.kernels.gpu.experts import few_token_experts
from dovetail.ops.kernels.gpu.packed_weights import few_token_packed_experts, packed_matmul
from dovetail.ops.quant.pack import pack
from dovetail.ops.quant.weight import Quantized

BANDWIDTH = 4.17e12  # bytes per second that a copy reaches on an H200
COPIED = 256 << 20  # bytes in bf16 of the weights that are used in turn; in 4 bits more than the L2 cache
CALLS = 5
PLANS = [  # of products in integers
    dict(groups=groups, ahead=ahead) for groups in (1, 2) for ahead in (1, 2, 4)
]
FORMATS = {
    "int8": Format("int8"),
    "fp8": Format("fp8"),
    "fp8_block": Format("fp8", 128),
    "int4": Format("int4", 128, "float16"),
    "uint4": Format("uint4", 128, "float16"),
    "mxfp4": Format("mxfp4", 32, "uint8"),
}
CHECKED = FORMATS | {"int4 g32": Format("int4", 32, "float16"), "uint4 g64": Format("uint4", 64, "float16")}
CHECKED_EXPERTS = "mxfp4", "fp8", "fp8_block", "int4"
MATRICES = {
    "4096 x 4096": (4096, 4096), "6144 x 4096": (6144, 4096), "14336 x 4096": (14336, 4096),
    "28672 x 4096": (28672, 4096), "4096 x 14336": (4096, 14336),
}  # fmt: skip
# what: (D, F, E, k, activation, biases, formats)
EXPERTS = {
    "qwen3-30b-a3b": (2048, 768, 128, 8, Glu(), False, ("fp8", "fp8_block", "int4")),
    "gpt-oss-20b": (2880, 2880, 32, 4, Glu(limit=7.0), True, ("mxfp4",)),
}
LIMIT = 8e-3  # of the greatest value: a result in bf16


def a_weight(form: Format | None, *shape: int, seed: int = 0) -> Any:
    """Return a random weight, packed if there is a format."""
    return _made(form, shape, jax.random.key(seed))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _made(form: Format | None, shape: tuple[int, ...], key: jax.Array) -> Any:
    w = jax.random.normal(key, shape, jnp.bfloat16) * shape[-1] ** -0.5
    return w if form is None else Quantized(pack(form, w), form, jnp.dtype(jnp.bfloat16))


@contextlib.contextmanager
def planned(**changes: int) -> Iterator[None]:
    """Change the plans of products in integers."""
    before = packed_few.plan
    packed_few.plan = lambda *a, **b: p._replace(**changes) if (p := before(*a, **b)).in_integers else p
    _forget()
    try:
        yield
    finally:
        packed_few.plan = before
        _forget()


def _forget() -> None:
    for product in (packed_matmul, few_token_packed_experts):
        cast(Any, product).clear_cache()  # they are traced with the plan


def variants(form: Format | None, tokens: int, plans: bool) -> Iterator[str]:
    """Choose the default plan, and other ones of products in integers if asked; yield a note for each."""
    yield ""
    in_integers = form is not None and form.name in ("int4", "mxfp4") and tokens == 1
    for plan in PLANS if plans and in_integers else ():
        with planned(**plan):
            yield f", {4 * plan['groups']} warps, {plan['ahead']} ahead"


def error(got: jax.Array, expected: jax.Array) -> float:
    """Return the greatest difference as a share of the greatest value."""
    return float(jnp.max(jnp.abs(got.astype(jnp.float32) - expected)) / jnp.max(jnp.abs(expected)))


def reported(label: str, run: Callable[[], str]) -> None:
    """Print what `run` returns, or how it failed."""
    try:
        print(f"{label:64} {run()}", flush=True)
    except Exception as problem:  # the other lines are still wanted
        print(f"{label:64} FAILED {type(problem).__name__}: {str(problem)[:400]}", flush=True)


# --- check ------------------------------------------------------------------------------------------------------------


def check(only: str, tokens: list[int] | None) -> None:
    """Compare matrices in all formats and experts in some with unpack-then-multiply."""
    for name, form in CHECKED.items():
        # few tokens; tokens of several tiles; rows that end in the midst of a step, in f32
        for T, out, size, dtype in (
            (1, 512, 4096, None), (1, 28672, 4096, None), (2, 4096, 14336, None), (4, 6144, 4096, None),
            (5, 28672, 4096, None), (8, 4096, 4096, None), (100, 8192, 1024, None),
            (1, 128, 2944, jnp.float32), (5, 128, 2880, jnp.float32), (24, 128, 2880, jnp.float32),
        ):  # fmt: skip
            if name.startswith(only) and size % (form.group or 64) == 0 and T in (tokens or [T]):
                reported(f"{name}, {T} x {out} x {size}", lambda a=(form, T, out, size, dtype): _check_matrix(*a))
    for name, form in FORMATS.items():
        # more than 8: tiles of 16 to 128 tokens, and two of an expert
        for T in (1, 3, 5, 8, 40, 100, 300, 700) if name.startswith(only) and name in CHECKED_EXPERTS else ():
            if T in (tokens or [T]):
                reported(f"{name}, experts, {T} tokens", lambda form=form, T=T: _check_experts(form, T))


def _check_matrix(form: Format, T: int, out: int, size: int, dtype: Any) -> str:
    w, x = a_weight(form, out, size), jax.random.normal(jax.random.key(1), (T, size), jnp.bfloat16)
    expected = _exact(x, w)
    return _verdict(error(packed_matmul(x, w, dtype), expected), LIMIT if dtype is None else LIMIT / 8)


@jax.jit
def _exact(x: jax.Array, w: Quantized) -> jax.Array:
    whole = w.astype(jnp.float32).dense()
    return jnp.einsum("td,fd->tf", x.astype(jnp.float32), whole, precision="highest")


def _check_experts(form: Format, T: int) -> str:
    D, F = (2880, 2880) if form.name == "mxfp4" else (1024, 768)
    params, glu = some_experts(form, D, F, 8, True), Glu(limit=7.0)
    x, (weights, chosen) = jax.random.normal(jax.random.key(1), (T, D), jnp.bfloat16), choices(T, 8, 2)
    got = few_token_packed_experts(x, weights, chosen, params, glu)
    whole = {n: w.astype(jnp.float32).dense() if isinstance(w, Quantized) else w for n, w in params.items()}
    with jax.default_matmul_precision("highest"):
        exact = jax.tree.map(lambda a: a.astype(jnp.float32), (x, whole))
        expected = jax.jit(moe.experts_reference, static_argnums=4)(exact[0], weights, chosen, exact[1], glu)
    return _verdict(error(got, expected), 2 * LIMIT)  # hidden values are rounded as well


def _verdict(found: float, limit: float) -> str:
    return f"error {found:.1e} {'ok' if found < limit else 'DIFFERS'}"


def some_experts(form: Format | None, D: int, F: int, E: int, biases: bool, seed: int = 0) -> dict[str, Any]:
    shapes = {"gate": (E, F, D), "up": (E, F, D), "down": (E, D, F)}
    params = {name: a_weight(form, *shape, seed=3 * seed + at) for at, (name, shape) in enumerate(shapes.items())}
    return params | ({f"{n}_bias": a_weight(None, *shape[:2]) for n, shape in shapes.items()} if biases else {})


def choices(T: int, E: int, k: int, seed: int = 0) -> tuple[jax.Array, jax.Array]:
    """Return weights and experts [T, k]: experts are equally likely, and a token's are distinct."""
    rng = np.random.default_rng(1000 * seed + T)
    chosen = rng.random((T, E)).argsort(axis=-1)[:, :k]
    weights = rng.random((T, k))
    return jnp.asarray(weights / weights.sum(axis=-1, keepdims=True), jnp.float32), jnp.asarray(chosen, jnp.int32)


# --- time -------------------------------------------------------------------------------------------------------------


def kernels(run: Callable, *args: Any) -> dict[str, float]:
    """Return the seconds of the kernels of a call in CALLS of them, by name."""
    jax.block_until_ready(run(*args))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready([run(*args) for _ in range(CALLS)])
        (path,) = Path(folder).glob("plugins/profile/*/*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(path))
    found: dict[str, float] = collections.defaultdict(float)
    lines = [line for plane in data.planes if "GPU" in plane.name for line in plane.lines]
    for event in (event for line in lines if line.name.startswith("Stream") for event in line.events):
        found[event.name] += event.duration_ns / 1e9 / CALLS
    return found


def in_turn(product: Callable, x: jax.Array, items: list) -> tuple[list[float], float]:
    """Return the seconds of a product of x with each item, one after another, per item: of its kernels, and of all."""

    @jax.jit
    def run(x: jax.Array, items: list) -> list[jax.Array]:
        found = []
        for item in items:
            found.append(product(x, item))
            x, found[-1] = jax.lax.optimization_barrier((x, found[-1]))  # the next one comes after this one
        return found

    found = kernels(run, x, items)
    own = [took for name, took in found.items() if "packed" in name] or list(found.values())
    return [took / len(items) for took in own], sum(found.values()) / len(items)


def time_matrix(what: str, name: str, form: Format | None, tokens: list[int], plans: bool) -> None:
    out, size = MATRICES[what]
    copies = max(4, COPIED // (out * size * 2))
    items = [a_weight(form, out, size, seed=i) for i in range(copies)]
    floor = items[0].nbytes / BANDWIDTH
    product = packed_matmul if form else (lambda x, w: x @ w.T)
    for T in tokens:
        x = jnp.ones((T, size), jnp.bfloat16)
        run = lambda x=x: _share(in_turn(product, x, items), floor)  # noqa: E731
        for note in variants(form, T, plans):
            reported(f"{what}, {name}, {T}{note}", run)


def time_experts(what: str, name: str, form: Format | None, tokens: list[int], plans: bool) -> None:
    D, F, E, k, glu, biases, _ = EXPERTS[what]
    layers = [some_experts(form, D, F, E, biases, seed=i) for i in range(2)]
    bytes_of = sum(layers[0][n].nbytes for n in ("gate", "up", "down")) / E
    run = few_token_packed_experts if form else few_token_experts
    for T in tokens:
        made = [choices(T, E, k, i) for i in range(4)]
        used = float(np.mean([len(np.unique(np.asarray(chosen))) for _, chosen in made]))
        items = [(*each, layers[i % 2]) for i, each in enumerate(made)]
        x = jax.random.normal(jax.random.key(T), (T, D), jnp.bfloat16)
        product = lambda x, item: run(x, *item, glu)  # noqa: E731
        floor = used * bytes_of / BANDWIDTH
        for note in variants(form, T, plans):
            label = f"{what}, {name}, {T}{note}"
            reported(label, lambda p=product, x=x, i=items, f=floor: _share(in_turn(p, x, i), f))


def _share(took: tuple[list[float], float], floor: float) -> str:
    kernels, total = took
    own = sum(kernels)
    each = f" ({' + '.join(f'{1e6 * one:.2f}' for one in kernels)})" if len(kernels) > 1 else ""
    others = f", {1e6 * (total - own):.1f} us of other kernels" if total > own else ""
    return f"{own * 1e6:9.2f} us {floor / own:6.0%} of the bandwidth{each}{others}"


def main() -> None:
    """Print what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--only", default="", help="formats whose name begins with this")
    parser.add_argument("--tokens", type=int, nargs="+", help="1, 8, 64 and 256 to time, and those of all checks")
    parser.add_argument("--plans", action="store_true", help="also other plans of products in integers")
    parser.add_argument("--shapes", default="", help="matrices and experts whose name contains this")
    asked = parser.parse_args()
    print(jax.devices(), jax.__version__)
    if asked.check:
        check(asked.only, asked.tokens)
    if not asked.time:
        return
    formats = {"bf16": None} | {name: form for name, form in FORMATS.items() if name.startswith(asked.only)}
    tokens = asked.tokens or [1, 8, 64, 256]
    for what in (what for what in MATRICES if asked.shapes in what):
        for name, form in formats.items():
            time_matrix(what, name, form, tokens, asked.plans)
    for what, (*_, known) in EXPERTS.items():
        for name, form in formats.items():
            if asked.shapes in what and (name == "bf16" or name in known):
                time_experts(what, name, form, tokens, asked.plans)


if __name__ == "__main__":
    main()
