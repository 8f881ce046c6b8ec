"""A load on a server: requests that come at random moments whether or not it keeps up, or so many at a time."""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dovetail.cli.remote import DONE, ServerError, explained, read_event, refusal
from dovetail.core.errors import UserError

if TYPE_CHECKING:
    import httpx


@dataclass(frozen=True, kw_only=True)
class Load:
    """Exactly one of rate and concurrency is not 0."""

    requests: int
    rate: float = 0.0  # requests per second, Poisson; inf: all at once
    concurrency: int = 0
    input: int = 128
    output: int = 64
    seed: int = 0

    def __post_init__(self):
        if bool(self.rate) == bool(self.concurrency):
            raise UserError("give --rate (open loop) or --concurrency (so many at a time), and not both")

    def describe(self) -> dict[str, Any]:
        """For JSON, which has no infinity."""
        unused = "concurrency" if self.rate else "rate"
        values = {name: value for name, value in vars(self).items() if name != unused}
        return values | ({"rate": "inf"} if math.isinf(self.rate) else {})

    def moments(self) -> list[float]:
        """When each request comes, in seconds since the start. A Poisson process waits exponentially."""
        rng, now, moments = random.Random(f"arrivals {self.seed}"), 0.0, []
        for _ in range(self.requests):
            moments.append(now)
            now += rng.expovariate(self.rate)
        return moments

    def bodies(self, model: str, vocab: int, count: int, purpose: str = "load") -> list[bytes]:
        """Made before the clock starts. The first ids are often special tokens, so they are left out."""
        rng = random.Random(f"{purpose} {self.seed}")
        same = {
            "model": model, "max_tokens": self.output, "ignore_eos": True, "temperature": 0, "stream": True,
            "stream_options": {"include_usage": True},
        }  # fmt: skip
        low = min(100, vocab // 2)
        prompts = ([rng.randrange(low, vocab) for _ in range(self.input)] for _ in range(count))
        return [json.dumps({**same, "prompt": prompt}).encode() for prompt in prompts]


@dataclass
class Record:
    """One request. Times are in seconds since the load began; `due` is when it should have been sent: a wait that the
    sender itself caused counts, or a slow server would look better the more it holds up."""

    due: float
    sent: float
    events: list[float] = field(default_factory=list)  # when tokens came
    end: float | None = None  # None: it never did
    tokens: int = 0
    error: str | None = None  # its kind
    said: str = ""  # its sentence

    @property
    def ok(self) -> bool:
        return self.end is not None and self.error is None

    @property
    def ttft(self) -> float:
        return self.events[0] - self.due

    @property
    def e2e(self) -> float:
        assert self.end is not None
        return self.end - self.due

    def gaps(self) -> Iterator[float]:
        return (later - earlier for earlier, later in zip(self.events, self.events[1:], strict=False))


class Generator:
    """Sends a load. `records` fills as requests are sent, so an interrupted load can still be reported."""

    def __init__(self, client: httpx.AsyncClient, load: Load, tick: Callable[[Record], None] = lambda record: None):
        self._client, self._load, self._tick = client, load, tick
        self.records: list[Record] = []
        self._start = 0.0

    async def run(self, bodies: list[bytes]) -> None:
        self._start = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            if self._load.concurrency:
                waiting = iter(bodies)  # shared: a client that is free takes the next
                for _ in range(min(self._load.concurrency, len(bodies))):
                    tasks.create_task(self._worker(waiting))
            else:
                for due, body in zip(self._load.moments(), bodies, strict=True):
                    await asyncio.sleep(max(0.0, due - self.now()))
                    tasks.create_task(self.send(body, due))

    def now(self) -> float:
        return time.perf_counter() - self._start

    async def _worker(self, waiting: Iterator[bytes]) -> None:
        for body in waiting:
            await self.send(body, self.now())

    async def send(self, body: bytes, due: float) -> Record:
        record = Record(due, self.now())
        self.records.append(record)
        try:
            with explained(self._client.base_url):
                await self._read(record, body)
            if not record.events:
                raise ServerError("no tokens", "the answer held no token")
        except ServerError as error:
            record.error, record.said = error.kind, str(error)
        record.end = self.now()
        self._tick(record)
        return record

    async def _read(self, record: Record, body: bytes) -> None:
        headers = {"content-type": "application/json"}
        async with self._client.stream("POST", "/v1/completions", content=body, headers=headers) as response:
            if response.is_error:
                await response.aread()
                raise refusal(response)
            async for line in response.aiter_lines():
                event = read_event(line)
                if event is DONE:
                    break
                if event:
                    self._take(record, event)
            else:
                raise ServerError("cut off", "the server closed a connection before the answer's end")
        record.tokens = record.tokens or len(record.events)  # a server that sends no usage, one token per event

    def _take(self, record: Record, event: dict[str, Any]) -> None:
        """Text may be held back (half a character), so an event without any is a token too; but not a mere ending."""
        for choice in event.get("choices", ()):
            if choice.get("text") or not choice.get("finish_reason") or not record.events:
                record.events.append(self.now())
        record.tokens = (event.get("usage") or {}).get("completion_tokens", record.tokens)
