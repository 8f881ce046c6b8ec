"""Decode steps of a model on a CPU beside the time that reading its weights takes, with our products and with XLA's.

The variants take turns in one process, and the best of the turns counts: wall time, and CPU time, which other work on
the machine changes less. python benchmarks/cpu_decode.py --streams 1 2 8
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import jax
import numpy as np
from numba import njit

from dovetail.core.spec import held_bytes
from dovetail.engine.llm import LLM
from dovetail.engine.request.params import SamplingParams
from dovetail.ops import linear

TOKENS, TURNS = 24, 5
PARAMS = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)


@njit(nogil=True, fastmath=True)
def _sum(numbers):
    total = np.float32(0)
    for i in range(numbers.size):
        total += numbers[i]
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 2, 8])
    args = parser.parse_args()
    jax.config.update("jax_enable_compilation_cache", False)  # both variants have one name
    ours = linear.choose_product
    engines = {
        "ours": _engine(args.model, args.streams, ours),
        "XLA": _engine(args.model, args.streams, lambda *_: "xla"),
    }
    weights = np.ones(held_bytes(engines["ours"].runner.params) // 4, np.float32)
    _sum(weights)
    read, best = (9.0, 9.0), {}
    for _ in range(TURNS):
        read = _least(read, _timed(lambda: _sum(weights)))
        for n in args.streams:
            for name, llm in engines.items():
                llm.reset_prefix_cache()
                prompts = [[1, 2, 3, i] for i in range(n)]
                spent = _timed(lambda llm=llm, prompts=prompts: llm.generate(prompts, PARAMS, progress=False))
                best[n, name] = _least(best.get((n, name), (99.0, 99.0)), tuple(x / TOKENS for x in spent))
    print(
        f"reading {weights.nbytes / 1e6:.0f} MB of weights on one core: {1e3 * read[0]:.0f} ms, CPU {1e3 * read[1]:.0f}"
    )
    for (n, name), (wall, cpu) in best.items():
        print(f"{n} streams, {name}: {n / wall:.1f} tok/s; a step {1e3 * wall:.0f} ms, CPU {1e3 * cpu:.0f} ms")


def _engine(model: str, streams: list[int], choose: Callable) -> LLM:
    linear.choose_product = choose
    jax.clear_caches()
    llm = LLM(model, kv_cache_memory_bytes=200 << 20, max_model_len=512, max_num_seqs=max(streams), max_decode_steps=1)
    for n in streams:
        llm.generate([[1, 2, 3, i] for i in range(n)], PARAMS, progress=False)
    return llm


def _timed(call: Callable) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - wall, time.process_time() - cpu


def _least(a: tuple[float, ...], b: tuple[float, ...]) -> tuple[float, float]:
    return min(a[0], b[0]), min(a[1], b[1])


if __name__ == "__main__":
    main()
