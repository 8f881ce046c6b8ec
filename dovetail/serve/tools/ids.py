"""Ids of tool calls. A parser is given one of these factories; a test gives it one that counts."""

from __future__ import annotations

import secrets
import string


def call_id() -> str:
    """As OpenAI's look: call_ and 24 characters."""
    return "call_" + secrets.token_hex(12)


def short_id() -> str:
    """Mistral's templates take an id of exactly 9 letters and digits, and refuse any other."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
