"""/v1/embeddings and /v1/score: a vector per text from the model's hidden states, and a reward model's score."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

import msgspec
import numpy as np
from fastapi import APIRouter, Response
from pydantic import Field

from dovetail.core.errors import RequestError, UserError
from dovetail.serve.api.chat import ChatTool, Message, plain_messages, plain_tools
from dovetail.serve.api.delivery import JsonAnswer, encode
from dovetail.serve.api.requests import LABELS, Body, PromptField, RefusedField, prompt_list
from dovetail.serve.talk.prompts import Conversation
from dovetail.serve.talk.service import Service

Messages = Annotated[list[Message], Field(min_length=1)]
Conversations = Annotated[list[Messages], Field(min_length=1, max_length=2048)]


class EmbeddingRequest(Body):
    """The body of /v1/embeddings."""

    model: str | None = None
    input: PromptField
    encoding_format: Literal["float", "base64"] = "float"
    pooling: Literal["mean", "last"] = "mean"  # of the last hidden states
    refused: ClassVar = {"dimensions": RefusedField("the model's vectors cannot be shortened")}
    ignored: ClassVar = LABELS


class ScoreRequest(Body):
    """The body of /v1/score: `input` with texts or token ids, or `messages` with one conversation or several.

    Each conversation ends with the answer to be scored.
    """

    model: str | None = None
    input: PromptField | None = None
    messages: Messages | Conversations | None = None
    tools: list[ChatTool] | None = None  # of all conversations
    ignored: ClassVar = LABELS

    def conversations(self) -> list[Conversation]:
        """Return the conversations, checked."""
        given: list[Any] = list(self.messages or ())
        one = bool(given) and isinstance(given[0], Message)
        paths = ["messages"] if one else [f"messages.{i}" for i in range(len(given))]
        return [
            Conversation(
                messages=plain_messages(each, where), tools=plain_tools(self.tools), add_generation_prompt=False
            )
            for each, where in zip([given] if one else given, paths, strict=True)
        ]

    def check(self) -> str:
        """Return the name of the field that is given, `input` or `messages`."""
        if (self.input is None) == (self.messages is None):
            raise RequestError("exactly one of `input` and `messages` must be given", param="input")
        if self.tools is not None and self.messages is None:
            raise RequestError("`tools` requires `messages`, got `input`", param="tools")
        return "messages" if self.input is None else "input"


def routes(service: Service) -> APIRouter:
    """Return the routes /v1/embeddings, /v1/score and /score."""
    router = APIRouter()

    @router.post("/v1/embeddings")
    async def embeddings(body: EmbeddingRequest) -> Response:
        """Return one vector per text, pooled from the model's last hidden states."""
        return JsonAnswer(_embeddings(service, body, service.adapter_of(body.model)))

    @router.post("/v1/score")
    @router.post("/score", include_in_schema=False)
    async def score(body: ScoreRequest) -> Response:
        """Return one number per text or conversation, read at its last token."""
        return JsonAnswer(_score(service, body, service.adapter_of(body.model)))

    return router


async def _embeddings(service: Service, body: EmbeddingRequest, adapter: str | None) -> dict[str, Any]:
    prompts = await _read(service, lambda most: _tokens(service, prompt_list(body.input, "input"), most), "input")
    with _param("input"):
        vectors = await service.forward(service.engine.embed(prompts, body.pooling, adapter), len(prompts))
    form = _base64 if body.encoding_format == "base64" else list
    data = []
    for i, vector in enumerate(vectors):  # encoded one by one: thousands at once would hold the event loop for a second
        data.append(msgspec.Raw(encode({"object": "embedding", "index": i, "embedding": form(vector)})))
        await asyncio.sleep(0)
    return {"object": "list", "data": data, "model": service.name_of(adapter), "usage": _usage(prompts)}


def _base64(vector: Any) -> str:
    return base64.b64encode(np.asarray(vector, "<f4").tobytes()).decode()


async def _score(service: Service, body: ScoreRequest, adapter: str | None) -> dict[str, Any]:
    name = body.check()

    def encode(most: int) -> list[list[int]]:
        if name == "input":
            return _tokens(service, prompt_list(body.input, name), most)
        for talk in body.conversations():
            for image in talk.images:
                message = f"{image.where} is not supported: only requests that generate text take images"
                raise RequestError(message, param=image.where, code="refused_field")
        texts = (service.prompts.text(replace(talk, adapter=adapter)) for talk in body.conversations())
        return [service.prompts.encode(text, add_special=False, most=most, rendered=True) for text in texts]

    prompts = await _read(service, encode, name)
    with _param(name):
        scores = await service.forward(service.engine.score(prompts, adapter), len(prompts))
    data = [{"object": "score", "index": i, "score": score} for i, score in enumerate(scores)]
    return {"object": "list", "data": data, "model": service.name_of(adapter), "usage": _usage(prompts)}


async def _read(service: Service, encode: Callable[[int], list[list[int]]], name: str) -> list[list[int]]:
    """Return the tokens of a request's inputs, checked.

    Args:
        service: The service, which is ready for the inputs afterwards.
        encode: Called in a thread with the most tokens that an input may have.
        name: The request's field, for errors.
    """
    most = min(service.max_len, service.config.limits.max_prompt_tokens or service.max_len)
    prompts = await asyncio.to_thread(encode, most)
    for prompt in prompts:
        if not prompt:
            raise RequestError(f"`{name}` must not be empty: give at least one token", param=name)
        if len(prompt) > most:
            raise RequestError(f"`{name}` must have at most {most} tokens per text, got {len(prompt)}", param=name)
    service.check_ready()
    service.inflight.check([1] * len(prompts))
    return prompts


def _tokens(service: Service, inputs: list[Any], most: int) -> list[list[int]]:
    """Tokenize the texts, and leave token ids as they are."""
    return [service.prompts.encode(each, most=most) if isinstance(each, str) else each for each in inputs]


@contextmanager
def _param(name: str) -> Iterator[None]:
    """Name the request's field in errors of the engine, which calls it `prompt`."""
    try:
        yield
    except UserError as error:
        raise RequestError(f"{name}: {str(error).removeprefix('prompt: ')}", param=name, code=error.code) from None


def _usage(prompts: list[list[int]]) -> dict[str, int]:
    total = sum(map(len, prompts))
    return {"prompt_tokens": total, "total_tokens": total}
