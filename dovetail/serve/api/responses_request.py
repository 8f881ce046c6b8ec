"""/v1/responses: the request. Nothing is stored between requests, so `input` holds the whole conversation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from dovetail.core.errors import UserError
from dovetail.engine.request.params import SamplingParams, Structured
from dovetail.serve.api.chat_request import CalledFunction, FunctionCall, Message, Name
from dovetail.serve.api.fields import Body, Flag, Int, Num, Refused
from dovetail.serve.api.generation_request import LABELS, TopLogprobs
from dovetail.serve.errors import bad, refused
from dovetail.serve.talk.prompts import EFFORTS, Conversation

LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"  # asks for reasoning that can be sent back: here it comes as text, and can
_TEXT_ONLY = Refused("the model reads text only")
_NOT_STORED = Refused("nothing is stored between requests: send the whole conversation as input")


class InputPart(Body):
    type: Literal["input_text", "output_text", "refusal", "text", "reasoning_text", "summary_text"]
    text: str | None = None
    refusal: str | None = None
    logprobs: list[dict[str, Any]] | None = None  # of an earlier answer: only its text is read
    refused: ClassVar = {
        "image_url": _TEXT_ONLY, "file_id": _TEXT_ONLY, "file_data": _TEXT_ONLY, "input_audio": _TEXT_ONLY,
    }  # fmt: skip
    ignored: ClassVar = {"annotations": "templates show a message's text"}


Parts = str | list[InputPart]


class Item(Body):
    """A message, a call, a call's result, or reasoning: as they come in an answer's `output`."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    id: str | None = None
    status: str | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Parts | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: Parts | None = None
    summary: list[InputPart] | None = None
    refused: ClassVar = {
        "encrypted_content": Refused("reasoning comes as text"),
        "phase": Refused("answers have none"),
        "caller": Refused("calls are the model's own"),
        "namespace": Refused("there are no namespaces"),
        "async": Refused("calls are answered in the next request"),
        "async_": Refused("calls are answered in the next request"),
    }


class FunctionTool(Body):
    type: Literal["function"]
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Flag | None = None
    refused: ClassVar = {"defer_loading": Refused("tools are read at once", (False,))}

    def chat(self) -> dict[str, Any]:
        return {"type": "function", "function": self.model_dump(exclude_none=True, exclude={"type"})}


class NamedFunctionChoice(Body):
    type: Literal["function"]
    name: str


class TextFormat(Body):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: Flag | None = None

    def structured(self) -> Structured | None:
        if self.type == "text":
            return None
        return Structured(json=(self.schema_ or "object") if self.type == "json_schema" else "object")


class TextOptions(Body):
    format: TextFormat | None = None
    ignored: ClassVar = {"verbosity": "templates have no place for it: ask for it in the prompt"}


class ReasoningOptions(Body):
    effort: Literal[EFFORTS] | None = None  # type: ignore[valid-type]
    refused: ClassVar = {
        "summary": Refused("reasoning comes whole, as reasoning text", ("auto",)),
        "generate_summary": Refused("reasoning comes whole, as reasoning text"),
    }


class ResponsesRequest(Body):
    model: str | None = None
    input: str | Annotated[list[Item], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Int | None = None
    temperature: Num | None = None
    top_p: Num | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunctionChoice | None = None
    parallel_tool_calls: Flag = True
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    metadata: dict[str, str] | None = None  # returned with the answer
    include: list[Literal[LOGPROBS, ENCRYPTED]] | None = None  # type: ignore[valid-type]
    top_logprobs: TopLogprobs | None = None
    stream: Flag = False
    user: str | None = None  # returned with the answer

    refused: ClassVar = {
        "previous_response_id": _NOT_STORED,
        "conversation": _NOT_STORED,
        "prompt": _NOT_STORED,
        "background": Refused("answers are not stored", (False,)),
        "truncation": Refused("shorten the input before it is sent", ("disabled",)),
        "context_management": Refused("shorten the input before it is sent", ([],)),
        "moderation": Refused("there is none"),
        "access_programs": Refused("there are none"),
        "image": _TEXT_ONLY,
    }
    ignored: ClassVar = {
        **{name: why for name, why in LABELS.items() if name not in ("user", "metadata")},
        "max_tool_calls": "it counts tools that a server runs, and this one runs none",
        "stream_options": "events are not padded",
    }

    @property
    def with_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())

    def params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        if self.top_logprobs and not self.with_logprobs:
            raise bad(f'top_logprobs needs include: ["{LOGPROBS}"]', "top_logprobs")
        given = {"max_tokens": self.max_output_tokens, "temperature": self.temperature, "top_p": self.top_p}
        given["logprobs"] = (self.top_logprobs or 0) if self.with_logprobs else None
        values = {"max_tokens": None, **defaults, **{name: each for name, each in given.items() if each is not None}}
        form = self.text.format if self.text else None
        try:
            return SamplingParams(**values, structured=form.structured() if form else None)
        except UserError as error:
            raise refused(error) from None

    def conversation(self) -> Conversation:
        named = self.tool_choice.name if isinstance(self.tool_choice, NamedFunctionChoice) else None
        return Conversation(
            messages=self._messages(),
            tools=[tool.chat() for tool in self.tools or ()],
            choice="named" if named else self.tool_choice or "auto",  # type: ignore[arg-type]
            named=named,
            parallel=self.parallel_tool_calls,
            effort=self.reasoning.effort if self.reasoning else None,
        )

    def _messages(self) -> list[dict[str, Any]]:
        messages = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        turn = _Turn()
        for i, item in enumerate(self.input):
            messages += turn.take(item, f"input.{i}")
        return messages + turn.end()


class _Turn:
    """Collects one assistant message from several items: reasoning, text and calls are separate items here."""

    def __init__(self):
        self._parts: dict[str, Any] = {}

    def take(self, item: Item, where: str) -> list[dict[str, Any]]:
        """The messages that this item completes."""
        if item.type == "reasoning":
            before = self.end()
            self._parts["reasoning_content"] = _text(item.content or item.summary or "", where)
            return before
        if item.type == "function_call":
            function = CalledFunction(name=item.need("name", where), arguments=item.arguments or "{}")
            call = FunctionCall(id=item.need("call_id", where), function=function)
            self._parts.setdefault("tool_calls", []).append(call)
            return []
        if item.type == "message" and item.role == "assistant":
            before = self.end() if self._parts.keys() & {"content", "tool_calls"} else []
            self._parts["content"] = _text(item.content or "", where)  # null: cut off before its text
            return before
        made = _call_result if item.type == "function_call_output" else _message
        return [*self.end(), made(item, where)]

    def end(self) -> list[dict[str, Any]]:
        parts, self._parts = self._parts, {}
        if not parts.keys() & {"content", "tool_calls"}:
            return []  # reasoning without an answer
        return [Message(role="assistant", **parts).plain("input")]


def _call_result(item: Item, where: str) -> dict[str, Any]:
    content = _text(item.need("output", where), where)
    return {"role": "tool", "tool_call_id": item.need("call_id", where), "content": content}


def _message(item: Item, where: str) -> dict[str, Any]:
    return {"role": item.need("role", where), "content": _text(item.need("content", where), where)}


def _text(parts: Parts, where: str) -> str:
    if isinstance(parts, str):
        return parts
    texts = [part.refusal if part.type == "refusal" else part.text for part in parts]
    if None in texts:
        raise bad(f"{where}: a part of its content has no text", where)
    return "\n".join(text for text in texts if text is not None)
