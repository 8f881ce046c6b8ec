"""/v1/messages: the request, in Anthropic's form."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from dovetail.core.errors import UserError
from dovetail.engine.request.params import SamplingParams, Structured
from dovetail.io.tool_formats.formats import SHORT_ID_LENGTH
from dovetail.serve.api.chat_request import Name
from dovetail.serve.api.fields import Body, Flag, Int, Num, Refused, StopList
from dovetail.serve.api.generation_request import LABELS
from dovetail.serve.errors import bad, refused
from dovetail.serve.talk.prompts import Conversation

_TEXT_ONLY = Refused("the model reads text only")


class CacheControl(Body):
    """Where a prefix may be cached. Here every prefix is cached, so it is always accepted."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class Block(Body):
    type: Literal["text", "thinking", "redacted_thinking", "tool_use", "tool_result"]
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    data: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[Block] | None = None
    is_error: Flag | None = None
    cache_control: CacheControl | None = None
    refused: ClassVar = {
        "source": _TEXT_ONLY,
        "citations": Refused("answers have none", ({"enabled": False},)),
        "caller": Refused("calls are the model's own", ({"type": "direct"},)),
    }


class Turn(Body):
    role: Literal["user", "assistant"]
    content: str | list[Block]

    def plain(self, where: str) -> list[dict[str, Any]]:
        """A turn in OpenAI's chat shape: tool results are separate messages there, and come first."""
        if isinstance(self.content, str):
            return [{"role": self.role, "content": self.content}]
        results, texts, message = [], [], {"role": self.role}
        for i, block in enumerate(self.content):
            here = f"{where}.content.{i}"
            if block.type == "text":
                texts.append(block.need("text", here))
            elif block.type == "tool_result" and self.role == "user":
                results.append(_tool_result(block, here))
            elif block.type == "tool_use" and self.role == "assistant":
                message.setdefault("tool_calls", []).append(_tool_call(block, here))  # type: ignore[union-attr]
            elif block.type == "thinking" and self.role == "assistant":
                message["reasoning_content"] = block.need("thinking", here)
            elif block.type != "redacted_thinking":
                raise bad(f"{here}.type: {block.type} does not belong in a {self.role}'s message", f"{here}.type")
        if texts or "tool_calls" in message or not results:
            results.append({**message, "content": "\n".join(texts)})
        return results


class MessageTool(Body):
    name: Name
    type: Literal["custom"] = "custom"
    description: str | None = None
    input_schema: dict[str, Any]
    strict: Flag | None = None
    cache_control: CacheControl | None = None
    refused: ClassVar = {
        "defer_loading": Refused("tools are read at once", (False,)),
        "input_examples": Refused("put them in the description", ([],)),
        "allowed_callers": Refused("the model calls", (["direct"],)),
        "eager_input_streaming": Refused("arguments are always streamed", (True,)),
    }

    def chat(self) -> dict[str, Any]:
        function = {"name": self.name, "parameters": self.input_schema}
        more = {"description": self.description, "strict": self.strict}
        return {"type": "function", "function": function | {k: v for k, v in more.items() if v is not None}}


class MessageToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: Flag = False


class Thinking(Body):
    type: Literal["disabled", "enabled", "adaptive"]
    refused: ClassVar = {
        "budget_tokens": Refused("thinking is not counted separately; use max_tokens and type adaptive"),
        "display": Refused("thinking is always returned in full", ("full",)),
    }


class OutputFormat(Body):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    refused: ClassVar = {"task_budget": Refused("use max_tokens")}


class CountRequest(Body):
    model: str | None = None
    messages: Annotated[list[Turn], Field(min_length=1)]
    system: str | list[Block] | None = None
    tools: list[MessageTool] | None = None
    tool_choice: MessageToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None
    refused: ClassVar = {
        "mcp_servers": Refused("this server calls no others", ([],)),
        "context_management": Refused("shorten the messages before they are sent"),
        "user_profile_id": Refused("there are no profiles"),
        "workspace_id": Refused("there are no workspaces"),
        "output_format": Refused("send output_config.format"),
    }
    ignored: ClassVar = {"anthropic_version": "there is one version"}  # in a body that was made for a cloud's gateway

    def conversation(self) -> Conversation:
        messages = [plain for i, turn in enumerate(self.messages) for plain in turn.plain(f"messages.{i}")]
        if self.system is not None:
            messages = [{"role": "system", "content": _system(self.system)}, *messages]
        choice = self.tool_choice
        if choice is not None and choice.type == "tool" and choice.name is None:
            raise bad("tool_choice.name is missing", "tool_choice.name")
        goes_on = messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls")
        return Conversation(
            messages=messages,
            tools=[tool.chat() for tool in self.tools or ()],
            choice={"any": "required", "tool": "named"}.get(choice.type, choice.type) if choice else "auto",
            named=choice.name if choice else None,
            parallel=not (choice and choice.disable_parallel_tool_use),
            thinking=None if self.thinking is None else self.thinking.type != "disabled",
            effort=self.output_config.effort if self.output_config else None,
            add_generation_prompt=not goes_on,  # a last message by the assistant is the beginning of the answer
            continue_final_message=goes_on,
        )


class MessagesRequest(CountRequest):
    max_tokens: Int
    stop_sequences: StopList | None = None
    temperature: Num | None = None
    top_p: Num | None = None
    top_k: Int | None = None
    stream: Flag = False
    refused: ClassVar = {
        **CountRequest.refused,
        "container": Refused("this server runs no code"),
        "inference_geo": Refused("the server runs in one place"),
        "diagnostics": Refused("there are none"),
    }
    ignored: ClassVar = {
        **CountRequest.ignored,
        "metadata": LABELS["metadata"],
        "service_tier": LABELS["service_tier"],
        "speed": "there is one speed",
    }

    def params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        values = {name: getattr(self, name) for name in ("temperature", "top_p", "top_k")}
        values = {**defaults, **{name: value for name, value in values.items() if value is not None}}
        values["max_tokens"] = self.max_tokens
        form = self.output_config.format if self.output_config else None
        structured = Structured(json=form.schema_ or "object") if form else None
        try:
            return SamplingParams(stop=tuple(self.stop_sequences or ()), structured=structured, **values)
        except UserError as error:
            raise refused(error) from None


def _system(system: str | list[Block]) -> str:
    if isinstance(system, str):
        return system
    return "\n".join(block.need("text", f"system.{i}") for i, block in enumerate(system))


def _tool_call(block: Block, where: str) -> dict[str, Any]:
    function = {"name": block.need("name", where), "arguments": block.input or {}}
    return {"id": from_anthropic(block.need("id", where)), "type": "function", "function": function}


def _tool_result(block: Block, where: str) -> dict[str, Any]:
    content = block.content or ""
    if isinstance(content, list):
        content = "\n".join(part.need("text", f"{where}.content.{i}") for i, part in enumerate(content))
    if block.is_error:  # chat templates can show this only in the text
        content = json.dumps({"error": content}, ensure_ascii=False)
    return {"role": "tool", "tool_call_id": from_anthropic(block.need("tool_use_id", where)), "content": content}


def to_anthropic(id: str) -> str:
    """Return a call's id as Anthropic's look, toolu_ and what follows call_."""
    return "toolu_" + id.removeprefix("call_")


def from_anthropic(id: str) -> str:
    """Return the id that `to_anthropic` was given, for a chat template; any other id as it is."""
    rest = id.removeprefix("toolu_")
    return id if rest == id else rest if len(rest) == SHORT_ID_LENGTH else f"call_{rest}"
