"""`dovetail bench throughput`: output tokens per second of the engine, optionally beside transformers."""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dovetail.core.errors import UserError


def run(
    model: str, engine: dict[str, Any], streams: list[int], prompt: int, output: int, peer: str, arrivals: float
) -> None:
    """Print one row per number of streams; requests arrive at once or at random times over `arrivals` seconds."""
    from rich.console import Console
    from rich.table import Table

    from dovetail.core.reporter import bar
    from dovetail.engine.llm import LLM
    from dovetail.engine.options import EngineOptions

    if peer not in ("transformers", "none"):
        raise UserError(f"--peer must be transformers or none, got {peer!r}", param="--peer")
    console = Console()
    length, rows = engine["max_model_len"] or prompt + output, engine["max_num_seqs"] or max(streams)
    options = EngineOptions.of(engine | dict(max_model_len=length, max_num_seqs=rows))
    with bar() as progress:
        llm = LLM.from_options(model, options, progress=progress)
    console.print(f"started in {llm.start_seconds:.1f} s; {llm.describe()}")
    expected = llm.engine.predicted
    if expected.why:
        console.print(expected.why, markup=False)
    theirs = _transformers(model) if peer == "transformers" else None
    measure = (lambda n: _arriving(llm, n, prompt, output, arrivals)) if arrivals else _at_once(llm, prompt, output)
    columns = ["streams", "in + out", "output tok/s", "predicted", "TTFT p50 ms", "TTFT p99 ms", "ms a token"]
    table = Table(*columns, *(["transformers tok/s", "ratio"] if theirs else []))
    for n in streams:
        rate, first, each = measure(n)
        row = [str(n), f"{prompt} + {output}", f"{rate:,.0f}", _predicted(expected, n, prompt, output)]
        row += [f"{_percentile(first, q) * 1e3:,.0f}" for q in (50, 99)] + [f"{statistics.median(each) * 1e3:.2f}"]
        if theirs:
            other = _time_transformers(theirs, n, prompt, output, llm.config.vocab)
            row += [f"{other:,.0f}", f"{rate / other:.2f}x"]
        table.add_row(*row)
    console.print(table)


def _predicted(expected, n: int, prompt: int, output: int) -> str:
    """Return the predicted output tok/s: bounds, or a calibrated value from earlier runs."""
    from dovetail.engine.schedule.step_time import rates

    return rates(expected.replica.per_token(n, prompt, output), n) if expected.replica else "-"


def _prompts(n: int, length: int, vocab: int, seed: int) -> list[list[int]]:
    import numpy as np

    return np.random.default_rng(seed).integers(3, vocab, (n, length)).tolist()


Measured = tuple[float, list[float], list[float]]  # output tok/s, seconds to each first token, seconds per later token


def _at_once(llm, prompt: int, output: int) -> Callable[[int], Measured]:
    def measure(n: int) -> Measured:
        _run(llm, n, prompt, output, [0.0] * n, seed=1)  # warm-up: compile
        return _run(llm, n, prompt, output, [0.0] * n, seed=2)

    return measure


def _arriving(llm, n: int, prompt: int, output: int, window: float) -> Measured:
    import numpy as np

    llm.reset_prefix_cache()  # the same prompts may have run before
    moments = np.sort(np.random.default_rng(7).uniform(0, window, n)).tolist()
    _run(llm, n, prompt, output, moments, seed=1)
    while llm.runner.is_compiling:  # XLA benchmarks products on the device while it compiles
        time.sleep(0.1)
    return _run(llm, n, prompt, output, moments, seed=2)


def _run(llm, n: int, prompt: int, output: int, moments: list[float], seed: int) -> Measured:
    """Drive the engine as LLM.generate or, with arrival times, a server does; time each first and last token."""
    from dovetail.engine.request.params import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
    prompts = _prompts(n, prompt, llm.config.vocab, seed)
    gc.collect()
    gc.freeze()  # a garbage collection during the run would delay every request
    engine, at_once, start = llm.engine, moments[-1] == 0, time.perf_counter()
    asked: dict[str, float] = {}
    first, last = {}, {}
    while len(last) < n:
        while len(asked) < n and time.perf_counter() - start >= moments[len(asked)]:
            id = f"bench-{seed}-{len(asked)}"
            engine.add(id, prompts[len(asked)], params)
            asked[id] = start + moments[len(asked)]
        for update in engine.step(prompts_first=at_once):
            id, now = update.request_id, time.perf_counter()
            first.setdefault(id, now)
            if update.finished:
                last[id] = now
                engine.output(id)
    total = time.perf_counter() - start
    waits = [first[id] - asked[id] for id in asked]
    return n * output / total, waits, [(last[id] - first[id]) / max(1, output - 1) for id in asked]


def _percentile(values: list[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(q / 100 * (len(ordered) - 1)))]


def _transformers(model: str):
    import torch
    import transformers

    from dovetail.io.load import convert

    with tempfile.TemporaryDirectory() as folder:
        path = convert(model, Path(folder) / "model", dtype="f32")
        return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def _time_transformers(peer, n: int, prompt: int, output: int, vocab: int) -> float:
    import torch

    ids = torch.tensor(_prompts(n, prompt, vocab, seed=2))
    options = dict(max_new_tokens=output, min_new_tokens=output, do_sample=False, pad_token_id=0)
    with torch.inference_mode():
        peer.generate(
            ids, attention_mask=torch.ones_like(ids), **(options | {"max_new_tokens": 2, "min_new_tokens": 2})
        )
        start = time.perf_counter()
        peer.generate(ids, attention_mask=torch.ones_like(ids), **options)
    return n * output / (time.perf_counter() - start)
