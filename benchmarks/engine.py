"""An engine as a user builds it, on a fresh machine: how long until it is ready, how fast its first requests are, a
second start, and then the lines of docs/performance.md. Dummy weights, nothing set but what the table says.

python benchmarks/engine.py DIR [--lines W,sampling,arrivals,rollout]      # DIR: a folder with a config.json
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time

OPTIONS = dict(max_model_len=8192, max_num_seqs=512)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("config")
    parser.add_argument("--lines", default="W,sampling,arrivals", help="of the second start")
    parser.add_argument("--start", choices=["first", "second"], help="(the two processes of one run)")
    args = parser.parse_args()
    if args.start:
        return _measure(args)
    with tempfile.TemporaryDirectory() as home:  # nothing compiled before
        for start in ("first", "second"):
            environment = os.environ | {"DOVETAIL_HOME": home}
            subprocess.run([sys.executable, *sys.argv, "--start", start], env=environment, check=True)


def _measure(args: argparse.Namespace) -> None:
    began = time.perf_counter()
    import dovetail as dt

    llm = dt.LLM(args.config, load_format="dummy", **OPTIONS)
    ready = time.perf_counter()
    _say(f"{args.start} start: ready after {ready - began:.1f} s (weights {llm.load_seconds:.1f}); {llm.describe()}")
    stats = llm.runner.cache[0].device.memory_stats() or {}
    _say(f"  {len(llm.runner.steps._futures)} steps; jax may take {stats.get('bytes_limit', 0) / 2**30:.1f} GiB")
    lines = {"W": _streams, "sampling": _sampling, "arrivals": _arrivals, "rollout": _rollout}
    for name in args.lines.split(","):
        if args.start == "second" or name == "W":
            lines[name](llm)


def _streams(llm) -> None:
    for when in ("at once", "again"):
        for streams, prompt in ((1, 128), (64, 128), (512, 512)):
            rate = _generate(llm, streams, prompt)
            _say(f"  {when}: {streams} x ({prompt} + 256): {rate:,.0f} tok/s")


def _rollout(llm) -> None:
    """As reinforcement learning does it: 8 prompts, 64 answers each."""
    for _ in range(3):
        start = time.perf_counter()
        tokens = 8 * 64 * 256
        _generate(llm, 8, 128, n=64, temperature=1, logprobs=0)
        seconds = time.perf_counter() - start
        _say(f"  8 prompts x 64 x 256, temperature 1, logprobs=0: {seconds:.2f} s, {tokens / seconds:,.0f} tok/s")


def _sampling(llm) -> None:
    drawn = dict(temperature=0.8, top_p=0.95, top_k=50)
    penalties = dict(presence_penalty=0.5, repetition_penalty=1.1)
    asked = [
        (64, "greedy", {}), (64, "temperature 0.8, top_p 0.95, top_k 50", drawn),
        (64, "presence_penalty 0.5, repetition_penalty 1.1", penalties),
        (256, "greedy", {}), (256, "logprobs=1", dict(logprobs=1)),
        (256, "temperature 1, logprobs=0", dict(temperature=1, logprobs=0)),
    ]  # fmt: skip
    for streams, name, more in asked:
        _generate(llm, streams, 128, **more)
        rate = _generate(llm, streams, 128, **more)
        _say(f"  {streams} streams, {name}: {rate:,.0f} tok/s")


def _arrivals(llm) -> None:
    import numpy as np

    from dovetail.cli.bench_throughput import _percentile, _run

    moments = np.sort(np.random.default_rng(7).uniform(0, 2.0, 64)).tolist()
    for name, seed in (("no prefix known", 11), ("every prefix known", 11), ("no prefix known", 12)):
        rate, first, _ = _run(llm, 64, 128, 256, moments, seed=seed)
        p50, p99 = (_percentile(first, q) * 1e3 for q in (50, 99))
        _say(f"  64 over 2 s, {name}: {rate:,.0f} tok/s, first token p50 {p50:.1f} ms, p99 {p99:.1f} ms")


def _generate(llm, streams: int, prompt: int, **more) -> float:
    import numpy as np

    import dovetail as dt

    params = dt.SamplingParams(**({"temperature": 0, "max_tokens": 256, "ignore_eos": True} | more))
    ids = np.random.default_rng().integers(3, llm.config.vocab, (streams, prompt)).tolist()
    start = time.perf_counter()
    llm.generate(ids, params, progress=False)
    return streams * 256 / (time.perf_counter() - start)


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    main()
