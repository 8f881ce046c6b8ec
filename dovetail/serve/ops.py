"""The small routes: models, tokens, embeddings, and how the server does; and, for whoever runs it, its controls."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Awaitable
from typing import Any, TypeVar

import msgspec
import numpy as np
from fastapi import APIRouter, Response

from dovetail.engine.died import EngineDied
from dovetail.serve.errors import ApiError, bad, refused
from dovetail.serve.protocol_ops import (
    DetokenizeRequest,
    EmbeddingRequest,
    SleepRequest,
    TokenizeRequest,
    WeightsRequest,
)
from dovetail.serve.respond import Whole
from dovetail.serve.service import Service

ANSWERS_WITHIN = 5.0  # seconds, of an engine that is well
T = TypeVar("T")


def _json(content: Any) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")


def models(service: Service) -> APIRouter:
    router = APIRouter()

    def describe(name: str) -> dict[str, Any]:
        return {
            "id": name, "object": "model", "created": service.created, "owned_by": "dovetail", "root": service.name,
            "max_model_len": service.max_len, "vocab_size": service.backend.info.vocab,
        }  # fmt: skip

    @router.get("/v1/models")
    async def list_models() -> Response:
        return _json({"object": "list", "data": [describe(name) for name in service.config.names]})

    @router.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Response:
        service.check_model(name)
        return _json(describe(name))

    return router


def tokens(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> Response:
        """The tokens of a prompt, or of messages as the model's template writes them."""
        service.check_model(body.model)
        return _json(await asyncio.to_thread(_tokenize, service, body))

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> Response:
        service.check_model(body.model)
        try:
            text = await asyncio.to_thread(service.tokenizer.decode, body.tokens, body.skip_special_tokens)
        except ValueError as error:
            raise bad(str(error), "tokens") from None
        return _json({"prompt": text})

    @router.post("/v1/embeddings")
    async def embeddings(body: EmbeddingRequest) -> Response:
        """One vector a text, pooled from the model's last hidden states."""
        service.check_model(body.model)
        return Whole(_embeddings(service, body))

    return router


def _tokenize(service: Service, body: TokenizeRequest) -> dict[str, Any]:
    if (body.prompt is None) == (body.messages is None):
        raise bad("expected one of prompt and messages", "prompt")
    if body.prompt is not None:
        for name in ("tools", "chat_template", "chat_template_kwargs"):
            if getattr(body, name) is not None:
                raise bad(f"{name} goes with messages, not with a prompt", name)
        found = service.prompts.encode(body.prompt, body.add_special_tokens is not False)
    else:
        found = service.prompts.encode(service.prompts.text(body.conversation()), bool(body.add_special_tokens))
    texts = [service.tokenizer.token(token) for token in found] if body.return_token_strs else None
    return {"count": len(found), "max_model_len": service.max_len, "tokens": found, "token_strs": texts}


async def _embeddings(service: Service, body: EmbeddingRequest) -> dict[str, Any]:
    def encode() -> list[list[int]]:
        return [service.prompts.encode(each) if isinstance(each, str) else each for each in body.inputs()]

    prompts = await asyncio.to_thread(encode)
    most = min(service.max_len, service.config.limits.prompt_tokens or service.max_len)
    for prompt in prompts:
        if not prompt:
            raise bad("input is empty: give at least one token", "input")
        if len(prompt) > most:
            raise bad(f"input: a text has {len(prompt)} tokens, and this server takes at most {most}", "input")
    service.inflight.check(len(prompts))
    try:
        vectors = await service.backend.embed(prompts, body.pooling)
    except ValueError as error:
        raise refused(error) from None
    form = _base64 if body.encoding_format == "base64" else list
    data = [{"object": "embedding", "index": i, "embedding": form(vector)} for i, vector in enumerate(vectors)]
    total = sum(map(len, prompts))
    usage = {"prompt_tokens": total, "total_tokens": total}
    return {"object": "list", "data": data, "model": service.name, "usage": usage}


def _base64(vector: Any) -> str:
    return base64.b64encode(np.asarray(vector, "<f4").tobytes()).decode()


def state(service: Service) -> APIRouter:
    router = APIRouter()

    @router.get("/health")
    @router.get("/ping")
    async def health() -> Response:
        """200 only when the engine answers."""
        stats = await _answered(service)
        return _json({"status": "ok", "weights_version": stats.weights_version, "sleeping": stats.sleeping})

    @router.get("/load")
    async def load() -> Response:
        return _json({"server_load": len(service.inflight)})

    @router.get("/version")
    async def version() -> Response:
        from dovetail import __version__

        return _json({"version": __version__})

    @router.get("/metrics")
    async def metrics() -> Response:
        try:
            stats = await _answered(service)
        except ApiError:
            stats = None
        return Response(service.metrics.text(stats), media_type="text/plain; version=0.0.4; charset=utf-8")

    return router


async def _answered(service: Service) -> Any:
    why = service.backend.trouble
    if why is None:
        try:
            return await asyncio.wait_for(service.backend.stats(), ANSWERS_WITHIN)
        except (EngineDied, TimeoutError):
            why = "the engine does not answer"
    raise ApiError(503, why, code="engine_unavailable", retry_after=5)


def profile(service: Service, folder: str) -> APIRouter:
    router = APIRouter()

    @router.post("/start_profile")
    async def start_profile() -> Response:
        """Write a trace for xprof to the server's --profile-dir, until /stop_profile."""
        await _done(service.backend.start_profile(folder))
        return _json({"status": "profiling"})

    @router.post("/stop_profile")
    async def stop_profile() -> Response:
        await _done(service.backend.stop_profile())
        return _json({"status": "written"})

    return router


def admin(service: Service) -> APIRouter:
    """For reinforcement learning and operations. The gate asks for the admin key before any of these."""
    router, backend = APIRouter(), service.backend

    @router.post("/sleep")
    async def sleep(body: SleepRequest | None = None) -> Response:
        """Give the device's memory back; level 2 drops the weights too."""
        await _done(backend.sleep((body or SleepRequest()).level))
        return _json({"status": "asleep"})

    @router.post("/wake_up")
    async def wake_up() -> Response:
        await _done(backend.wake())
        return _json({"status": "awake"})

    @router.post("/pause")
    async def pause() -> Response:
        """No more steps until /resume; requests wait."""
        await _done(backend.pause())
        return _json({"status": "paused"})

    @router.post("/resume")
    async def resume() -> Response:
        await _done(backend.resume())
        return _json({"status": "running"})

    @router.post("/reset_prefix_cache")
    async def reset_prefix_cache() -> Response:
        await _done(backend.reset_prefix_cache())
        return _json({"status": "empty"})

    @router.post("/update_weights")
    async def update_weights(body: WeightsRequest) -> Response:
        """Load weights from a path of the server's machine, between two steps."""
        return _json({"weights_version": await _done(backend.update_weights(body.path))})

    return router


async def _done(call: Awaitable[T]) -> T:
    try:
        return await call
    except ValueError as error:
        raise refused(error) from None
