"""Convert the messages of datasets to those that chat templates read: role, content, tool calls as objects."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from dovetail.core.choice import did_you_mean
from dovetail.core.errors import UserError
from dovetail.data.settings import Keys
from dovetail.io.chat import checked_messages, checked_tools, is_image

Messages = list[dict[str, Any]]

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
# ShareGPT's names of the roles.
_SHAREGPT = {
    "human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant",
    "observation": "tool", "function_call": "assistant",
}  # fmt: skip
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")


def say(role: str, content: str) -> dict[str, Any]:
    """Return a message."""
    return {"role": role, "content": content}


def is_messages(value: Any) -> bool:
    """Return whether a value is a list of messages."""
    return isinstance(value, list | tuple) and len(value) > 0 and isinstance(value[0], Mapping)


def conversation(value: Any, keys: Keys, where: str) -> Messages:
    """Return a copy of messages with the names that templates know. A UserError names the wrong message."""
    if not is_messages(value):
        raise UserError(f"{where}: expected a list of at least one message, each a dict, got {value!r:.60}")
    found = [_message(message, keys, f"{where}[{i}]") for i, message in enumerate(value)]
    try:
        checked_messages(found)  # only its checks: rendering makes its own copy
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    return found


def check_roles(messages: Messages, template: str = "") -> None:
    """Refuse a role that is neither a usual one nor named in the source of the chat template."""
    for i, message in enumerate(messages):
        role = message["role"]
        if role not in ROLES and f"'{role}'" not in template and f'"{role}"' not in template:
            raise UserError(
                f"messages[{i}]: unknown role {role!r}, expected one of {', '.join(ROLES)}."
                f"{did_you_mean(role, (*ROLES, *_SHAREGPT))} Rename it, or set data.template to one with this role"
            )


def check_turns(messages: Messages) -> None:
    """Refuse an empty turn of the user or the assistant."""
    for i, message in enumerate(messages):
        content = message.get("content") or message.get("tool_calls") or any(message.get(name) for name in _THOUGHTS)
        content = content.strip() if isinstance(content, str) else content
        if not content and message["role"] in ("user", "assistant"):
            raise UserError(f"messages[{i}]: the {message['role']}'s turn is empty; fill it, or remove the record")


def tools_of(value: Any, where: Callable[[], str]) -> list[dict[str, Any]] | None:
    """Return tools given as a list, or as its JSON text: a column cannot hold objects of different shapes."""
    if value is None or value == "":
        return None
    try:
        found = json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise UserError(f"{where()}: tools: {error}") from None
    try:
        return checked_tools(found) or None
    except UserError as error:
        raise UserError(f"{where()}: tools: {error}") from None


def _message(message: Any, keys: Keys, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise UserError(f"{where}: expected a dict such as {say('user', 'Hello')}, got {type(message).__name__}")
    # `content` may be null beside tool calls; any other key that is null counts as absent.
    found = {key: value for key, value in message.items() if value is not None or key == "content"}
    role = _take(found, keys.role, "role", "from")
    content = _take(found, keys.content, "content", "value")
    content = _parts(content, f"{where}.content") if isinstance(content, list | tuple) else content
    if content is None and not found.get("tool_calls"):
        raise UserError(f"{where}: content is null or missing, and there are no tool_calls; write the text there")
    if role == "function_call":
        found["tool_calls"], content = _calls(content, where), ""
    if isinstance(calls := found.get("tool_calls"), list | tuple):
        found["tool_calls"] = [_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
    return {"role": _SHAREGPT.get(role, role), "content": content, **found}


def _parts(parts: Any, where: str) -> str | list[dict[str, Any]]:
    """Return the text of parts that are all text; else the parts, texts as dicts."""
    if not any(map(is_image, parts)):
        return _flat(parts, where)
    return [
        {key: value for key, value in part.items() if value is not None}
        if is_image(part)
        else {"type": "text", "text": _flat([part], f"{where}[{i}]")}
        for i, part in enumerate(parts)
    ]


def _flat(parts: Any, where: str) -> str:
    """Join the parts of a content into one text, as the server does: a line per part."""
    texts = []
    for i, part in enumerate(parts):
        text = part if isinstance(part, str) else part.get("text") if isinstance(part, Mapping) else None
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise UserError(f"{where}[{i}]: expected a text part, got {kind!r}; only text and images can be trained on")
        texts.append(text)
    return "\n".join(texts)


def _take(message: dict[str, Any], given: str, *usual: str) -> Any:
    names = (given,) if given else usual
    return next((message.pop(name) for name in names if name in message), None)


def _calls(content: Any, where: str) -> list[dict[str, Any]]:
    """Return the tool calls of a ShareGPT message: the JSON text of one call, or of several."""
    try:
        found = json.loads(content)
    except (TypeError, ValueError):
        raise UserError(f"{where}: expected a function_call to be the JSON of a name and arguments") from None
    calls = found if isinstance(found, list) else [found]
    return [{"type": "function", "function": call} for call in calls]


def _call(call: Any, where: str) -> Any:
    """Return a call with its arguments as an object: templates write them in the model's own notation."""
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
