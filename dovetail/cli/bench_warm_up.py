"""The requests before a benchmark's clock starts, and what the server says it has compiled; servers of other makes say
nothing of that."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from typing import Any

from dovetail.cli.bench_load import Generator, Load
from dovetail.core.errors import UserError

ROUNDS = 4  # of warming up, at most
OPEN_LOOP = 8  # requests at a time that a load by --rate is warmed up with
_LINE = re.compile(r"^dovetail:(compiled_steps|compile_seconds)_total(?:\{[^}]*\})? (\S+)$", re.M)


async def read_compiled(client: Any) -> tuple[float, float] | None:
    """Return how many steps the server has compiled since its start, and the seconds; None: it does not say."""
    import httpx

    try:
        text = (await client.get("/metrics")).text
    except httpx.HTTPError:
        return None
    found = {name: float(value) for name, value in _LINE.findall(text)}
    return (found["compiled_steps"], found["compile_seconds"]) if len(found) == 2 else None


async def warm_up(client: Any, load: Load, model: str, vocab: int, count: int | None) -> None:
    """Send one request, which shows whether any will be answered, then the other `count` - 1 at once. Without a count:
    rounds with as many at a time as the load has, until one compiles nothing."""
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
            raise UserError(f"a first request failed: {record.said}")
