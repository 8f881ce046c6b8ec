"""/tokenize and /detokenize."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Response
from pydantic import Field

from dovetail.core.errors import RequestError, UserError
from dovetail.serve.api.chat import ChatTool, Message, plain_messages, plain_tools
from dovetail.serve.api.delivery import json_answer
from dovetail.serve.api.requests import Body, Flag, Tokens
from dovetail.serve.talk.prompts import Conversation
from dovetail.serve.talk.service import Service


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
        )


class DetokenizeRequest(Body):
    """The body of /detokenize."""

    model: str | None = None
    tokens: Tokens
    skip_special_tokens: Flag = False


def routes(service: Service) -> APIRouter:
    """Return the routes /tokenize and /detokenize."""
    router = APIRouter()

    @router.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> Response:
        """Return the tokens of a prompt, or of messages as the model's template writes them."""
        service.adapter_of(body.model)
        return json_answer(await service.in_thread(body.chat_template, _tokenize, service, body))

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


def _tokenize(service: Service, body: TokenizeRequest) -> dict[str, Any]:
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("exactly one of `prompt` and `messages` must be given", param="prompt")
    if body.prompt is not None:
        for name in ("tools", "chat_template", "chat_template_kwargs"):
            if getattr(body, name) is not None:
                raise RequestError(f"`{name}` requires `messages`, got `prompt`", param=name)
        found = service.prompts.encode(body.prompt, body.add_special_tokens is not False)
    else:
        talk = replace(body.conversation(), adapter=service.adapter_of(body.model))
        found = service.prompts.encode(service.prompts.text(talk), bool(body.add_special_tokens), rendered=True)
    texts = [service.tokenizer.token(token) for token in found] if body.return_token_strs else None
    return {"count": len(found), "max_model_len": service.max_len, "tokens": found, "token_strs": texts}
