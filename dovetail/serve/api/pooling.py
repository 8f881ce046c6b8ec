"""Inputs that are read and not answered with text, for /v1/embeddings and /v1/score: their tokens, checked.

/v1/embeddings: one vector per text, pooled from the model's last hidden states.

/score and /v1/score: one number per text or conversation, by a reward model."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

import msgspec
import numpy as np
from fastapi import APIRouter, Response
from pydantic import Field

from dovetail.core.errors import UserError
from dovetail.serve.api.chat import ChatTool, Message
from dovetail.serve.api.completions import Batch, TokenBatch, as_many
from dovetail.serve.api.delivery import JsonAnswer, encode
from dovetail.serve.api.requests import LABELS, Body, RefusedField, Tokens
from dovetail.serve.errors import bad
from dovetail.serve.talk.prompts import Conversation
from dovetail.serve.talk.service import Service


async def read_inputs(service: Service, encode: Callable[[int], list[list[int]]], name: str) -> list[list[int]]:
    """What `encode` gives, in a thread, when it is told the most tokens that an input may have. `name`: the request's
    field, for a refusal. The server is ready for them when this returns."""
    most = min(service.max_len, service.config.limits.max_prompt_tokens or service.max_len)
    prompts = await asyncio.to_thread(encode, most)
    for prompt in prompts:
        if not prompt:
            raise bad(f"{name} is empty: give at least one token", name)
        if len(prompt) > most:
            raise bad(f"{name}: a text has {len(prompt)} tokens, and this server takes at most {most}", name)
    service.check_ready()
    service.inflight.check([1] * len(prompts))
    return prompts


def encoded(service: Service, inputs: list[Any], most: int) -> list[list[int]]:
    """Texts tokenized, token ids as they came."""
    return [service.prompts.encode(each, most=most) if isinstance(each, str) else each for each in inputs]


def refused(error: ValueError, name: str) -> Exception:
    """What the engine would not take, as the field's fault."""
    return bad(f"{name}: {str(error).removeprefix('prompt: ')}", name)


def usage(prompts: list[list[int]]) -> dict[str, int]:
    total = sum(map(len, prompts))
    return {"prompt_tokens": total, "total_tokens": total}


class EmbeddingRequest(Body):
    model: str | None = None
    input: str | Batch | Tokens | TokenBatch
    encoding_format: Literal["float", "base64"] = "float"
    pooling: Literal["mean", "last"] = "mean"  # of the last hidden states
    refused: ClassVar = {"dimensions": RefusedField("the model was not trained to be cut short")}
    ignored: ClassVar = LABELS

    def inputs(self) -> list[Any]:
        return as_many(self.input, "input")


async def _embeddings(service: Service, body: EmbeddingRequest, adapter: str | None) -> dict[str, Any]:
    prompts = await read_inputs(service, lambda most: encoded(service, body.inputs(), most), "input")
    try:
        vectors = await service.forward(service.backend.embed(prompts, body.pooling, adapter), len(prompts))
    except UserError as error:
        raise refused(error, "input") from None
    form = _base64 if body.encoding_format == "base64" else list
    data = []
    for i, vector in enumerate(vectors):  # encoded one by one: thousands at once would hold the event loop for a second
        data.append(msgspec.Raw(encode({"object": "embedding", "index": i, "embedding": form(vector)})))
        await asyncio.sleep(0)
    return {"object": "list", "data": data, "model": service.name_of(adapter), "usage": usage(prompts)}


def _base64(vector: Any) -> str:
    return base64.b64encode(np.asarray(vector, "<f4").tobytes()).decode()


Messages = Annotated[list[Message], Field(min_length=1)]
Conversations = Annotated[list[Messages], Field(min_length=1, max_length=2048)]


class ScoreRequest(Body):
    """Texts or token ids as `input`, or `messages`: one conversation or several, each with the answer to be judged."""

    model: str | None = None
    input: str | Batch | Tokens | TokenBatch | None = None
    messages: Messages | Conversations | None = None
    tools: list[ChatTool] | None = None  # of all conversations
    ignored: ClassVar = LABELS

    def conversations(self) -> list[Conversation]:
        tools = [tool.model_dump(exclude_none=True) for tool in self.tools or ()]
        given: list[Any] = list(self.messages or ())
        one = bool(given) and isinstance(given[0], Message)
        where = {0: "messages"} if one else {i: f"messages.{i}" for i in range(len(given))}
        return [
            Conversation(
                messages=[message.plain(f"{where[i]}.{j}") for j, message in enumerate(each)], tools=tools,
                add_generation_prompt=False,
            )
            for i, each in enumerate([given] if one else given)
        ]  # fmt: skip

    def check(self) -> str:
        """The name of the field that it brings."""
        if (self.input is None) == (self.messages is None):
            raise bad("expected one of input and messages", "input")
        if self.tools is not None and self.messages is None:
            raise bad("tools goes with messages, not with input", "tools")
        return "messages" if self.input is None else "input"


async def _score(service: Service, body: ScoreRequest, adapter: str | None) -> dict[str, Any]:
    name = body.check()

    def encode(most: int) -> list[list[int]]:
        if name == "input":
            return encoded(service, as_many(body.input, name), most)
        texts = (service.prompts.text(replace(talk, adapter=adapter)) for talk in body.conversations())
        return [service.prompts.encode(text, add_special=False, most=most, rendered=True) for text in texts]

    prompts = await read_inputs(service, encode, name)
    try:
        scores = await service.forward(service.backend.score(prompts, adapter), len(prompts))
    except UserError as error:
        raise refused(error, name) from None
    data = [{"object": "score", "index": i, "score": score} for i, score in enumerate(scores)]
    return {"object": "list", "data": data, "model": service.name_of(adapter), "usage": usage(prompts)}


def routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/embeddings")
    async def embeddings(body: EmbeddingRequest) -> Response:
        """One vector per text, pooled from the model's last hidden states."""
        return JsonAnswer(_embeddings(service, body, service.adapter_of(body.model)))

    @router.post("/v1/score")
    @router.post("/score", include_in_schema=False)
    async def score(body: ScoreRequest) -> Response:
        """One number per text or conversation, read at its last token."""
        return JsonAnswer(_score(service, body, service.adapter_of(body.model)))

    return router
