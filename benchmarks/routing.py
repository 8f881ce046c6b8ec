"""The kernels that choose the experts of tokens and order the tokens by expert, on a GPU, beside XLA's.

`python benchmarks/routing.py`. First both are held to the references over shapes and kinds of scores, with ties, NaN,
and experts without tokens: choices and order must be equal, weights within 1e-5. Then a loop of 50 calls, each with
what the last one found, is profiled: microseconds of all kernels of a turn, including two small ones of the loop.
"""

from __future__ import annotations

import collections
import functools
import itertools
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dovetail.ops import moe, router
from dovetail.ops.kernels.gpu import experts, grouped_parts
from dovetail.ops.kernels.gpu.mosaic import routing, sorting

TOKENS = (9, 33, 64, 256, 512)
EXPERTS = ((8, 128), (4, 32), (4, 128), (2, 8), (6, 64), (8, 256))  # per token, of how many
MANY_TOKENS = (513, 1024, 4096, 16384, 32768)  # ordered by the kernels of mosaic/sorting.py
TIMED = ((64, 8, 128), (256, 8, 128), (512, 8, 128), (512, 8, 256), (1024, 8, 128), (16384, 8, 128), (32768, 8, 64))
TURNS = 50


def sizes_of(T: int, k: int, E: int) -> routing.Sizes:
    """Return the arrangement that the engine would use."""
    return routing.Sizes(T, k, E, experts.tokens_of_tile(T * k, E, experts.MAX_TOKENS, experts.SLACK), experts.CHUNK)


def router_of(k: int, E: int) -> moe.Router:
    """Return a router whose weights are a softmax over the chosen experts."""
    return moe.Router(E, k, normalize=True, scale=1.5)


def orders(T: int, k: int, E: int) -> tuple[Callable, Callable, jax.ShapeDtypeStruct]:
    """Return the kernel that orders tokens, the reference, and their input."""
    sizes = sizes_of(T, k, E)
    run, reference = functools.partial(routing.arrange, sizes=sizes), functools.partial(experts.places, sizes=sizes)
    return run, reference, jax.ShapeDtypeStruct((T, k), jnp.int32)


def choices(T: int, k: int, E: int) -> tuple[Callable, Callable, jax.ShapeDtypeStruct]:
    """Return the kernel that chooses experts, the reference, and their input."""
    router = router_of(k, E)
    run, reference = functools.partial(routing.route_top_k, router), functools.partial(moe.route, router)
    return run, reference, jax.ShapeDtypeStruct((T, E), jnp.float32)


def sorts(T: int, k: int, E: int) -> tuple[Callable, Callable, jax.ShapeDtypeStruct]:
    """Return the kernels that sort many pairs and divide them into tiles, the reference, and their input."""

    def run(chosen: jax.Array) -> tuple:
        place, pair, sizes = sorting.sort_pairs(chosen.reshape(-1), E)
        tiles = sorting.tiles_of_groups(sizes, T * k, grouped_parts.sizes_of_tiles(T * k, E))
        return place, pair, sizes, *tiles

    def reference(chosen: jax.Array) -> tuple:
        place, pair, sizes = moe.sort_by_group(chosen.reshape(-1), E)
        return place, pair, sizes, *grouped_parts.tiles_of(sizes, T * k)

    return run, jax.jit(reference), jax.ShapeDtypeStruct((T, k), jnp.int32)


def chosen_of(T: int, k: int, E: int) -> Iterator[np.ndarray]:
    """Yield experts [T, k]: random ones, one alone, the last, few of many, and none at the ends."""
    rng = np.random.default_rng(T + E)
    yield rng.random((T, E)).argsort(axis=1)[:, :k]
    yield from (np.full((T, k), each) for each in (E // 2, E - 1))
    yield (E * rng.random((T, k)) ** 6).astype(int)
    yield rng.integers(E // 4, E // 2, (T, k))


def logits_of(T: int, E: int) -> Iterator[np.ndarray]:
    """Yield scores [T, E]: random ones, ties of -0.0 and 0.0, many of -inf, all equal, and some of NaN."""
    rng = np.random.default_rng(T + E)
    x = 3 * rng.normal(size=(T, E)).astype(np.float32)
    yield x
    if T * E < router.MANY_SCORES:  # from there on XLA sorts -0.0 below 0.0
        yield np.where(rng.random((T, E)) < 0.5, -0.0, np.round(x / 2)).astype(np.float32)
    yield np.where(rng.random((T, E)) < 0.5, -np.inf, x).astype(np.float32)
    yield np.zeros((T, E), np.float32)
    broken = x.copy()
    broken[0], broken[1, ::2], broken[2, 3] = np.nan, np.nan, -np.nan
    yield broken


def check_order(run: Callable, reference: Callable, T: int, k: int, E: int) -> None:
    """Raise AssertionError if the kernel's arrays are not the reference's."""
    for chosen in chosen_of(T, k, E):
        given = jnp.asarray(chosen, jnp.int32)
        for got, want in zip(run(given), reference(given), strict=True):
            assert (np.asarray(got) == np.asarray(want)).all(), "the order differs"


def check_choice(run: Callable, reference: Callable, T: int, k: int, E: int) -> None:
    """Raise AssertionError if the kernel chooses otherwise than the reference, or an expert that does not exist."""
    for x in logits_of(T, E):
        (weights, chosen), (want, experts) = (map(np.asarray, f(jnp.asarray(x))) for f in (run, reference))
        assert ((chosen >= 0) & (chosen < E)).all(), "there is no such expert"
        real = ~np.isnan(x).any(axis=1) & np.isfinite(want).all(axis=1)
        assert (chosen == experts)[real].all(), "other experts"
        assert np.allclose(weights[real], want[real], rtol=1e-5, atol=1e-30), "other weights"


def attempt(check: Callable, *given: Any) -> str:
    """Return `ok`, or what is wrong."""
    try:
        check(*given)
    except Exception as error:
        return f"FAILED {error!s:.300}"
    return "ok"


def repeated(run: Callable, results: int) -> Callable:
    """Return a function that calls `run` in a loop; what it returns decides the next input, which stays the same."""

    def turn(_: int, given: jax.Array) -> jax.Array:
        found = run(given)
        least = sum(jnp.minimum(x.ravel()[0], 0).astype(given.dtype) for x in found[:results])
        return given + jnp.minimum(least, 0)

    return lambda given: lax.fori_loop(0, TURNS, turn, given)


def profiled(run: Callable, given: jax.Array) -> str:
    """Return the microseconds of the kernels of a turn, and the longest."""
    jax.block_until_ready(run(given))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(run(given))
        (path,) = Path(folder).glob("plugins/profile/*/*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(path))
    times: collections.Counter = collections.Counter()
    lines = [line for plane in data.planes if "GPU" in plane.name for line in plane.lines]
    for event in (event for line in lines if line.name.startswith("Stream") for event in line.events):
        times[event.name] += event.duration_ns / 1e3 / TURNS
    longest = ", ".join(f"{name[:36]} {us:.2f}" for name, us in times.most_common(3))
    return f"{sum(times.values()):6.2f} us: {longest}"


def kinds_of(T: int) -> dict[str, tuple[Callable, Callable, int]]:
    """Return what is compared: functions that make and check it, and how many results a loop depends on."""
    order = {"sort": (sorts, check_order, 3)} if T > experts.FEW else {"order": (orders, check_order, 3)}
    return order | {"choice": (choices, check_choice, 2)}


def main() -> None:
    """Check, then measure."""
    with ThreadPoolExecutor(8) as pool:
        for T, (k, E) in itertools.product(TOKENS + MANY_TOKENS, EXPERTS):
            for name, (make, check, _) in kinds_of(T).items():
                run, reference, given = make(T, k, E)
                if name == "choice" and routing.why_not_top_k(router_of(k, E), given, None):
                    continue
                both = [pool.submit(lambda f=f, x=given: jax.jit(f).lower(x).compile()) for f in (run, reference)]
                found = attempt(check, *[f.result() for f in both], T, k, E)
                print(f"{T:5} tokens, {k} of {E:3} experts, {name:6} {found}", flush=True)
    for T, k, E in TIMED:
        scores = np.random.default_rng(0).normal(size=(T, E)).astype(np.float32)
        chosen = jnp.asarray(np.argsort(-scores, axis=1)[:, :k], jnp.int32)
        for name, (make, _, results) in kinds_of(T).items():
            for label, run in zip(("kernel", "xla"), make(T, k, E)[:2], strict=True):
                given = jnp.asarray(scores) if name == "choice" else chosen
                found = profiled(jax.jit(repeated(run, results)), given)
                print(f"{T:5} tokens, {k} of {E:3} experts, {name:6} {label:6} {found}", flush=True)


if __name__ == "__main__":
    main()
