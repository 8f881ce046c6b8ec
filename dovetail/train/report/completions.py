"""Read a policy's completions (`completions.jsonl`), as many as a page can hold.

The file of a long run has gigabytes: it is read line by line, and only chosen steps are parsed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FILE = "completions.jsonl"
MOST_BYTES, STEP_BYTES = 4_000_000, 200_000  # bytes of the file that a page holds: in total and per step
MOST_TEXT = 8_000  # characters of a text; the middle of a longer one is removed
_STEP = re.compile(rb'\{"step": (\d+),')


@dataclass(frozen=True)
class Kept:
    """Hold the completions that a page shows."""

    lines: list[dict[str, Any]] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)  # the chosen steps
    all_steps: int = 0
    all_lines: int = 0


def kept(path: Path, most: int = MOST_BYTES, of_step: int = STEP_BYTES) -> Kept:
    """Return the completions of the first step, the last step, and evenly spaced steps between them."""
    sizes: dict[int, int] = {}
    count = 0
    for step, line in _lines(path):
        count, sizes[step] = count + 1, sizes.get(step, 0) + len(line)
    costs = [min(size, of_step) for size in sizes.values()]
    room = len(costs) if sum(costs) <= most else max(2, most * len(costs) // sum(costs))
    chosen = set(_evenly(sorted(sizes), room))
    return Kept(_read(path, chosen, of_step), sorted(chosen), len(sizes), count)


def turns(messages: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Return (role, text) of each message; a tool call is written as name(arguments)."""
    return [(str(message.get("role", "")), _text_of(message)) for message in messages if isinstance(message, Mapping)]


def written(line: Mapping[str, Any]) -> Any:
    """Return a line's completion; of a conversation, the messages after the prompt."""
    prompt, completion = line.get("prompt"), line.get("completion")
    if not (isinstance(prompt, list) and isinstance(completion, list)):
        return completion
    return completion[len(prompt) :] if turns(completion[: len(prompt)]) == turns(prompt) else completion


def shortened(text: str) -> str:
    """Return a text without its middle if it is too long."""
    half = MOST_TEXT // 2
    if len(text) <= MOST_TEXT:
        return text
    return f"{text[:half]}\n[… {len(text) - 2 * half:,} characters …]\n{text[-half:]}"


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield (step, line) of each complete line."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n") and (found := _STEP.match(line)):
                yield int(found[1]), line


def _evenly(steps: list[int], most: int) -> list[int]:
    if len(steps) <= most:
        return steps
    return [steps[round(i * (len(steps) - 1) / (most - 1))] for i in range(most)]


def _read(path: Path, chosen: set[int], of_step: int) -> list[dict[str, Any]]:
    """Parse the chosen steps; of a step that is too large only the first groups, each complete."""
    found, used, last = [], dict.fromkeys(chosen, 0), {}
    for step, line in _lines(path):
        if step not in chosen:
            continue
        entry = json.loads(line)
        if used[step] >= of_step and entry.get("group") != last.get(step):
            continue
        used[step], last[step] = used[step] + len(line), entry.get("group")
        found.append(entry)
    return found


def _text_of(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):  # a list of parts, as in the APIs
        content = "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    parts = [str(message["reasoning_content"])] if message.get("reasoning_content") else []
    parts += [str(content)] if content else []
    for call in message.get("tool_calls") or ():
        function = call.get("function", call)
        arguments = function.get("arguments", "")
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        parts.append(f"{function.get('name', '')}({text})")
    return "\n".join(parts)
