"""Routes that describe the server: its models and adapters, health, load, version and metrics."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import APIRouter, Query, Response

from dovetail import __version__
from dovetail.core.errors import RequestError
from dovetail.engine.interface import EngineDied, EngineStats
from dovetail.serve.api.delivery import json_answer
from dovetail.serve.errors import RETRY_SECONDS, ApiError
from dovetail.serve.talk.service import Service

ANSWER_SECONDS = 5.0  # in which a healthy engine answers


def routes(service: Service) -> APIRouter:
    """Return /v1/models, /health, /ping, /ready, /load, /version and /metrics."""
    router = APIRouter()

    @router.get("/v1/models")
    async def list_models(
        after_id: str | None = None, before_id: str | None = None, limit: Annotated[int | None, Query(ge=1)] = None
    ) -> Response:
        """List the model's names and its adapters; the arguments are Anthropic's, for a part of the list."""
        names = [*service.config.names, *service.engine.info.adapters]
        some = names[_place(names, after_id, "after_id", -1) + 1 : _place(names, before_id, "before_id", len(names))]
        page = some[:limit] if before_id is None or limit is None else some[-limit:]
        data = [_describe(service, name) for name in page]
        ends = {"first_id": page[0] if page else None, "last_id": page[-1] if page else None}
        return json_answer({"object": "list", "data": data, "has_more": len(page) < len(some), **ends})

    @router.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Response:
        """Describe one model or adapter."""
        service.adapter_of(name)
        return json_answer(_describe(service, name))

    @router.get("/health")
    @router.get("/ping")
    async def health() -> Response:
        """Return 200 while the engine lives, also when it sleeps or is paused; restart a server that stays at 503."""
        stats = await _stats(service)
        return json_answer({"status": "ok", "weights_version": stats.weights_version, "sleeping": stats.sleeping})

    @router.get("/ready")
    async def ready() -> Response:
        """Return 200 while requests are answered, and 503 with the reason otherwise."""
        service.check_ready()
        stats = await _stats(service)
        return json_answer({"status": "ready", "weights_version": stats.weights_version})

    @router.get("/load")
    async def load() -> Response:
        """Return the number of running requests."""
        return json_answer({"server_load": len(service.inflight)})

    @router.get("/version")
    async def version() -> Response:
        """Return the version of Dovetail."""
        return json_answer({"version": __version__})

    @router.get("/metrics")
    async def metrics() -> Response:
        """Return the metrics for Prometheus."""
        try:
            stats = await _stats(service)
        except ApiError:
            stats = None
        return Response(service.metrics.text(stats), media_type="text/plain; version=0.0.4; charset=utf-8")

    return router


def _describe(service: Service, name: str) -> dict[str, Any]:
    """Return the fields of OpenAI's, vLLM's and Anthropic's models in one object: the three share the route."""
    info = service.engine.info
    adapter = info.adapters.get(name)
    version = adapter.version if adapter else info.weights_version
    created_at = datetime.fromtimestamp(service.created, UTC).isoformat().replace("+00:00", "Z")
    return {
        "id": name, "object": "model", "created": service.created, "owned_by": "dovetail", "root": service.name,
        "parent": service.name if adapter else None, "weights_version": version,
        "max_model_len": service.max_len, "vocab_size": info.vocab,
        "type": "model", "display_name": name, "created_at": created_at, "lifecycle": "active",
        "max_input_tokens": service.prompts.max_tokens, "max_tokens": service.max_len - 1,
    }  # fmt: skip


def _place(names: list[str], name: str | None, param: str, default: int) -> int:
    """Return the index of `name`, or `default` if it is None."""
    if name is not None and name not in names:
        raise RequestError(f"`{param}` must be one of the models, got {name[:200]!r}", param=param)
    return default if name is None else names.index(name)


async def _stats(service: Service) -> EngineStats:
    trouble = service.engine.trouble
    if trouble is None:
        try:
            return await asyncio.wait_for(service.engine.stats(), ANSWER_SECONDS)
        except (EngineDied, TimeoutError):
            trouble = "the engine does not answer"
    raise ApiError(503, trouble, code="engine_unavailable", retry_after=RETRY_SECONDS)
