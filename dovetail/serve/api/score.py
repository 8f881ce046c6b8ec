"""/score and /v1/score: one number per text or conversation, by a reward model."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, ClassVar

from fastapi import APIRouter, Response
from pydantic import Field

from dovetail.core.errors import UserError
from dovetail.serve.api.chat_request import Message, Tool
from dovetail.serve.api.completions_request import Batch, TokenBatch, as_many
from dovetail.serve.api.delivery import JsonAnswer
from dovetail.serve.api.fields import Body
from dovetail.serve.api.generation_request import LABELS, Tokens
from dovetail.serve.api.inputs import encoded, read_inputs, refused, usage
from dovetail.serve.errors import bad
from dovetail.serve.talk.prompts import Conversation
from dovetail.serve.talk.service import Service

Messages = Annotated[list[Message], Field(min_length=1)]
Conversations = Annotated[list[Messages], Field(min_length=1, max_length=2048)]


class ScoreRequest(Body):
    """Texts or token ids as `input`, or `messages`: one conversation or several, each with the answer to be judged."""

    model: str | None = None
    input: str | Batch | Tokens | TokenBatch | None = None
    messages: Messages | Conversations | None = None
    tools: list[Tool] | None = None  # of all conversations
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


def routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/score")
    @router.post("/score", include_in_schema=False)
    async def score(body: ScoreRequest) -> Response:
        """One number per text or conversation, read at its last token."""
        return JsonAnswer(_score(service, body, service.adapter_of(body.model)))

    return router


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
