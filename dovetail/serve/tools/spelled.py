"""Tools for a model whose template does not take them: described in the system message, with earlier calls as text.

The words are those of Hermes's template, which most models have seen; their calls are then read in Hermes's format.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

_BEFORE = (
    "You may call functions to assist with the user's query. Their signatures are within <tools></tools>:\n<tools>\n"
)
_AFTER = (
    "\n</tools>\n\nFor each function call, return a JSON object with the function's name and arguments within "
    '<tool_call></tool_call>:\n<tool_call>\n{"name": <function name>, "arguments": <JSON object>}\n</tool_call>'
)


def spell(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages with the tools described in the system message, and with calls as the text that made them."""
    spelled = [_with_calls_as_text(message) for message in messages]
    if not tools:
        return spelled
    described = _BEFORE + "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools) + _AFTER
    if spelled[0]["role"] == "system":
        spelled[0]["content"] = f"{spelled[0]['content']}\n\n{described}"
        return spelled
    return [{"role": "system", "content": described}, *spelled]


def _with_calls_as_text(message: Mapping[str, Any]) -> dict[str, Any]:
    plain = {key: value for key, value in message.items() if key != "tool_calls"}
    calls = [
        f"<tool_call>\n{json.dumps(dict(call['function']), ensure_ascii=False)}\n</tool_call>"
        for call in message.get("tool_calls") or ()
    ]
    if calls:
        plain["content"] = "\n".join([*([plain["content"]] if plain.get("content") else []), *calls])
    return plain
