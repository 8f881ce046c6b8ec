"""/v1/embeddings: one vector per text, pooled from the model's last hidden states."""

from __future__ import annotations

import asyncio
import base64
from typing import Any, ClassVar, Literal

import msgspec
import numpy as np
from fastapi import APIRouter, Response

from dovetail.core.errors import UserError
from dovetail.serve.api.completions_request import Batch, TokenBatch, as_many
from dovetail.serve.api.delivery import JsonAnswer, encode
from dovetail.serve.api.fields import Body, Refused
from dovetail.serve.api.generation_request import LABELS, Tokens
from dovetail.serve.api.inputs import encoded, read_inputs, refused, usage
from dovetail.serve.talk.service import Service


class EmbeddingRequest(Body):
    model: str | None = None
    input: str | Batch | Tokens | TokenBatch
    encoding_format: Literal["float", "base64"] = "float"
    pooling: Literal["mean", "last"] = "mean"  # of the last hidden states
    refused: ClassVar = {"dimensions": Refused("the model was not trained to be cut short")}
    ignored: ClassVar = LABELS

    def inputs(self) -> list[Any]:
        return as_many(self.input, "input")


def routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/embeddings")
    async def embeddings(body: EmbeddingRequest) -> Response:
        """One vector per text, pooled from the model's last hidden states."""
        return JsonAnswer(_embeddings(service, body, service.adapter_of(body.model)))

    return router


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
