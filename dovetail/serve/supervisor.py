"""Supervisor: keeps an engine's process alive. One that dies is started again, later each time, until it has died so
often in so short a time that another start would help nobody."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass

from dovetail.engine.died import EngineDied
from dovetail.serve.child import Child, ShowProgress
from dovetail.serve.messages import Start
from dovetail.serve.standing import Standing
from dovetail.serve.watchdog import watch

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Limits:
    """When to start again. A death after a request was served to its end is the first of a new count."""

    deaths: int = 3  # so many ...
    seconds: float = 60.0  # ... within these, and it stays dead
    backoff: float = 0.5  # before the first new start; twice as long before each further
    longest_backoff: float = 30.0
    step_seconds: float = 300.0  # a step that takes longer is a death; 0: it may take as long as it likes


class Supervisor:
    def __init__(self, start: Start, limits: Limits, progress: ShowProgress | None = None):
        self._start, self._limits, self._progress = start, limits, progress
        self.standing = Standing()
        self._child: Child | None = None
        self._why = "the engine is starting"
        self._deaths: list[float] = []
        self._task: asyncio.Task | None = None
        self._watching: asyncio.Task | None = None
        self.restarts = 0
        self.gave_up = False

    async def start(self) -> None:
        """The first child; what is wrong with the model or an option is raised, not tried again."""
        self._use(await Child.spawn(self._start, self._progress))
        self._task = asyncio.create_task(self._keep())

    def _use(self, child: Child) -> None:
        self._child = child
        if self._limits.step_seconds:
            self._watching = asyncio.create_task(watch(child, self._limits.step_seconds))

    @property
    def child(self) -> Child:
        """The one that serves; EngineDied, saying how things stand, if there is none."""
        if self._child is None or not self._child.is_alive:
            raise EngineDied(self._why)
        return self._child

    async def close(self, seconds: float) -> None:
        for task in (self._task, self._watching):
            if task is not None:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
        if self._child is not None:
            await self._child.stop(seconds)
        self._why = "the engine was stopped"

    async def _keep(self) -> None:
        """The supervisor's life: wait for a death, wait a while, start again."""
        child = self._child
        while True:
            if child is not None:
                await child.ended.wait()
                self._note_death(child.why, child.served)
            if self._is_hopeless():
                return
            await asyncio.sleep(min(self._limits.backoff * 2 ** (len(self._deaths) - 1), self._limits.longest_backoff))
            child = await self._spawn()

    def _note_death(self, why: str, served: bool) -> None:
        self._deaths = [] if served else self._deaths
        self._deaths.append(time.monotonic())
        self._why = f"{why}; it is being started again"
        log.error("%s (death %d of %d)", self._why, len(self._deaths), self._limits.deaths)

    def _is_hopeless(self) -> bool:
        now = time.monotonic()
        self._deaths = [death for death in self._deaths if now - death <= self._limits.seconds]
        if len(self._deaths) < self._limits.deaths:
            return False
        count, seconds = self._limits.deaths, self._limits.seconds
        self._why = f"the engine died {count} times within {seconds:g} s and is not started again: see the server's log"
        self.gave_up = True
        log.critical(self._why)
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
            await self.standing.restore(child)
        except BaseException:
            await child.stop(0.0)
            raise
