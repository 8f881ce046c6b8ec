"""Inputs that are read and not answered with text, for /v1/embeddings and /v1/score: their tokens, checked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from dovetail.serve.errors import bad
from dovetail.serve.talk.service import Service


async def read_inputs(service: Service, encode: Callable[[int], list[list[int]]], name: str) -> list[list[int]]:
    """What `encode` gives, in a thread, when it is told the most tokens that an input may have. `name`: the request's
    field, for a refusal. The server is ready for them when this returns."""
    most = min(service.max_len, service.config.limits.prompt_tokens or service.max_len)
    prompts = await asyncio.to_thread(encode, most)
    for prompt in prompts:
        if not prompt:
            raise bad(f"{name} is empty: give at least one token", name)
        if len(prompt) > most:
            raise bad(f"{name}: a text has {len(prompt)} tokens, and this server takes at most {most}", name)
    service.check_ready()
    service.inflight.check([1] * len(prompts))
    return prompts


def encoded(service: Service, inputs: list[Any], most: int) -> list[list[int]]:
    """Texts tokenized, token ids as they came."""
    return [service.prompts.encode(each, most=most) if isinstance(each, str) else each for each in inputs]


def refused(error: ValueError, name: str) -> Exception:
    """What the engine would not take, as the field's fault."""
    return bad(f"{name}: {str(error).removeprefix('prompt: ')}", name)


def usage(prompts: list[list[int]]) -> dict[str, int]:
    total = sum(map(len, prompts))
    return {"prompt_tokens": total, "total_tokens": total}
