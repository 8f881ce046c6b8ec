"""Errors as the log holds them: bounded, because an error's message may repeat what a user sent."""

from __future__ import annotations

import traceback

LONGEST_ENTRY, LONGEST = 500, 8000  # characters of a frame or a message, and of the whole


def traceback_text(error: BaseException) -> str:
    """Return the traceback, each frame and message and the whole of it cut to a bounded length."""
    return cut("".join(cut(entry, LONGEST_ENTRY) for entry in traceback.format_exception(error)).rstrip(), LONGEST)


def cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]} ... ({len(text) - most:,} more characters)\n"
