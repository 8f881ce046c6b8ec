"""Let HTTP clients share a TLS context: each `httpx.get` would read all certificates again, which takes 0.1 seconds."""

from __future__ import annotations

import functools


@functools.cache
def share() -> None:
    """Let the clients of httpx, and those of OpenAI and Anthropic, that ask for the same context get the same one."""
    from httpx._transports import default

    default.create_ssl_context = functools.cache(default.create_ssl_context)
