"""What the server reports of itself: its model and adapters, its health, its load and its metrics."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Response

from dovetail import __version__
from dovetail.engine.died import EngineDied
from dovetail.serve.api.delivery import json_answer
from dovetail.serve.errors import RETRY_SECONDS, ApiError
from dovetail.serve.talk.service import Service

ANSWER_SECONDS = 5.0  # in which a healthy engine answers


def models(service: Service) -> APIRouter:
    router = APIRouter()

    def describe(name: str) -> dict[str, Any]:
        info = service.backend.info
        adapter = info.adapters.get(name)
        version = adapter.version if adapter else info.weights_version
        return {
            "id": name, "object": "model", "created": service.created, "owned_by": "dovetail", "root": service.name,
            "parent": service.name if adapter else None, "weights_version": version,
            "max_model_len": service.max_len, "vocab_size": info.vocab,
        }  # fmt: skip

    @router.get("/v1/models")
    async def list_models() -> Response:
        names = [*service.config.names, *service.backend.info.adapters]
        return json_answer({"object": "list", "data": [describe(name) for name in names]})

    @router.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Response:
        service.adapter_of(name)
        return json_answer(describe(name))

    return router


def state(service: Service) -> APIRouter:
    router = APIRouter()

    @router.get("/health")
    @router.get("/ping")
    async def health() -> Response:
        """200 while the engine lives, also when it sleeps or is paused; restart a server that stays at 503."""
        stats = await _stats(service)
        return json_answer({"status": "ok", "weights_version": stats.weights_version, "sleeping": stats.sleeping})

    @router.get("/ready")
    async def ready() -> Response:
        """200 only while requests are answered: 503 says why they are not."""
        service.check_ready()
        stats = await _stats(service)
        return json_answer({"status": "ready", "weights_version": stats.weights_version})

    @router.get("/load")
    async def load() -> Response:
        return json_answer({"server_load": len(service.inflight)})

    @router.get("/version")
    async def version() -> Response:
        return json_answer({"version": __version__})

    @router.get("/metrics")
    async def metrics() -> Response:
        try:
            stats = await _stats(service)
        except ApiError:
            stats = None
        return Response(service.metrics.text(stats), media_type="text/plain; version=0.0.4; charset=utf-8")

    return router


async def _stats(service: Service) -> Any:
    why = service.backend.trouble
    if why is None:
        try:
            return await asyncio.wait_for(service.backend.stats(), ANSWER_SECONDS)
        except (EngineDied, TimeoutError):
            why = "the engine does not answer"
    raise ApiError(503, why, code="engine_unavailable", retry_after=RETRY_SECONDS)
