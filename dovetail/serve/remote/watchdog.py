"""The watchdog: an engine whose step does not end counts as dead although its process lives. A device that hangs
reports nothing, and every stream would wait for it."""

from __future__ import annotations

import asyncio

from dovetail.engine.controls import EngineDied
from dovetail.serve.remote.child import Child

CHECKS = 4  # at least so many within the time that a step may take


async def watch(child: Child, seconds: float) -> None:
    """Give the child up when one of its steps takes longer than `seconds`. Compiling does not count (see
    EngineLoop.pulse); a process that does not answer within that time hangs too."""
    while child.is_alive:
        try:
            took = await asyncio.wait_for(child.call("pulse"), seconds)
        except TimeoutError:
            took = seconds
        except EngineDied:
            return
        if took >= seconds:
            return child.give_up(f"a step of the engine has taken longer than {seconds:g} s")
        await asyncio.sleep(min(1.0, seconds / CHECKS))
