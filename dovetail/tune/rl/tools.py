"""Tools: typed Python functions that an agent may call, described to the model in OpenAI's format.

    def lookup(item: str) -> int:
        '''Return the price of an item.

        item: its name, in the singular
        '''
        return PRICES[item]

    class Shop(ToolEnvironment):
        tools = (lookup,)

        def score(self, turn):
            return float(turn.content.strip() == self.columns["price"])

A tool that needs the episode's state is a method, which a `tools` property returns. Tools run in this process, for
several episodes at a time, without a time limit; for untrusted code see rewards.sandbox.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from dovetail.core.choice import did_you_mean
from dovetail.core.errors import UserError
from dovetail.io.tool_formats.events import ToolCall
from dovetail.tune.rl.rewards.json_schema import fits


@dataclass(frozen=True)
class Tool:
    """A function and its description.

    Attributes:
        function: The function, sync or async.
        schema: Its description in OpenAI's format.
    """

    function: Callable[..., Any]
    schema: dict[str, Any]

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Tool:
        """Return a tool, described by the function's type hints and docstring."""
        return cls(function, tool_schema(function))

    @property
    def name(self) -> str:
        """The function's name."""
        return self.schema["function"]["name"]

    def __call__(self, arguments: str) -> str:
        """Call the function with JSON arguments. Return its result or its error as text for the model."""
        try:
            given = json.loads(arguments)
            if mistake := self._mistake(given):
                return f"error: {mistake}"
            result = self.function(**given)
            if inspect.iscoroutine(result):
                result = asyncio.run(result)
            return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
        except Exception as error:
            return f"error: {type(error).__name__}: {error}"

    def _mistake(self, given: Any) -> str:
        """Return how the arguments violate the schema, or an empty text."""
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
    """Return the tools of an environment."""
    tools = [Tool.of(function) for function in getattr(environment, "tools", ())]
    names = [tool.name for tool in tools]
    if twice := {name for name in names if names.count(name) > 1}:
        raise UserError(f"tools must have different names; {', '.join(sorted(twice))} comes twice", param="tools")
    return tools


def call_tools(calls: Sequence[ToolCall], tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Run the calls and return a tool message for each, in their order."""
    by_name = {tool.name: tool for tool in tools}
    return [
        {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": _result(call, by_name)}
        for call in calls
    ]


def _result(call: ToolCall, tools: dict[str, Tool]) -> str:
    if call.name not in tools:
        return f"error: there is no tool {call.name!r}; there are {', '.join(tools)}"
    if not call.complete:
        return f"error: the arguments of {call.name} are not complete JSON"
    return tools[call.name](call.arguments)


# --- the schema of a function -----------------------------------------------------------------------------------------

_SCALARS = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}
_CONTAINERS = {list: "array", dict: "object"}
P = inspect.Parameter


def tool_schema(function: Callable[..., Any]) -> dict[str, Any]:
    """Return a function's description in OpenAI's format, from its type hints and its docstring."""
    name = getattr(function, "__name__", "")
    if not callable(function) or not name.isidentifier():
        raise UserError(f"a tool must be a function with a name, not a lambda; got {function!r}", param="tools")
    hints, docs = _hints(function, name), inspect.getdoc(function) or ""
    parameters = inspect.signature(function).parameters
    properties = {key: _property(each, hints, docs, name) for key, each in parameters.items()}
    required = [key for key, each in parameters.items() if each.default is P.empty]
    schema = {"type": "object", "properties": properties, "required": required}
    described = {"description": _summary(docs)} if docs else {}
    return {"type": "function", "function": {"name": name, **described, "parameters": schema}}


def _hints(function: Callable[..., Any], name: str) -> dict[str, Any]:
    try:
        return get_type_hints(function, include_extras=True)
    except NameError as error:
        raise UserError(
            f"the tool {name} has a type hint that is not defined in its module ({error}): import it there",
            param="tools",
        ) from None


def _property(parameter: P, hints: dict[str, Any], docs: str, tool: str) -> dict[str, Any]:
    if parameter.kind not in (P.POSITIONAL_OR_KEYWORD, P.KEYWORD_ONLY):
        raise UserError(
            f"a tool's parameters must be passable by name; the tool {tool} has {parameter}: name each parameter",
            param="tools",
        )
    if parameter.name not in hints:
        raise UserError(
            f"the tool {tool} must have a type hint for each parameter; {parameter.name} has none", param="tools"
        )
    schema = _schema(hints[parameter.name], f"{parameter.name} of the tool {tool}")
    if description := _description(parameter.name, docs):
        schema["description"] = description
    if parameter.default is not P.empty and isinstance(parameter.default, str | int | float | bool | None):
        schema["default"] = parameter.default
    return schema


def _schema(hint: Any, where: str) -> dict[str, Any]:
    """Return the JSON schema of a type."""
    if hint is Any:
        return {}
    if hint in _SCALARS:
        return {"type": _SCALARS[hint]}
    origin, inner = get_origin(hint) or hint, get_args(hint)
    if origin is Annotated:
        texts = [each for each in inner[1:] if isinstance(each, str)]
        return {**_schema(inner[0], where), **({"description": texts[0]} if texts else {})}
    if origin is Literal:
        return {"enum": list(inner)}
    if origin in (Union, types.UnionType):
        return {"anyOf": [_schema(each, where) for each in inner]}
    if origin in _CONTAINERS:
        return _nested(origin, inner, where)
    raise UserError(
        f"{where} must be str, int, float, bool, None, Literal, list, dict, or a union of these; its type is {hint}",
        param="tools",
    )


def _nested(origin: Any, inner: tuple, where: str) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": _CONTAINERS[origin]}
    if origin is list and inner:
        schema["items"] = _schema(inner[0], where)
    elif origin is dict and inner:
        schema["additionalProperties"] = _schema(inner[1], where)
    return schema


def _summary(docs: str) -> str:
    """Return the first paragraph of a docstring on one line."""
    return " ".join(docs.split("\n\n")[0].split())


def _description(name: str, docs: str) -> str:
    """Return the text after `name:`, `name (type):` or `:param name:` at the beginning of a line."""
    match = re.search(rf"^\s*(?::param\s+)?{re.escape(name)}\s*(?:\([^)]*\))?:[ \t]*(.+)$", docs, re.MULTILINE)
    return match[1].strip() if match else ""
