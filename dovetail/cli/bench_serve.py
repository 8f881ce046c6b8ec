"""`dovetail bench serve`: put a load on a running server and measure the latencies that users would see."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dovetail.cli.bench_load import Generator, Load, RequestRecord
from dovetail.core.errors import UserError

ROUNDS = 4  # maximum rounds of warming up
OPEN_LOOP = 8  # concurrent requests of the warm-up for a load with --rate
EVERY = 1.0  # seconds between two readings of the server's metrics
PERCENTILES = (50, 90, 99)
SOME_VOCAB = 1000  # assumed vocabulary where the server does not report one
LATE = 0.02  # seconds by which the p99 arrival may be late before this machine counts as too slow
BUSY = 0.8  # share of a core above which the generator's own work distorts the measurement
_METRIC = re.compile(r"^(?:dovetail|vllm):(\w+)(?:\{[^}]*\})? (\S+)$", re.M)


async def read_metrics(client: Any) -> dict[str, float]:
    """Return the server's gauges and counters by name; empty if it has no /metrics."""
    import httpx

    try:
        return parse_metrics((await client.get("/metrics")).text)
    except httpx.HTTPError:
        return {}


def parse_metrics(text: str) -> dict[str, float]:
    """Return the values of Prometheus text by name, without the prefix."""
    return {name: float(value) for name, value in _METRIC.findall(text)}


async def read_compiled(client: Any) -> tuple[float, float] | None:
    """Return the steps that the server has compiled and the seconds it took; None if it does not report them."""
    found = await read_metrics(client)
    both = found.get("compiled_steps_total"), found.get("compile_seconds_total")
    return None if None in both else both  # type: ignore[return-value]


async def warm_up(client: Any, load: Load, model: str, vocab: int, count: int | None) -> None:
    """Send warm-up requests: one first, to see that the server answers, then the other `count` - 1 at once.

    Without a count, send rounds with the load's concurrency until a round compiles nothing.
    """
    generator = Generator(client, load)
    if count is not None:
        bodies = load.bodies(model, vocab, count, "warm-up")
        for group in (bodies[:1], bodies[1:]):
            await asyncio.gather(*(generator.send(body, 0.0) for body in group))
            _check(generator)
        return
    await generator.send(load.bodies(model, vocab, 1, "warm-up")[0], 0.0)
    _check(generator)
    most = load.concurrency or (load.requests if load.rate == float("inf") else OPEN_LOOP)
    closed = replace(load, rate=0.0, concurrency=most, requests=min(2 * most, load.requests))
    for i in range(ROUNDS):
        before = await read_compiled(client)
        generator = Generator(client, closed)
        await generator.run(load.bodies(model, vocab, closed.requests, f"warm-up {i}"))
        _check(generator)
        if await read_compiled(client) == before:
            return


def _check(generator: Generator) -> None:
    for record in generator.records:
        if record.error:
            raise UserError(f"a warm-up request failed: {record.message}")


async def watch(client: Any, found: list[dict[str, float]]) -> None:
    """Append the server's decode step time every second until cancelled."""
    while True:
        await asyncio.sleep(EVERY)
        if seen := decode_step(await read_metrics(client)):
            found.append(seen)


def decode_step(values: dict[str, float]) -> dict[str, float] | None:
    """Return the measured and predicted decode step; None while nothing runs or if nothing is predicted."""
    least, most = (values.get(f"predicted_decode_step_seconds_{bound}", 0.0) for bound in ("least", "most"))
    measured = values.get("decode_step_seconds", 0.0)
    if not (measured and most):
        return None
    return {"running": values.get("num_requests_running", 0.0), "measured": measured, "least": least, "most": most}


def busiest(found: list[dict[str, float]]) -> dict[str, float]:
    """Return the last reading with the most running sequences; empty if there was none."""
    return max(enumerate(found), key=lambda each: (each[1]["running"], each[0]))[1] if found else {}


def describe(seen: dict[str, float]) -> str:
    """Return a sentence on the measured and predicted decode step."""
    ms = {name: f"{seen[name] * 1e3:.3g}" for name in ("measured", "least", "most")}
    return (
        f"the server's decode step with {seen['running']:.0f} running: {ms['measured']} ms, predicted {ms['least']} to "
        f"{ms['most']}"
    )


def run(
    url: str,
    api_key: str,
    model: str,
    load: Load,
    vocab: int,
    count: int | None,
    timeout: float,
    plot: str,
    json_file: str,
) -> None:
    """Run the benchmark and print its table; if interrupted, print what there is and raise KeyboardInterrupt."""
    if plot and Path(plot).suffix != ".svg":
        raise UserError(
            f"--plot must be an .svg file, got {plot}: use {Path(plot).with_suffix('.svg')}", param="--plot"
        )
    _more_files()
    bench = Bench(url, api_key, load, timeout)
    interrupted = False
    try:
        asyncio.run(bench.run(model, vocab, count))
    except KeyboardInterrupt:
        interrupted = True
        if not any(record.ok for record in bench.records):
            raise
    figures = bench.figures()
    _show(figures, bench.records)
    _write(figures, bench.records, plot, json_file)
    if interrupted:
        raise KeyboardInterrupt


class Bench:
    """Measure a server under a load."""

    def __init__(self, url: str, api_key: str, load: Load, timeout: float):
        from dovetail.cli.remote import client_options

        self._url, self._load, self._options = url, load, client_options(url, api_key, timeout)
        self._model = ""
        self._seconds = self._cpu = 0.0
        self._seen: list[dict[str, float]] = []
        self._compiled: dict[str, float] = {}  # during the measurement; empty if not reported
        self.records: list[RequestRecord] = []

    async def run(self, model: str, vocab: int, count: int | None) -> None:
        """Warm the server up and send the load."""
        import httpx

        from dovetail.core.reporter import bar

        async with httpx.AsyncClient(**self._options) as client:
            self._model, vocab = await self._ask(client, model, vocab)
            await warm_up(client, self._load, self._model, vocab, count)
            before = await read_compiled(client)
            bodies = self._load.bodies(self._model, vocab, self._load.requests)
            with bar() as progress:
                ended: list[bool] = []  # whether each finished request failed

                def tick(record: RequestRecord) -> None:
                    ended.append(record.error is not None)
                    progress(f"requests, {sum(ended)} failed" if any(ended) else "requests", len(ended), len(bodies))

                generator = Generator(client, self._load, tick)
                self.records = generator.records
                cpu, watching = time.process_time(), asyncio.create_task(watch(client, self._seen))
                try:
                    await generator.run(bodies)
                finally:
                    self._seconds, self._cpu = generator.now(), time.process_time() - cpu
                    watching.cancel()
            after = await read_compiled(client)
            if before and after:
                self._compiled = {"steps": after[0] - before[0], "seconds": after[1] - before[1]}

    async def _ask(self, client, model: str, vocab: int) -> tuple[str, int]:
        """Return the model's name and vocabulary size, from the server unless given."""
        from dovetail.cli.remote import ServerError, explained, read_models

        try:
            with explained(self._url):
                models = read_models(await client.get("/v1/models"))
        except ServerError as error:
            raise UserError(str(error)) from None
        found = next((each for each in models if each["id"] == model), None) if model else models[0]
        if found is None:
            raise UserError(
                f"{self._url} has no model {model}: choose one of {', '.join(each['id'] for each in models)}",
                param="--model",
            )
        longest, asked = found.get("max_model_len"), self._load.input + self._load.output
        if longest and asked > longest:
            raise UserError(
                f"--input plus --output must be at most {longest} tokens for {found['id']}, got {asked}",
                param="--input",
            )
        return found["id"], vocab or found.get("vocab_size") or SOME_VOCAB

    def figures(self) -> dict[str, Any]:
        """Return everything that was measured."""
        ok = [record for record in self.records if record.ok]
        tokens = sum(record.tokens for record in ok)
        later = [r for r in ok if r.tokens > 1]
        return {
            "url": self._url,
            "model": self._model,
            "load": self._load.describe(),
            "seconds": self._seconds,
            "sent": len(self.records),
            "answered": len(ok),
            "errors": dict(Counter(record.error for record in self.records if record.error)),
            "requests_per_second": len(ok) / self._seconds if self._seconds else 0.0,
            "prompt_tokens": sum(record.prompt_tokens for record in ok),
            "output_tokens": tokens,
            "output_tokens_per_second": tokens / self._seconds if self._seconds else 0.0,
            "tokens_per_event": tokens / max(1, sum(len(record.events) for record in ok)),
            "shorter_than_asked": sum(record.tokens < self._load.output for record in ok),
            "ttft_ms": summary([record.ttft for record in ok]),
            "itl_ms": summary([gap for record in ok for gap in record.gaps()]),
            "tpot_ms": summary([(r.events[-1] - r.events[0]) / (r.tokens - 1) for r in later]),
            "e2e_ms": summary([record.e2e for record in ok]),
            "late_ms": summary([record.sent - record.due for record in self.records]),
            "decode_step": busiest(self._seen),
            "compiled": self._compiled,
            "generator_busy": self._cpu / self._seconds if self._seconds else 0.0,
        }


def summary(seconds: Sequence[float]) -> dict[str, float]:
    """Return mean, percentiles and maximum in ms; empty for no values."""
    if not seconds:
        return {}
    found = {f"p{q}": percentile(seconds, q) * 1e3 for q in PERCENTILES}
    return {"mean": sum(seconds) / len(seconds) * 1e3, **found, "max": max(seconds) * 1e3}


def percentile(values: Sequence[float], q: float) -> float:
    """Return a percentile, interpolated linearly as numpy does."""
    ordered = sorted(values)
    at = q / 100 * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def rates(records: Sequence[RequestRecord], seconds: float, bins: int = 60) -> list[float]:
    """Return output tok/s in each part of the run, assuming that all events of a request have equally many tokens."""
    each = seconds / bins or 1.0
    counts = [0.0] * bins
    for record in records:
        for event in record.events:
            counts[min(bins - 1, int(event / each))] += max(record.tokens, len(record.events)) / len(record.events)
    return [count / each for count in counts]


def _show(figures: dict[str, Any], records: list[RequestRecord]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    console.print(f"{figures['model']} at {figures['url']}: {_describe(figures)}", markup=False, soft_wrap=True)
    columns = ["mean", *(f"p{q}" for q in PERCENTILES), "max"]
    table = Table()
    table.add_column("ms", no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right")
    rows = {"TTFT": "time to first token", "ITL": "between events", "TPOT": "per later token", "E2E": "whole request"}
    for key, meaning in rows.items():
        values = figures[f"{key.lower()}_ms"]
        table.add_row(f"{key:<5}[dim]{meaning}[/dim]", *(_number(values.get(c)) for c in columns))
    console.print(table)
    console.print(
        f"{figures['answered']} of {figures['sent']} answered in {figures['seconds']:.1f} s: "
        f"[bold]{figures['output_tokens_per_second']:,.1f}[/bold] output tok/s, "
        f"[bold]{figures['requests_per_second']:,.2f}[/bold] requests/s",
        soft_wrap=True,
    )
    if images := figures["load"].get("images"):
        console.print(
            f"{figures['requests_per_second'] * images['count']:,.2f} images/s; a prompt had "
            f"{figures['prompt_tokens'] / max(1, figures['answered']):,.0f} tokens on average, images included",
            soft_wrap=True,
        )
    if figures["decode_step"]:
        console.print(describe(figures["decode_step"]), soft_wrap=True)
    for kind, count in figures["errors"].items():
        message = next(record.message for record in records if record.error == kind)
        console.print(f"{count} failed, {kind}: {message}", style="red", markup=False, soft_wrap=True)
    for note in _notes(figures):
        console.print(note, style="yellow", soft_wrap=True)


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}"


def _describe(figures: dict[str, Any]) -> str:
    load = figures["load"]
    how = f"{float(load['rate']):g} per second (Poisson)" if "rate" in load else f"{load['concurrency']} at a time"
    how = how if load.get("rate") != "inf" else "all at once"
    images = f"{load['images']['count']} images and " if "images" in load else ""
    size = f"{images}{load['input']} + {load['output']} tokens"
    return f"{load['requests']} requests, {how}, {size}, seed {load['seed']}"


def _notes(figures: dict[str, Any]) -> list[str]:
    """Return warnings about what distorted the measurement."""
    remarks = []
    if (compiled := figures["compiled"]) and compiled["steps"]:
        remarks.append(
            f"the server compiled {compiled['steps']:.0f} steps during the measurement ({compiled['seconds']:.1f} s), "
            "and requests waited for them: run the benchmark again"
        )
    if figures["shorter_than_asked"]:
        remarks.append(
            f"{figures['shorter_than_asked']} completions were shorter than --output: is ignore_eos supported?"
        )
    if figures["tokens_per_event"] > 1.05:
        remarks.append(f"events had {figures['tokens_per_event']:.1f} tokens on average: compare TPOT, not ITL")
    if figures["late_ms"] and figures["late_ms"]["p99"] > LATE * 1e3:
        remarks.append(
            f"requests were sent up to {figures['late_ms']['p99']:,.0f} ms late (p99): this machine was too slow"
        )
    if figures["generator_busy"] > BUSY:
        remarks.append(
            f"the load generator was busy {figures['generator_busy']:.0%} of the time, which distorts the latencies"
        )
    return remarks


def _write(figures: dict[str, Any], records: list[RequestRecord], plot: str, json_file: str) -> None:
    from dovetail.core.files import write_atomic

    ok = [record for record in records if record.ok]
    if json_file:
        each = ",\n  ".join(json.dumps(vars(record)) for record in records)  # a line each: they are long
        write_atomic(json_file, f'{json.dumps(figures, indent=1)[:-2]},\n "each": [\n  {each}\n ]\n}}\n')
    if plot:
        from dovetail.cli.plot import draw_load

        waits = []
        for name, values in (("TTFT", [r.ttft for r in ok]), ("E2E", [r.e2e for r in ok])):
            marks = {key: figures[f"{name.lower()}_ms"][key] for key in ("p50", "p90", "p99")} if values else {}
            waits.append((name, [value * 1e3 for value in values], marks))
        title = f"{figures['model']}: {_describe(figures)}"
        write_atomic(plot, draw_load(title, waits, rates(ok, figures["seconds"]), figures["seconds"]))


def _more_files() -> None:
    """Raise the limit of open files: each open request is a socket, and the usual limit is 1,024."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65536 if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
