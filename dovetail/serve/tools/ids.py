"""Ids of tool calls. A parser is given one of these factories; a test gives it one that counts."""

from __future__ import annotations

import secrets
import string

SHORT = 9  # letters and digits


def call_id() -> str:
    """As OpenAI's look: call_ and 24 characters."""
    return "call_" + secrets.token_hex(12)


def short_id() -> str:
    """Mistral's templates take an id of exactly 9 letters and digits, and refuse any other."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(SHORT))


def to_anthropic(id: str) -> str:
    """Return a call's id as Anthropic's look, toolu_ and what follows call_."""
    return "toolu_" + id.removeprefix("call_")


def from_anthropic(id: str) -> str:
    """Return the id that `to_anthropic` was given, for a chat template; any other id as it is."""
    rest = id.removeprefix("toolu_")
    return id if rest == id else rest if len(rest) == SHORT else f"call_{rest}"
