"""Tokens per second of an engine with random weights, and where the GPU's time goes, kernel by kernel.

python benchmarks/engine_profile.py DIR [key=value ...] [--lines 1x128 8x128 64x128 64x4096] [--profile 1 64]

DIR is a folder with a config.json, and key=value an engine option, such as quantization=int4. A line NxP is N requests
at once with prompts of P random tokens, 256 tokens out, and NxPxO one with O tokens out; a line NxP with 4,096 tokens
or more is 1 token out, and prompt tokens per second are printed. Each line runs twice. `--experts-only` rounds the
experts alone, as GPT-OSS is published. `--sampling N` prints the output tokens per second of N requests of 128 + 256
tokens, greedy, drawn and with penalties. `--profile N` prints the kernels of N requests of 128 + 160 tokens by their
time.
"""

from __future__ import annotations

import argparse
import collections
import logging
import re
import tempfile
import time
from pathlib import Path

import jax
import numpy as np

import dovetail as dt
from dovetail.engine import llm as engine_llm

OPTIONS = dict(max_model_len=8192, max_num_seqs=256)
LONG = 4096  # tokens of a prompt from which on prompts are measured
LISTED = 28  # kernels of a profile
PENALTIES = {"presence_penalty": 0.5, "repetition_penalty": 1.1}
SAMPLINGS = ({}, PENALTIES, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9}, {"temperature": 1.0, **PENALTIES})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("options", nargs="*", metavar="key=value")
    parser.add_argument("--lines", nargs="*", default=["1x128", "8x128", "64x128", "256x128"])
    parser.add_argument("--profile", nargs="*", type=int, default=[])
    parser.add_argument("--sampling", nargs="*", type=int, default=[])
    parser.add_argument("--experts-only", action="store_true")
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(relativeCreated)d ms %(message)s")
    logging.getLogger("dovetail").setLevel(logging.INFO)  # seconds of each compilation
    if args.experts_only:
        of_all = engine_llm.rounded_formats
        engine_llm.rounded_formats = lambda *given: tuple(each for each in of_all(*given) if "experts" in each[0])
    begin = time.perf_counter()
    llm = dt.LLM(args.config, load_format="dummy", **OPTIONS | dict(map(_option, args.options)))
    print(f"ready after {time.perf_counter() - begin:.1f} s; {llm.describe()}", flush=True)
    for line in args.lines:
        sizes = list(map(int, line.split("x")))
        rates = [_rate(llm, *sizes) for _ in range(2)]
        kind = "prompt tok/s" if len(sizes) == 2 and sizes[1] >= LONG else "tok/s"
        print(f"{line:>10}: {rates[0]:10,.0f} {rates[1]:10,.0f} {kind}", flush=True)
    for streams in args.sampling:
        for sampling in SAMPLINGS:
            rates = [_rate(llm, streams, 128, 256, **sampling) for _ in range(3)]
            print(f"{streams} streams, {sampling or 'greedy'}: {max(rates):10,.0f} tok/s", flush=True)
    for streams in args.profile:
        _profile(llm, streams)


def _option(text: str) -> tuple[str, int | str]:
    name, _, value = text.partition("=")
    return name, int(value) if value.isdigit() else value


def _generate(llm: dt.LLM, streams: int, prompt: int, output: int, **sampling: float) -> float:
    """Return the seconds of so many requests that arrive at once."""
    params = dt.SamplingParams(**{"temperature": 0, **sampling}, max_tokens=output, ignore_eos=True)
    ids = np.random.default_rng().integers(3, llm.config.vocab, (streams, prompt)).tolist()
    llm.reset_prefix_cache()
    begin = time.perf_counter()
    llm.generate(ids, params, progress=False)
    return time.perf_counter() - begin


def _rate(llm: dt.LLM, streams: int, prompt: int, output: int = 0, **sampling: float) -> float:
    output = output or (1 if prompt >= LONG else 256)
    return streams * (prompt if output == 1 else output) / _generate(llm, streams, prompt, output, **sampling)


def _profile(llm: dt.LLM, streams: int) -> None:
    """Print the time and the calls of each kernel; those whose names differ in a number are one."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            _generate(llm, streams, 128, 160)
        (path,) = Path(folder).glob("plugins/profile/*/*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(path))
    times, calls = collections.Counter(), collections.Counter()
    lines = [line for plane in data.planes if "GPU" in plane.name for line in plane.lines]
    for event in (event for line in lines if line.name.startswith("Stream") for event in line.events):
        name = re.sub(r"[_.]?\d+$", "", event.name)
        times[name] += event.duration_ns
        calls[name] += 1
    print(f"{streams} streams: {sum(times.values()) / 1e6:.1f} ms of kernels")
    for name, taken in times.most_common(LISTED):
        print(f"{taken / 1e6:10.2f} ms {calls[name]:7} x {taken / calls[name] / 1e3:8.1f} us  {name[:90]}", flush=True)


if __name__ == "__main__":
    main()
