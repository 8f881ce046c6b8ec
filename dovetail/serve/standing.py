"""Standing: what an engine was told since its start, so that one that is started in its place stands where it stood: it
has the weights that were loaded last, is paused if it was, sleeps if it did. Weights come by their path, so they can be
loaded again; where they cannot, the new engine is not used: it would answer with older ones, and nobody would know."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import NamedTuple

from dovetail.serve.child import Child

log = logging.getLogger(__name__)


class Loaded(NamedTuple):
    path: str
    version: int
    stamp: tuple  # of the files as they were


class Standing:
    def __init__(self):
        self.paused = False
        self.lost = False  # the last weights could not be loaded again
        self._weights: Loaded | None = None  # None: those it was started with
        self._level = 0  # of its sleep
        self._dropped = False  # a deep sleep took the weights, and no others have come
        self._loaded_asleep = False

    def slept(self, level: int) -> None:
        self._level, self._loaded_asleep = max(level, self._level), False
        self._dropped |= level == 2

    def woke(self) -> None:
        self._level, self._loaded_asleep = 0, False

    def loaded(self, path: str, version: int, stamp: tuple) -> None:
        self._weights = Loaded(path, version, stamp)
        self._dropped, self._loaded_asleep = False, self._level > 0

    async def restore(self, child: Child) -> None:
        """Tell a new engine what the last one was told; ValueError where it cannot be done."""
        depth = 2 if self._dropped else self._level
        if not self._dropped and not self._loaded_asleep:
            await self._load(child)
        if depth:
            await child.call("sleep", depth)
        if self._loaded_asleep:
            await self._load(child)
        if depth and not self._level:
            await child.call("wake")
        if self.paused:
            await child.call("pause")

    async def _load(self, child: Child) -> None:
        if self._weights is None:
            return
        path, version, stamp = self._weights
        now = stamp_of(path)
        if now != stamp:
            version += 1
            log.warning("the weights in %s have changed since they were loaded: they are now version %d", path, version)
        self.lost = True
        await child.call("update_weights", path, False, version)
        self.lost, self._weights = False, Loaded(path, version, now)
        child.set_version(version)


def stamp_of(path: str) -> tuple:
    """What changes when the files there do; of what cannot be read, which whoever loads it will say, nothing."""
    folder = Path(path)
    try:
        files = sorted(folder.iterdir()) if folder.is_dir() else [folder]
        return tuple((file.name, file.stat().st_mtime_ns, file.stat().st_size) for file in files if file.is_file())
    except OSError:
        return ()
