"""Sampling on a GPU in Triton, Mosaic GPU and XLA: microseconds per step in a loop on the device, as an engine's.

PYTHONPATH=. python benchmarks/sampling.py [--rows 1 8 64 256] [--vocab 128256 151936] [--only triton mosaic xla]
PYTHONPATH=. python benchmarks/sampling.py --rows 1 64 --only triton mosaic --check-rows 60 --profile --cases top_ drawn

The kernels are timed, then compared with the reference over rows of every kind. Each step makes its logits anew
(the kernels change them in place); what that takes is measured alone and taken off. The floor is the time to read the
logits once at 4.17 TB/s, an H200's rate of copying. `--set WARPS=8 UNROLL=2` changes numbers of ops.kernels.gpu.sample.
All programs are compiled first, at the same time. `--profile` adds what the profiler says of each kernel, per step.
"""

from __future__ import annotations

import argparse
import collections
import functools
import itertools
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dovetail.ops import sample as ops
from dovetail.ops.kernels.gpu import sample as triton
from dovetail.ops.kernels.gpu.mosaic import adjust as mosaic_adjust
from dovetail.ops.kernels.gpu.mosaic import sample as mosaic

RATE = 4.17e12
STEPS, TOP, BIAS = 20, 20, 512
SEEN = 1 / 256  # the share of the vocabulary in a row's history: some hundred tokens

# What every row asks, and the standard deviation of its logits
CASES: dict[str, dict] = {
    "greedy": {},
    "temperature": dict(temperature=0.8),
    "top_k 50, top_p 0.95": dict(temperature=0.8, top_k=50, top_p=0.95),
    "top_p 0.95": dict(temperature=0.8, top_p=0.95),
    "top_p 0.95, sd 3": dict(temperature=0.8, top_p=0.95, sd=3.0),
    "top_p 0.95, sd 1": dict(temperature=0.8, top_p=0.95, sd=1.0),
    "min_p 0.05": dict(temperature=0.8, min_p=0.05),
    "greedy, logprobs 1": dict(top_logprobs=1),
    "greedy, logprobs 5": dict(top_logprobs=5),
    "greedy, logprobs 20": dict(top_logprobs=20),
    "drawn, logprobs 1": dict(temperature=0.8, top_k=50, top_p=0.95, top_logprobs=1),
    "penalties": dict(slot=True, presence=0.5, frequency=0.1, repetition=1.1),
    "mask": dict(mask_until=ops.FOREVER),
    "bias of 10": dict(bias=10),
}


def make_inputs(asks: list[dict], V: int) -> ops.SampleInputs:
    """One row for each of `asks`."""
    S, rng = len(asks), np.random.default_rng(0)
    off = dict(temperature=0.0, top_p=1.0, min_p=0.0, presence=0.0, frequency=0.0, repetition=1.0, top_k=0)
    off |= dict(mask_until=0, top_logprobs=-1)
    arrays = {
        name: np.array([ask.get(name, value) for ask in asks], np.float32 if isinstance(value, float) else np.int32)
        for name, value in off.items()
    }
    seeds = {name: rng.integers(0, 2**32, S, dtype=np.uint32) for name in ("seed_hi", "seed_lo")}
    slot = np.array([row if ask.get("slot") else S for row, ask in enumerate(asks)], np.int32)
    ids, bias = np.full((S, BIAS), -1, np.int32), np.zeros((S, BIAS), np.float32)
    for row, ask in enumerate(asks):
        ids[row, : ask.get("bias", 0)] = rng.choice(V, ask.get("bias", 0), replace=False)
    bias[ids >= 0] = 1.5
    mask = rng.integers(0, 2**32, (S, -(-V // 32)), dtype=np.uint32)
    rest = dict(position=np.full(S, 9, np.int32), slot=slot, bias_ids=ids, bias=bias, mask=mask)
    return jax.tree.map(jnp.asarray, ops.SampleInputs(**arrays, **seeds, **rest))  # pyright: ignore


def steps(choose: Callable, logits: jax.Array, inputs: ops.SampleInputs, history: jax.Array):
    def body(i, carry):
        shift = jnp.minimum(jax.tree.leaves(carry)[0].ravel()[0], 0).astype(jnp.float32)  # 0, which XLA cannot know
        return choose(lax.optimization_barrier(logits + shift), ops.advance(inputs, i), history)

    shape = jax.eval_shape(choose, logits, inputs, history)
    return lax.fori_loop(0, STEPS, body, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shape))


def nothing(logits, inputs, history):
    return logits[0, :1]


def greedy(logits, inputs, history):
    return ops.argmax(logits)


def in_triton(logits, inputs, history):
    return triton.sample(logits, inputs, history, TOP)


def in_mosaic(logits, inputs, history):
    return mosaic.sample(logits, inputs, history, TOP)


def reference(logits, inputs, history):
    return ops.sample(logits, inputs, history, TOP, platform="cpu")


KERNELS = {"triton": (in_triton, triton.adjust), "mosaic": (in_mosaic, mosaic_adjust.adjust)}


RUNS = {"nothing": nothing, "greedy": greedy, "xla": reference} | {name: run for name, (run, _) in KERNELS.items()}


def given_of(S: int, V: int, asks: list[dict]) -> tuple:
    """Return logits, inputs and history of so many rows."""
    rng = np.random.default_rng(0)
    noise, seen = np.resize(rng.standard_normal(2**20, np.float32), (S, V)), np.resize(rng.random(2**20), (S, V)) < SEEN
    history = np.where(seen, np.resize(rng.integers(1, 4, 2**20), (S, V)), 0).astype(np.int32)
    return jax.device_put(noise), make_inputs(asks, V), jax.device_put(history)


def compiled(run: Callable, given: tuple) -> Any:
    """Return the program, or the error of its compilation."""
    try:
        return jax.jit(run).lower(*given).compile()
    except Exception as error:
        return error


def called(program: Any, *given) -> Any:
    if isinstance(program, Exception):
        raise program
    return jax.block_until_ready(program(*given))


def microseconds(program: Any, calls: int, *given) -> float:
    """Per step, the median of so many calls."""
    called(program, *given)
    taken = []
    for _ in range(calls):
        start = time.perf_counter()
        called(program, *given)
        taken.append(time.perf_counter() - start)
    return float(np.median(taken)) / STEPS * 1e6


def profiled(program: Any, *given) -> str:
    """Return the microseconds of each kernel per step, as the profiler tells them."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            called(program, *given)
        (path,) = Path(folder).rglob("*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(path))
    times: collections.Counter = collections.Counter()
    lines = [line for plane in data.planes if "GPU" in plane.name for line in plane.lines]
    for event in (event for line in lines if line.name.startswith("Stream") for event in line.events):
        times[event.name] += event.duration_ns / 1e3 / STEPS
    return ", ".join(f"{name[:32]} {us:.2f}" for name, us in times.most_common(8))


def measure(S: int, V: int, args: argparse.Namespace, programs: dict) -> None:
    noise, _, history = given_of(S, V, [{}] * S)
    made = None
    for name, asks in chosen_cases(args).items():
        given = noise * asks.get("sd", 10.0), make_inputs([asks] * S, V), history
        if made is None:
            made = microseconds(programs["nothing", S, V], args.calls, *given)
            argmax = microseconds(programs["greedy", S, V], args.calls, *given) - made
            floor = S * V * 4 / RATE * 1e6
            print(f"{S:5} {V:8} making the logits {made:.1f}, argmax alone {argmax:.1f}, floor {floor:.1f}", flush=True)
        line, kernels = f"{S:5} {V:8} {name:22}", []
        for each in args.only:
            try:
                often = args.reference_calls if each == "xla" else args.calls
                line += f" {microseconds(programs[each, S, V], often, *given) - made:11.1f}"
                if args.profile:
                    kernels.append(f"{'':14} {each}: {profiled(programs[each, S, V], *given)}")
            except Exception as error:
                line += f" {type(error).__name__:>11.11}"
                print(f"{each}: {error}", flush=True)
        print("\n".join([line, *kernels]), flush=True)


def chosen_cases(args: argparse.Namespace) -> dict[str, dict]:
    """Return the cases whose names contain one of the words asked for."""
    return {name: asks for name, asks in CASES.items() if any(word in name for word in args.cases)}


def check_rows(S: int) -> list[dict]:
    """Return rows of all the cases and hotter ones."""
    asks = [{**ask, "top_logprobs": ask.get("top_logprobs", 0)} for ask in CASES.values()]
    asks += [dict(temperature=1.0, top_k=1000), dict(temperature=2.0, top_p=0.999), dict(temperature=1.0, min_p=0.01)]
    asks += [dict(temperature=1.0, top_k=3, slot=True, repetition=1.2, bias=4, mask_until=ops.FOREVER, top_logprobs=20)]
    return [asks[row % len(asks)] for row in range(S)]


def compare(name: str, S: int, V: int, sd: float, programs: dict) -> None:
    """Compare tokens, ranks and lists of kernel and reference, over rows of all the cases and hotter ones."""
    _, inputs, _ = given_of(S, V, check_rows(S))
    history = jax.device_put(np.resize(np.random.default_rng(1).integers(0, 4, 2**20, np.int32), (S, V)))
    wrong, total, far, bits = np.zeros(3, int), 0, 0.0, 0
    for turn in range(4):
        rng = np.random.default_rng(turn)
        logits = jax.device_put(np.resize(sd * rng.standard_normal(2**23 + turn, np.float32), (S, V)))
        given = logits, ops.advance(inputs, turn), history
        theirs, scores = called(programs["reference", S, V], *given)
        ours, own_scores = called(programs[name, "check", S, V], *given)
        same = np.asarray(ours == theirs)
        ranks = np.asarray(own_scores[1] != scores[1]) & same
        wrong += [(~same).sum(), ranks.sum(), np.asarray(own_scores[3] != scores[3]).any(axis=1).sum()]
        total, far = total + S, max(far, float(np.abs(np.asarray(own_scores[0] - scores[0]))[same].max()))
        bits = int(called(programs[name, "adjust", S, V], *given))
    print(
        f"{name}, sd {sd:4}: of {total} rows of {V}, {wrong[0]} tokens, {wrong[1]} ranks, {wrong[2]} lists differ; "
        f"log-probabilities by {far:.1e} at most; adjusted logits: {bits} of {S * V} in their last bits",
        flush=True,
    )


def count_adjusted(adjust: Callable, logits: jax.Array, inputs: ops.SampleInputs, history: jax.Array) -> jax.Array:
    """Return how many adjusted logits differ from the reference's."""
    return jnp.sum(ops.adjust(logits, inputs, history) != adjust(logits + 0, inputs, history))


def compile_all(args: argparse.Namespace) -> dict:
    """Compile what will be run and compared, at once."""
    asked: dict[tuple, tuple[Callable, tuple]] = {}
    for V, S in itertools.product(args.vocab, args.rows):
        given = given_of(S, V, [{}] * S)
        for name in ("nothing", "greedy", *args.only):
            asked[name, S, V] = functools.partial(steps, RUNS[name]), given
    for V, S in itertools.product(args.vocab, [args.check_rows] if args.check_rows else []):
        given = given_of(S, V, check_rows(S))
        asked["reference", S, V] = reference, given
        for name in (name for name in args.only if name in KERNELS):
            run, adjust = KERNELS[name]
            asked[name, "check", S, V] = run, given
            asked[name, "adjust", S, V] = functools.partial(count_adjusted, adjust), given
    with ThreadPoolExecutor(16) as pool:
        return dict(zip(asked, pool.map(lambda job: compiled(*job), asked.values()), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 64, 256])
    parser.add_argument("--vocab", nargs="+", type=int, default=[151_936])
    parser.add_argument("--only", nargs="+", choices=[*KERNELS, "xla"], default=[*KERNELS, "xla"])
    parser.add_argument("--calls", type=int, default=50)
    parser.add_argument("--reference-calls", type=int, default=3, help="it is slow")
    parser.add_argument("--check-rows", type=int, default=180, help="compared, four times for each deviation; 0: none")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=NUMBER")
    parser.add_argument("--cases", nargs="+", default=[""], help="words in the names of the cases")
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    for name, _, value in (item.partition("=") for item in args.set):
        setattr(triton, name, type(getattr(triton, name))(int(value)))
    print(jax.__version__, jax.devices()[0].device_kind, *args.set)
    start = time.perf_counter()
    programs = compile_all(args)
    print(f"compiled {len(programs)} programs in {time.perf_counter() - start:.1f} s", flush=True)
    print(f"{'rows':>5} {'vocab':>8} {'every row asks':22}", *(f"{name:>11}" for name in args.only))
    for V, S in itertools.product(args.vocab, args.rows):
        measure(S, V, args, programs)
    kernels = [name for name in args.only if name in KERNELS]
    for name, V, sd in itertools.product(kernels, args.vocab if args.check_rows else [], (1.0, 3.0, 10.0)):
        try:
            compare(name, args.check_rows, V, sd, programs)
        except Exception as error:  # the other kernels are compared all the same
            print(f"{name}: {error}", flush=True)


if __name__ == "__main__":
    main()
