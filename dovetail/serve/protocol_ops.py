"""The small routes: what is asked of tokenize, detokenize, embeddings, and of the engine itself."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from dovetail.serve.fields import Body, Flag, Int, Refused
from dovetail.serve.prompts import Conversation
from dovetail.serve.protocol_chat import Message, Tool
from dovetail.serve.protocol_completions import Batch, TokenBatch, as_many
from dovetail.serve.protocol_sampling import Tokens


class TokenizeRequest(Body):
    """A prompt, or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    tools: list[Tool] | None = None
    add_special_tokens: Flag | None = None
    add_generation_prompt: Flag = True
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: Flag = False

    def conversation(self) -> Conversation:
        return Conversation(
            messages=[message.plain(f"messages.{i}") for i, message in enumerate(self.messages or ())],
            tools=[tool.model_dump(exclude_none=True) for tool in self.tools or ()],
            template=self.chat_template,
            template_kwargs=self.chat_template_kwargs or {},
            add_generation_prompt=self.add_generation_prompt,
        )


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: Tokens
    skip_special_tokens: Flag = False


class EmbeddingRequest(Body):
    model: str | None = None
    input: str | Batch | Tokens | TokenBatch
    encoding_format: Literal["float", "base64"] = "float"
    pooling: Literal["mean", "last"] = "mean"  # of the last hidden states
    user: str | None = None
    refused: ClassVar = {"dimensions": Refused("the model was not trained to be cut short")}

    def inputs(self) -> list[Any]:
        return as_many(self.input, "input")


class SleepRequest(Body):
    level: Annotated[Int, Field(ge=1, le=2)] = 1


class WeightsRequest(Body):
    path: Annotated[str, Field(min_length=1)]
