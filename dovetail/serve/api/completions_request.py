"""/v1/completions: the request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field

from dovetail.engine.request.params import SamplingParams
from dovetail.serve.api.chat_request import ResponseFormat
from dovetail.serve.api.fields import Flag, Int, Refused
from dovetail.serve.api.generation_request import GenerationRequest, Tokens
from dovetail.serve.errors import bad

Batch = Annotated[list[str], Field(min_length=1, max_length=2048)]
TokenBatch = Annotated[list[Tokens], Field(min_length=1, max_length=2048)]


class CompletionRequest(GenerationRequest):
    prompt: str | Batch | Tokens | TokenBatch
    max_tokens: Int | None = None
    logprobs: Int | None = None
    echo: Flag = False
    response_format: ResponseFormat | None = None
    add_special_tokens: Flag = True

    refused: ClassVar = {
        **GenerationRequest.refused,
        "suffix": Refused("the model continues a text, it does not fill in", ("",)),
        "prompt_embeds": Refused("send text or token ids"),
        "max_completion_tokens": Refused("it is called max_tokens on this route"),
    }

    def params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """With `echo` and max_tokens 0, which only scores the prompt, one token is generated and not shown."""
        self.check_stream()
        if self.max_tokens == 0 and not self.echo:
            raise bad("max_tokens must be at least 1; 0 is for echo", "max_tokens")
        most = 16 if self.max_tokens is None else self.max_tokens or 1
        scored = self.logprobs if self.echo and self.prompt_logprobs is None else None
        structured = self.response_format.structured() if self.response_format else None
        return self.sampling(defaults, most, logprobs=self.logprobs, structured=structured, prompt_logprobs=scored)

    def prompts(self) -> list[Any]:
        return as_many(self.prompt, "prompt")


def as_many(value: Any, name: str) -> list[Any]:
    """One prompt or several, each of them text or token ids, as a list."""
    many = [value] if isinstance(value, str) or (value and isinstance(value[0], int)) else value
    if not all(many) or not many:
        raise bad(f"{name} is empty: give at least one token", name)
    return many
