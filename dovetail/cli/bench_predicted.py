"""What a server under load says of its decode steps, measured beside predicted; servers of other makes say nothing."""

from __future__ import annotations

import asyncio
import re
from typing import Any

EVERY = 1.0  # seconds between two looks
_LINE = re.compile(r"^(dovetail:\w*decode_step_seconds\w*|vllm:num_requests_running)\{[^}]*\} (\S+)$", re.M)


async def watch(client: Any, found: list[dict[str, float]]) -> None:
    """Look at the server's metrics until cancelled."""
    import httpx

    while True:
        await asyncio.sleep(EVERY)
        try:
            text = (await client.get("/metrics")).text
        except httpx.HTTPError:
            continue
        if seen := _read(text):
            found.append(seen)


def _read(text: str) -> dict[str, float] | None:
    """None while nothing runs, or where the server predicts nothing."""
    values = {name.partition(":")[2]: float(value) for name, value in _LINE.findall(text)}
    least, most = (values.get(f"predicted_decode_step_seconds_{bound}", 0.0) for bound in ("least", "most"))
    measured = values.get("decode_step_seconds", 0.0)
    if not (measured and most):
        return None
    return {"running": values.get("num_requests_running", 0.0), "measured": measured, "least": least, "most": most}


def busiest(found: list[dict[str, float]]) -> dict[str, float]:
    """The look with most sequences running, the later of two; empty where there was none."""
    return max(enumerate(found), key=lambda each: (each[1]["running"], each[0]))[1] if found else {}


def describe(seen: dict[str, float]) -> str:
    ms = {name: f"{seen[name] * 1e3:.3g}" for name in ("measured", "least", "most")}
    return (
        f"the server's decode step with {seen['running']:.0f} running: {ms['measured']} ms, predicted {ms['least']} to "
        f"{ms['most']}"
    )
