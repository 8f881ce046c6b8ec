"""A turn: from a user's message to the end of the answer, with the tool calls between."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from dovetail.io.tool_formats.events import ToolCall
from dovetail.tune.rl.tools import Tool, call_tools
from examples.assistant.history import History, Message, shown_call
from examples.assistant.model import Answer, Model, ModelError

MAX_ROUNDS = 6  # requests to the model; the last may not call tools
MAX_CALLS = 10  # of one message
SYSTEM = (
    "You keep the user's food diary. When the user names or shows foods that they ate, call log_meal once for each "
    "food. Answer questions about the day by day_summary, and about foods by search_food. If a tool returns an error, "
    "correct the call. Then answer in one or two short sentences. Today is {today}."
)

Event = dict[str, Any]


class Turn:
    """Run one turn, and yield what happens as events for the page.

    Events: {"type": "text", "text"}, {"type": "call", "call"} with its result, {"type": "error", "message"} and at the
    end {"type": "done"}.
    """

    def __init__(self, model: Model, history: History, tools: list[Tool], images: bool, today: str) -> None:
        self._model, self._history, self._tools, self._images = model, history, tools, images
        self._system = {"role": "system", "content": SYSTEM.format(today=today)}

    async def run(self) -> AsyncGenerator[Event]:
        """Ask the model and run its tool calls until it answers without one."""
        try:
            for left in reversed(range(MAX_ROUNDS)):
                answer = Answer()
                async for event in self._ask(answer, self._choice(left)):
                    yield event
                calls = self._record(answer)
                for call in calls:
                    yield {"type": "call", "call": call}
                if answer.finish_reason == "length":
                    yield {"type": "error", "message": "The answer reached its maximum length."}
                if not calls:
                    break
        except ModelError as error:
            yield {"type": "error", "message": str(error)}
        yield {"type": "done"}

    def _choice(self, left: int) -> str:
        """Return the tool choice of a request after which `left` more are allowed."""
        if left == MAX_ROUNDS - 1:
            return self._model.choice.tool_choice
        return "auto" if left else "none"

    async def _ask(self, answer: Answer, tool_choice: str) -> AsyncIterator[Event]:
        messages = [self._system, *self._history.prompt(self._images)]
        schemas = [tool.schema for tool in self._tools]
        try:
            async for text in self._model.stream(messages, schemas, tool_choice, answer):
                yield {"type": "text", "text": text}
        except BaseException:  # stopped by the user, or broken off: what came so far stays, so that roles alternate
            self._history.add([{**self._message(answer.text), "stopped": True}])
            raise

    def _record(self, answer: Answer) -> list[dict[str, Any]]:
        """Run the tool calls of a message, add it and their results to the history, and return the calls as shown."""
        calls = [_complete(call) for _, call in sorted(answer.calls.items())]
        message = self._message(answer.text)
        if not calls:
            self._history.add([message])
            return []
        message["tool_calls"] = [_sent_back(call) for call in calls]
        results = call_tools(calls[:MAX_CALLS], self._tools)
        results += [_too_many(call) for call in calls[MAX_CALLS:]]
        # `name` of a result is not in OpenAI's format.
        results = [{key: value for key, value in result.items() if key != "name"} for result in results]
        self._history.add([message, *results])
        contents = {result["tool_call_id"]: result["content"] for result in results}
        return [shown_call(call, contents) for call in message["tool_calls"]]

    def _message(self, text: str) -> Message:
        return {"role": "assistant", "content": text, "model": self._model.choice.label}


def _complete(call: dict[str, str]) -> ToolCall:
    """Return a streamed call with an id, and whether its arguments are JSON."""
    try:
        json.loads(call["arguments"])
        complete = True
    except ValueError:
        complete = False
    return ToolCall(call["id"] or f"call_{uuid.uuid4().hex}", call["name"], call["arguments"], complete)


def _sent_back(call: ToolCall) -> dict[str, Any]:
    """Return a call as later requests contain it: servers refuse arguments that are not JSON."""
    arguments = call.arguments if call.complete else "{}"
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _too_many(call: ToolCall) -> dict[str, Any]:
    content = f"error: at most {MAX_CALLS} calls in one message; this one was not run"
    return {"role": "tool", "tool_call_id": call.id, "content": content}
