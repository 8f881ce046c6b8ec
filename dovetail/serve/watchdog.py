"""The watchdog: an engine whose step does not end is as good as dead, though its process lives. A device that hangs
says nothing, and every stream would wait for it."""

from __future__ import annotations

import asyncio

from dovetail.engine.died import EngineDied
from dovetail.serve.child import Child

LOOKS = 4  # at the least, within the time that a step may take


async def watch(child: Child, seconds: float) -> None:
    """Give the child up when a step of it has taken so long. Compiling does not count (see EngineLoop.pulse); a process
    that does not even say how it stands hangs too."""
    while child.is_alive:
        try:
            took = await asyncio.wait_for(child.call("pulse"), seconds)
        except TimeoutError:
            took = seconds
        except EngineDied:
            return
        if took >= seconds:
            return child.give_up(f"a step of the engine has taken longer than {seconds:g} s")
        await asyncio.sleep(min(1.0, seconds / LOOKS))
