"""The text of what a model answered, be it a string or messages."""

from __future__ import annotations

import re
from typing import Any

OPENS = re.compile(r"[ \t]*(`{3,}|~{3,})[ \t]*([\w+-]*)")
CLOSES = re.compile(r"[ \t]*(`{3,}|~{3,})\s*$")


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
    blocks = _blocks(text)
    chosen = [body for language, body in blocks if language in languages] or [body for _, body in blocks]
    return chosen[-1] if chosen else text


def _blocks(text: str) -> list[tuple[str, str]]:
    """Return language and body of each fenced block that is closed, in time proportional to the text.

    A search for the end of each block in turn, as one regular expression does, takes minutes for a completion that
    opens thousands of blocks and closes none.
    """
    lines = text.split("\n")
    ends: dict[str, list[int]] = {}  # of each fence the lines that close it, the last first
    for number in range(len(lines) - 1, -1, -1):
        if closes := CLOSES.match(lines[number]):
            ends.setdefault(closes[1], []).append(number)
    blocks, number = [], 0
    while number < len(lines):
        opens, number = OPENS.match(lines[number]), number + 1
        later = ends.get(opens[1], []) if opens else []
        while later and later[-1] < number:
            later.pop()
        if opens and later:
            blocks.append((opens[2].lower(), "".join(line + "\n" for line in lines[number : later[-1]])))
            number = later[-1] + 1
    return blocks


def _content(content: Any) -> str:
    """Of a message: text, or parts of which some are text."""
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content if part.get("type", "text") == "text")
    return content or ""
