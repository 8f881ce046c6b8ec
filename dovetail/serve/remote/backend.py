"""Backend: what the server needs of an engine. EngineClient is one; tests have another."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, Literal, Protocol

from dovetail.engine.request.params import SamplingParams
from dovetail.serve.remote.wire import Delta


class Backend(Protocol):
    @property
    def info(self) -> Any: ...  # EngineInfo
    @property
    def trouble(self) -> str | None: ...  # why no request would be taken, in words a client may read
    @property
    def unready(self) -> str | None: ...  # why none would be answered now: trouble, or it sleeps or is paused
    def generate(
        self,
        id: str,
        prompt: list[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        adapter: str | None = None,
    ) -> AsyncGenerator[Delta]:
        """ValueError before the first delta for a request that is refused; leaving the iterator aborts it."""
        ...

    async def abort(self, id: str, index: int | None = None) -> None: ...
    async def stats(self) -> Any: ...  # Stats
    async def embed(
        self, prompts: list[list[int]], pooling: Literal["mean", "last"], adapter: str | None = None
    ) -> Any: ...
    async def score(self, prompts: list[list[int]], adapter: str | None = None) -> Any: ...
    async def control(self, name: str, *args: Any) -> Any: ...  # see engine.controls
    async def start_profile(self, folder: str) -> Any: ...
    async def stop_profile(self) -> Any: ...
    async def close(self) -> None: ...
