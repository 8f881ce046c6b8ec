"""The text of what a model answered, be it a string or messages."""

from __future__ import annotations

import re
from typing import Any

FENCE = re.compile(r"^[ \t]*(`{3,}|~{3,})[ \t]*([\w+-]*)[^\n]*\n(.*?)^[ \t]*\1[ \t]*$", re.DOTALL | re.MULTILINE)


def text_of(completion: Any) -> str:
    """A string as it is; of messages, what the assistant said last."""
    if isinstance(completion, str):
        return completion
    said = [m for m in completion if m.get("role") == "assistant"] or list(completion)
    return _content(said[-1].get("content")) if said else ""


def transcript_of(prompt: Any) -> str:
    """A string as it is; of messages, each with its role before it."""
    if isinstance(prompt, str):
        return prompt
    return "\n\n".join(f"{m.get('role', '')}: {_content(m.get('content'))}" for m in prompt)


def block_of(text: str, *languages: str) -> str:
    """The last fenced block in one of these languages, else the last of any, else the text."""
    blocks = [(language.lower(), body) for _, language, body in FENCE.findall(text)]
    chosen = [body for language, body in blocks if language in languages] or [body for _, body in blocks]
    return chosen[-1] if chosen else text


def _content(content: Any) -> str:
    """Of a message: text, or parts of which some are text."""
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content if part.get("type", "text") == "text")
    return content or ""
