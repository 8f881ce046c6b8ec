"""Tools: typed Python functions that an agent may call, and the environment of an agent that does.

    def lookup(item: str) -> int:
        '''The price of an item.

        item: its name, in the singular
        '''
        return PRICES[item]

    class Shop(ToolEnvironment):
        tools = (lookup,)

        def score(self, answer):
            return float(answer.content.strip() == self.columns["price"])

Tools that need the episode's state are methods: a `tools` property returns them. They run in this process, several
episodes at a time, without a time limit; for code that nobody has read see rewards.sandbox.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dovetail.core.choice import did_you_mean
from dovetail.core.errors import UserError
from dovetail.io.tool_formats.events import ToolCall
from dovetail.tune.rl.answer import Answer
from dovetail.tune.rl.environment import Environment, Step
from dovetail.tune.rl.rewards.json_schema import fits
from dovetail.tune.rl.tool_schema import tool_schema


@dataclass(frozen=True)
class Tool:
    function: Callable[..., Any]
    schema: dict[str, Any]  # in OpenAI's shape

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Tool:
        return cls(function, tool_schema(function))

    @property
    def name(self) -> str:
        return self.schema["function"]["name"]

    def __call__(self, arguments: str) -> str:
        """What it returns, as text; JSON where it is not text already. Its errors are for the model to read too."""
        try:
            given = json.loads(arguments)
            if wrong := self._wrong(given):
                return f"error: {wrong}"
            result = self.function(**given)
            if inspect.iscoroutine(result):
                result = asyncio.run(result)
            return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
        except Exception as error:
            return f"error: {type(error).__name__}: {error}"

    def _wrong(self, given: Any) -> str:
        """What of the arguments does not fit the schema; "" where all do."""
        schema = self.schema["function"]["parameters"]
        if not isinstance(given, dict):
            return f"arguments of {self.name} must be an object; got {given!r}"
        known = schema["properties"]
        for name in given:
            if name not in known:
                return f"{self.name} has no parameter {name!r}.{did_you_mean(name, known)}"
        if missing := [name for name in schema["required"] if name not in given]:
            return f"{self.name} needs {', '.join(missing)}"
        wrong = [name for name, value in given.items() if not fits(value, known[name])]
        return f"{wrong[0]} must fit {json.dumps(known[wrong[0]])}; got {given[wrong[0]]!r}" if wrong else ""


def tools_of(environment: Any) -> list[Tool]:
    """Of an environment, each by a name of its own."""
    found = [Tool.of(function) for function in getattr(environment, "tools", ())]
    names = [tool.name for tool in found]
    if twice := {name for name in names if names.count(name) > 1}:
        raise UserError(f"tools must have different names; {', '.join(sorted(twice))} comes twice")
    return found


def results(calls: Sequence[ToolCall], tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Of each call a message, in their order."""
    by_name = {tool.name: tool for tool in tools}
    return [
        {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": _result(call, by_name)}
        for call in calls
    ]


def _result(call: ToolCall, tools: dict[str, Tool]) -> str:
    if call.name not in tools:
        return f"error: there is no tool {call.name!r}; there are {', '.join(tools)}"
    if not call.complete:
        return f"error: the arguments of {call.name} are not whole JSON"
    return tools[call.name](call.arguments)


class ToolEnvironment(Environment):
    """Calls are run and their results told; an answer without a call is the last, and has its score."""

    def score(self, answer: Answer) -> float:
        """The reward of the last answer; 0 where the recipe's rewards judge it."""
        return 0.0

    def step(self, answer: Answer) -> Step:
        if answer.calls:
            return Step(results(answer.calls, tools_of(self)))
        return Step(reward=self.score(answer), done=True)
