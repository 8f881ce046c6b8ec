"""Messages as datasets write them, made into those that chat templates read: role, content, tool calls as objects."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from dovetail.core.choice import did_you_mean
from dovetail.core.errors import UserError
from dovetail.data.settings import Keys
from dovetail.io.chat import checked_messages, checked_tools

Messages = list[dict[str, Any]]

# ShareGPT's names of who speaks.
_ROLES = {
    "human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant",
    "observation": "tool", "function_call": "assistant",
}  # fmt: skip


ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")


def say(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def is_messages(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) > 0 and isinstance(value[0], Mapping)


def conversation(value: Any, keys: Keys, where: str) -> Messages:
    """A copy with the names that templates know. A ValueError says which message is wrong, and how."""
    if not is_messages(value):
        raise UserError(f"{where}: expected a list of at least one message, each a dict, got {value!r:.60}")
    found = [_message(message, keys, f"{where}[{i}]") for i, message in enumerate(value)]
    try:
        checked_messages(found)  # its copy also names the reasoning twice, which rendering does by itself
    except ValueError as error:
        raise UserError(f"{where}: {error}") from None
    return found


def check_roles(messages: Messages, template: str = "") -> None:
    """Raise a ValueError for a role that is neither a usual one nor named in the source of the chat template."""
    for i, message in enumerate(messages):
        role = message["role"]
        if role not in ROLES and f"'{role}'" not in template and f'"{role}"' not in template:
            raise UserError(
                f"messages[{i}]: unknown role {role!r}, expected one of {', '.join(ROLES)}."
                f"{did_you_mean(role, (*ROLES, *_ROLES))} Rename it, or set data.template to one that names this role"
            )


def check_turns(messages: Messages) -> None:
    """Raise a ValueError for a turn of the user or the assistant that says nothing."""
    for i, message in enumerate(messages):
        said = message.get("content") or message.get("tool_calls") or any(message.get(name) for name in _THOUGHTS)
        said = said.strip() if isinstance(said, str) else said
        if not said and message["role"] in ("user", "assistant"):
            raise UserError(f"messages[{i}]: the {message['role']}'s turn is empty; fill it, or remove the record")


def tools_of(value: Any, where: Callable[[], str]) -> list[dict[str, Any]] | None:
    """As a list, or the JSON text of one: a column cannot hold objects of different shapes."""
    if value is None or value == "":
        return None
    try:
        return checked_tools(json.loads(value) if isinstance(value, str) else value) or None
    except ValueError as error:
        raise UserError(f"{where()}: tools: {error}") from None


def _message(message: Any, keys: Keys, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise UserError(f"{where}: expected a dict such as {say('user', 'Hello')}, got {type(message).__name__}")
    # `content` may be null beside tool calls; any other key that is null is one that the record does not have.
    found = {key: value for key, value in message.items() if value is not None or key == "content"}
    role = _take(found, keys.role, "role", "from")
    content = _take(found, keys.content, "content", "value")
    content = _flat(content, f"{where}.content") if isinstance(content, list | tuple) else content
    if content is None and not found.get("tool_calls"):
        raise UserError(f"{where}: content is null or missing, and there are no tool_calls; write the text there")
    if role == "function_call":
        found["tool_calls"], content = _calls(content, where), ""
    if isinstance(calls := found.get("tool_calls"), list | tuple):
        found["tool_calls"] = [_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
    return {"role": _ROLES.get(role, role), "content": content, **found}


def _flat(parts: Any, where: str) -> str:
    """Join the parts of a content into one text, as the server does: a line per part."""
    texts = []
    for i, part in enumerate(parts):
        text = part if isinstance(part, str) else part.get("text") if isinstance(part, Mapping) else None
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise UserError(f"{where}[{i}]: expected a part of text, got {kind!r}; only text can be trained on")
        texts.append(text)
    return "\n".join(texts)


def _take(message: dict[str, Any], given: str, *usual: str) -> Any:
    names = (given,) if given else usual
    return next((message.pop(name) for name in names if name in message), None)


def _calls(content: Any, where: str) -> list[dict[str, Any]]:
    """ShareGPT's call of a function: the JSON text of one, or of several."""
    try:
        found = json.loads(content)
    except (TypeError, ValueError):
        raise UserError(f"{where}: expected a function_call to be the JSON of a name and arguments") from None
    calls = found if isinstance(found, list) else [found]
    return [{"type": "function", "function": call} for call in calls]


def _call(call: Any, where: str) -> Any:
    """Templates take arguments as an object and write them in the model's own notation, as in serving."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError:
        raise UserError(
            f"{where}: expected arguments to be an object or its JSON text, got {function['arguments']!r:.60}"
        ) from None
    changed = {**function, "arguments": arguments}
    return {**call, "function": changed} if "function" in call else changed
