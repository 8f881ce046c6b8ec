"""The lines of docs/performance.md on one GPU: W2 (1, 8 and 64 streams), W1 (512 at once), and the time to first
token of 64 streams that come at random moments, with and without several steps per dispatch. Dummy weights.

python benchmarks/engine.py --config DIR            # only the shapes that these lines use are compiled
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from dovetail.cli.bench_throughput import _arriving, _percentile
from dovetail.engine.batch import Shape
from dovetail.engine.llm import LLM
from dovetail.engine.params import SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", required=True)
    parser.add_argument("--lines", default="W2,W1,TTFT")
    parser.add_argument("--streams", type=int, default=512, help="of W1")
    parser.add_argument("--output", type=int, default=256)
    parser.add_argument("--kv-gib", type=float, default=80)
    args = parser.parse_args()
    lines = args.lines.split(",")
    llm = LLM(
        args.config, load_format="dummy", max_num_seqs=args.streams, max_model_len=512 + args.output, warm_up=False,
        kv_bytes=int(args.kv_gib * 2**30),
    )  # fmt: skip
    start = time.perf_counter()
    llm.runner.warm_up(llm.engine.sampler, _shapes(llm, lines))
    print(f"compiled in {time.perf_counter() - start:.1f} s", flush=True)
    if "W2" in lines:
        for streams in (1, 8, 64):
            _generate(llm, streams, 128, args.output)
    if "W1" in lines:
        _generate(llm, args.streams, 512, args.output)
    if "TTFT" in lines:
        for multi_step in (True, False):
            llm.engine._multi_step = multi_step
            rate, first, _ = _arriving(llm, 64, 128, args.output, 2.0)
            p50, p99 = (_percentile(first, q) * 1e3 for q in (50, 99))
            print(
                f"64 over 2 s, multi-step {multi_step}: {rate:,.0f} tok/s, TTFT p50 {p50:.1f} p99 {p99:.1f} ms",
                flush=True,
            )


def _shapes(llm: LLM, lines: list[str]) -> list[Shape]:
    buckets = llm.runner.buckets
    pages, most = buckets.max_pages, buckets.max_rows
    shapes = []
    if "W2" in lines:
        shapes += [Shape(n, n, pages, "greedy", steps) for n in (1, 8, 64) for steps in (4, 16)]
        shapes += [Shape(tokens, rows, pages) for tokens, rows in ((128, 8), (1024, 8), (8192, 64))]
    if "W1" in lines:
        shapes += [Shape(n, n, pages) for n in (16, 32, 64, 128, 256, 512)]
        shapes += [Shape(tokens, rows, pages) for tokens in (6144, 8192, buckets.max_tokens) for rows in (64, 512)]
    if "TTFT" in lines:
        shapes += [Shape(n, n, pages, "greedy", steps) for n in (1, 8, 16, 32, 64) for steps in (1, 4, 16)]
        shapes += [Shape(tokens, rows, pages) for tokens in (128, 256, 512, 1024) for rows in (8, 64)]
    return [shape for shape in dict.fromkeys(shapes) if shape.rows <= most and shape.tokens <= buckets.max_tokens]


def _generate(llm: LLM, streams: int, prompt: int, output: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
    rates = []
    for turn in range(3):  # the first compiles what was forgotten above
        ids = np.random.default_rng(turn).integers(3, llm.config.vocab, (streams, prompt)).tolist()
        start = time.perf_counter()
        llm.generate(ids, params, progress=False)
        rates.append(streams * output / (time.perf_counter() - start))
    print(f"{streams} streams, {prompt} + {output}: {rates[1]:,.0f} and {rates[2]:,.0f} tok/s", flush=True)


if __name__ == "__main__":
    main()
