"""/v1/chat/completions: the request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from dovetail.engine.request.params import SamplingParams, Structured
from dovetail.serve.api.cut_json import read_cut_off
from dovetail.serve.api.fields import Body, Flag, Int, Refused
from dovetail.serve.api.generation_request import GenerationRequest, TopLogprobs
from dovetail.serve.errors import bad
from dovetail.serve.talk.prompts import EFFORTS, Conversation

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]{1,128}$")]
_TEXT_ONLY = "the model reads text only"


class Part(Body):
    """A part of a message's content."""

    type: Literal["text", "refusal"]
    text: str | None = None
    refusal: str | None = None
    refused: ClassVar = {
        name: Refused(_TEXT_ONLY)
        for name in ("image_url", "input_audio", "audio_url", "video_url", "file", "image", "image_embeds")
    }
    ignored: ClassVar = {"cache_control": "every prefix is cached"}


class CalledFunction(Body):
    name: str
    arguments: str = "{}"
    ignored: ClassVar = {"parsed_arguments": "arguments say the same"}


class FunctionCall(Body):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: Int | None = None  # in a stream's deltas, which some clients send back as they came


class Message(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[FunctionCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    refused: ClassVar = {
        "audio": Refused(_TEXT_ONLY),
        "function_call": Refused("send tool_calls, its name since 2023"),
    }
    ignored: ClassVar = {  # what clients and gateways add to an answer that comes back in the history
        "annotations": "templates show a message's text",
        "parsed": "content says the same",
        "provider_specific_fields": "they are another server's",
    }

    def plain(self, where: str) -> dict[str, Any]:
        """The message as templates read it."""
        content = text_of(self.content, where)
        if content is None and self.refusal is not None:
            content = self.refusal
        found: dict[str, Any] = {"role": self.role, "content": content}
        for key in ("name", "tool_call_id", "reasoning_content", "reasoning"):
            if getattr(self, key) is not None:
                found[key] = getattr(self, key)
        if self.tool_calls:
            found["tool_calls"] = [
                _plain_call(call, f"{where}.tool_calls.{i}") for i, call in enumerate(self.tool_calls)
            ]
        elif content is None and self.role == "assistant":
            found["content"] = ""  # an answer that was cut off before its text, or refused
        elif content is None:
            raise bad(f"{where}.content is missing", f"{where}.content", "missing_required_parameter")
        return found


class Function(Body):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Flag | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function
    refused: ClassVar = {"custom": Refused("a tool is a function with JSON arguments")}


class NamedFunction(Body):
    name: str


class NamedChoice(Body):
    type: Literal["function"]
    function: NamedFunction
    refused: ClassVar = {"allowed_tools": Refused("send only the tools that are allowed")}


class JsonSchema(Body):
    name: str
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: Flag | None = None  # a schema is always enforced


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    refused: ClassVar = {"grammar": Refused("send structured_outputs with a grammar")}

    def structured(self) -> Structured | None:
        if self.type == "text":
            return None
        if self.type == "json_object":
            return Structured(json="object")
        if self.json_schema is None:
            raise bad("response_format.json_schema is missing", "response_format.json_schema")
        return Structured(json=self.json_schema.schema_ or "object")


class ChatRequest(GenerationRequest):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: Int | None = None
    max_completion_tokens: Int | None = None
    logprobs: Flag = False
    top_logprobs: TopLogprobs | None = None
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: Flag = True
    reasoning_effort: Literal[EFFORTS] | None = None  # type: ignore[valid-type]
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: Flag = True
    continue_final_message: Flag = False
    add_special_tokens: Flag = False
    include_reasoning: Flag = True

    refused: ClassVar = {
        **GenerationRequest.refused,
        "audio": Refused(_TEXT_ONLY),
        "modalities": Refused(_TEXT_ONLY, (["text"],)),
        "web_search_options": Refused("this server does not search"),
        "moderation": Refused("there is none"),
        "functions": Refused("send tools, their name since 2023"),
        "function_call": Refused("send tool_choice, its name since 2023"),
        "mm_processor_kwargs": Refused(_TEXT_ONLY),
    }
    ignored: ClassVar = {
        **GenerationRequest.ignored,
        "verbosity": "templates have no place for it: ask for it in the prompt",
        "prediction": "it would not make the answer come sooner",
    }

    def params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        self.check_stream()
        if self.top_logprobs is not None and not self.logprobs:
            raise bad("top_logprobs needs logprobs: true", "top_logprobs")
        # max_tokens is the old name; with both, the new one counts, as in vLLM.
        most = self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
        structured = self.response_format.structured() if self.response_format else None
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return self.sampling(defaults, most, logprobs=logprobs, structured=structured)

    def conversation(self) -> Conversation:
        messages = [message.plain(f"messages.{i}") for i, message in enumerate(self.messages)]
        named = self.tool_choice.function.name if isinstance(self.tool_choice, NamedChoice) else None
        kwargs = dict(self.chat_template_kwargs or {})
        if self.documents is not None:
            kwargs["documents"] = self.documents
        if (
            self.continue_final_message
            and self.add_generation_prompt
            and "add_generation_prompt" in self.model_fields_set
        ):
            raise bad("continue_final_message goes with add_generation_prompt: false", "continue_final_message")
        return Conversation(
            messages=messages,
            tools=[tool.model_dump(exclude_none=True) for tool in self.tools or ()],
            choice="named" if named else self.tool_choice or "auto",  # type: ignore[arg-type]
            named=named,
            parallel=self.parallel_tool_calls,
            template=self.chat_template,
            template_kwargs=kwargs,
            effort=self.reasoning_effort,
            add_generation_prompt=self.add_generation_prompt and not self.continue_final_message,
            continue_final_message=self.continue_final_message,
            add_special_tokens=self.add_special_tokens,
        )


def text_of(content: str | list[Part] | None, where: str) -> str | None:
    """Parts become lines of one text: few templates take parts."""
    if not isinstance(content, list):
        return content
    texts = []
    for i, part in enumerate(content):
        text = part.text if part.type == "text" else part.refusal
        if text is None:
            raise bad(f"{where}.content.{i}.{part.type} is missing", f"{where}.content.{i}")
        texts.append(text)
    return "\n".join(texts)


def _plain_call(call: FunctionCall, where: str) -> dict[str, Any]:
    """Templates take arguments as an object and write them in the model's own notation."""
    arguments = read_cut_off(call.function.arguments or "{}")  # a call that max_tokens cut off comes back as it was
    if arguments is None:
        message = f"{where}.function.arguments must be the text of a JSON object, or its beginning"
        raise bad(message, f"{where}.function.arguments")
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}
