"""Routes that generate nothing: models and adapters, health, load, version, metrics, and the tokenizer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from pydantic import Field

from dovetail import __version__
from dovetail.core.errors import RequestError, UserError
from dovetail.engine.interface import EngineDied, EngineStats
from dovetail.serve.api.chat import ChatTool, Message, plain_messages, plain_tools
from dovetail.serve.api.delivery import json_answer, wanted
from dovetail.serve.api.requests import Body, Flag, Tokens
from dovetail.serve.errors import RETRY_SECONDS, ApiError
from dovetail.serve.talk.prompts import Conversation
from dovetail.serve.talk.service import Service

ANSWER_SECONDS = 5.0  # in which a healthy engine answers


def routes(service: Service) -> APIRouter:
    """Return /v1/models, /health, /ping, /ready, /load, /version, /metrics, /tokenize and /detokenize."""
    router = _token_routes(service)

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
        "input_modalities": ["text"] if service.images is None else ["text", "image"],
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


# --- the tokenizer ----------------------------------------------------------------------------------------------------


class TokenizeRequest(Body):
    """The body of /tokenize: a prompt, or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    tools: list[ChatTool] | None = None
    add_special_tokens: Flag | None = None
    add_generation_prompt: Flag = True
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: Flag = False

    def conversation(self) -> Conversation:
        """Return the conversation of `messages`, checked."""
        return Conversation(
            messages=plain_messages(self.messages),
            tools=plain_tools(self.tools),
            template=self.chat_template,
            template_kwargs=self.chat_template_kwargs or {},
            add_generation_prompt=self.add_generation_prompt,
            add_special_tokens=bool(self.add_special_tokens),
        )


class DetokenizeRequest(Body):
    """The body of /detokenize."""

    model: str | None = None
    tokens: Tokens
    skip_special_tokens: Flag = False


def _token_routes(service: Service) -> APIRouter:
    """Return the routes /tokenize and /detokenize."""
    router = APIRouter()

    @router.post("/tokenize")
    async def tokenize(body: TokenizeRequest, http: Request) -> Response:
        """Return the tokens of a prompt, or of messages as the model's template writes them."""
        adapter = service.adapter_of(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise RequestError("exactly one of `prompt` and `messages` must be given", param="prompt")
        if body.prompt is not None:
            return json_answer(await asyncio.to_thread(_tokenize_text, service, body, body.prompt))
        talk = replace(body.conversation(), adapter=adapter)
        images = await wanted(http, service.load_images(talk))
        found = await service.in_thread(talk.template, service.prompts.tokens, talk, images)
        return json_answer(_tokenized(service, body, found.tokens))

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> Response:
        """Return the text of tokens."""
        service.adapter_of(body.model)
        try:
            text = await asyncio.to_thread(service.tokenizer.decode, body.tokens, body.skip_special_tokens)
        except UserError as error:
            raise RequestError(str(error), param="tokens") from None
        return json_answer({"prompt": text})

    return router


def _tokenize_text(service: Service, body: TokenizeRequest, prompt: str) -> dict[str, Any]:
    for name in ("tools", "chat_template", "chat_template_kwargs"):
        if getattr(body, name) is not None:
            raise RequestError(f"`{name}` requires `messages`, got `prompt`", param=name)
    return _tokenized(service, body, service.prompts.encode(prompt, body.add_special_tokens is not False))


def _tokenized(service: Service, body: TokenizeRequest, found: Sequence[int]) -> dict[str, Any]:
    texts = [service.tokenizer.token(token) for token in found] if body.return_token_strs else None
    return {"count": len(found), "max_model_len": service.max_len, "tokens": found, "token_strs": texts}
