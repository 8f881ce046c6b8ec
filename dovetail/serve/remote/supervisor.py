"""EngineSupervisor: restarts the engine's process when it dies or hangs.

It waits longer before each restart and gives up after several deaths within a short time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass

from dovetail.engine.interface import EngineDied
from dovetail.serve.remote.child import Child, ShowProgress
from dovetail.serve.remote.control_state import ControlState
from dovetail.serve.remote.wire import StartEngine

log = logging.getLogger(__name__)
CHECKS = 4  # the watchdog's least number of checks within the time that a step may take


@dataclass(frozen=True)
class RestartLimits:
    """When the engine's process is restarted.

    A start that fails counts as a death. Deaths before a completely answered request are not counted.
    """

    deaths: int = 3  # after this many deaths ...
    seconds: float = 60.0  # ... within this time the engine is not started again
    backoff: float = 0.5  # seconds before the first restart; doubled before each further one
    longest_backoff: float = 30.0
    step_seconds: float = 300.0  # a longer step counts as a death; 0: no limit


class EngineSupervisor:
    """Keep one engine process running."""

    def __init__(self, start: StartEngine, limits: RestartLimits, progress: ShowProgress | None = None):
        self._start, self._limits, self._progress = start, limits, progress
        self.control_state = ControlState()
        self._child: Child | None = None
        self._reason = "the engine is starting"
        self._deaths: list[float] = []
        self._task: asyncio.Task | None = None
        self._watching: asyncio.Task | None = None
        self.restarts = 0
        self.gave_up = False

    async def start(self) -> None:
        """Start the first process; its errors are raised, not retried."""
        child = await Child.spawn(self._start, self._progress)
        self._use(child)
        self.control_state.begin(child)
        self._start = self._start.again(child.info)
        self._task = asyncio.create_task(self._keep_running())

    def _use(self, child: Child) -> None:
        self._child = child
        if self._limits.step_seconds:
            self._watching = asyncio.create_task(watch(child, self._limits.step_seconds))

    @property
    def child(self) -> Child:
        """Return the running process; raise EngineDied with the reason if there is none."""
        if self._child is None or not self._child.is_alive:
            raise EngineDied(self._reason)
        return self._child

    async def close(self, seconds: float) -> None:
        """Stop the process, and kill it if that takes longer than `seconds`."""
        for task in (self._task, self._watching):
            if task is not None:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
        if self._child is not None:
            await self._child.stop(seconds)
        self._reason = "the engine was stopped"

    async def _keep_running(self) -> None:
        """Restart the process after each death, until there are too many."""
        child = self._child
        while True:
            if child is not None:
                await child.ended.wait()
                self._note_death(child.reason, child.served)
            if self._gives_up():
                return
            await asyncio.sleep(min(self._limits.backoff * 2 ** (len(self._deaths) - 1), self._limits.longest_backoff))
            child = await self._spawn()

    def _note_death(self, reason: str, served: bool) -> None:
        now = time.monotonic()
        recent = [] if served else [death for death in self._deaths if now - death <= self._limits.seconds]
        self._deaths = [*recent, now]
        self._reason = f"{reason}; it is being started again"
        log.error("%s (death %d of %d)", self._reason, len(self._deaths), self._limits.deaths)

    def _gives_up(self) -> bool:
        if len(self._deaths) < self._limits.deaths:
            return False
        count, seconds = self._limits.deaths, self._limits.seconds
        self._reason = (
            f"the engine died {count} times within {seconds:g} s and is not started again: see the server's log"
        )
        self.gave_up = True
        log.critical(self._reason)
        return True

    async def _spawn(self) -> Child | None:
        try:
            child = await Child.spawn(self._start, self._progress)
            await self._restore(child)
        except Exception as error:
            self._note_death(f"the engine could not be started: {error}", served=False)
            return None
        self._use(child)
        self.restarts += 1
        return child

    async def _restore(self, child: Child) -> None:
        try:
            await self.control_state.restore(child)
        except BaseException:
            await child.stop(0.0)
            raise


async def watch(child: Child, seconds: float) -> None:
    """Give the child up when one of its steps takes longer than `seconds`, or when it does not answer for that long.

    A device that hangs reports nothing, and every stream would wait for it. Compiling does not count (see
    EngineLoop.pulse).
    """
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
