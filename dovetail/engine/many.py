"""One or many: what LLM's calls take as a prompt or a list of them, a conversation or a list of them."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Many
from numbers import Integral
from typing import Any

from dovetail.core.errors import UserError
from dovetail.engine.intake import Prompt

Conversation = Many[Mapping[str, Any]]  # its messages


def as_many(prompts: Prompt | Many[Prompt]) -> list[Any]:
    """One prompt (text, or ids) or many of them, as a list."""
    if isinstance(prompts, str | bytes):
        return [prompts]
    if not isinstance(prompts, Many) and not hasattr(prompts, "__array__"):
        raise UserError(f"prompts are text or lists of token ids, one or a list of them; got {repr(prompts)[:80]}")
    return [prompts] if len(prompts) > 0 and isinstance(prompts[0], Integral) else list(prompts)


def holds_messages(prompts: Any) -> bool:
    """Whether these are messages, of one conversation or of several; else they are prompts."""
    first = _first(prompts)
    return isinstance(first, Mapping) or isinstance(_first(first), Mapping)


def is_conversation(messages: Conversation | Many[Conversation]) -> bool:
    """Whether these are the messages of one; else they are several conversations."""
    many = list(messages) if _is_list(messages) else []
    if many and all(isinstance(each, Mapping) for each in many):
        return True
    if many and all(map(_is_list, many)):
        return False
    got = repr(messages)[:80]
    raise UserError(f"chat takes a list of messages (dicts with role and content), or a list of such lists; got {got}")


def _first(value: Any) -> Any:
    return value[0] if _is_list(value) and len(value) else None


def _is_list(value: Any) -> bool:
    return isinstance(value, Many) and not isinstance(value, str | bytes)
