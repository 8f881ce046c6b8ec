"""The load of `dovetail bench serve`: requests at random times (open loop), or a fixed number at a time."""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dovetail.cli.bench_images import RandomImages
from dovetail.cli.remote import DONE, ServerError, explained, read_event, refusal
from dovetail.core.errors import UserError

if TYPE_CHECKING:
    import httpx


@dataclass(frozen=True, kw_only=True)
class Load:
    """Describe a load; exactly one of `rate` and `concurrency` is not 0."""

    requests: int
    rate: float = 0.0  # requests per second, Poisson; inf: all at once
    concurrency: int = 0
    input: int = 128
    output: int = 64
    seed: int = 0
    images: RandomImages | None = None  # sent to the chat route, with `input` words of text

    @property
    def route(self) -> str:
        """Return the route of the server that the requests go to."""
        return "/v1/chat/completions" if self.images else "/v1/completions"

    def __post_init__(self):
        if bool(self.rate) == bool(self.concurrency):
            raise UserError(
                "--rate (open loop) and --concurrency (closed loop) exclude each other: give one of them",
                param="--rate",
            )

    def describe(self) -> dict[str, Any]:
        """Return the load as JSON types; JSON has no infinity."""
        unused = "concurrency" if self.rate else "rate"
        values = {name: value for name, value in vars(self).items() if name not in (unused, "images")}
        values |= {"images": self.images.describe()} if self.images else {}
        return values | ({"rate": "inf"} if math.isinf(self.rate) else {})

    def moments(self) -> list[float]:
        """Return the arrival time of each request in seconds, from a Poisson process."""
        rng, now, moments = random.Random(f"arrivals {self.seed}"), 0.0, []
        for _ in range(self.requests):
            moments.append(now)
            now += rng.expovariate(self.rate)
        return moments

    def bodies(self, model: str, vocab: int, count: int, purpose: str = "load") -> list[bytes]:
        """Return the request bodies; ids below 100 are left out because they are often special tokens."""
        rng = random.Random(f"{purpose} {self.seed}")
        same = {
            "model": model, "max_tokens": self.output, "ignore_eos": True, "temperature": 0, "stream": True,
            "stream_options": {"include_usage": True},
        }  # fmt: skip
        if self.images:
            messages = (self.images.messages(rng, self.input) for _ in range(count))
            return [json.dumps({**same, "messages": each}).encode() for each in messages]
        low = min(100, vocab // 2)
        prompts = ([rng.randrange(low, vocab) for _ in range(self.input)] for _ in range(count))
        return [json.dumps({**same, "prompt": prompt}).encode() for prompt in prompts]


@dataclass
class RequestRecord:
    """Hold one request, with times in seconds since the load began.

    `due` is when it should have been sent. Latencies count from there, so that a server that blocks the sender does
    not look faster.
    """

    due: float
    sent: float
    events: list[float] = field(default_factory=list)  # when tokens arrived
    end: float | None = None  # None: not finished
    tokens: int = 0
    prompt_tokens: int = 0  # 0: the server does not report them
    error: str | None = None  # the kind of the error
    message: str = ""  # of the error

    @property
    def ok(self) -> bool:
        """Return whether the request was answered."""
        return self.end is not None and self.error is None

    @property
    def ttft(self) -> float:
        """Return the time to the first token."""
        return self.events[0] - self.due

    @property
    def e2e(self) -> float:
        """Return the time to the end."""
        assert self.end is not None
        return self.end - self.due

    def gaps(self) -> Iterator[float]:
        """Return the times between events."""
        return (later - earlier for earlier, later in zip(self.events, self.events[1:], strict=False))


class Generator:
    """Send a load; `records` grows as requests are sent, so that an interrupted load can be reported."""

    def __init__(
        self, client: httpx.AsyncClient, load: Load, tick: Callable[[RequestRecord], None] = lambda record: None
    ):
        self._client, self._load, self._tick = client, load, tick
        self.records: list[RequestRecord] = []
        self._start = 0.0

    async def run(self, bodies: list[bytes]) -> None:
        """Send all bodies as the load prescribes."""
        self._start = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            if self._load.concurrency:
                waiting = iter(bodies)  # shared: the next free worker takes the next body
                for _ in range(min(self._load.concurrency, len(bodies))):
                    tasks.create_task(self._worker(waiting))
            else:
                for due, body in zip(self._load.moments(), bodies, strict=True):
                    await asyncio.sleep(max(0.0, due - self.now()))
                    tasks.create_task(self.send(body, due))

    def now(self) -> float:
        """Return the seconds since the load began."""
        return time.perf_counter() - self._start

    async def _worker(self, waiting: Iterator[bytes]) -> None:
        for body in waiting:
            await self.send(body, self.now())

    async def send(self, body: bytes, due: float) -> RequestRecord:
        """Send one request and read its stream."""
        record = RequestRecord(due, self.now())
        self.records.append(record)
        try:
            with explained(self._client.base_url):
                await self._read(record, body)
            if not record.events:
                raise ServerError("no tokens", "the answer had no token")
        except ServerError as error:
            record.error, record.message = error.kind, str(error)
        record.end = self.now()
        self._tick(record)
        return record

    async def _read(self, record: RequestRecord, body: bytes) -> None:
        headers = {"content-type": "application/json"}
        async with self._client.stream("POST", self._load.route, content=body, headers=headers) as response:
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
                raise ServerError("cut off", "the server closed the connection before the end of the answer")
        record.tokens = record.tokens or len(record.events)  # without usage: one token per event

    def _take(self, record: RequestRecord, event: dict[str, Any]) -> None:
        """Count an event as a token even without text (half a character is held back), unless it only finishes."""
        for choice in event.get("choices", ()):
            delta = choice.get("delta", {})
            if "role" in delta and not delta.get("content"):
                continue  # a chat's first event has no token
            if choice.get("text") or delta.get("content") or not choice.get("finish_reason") or not record.events:
                record.events.append(self.now())
        usage = event.get("usage") or {}
        record.tokens = usage.get("completion_tokens", record.tokens)
        record.prompt_tokens = usage.get("prompt_tokens", record.prompt_tokens)
