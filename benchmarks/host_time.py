"""The host's own time per sampled token in a rollout of RL: 8 prompts x n=64 x 256 tokens on a device that costs
nothing. What is timed is the engine's Python between two steps; packing, the sampler's inputs and the device are left
out.

python benchmarks/host_time.py                          # a line per number of steps, with and without log-probabilities
python benchmarks/host_time.py --steps 1 --profile      # where the time goes, by function
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import pstats
import time
from collections import defaultdict
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np

import dovetail.engine.engine as engine_module
from dovetail.engine.engine import Engine
from dovetail.engine.request.params import SamplingParams
from dovetail.engine.schedule.scheduler import Scheduler, SchedulerConfig

VOCAB, EOS, PAGE, PROMPT, PROMPTS = 32_000, 2, 16, 128, 8
PARTS = ("schedule", "commit", "logprobs", "update", "output")


class OnHost(np.ndarray):
    """A numpy array for where the engine has a jax array."""

    def copy_to_host_async(self) -> None:
        pass


class Launched(SimpleNamespace):
    """As runner.LaunchedStep, of arrays that are there already."""

    def fetch(self) -> np.ndarray:
        return self.tokens


class StubRunner:
    """Every launch answers with the same random tokens, none of which ends a sequence, and their log-probabilities."""

    def __init__(self, rows: int, steps: int):
        self.cfg = SimpleNamespace(vocab=VOCAB, eos_ids=(EOS,))
        self.buckets, self.weights = SimpleNamespace(max_rows=rows), SimpleNamespace(version=0)
        self.programs, self.adapters = SimpleNamespace(everywhere=None), None
        rng = np.random.default_rng(0)
        shapes = (steps, rows), (steps, rows), (steps, rows, 0), (steps, rows, 0)
        value, rank, top, ids = (rng.integers(3, VOCAB, shape, np.int32) for shape in shapes)
        self.tokens = rng.integers(3, VOCAB, (steps, rows), np.int32).view(OnHost)
        logprobs = -value.astype(np.float32), rank, top.astype(np.float32), ids
        self.logprobs = [array.view(OnHost) for array in logprobs]

    def launch(self, plan, sampler, keeps_hidden: bool = False) -> Launched:
        tokens, logprobs = self.tokens[: plan.steps], tuple(array[: plan.steps] for array in self.logprobs)
        return Launched(plan=plan, tokens=tokens, logprobs=logprobs, hidden=None, version=0, padded=len(plan.rows))


class Watch:
    """Seconds spent in functions, by name: not the wall's, which others' processes move."""

    def __init__(self):
        self.seconds: dict[str, float] = defaultdict(float)

    def watched(self, name: str, function):
        def call(*args, **more):
            start = time.process_time()
            try:
                return function(*args, **more)
            finally:
                self.seconds[name] += time.process_time() - start

        return call

    def on(self, owner, method: str, name: str) -> None:
        setattr(owner, method, self.watched(name, getattr(owner, method)))


def make_engine(rows: int, steps: int, tokens: int) -> Engine:
    length = PROMPT + tokens
    config = SchedulerConfig(rows, 16384, length, PAGE, rows * -(-length // PAGE))
    engine = Engine(StubRunner(rows, steps), Scheduler(config), None)  # type: ignore[arg-type]
    engine._steps_wanted = lambda: steps  # type: ignore[method-assign]
    return engine


def rollout(
    rows: int, steps: int, tokens: int, logprobs: int | None, all_updates: bool = False, profile=None
) -> dict[str, float]:
    """Microseconds per sampled token, by part. `update`: what a step does beside the others."""
    engine, watch = make_engine(rows, steps, tokens), Watch()
    params = SamplingParams(n=rows // PROMPTS, temperature=1.0, max_tokens=tokens, logprobs=logprobs)
    for i in range(PROMPTS):
        prompt = np.random.default_rng(i).integers(3, VOCAB, PROMPT).tolist()
        engine.add(str(i), prompt, params)
    keep = engine_module.keep_logprobs
    if profile is None:
        watch.on(engine.scheduler, "schedule", "schedule")
        watch.on(engine.scheduler, "commit", "commit")
        watch.on(engine.runner, "launch", "launch")
        watch.on(engine, "step", "step")
        watch.on(engine, "output", "output")
        watch.on(engine_module, "keep_logprobs", "logprobs")
    gc.collect()
    gc.disable()  # as LLM.generate does
    try:
        with profile or nullcontext():
            while engine.has_work:
                engine.step(prompts_first=True, ended_only=not all_updates)
            outputs = [engine.output(str(i)) for i in range(PROMPTS)]
    finally:
        gc.enable()
        engine_module.keep_logprobs = keep
    count = sum(len(each.token_ids) for output in outputs for each in output.outputs)
    assert count == rows * tokens, count
    seconds = watch.seconds
    inner = sum(seconds[name] for name in ("schedule", "commit", "logprobs", "launch"))
    seconds["update"] = seconds["step"] - inner
    return {name: seconds[name] / count * 1e6 for name in PARTS}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, nargs="*", default=[1, 4, 16], help="decode steps per dispatch")
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--repeat", type=int, default=3, help="the median of so many rollouts")
    parser.add_argument("--updates", action="store_true", help="of every sequence at every step, as a server has them")
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    if not args.profile:
        print(f"microseconds per token, {args.rows} sequences of {args.tokens} tokens")
        print(f"{'steps':>5} {'logprobs':>8} {'total':>6}  " + " ".join(f"{part:>8}" for part in PARTS))
    for steps in args.steps:
        for logprobs in (None, 0):
            if args.profile:
                profile = cProfile.Profile()
                rollout(args.rows, steps, args.tokens, logprobs, args.updates, profile)
                print(f"{steps} steps, logprobs={logprobs}")
                pstats.Stats(profile).sort_stats("tottime").print_stats(18)
                continue
            turns = [rollout(args.rows, steps, args.tokens, logprobs, args.updates) for _ in range(args.repeat)]
            turn = sorted(turns, key=lambda parts: sum(parts.values()))[len(turns) // 2]
            print(f"{steps:>5} {logprobs!s:>8} {sum(turn.values()):>6.2f}  ", end="")
            print(" ".join(f"{turn[part]:>8.2f}" for part in PARTS), flush=True)


if __name__ == "__main__":
    main()
