"""ControlState: the controls that an engine has received (weights, adapters, pause, sleep).

A restarted engine is brought to the same state. Weights are loaded again from their path. If that fails, the new
engine is not used, because it would answer with older weights without notice.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from dovetail.core.errors import RequestError, UserError
from dovetail.engine.interface import CONTROLS
from dovetail.serve.errors import IN_USE
from dovetail.serve.remote.child import Child
from dovetail.serve.remote.wire import LoadedAdapter

log = logging.getLogger(__name__)


class LoadedWeights(NamedTuple):
    """Hold weights or an adapter that the engine has loaded."""

    path: str
    version: int
    stamp: tuple  # of the files when they were loaded: see stamp_of


class ControlState:
    """Run controls on the engine and remember the state that they leave it in."""

    def __init__(self):
        self._paused = False
        self.changing: str | None = None  # the change in progress, for clients that ask meanwhile
        self.lost = False  # whether the last weights could not be loaded after a restart
        self._weights: LoadedWeights | None = None  # None: those of the start
        self._level = 0  # sleep level; 0: awake
        self._dropped = False  # whether sleep level 2 dropped the weights, and none were loaded since
        self._loaded_asleep = False
        self._adapters: dict[str, LoadedWeights] = {}
        self._replaced: set[str] = set()  # adapters that wait for a slot; requests for them are refused meanwhile

    def begin(self, child: Child) -> None:
        """Record the adapters that the first engine was started with."""
        for name, given in child.info.adapters.items():
            self._adapters[name] = LoadedWeights(given.path, given.version, stamp_of(given.path))

    @property
    def rest(self) -> str | None:
        """Why a request would wait, and the route that ends that; None if it would be answered."""
        if self.changing is not None:
            return self.changing
        if self._level:
            return f"the engine sleeps (level {self._level}) until /wake_up"
        if self._dropped:
            return "the engine has no weights, because sleep level 2 dropped them; /update_weights loads new ones"
        return "the engine is paused until /resume" if self._paused else None

    async def control(self, child: Child, name: str, /, **args: Any) -> Any:
        """Run one of CONTROLS (engine.interface) with arguments by name, remember its effect, and return its result."""
        if name == "load_adapter":
            return await self._load_adapter(child, **args)
        if name == "unload_adapter":
            return await self._unload_adapter(child, **args)
        stamp = stamp_of(args["path"]) if name == "update_weights" else ()
        with self._change(CONTROLS[name].change):
            result = await child.call(name, **args)
            self._remember(child, name, args, result, stamp)
        return result

    @contextmanager
    def _change(self, what: str | None) -> Iterator[None]:
        """Refuse requests during a change: they would reach the engine after it."""
        self.changing = what or self.changing
        try:
            yield
        finally:
            self.changing = None if what else self.changing

    def _remember(self, child: Child, name: str, args: dict[str, Any], result: Any, stamp: tuple) -> None:
        match name:
            case "sleep":
                level = args.get("level", 1)
                self._level, self._loaded_asleep = max(level, self._level), False
                self._dropped |= level == 2
            case "wake_up":
                self._level, self._loaded_asleep = 0, False
            case "pause" | "resume":
                self._paused = name == "pause"
            case "update_weights":
                self._weights = LoadedWeights(args["path"], result, stamp)
                self._dropped, self._loaded_asleep = False, self._level > 0
                child.set_version(result)

    # --- adapters -----------------------------------------------------------------------------------------------------

    async def _load_adapter(self, child: Child, name: str, path: str, wait: bool = True) -> int:
        """Load an adapter and return its version.

        Running requests keep an older adapter of the same name. If that leaves no slot, new requests for it are
        refused until one is free.
        """
        stamp = stamp_of(path)
        version = await child.call("load_adapter", name=name, path=path)
        while not version:
            if not wait:
                message = f"adapter {name!r} must wait: running requests use every slot; ask again, or send wait: true"
                raise RequestError(message, param="wait", code=IN_USE)
            version = await self._replace_adapter(child, name, path)
        self._set_adapters(child, self._adapters | {name: LoadedWeights(path, version, stamp)})
        return version

    async def _replace_adapter(self, child: Child, name: str, path: str) -> int:
        """Unload the adapter of that name, wait for a slot, and load the new one; 0 if another one took the slot."""
        self._replaced.add(name)
        self._set_adapters(child, self._adapters)
        try:
            with suppress(UserError):  # it is not loaded, or was unloaded while this waited
                await child.call("unload_adapter", name=name)
            await child.call("adapter_place", name=name)
            return await child.call("load_adapter", name=name, path=path)
        except UserError:  # its files have changed since they were read: the old one is gone
            self._forget_adapter(child, name)
            raise
        finally:
            self._replaced.discard(name)

    async def _unload_adapter(self, child: Child, name: str, wait: bool = True) -> None:
        """Refuse new requests for an adapter, and return when running ones have ended."""
        version, users = await child.call("unload_adapter", name=name)
        self._forget_adapter(child, name)
        if users and not wait:
            message = f"adapter {name!r} accepts no more requests and is dropped when {users} running ones have ended"
            raise RequestError(message, param="wait", code=IN_USE)
        await child.call("adapter_unused", name=name, version=version)

    def _forget_adapter(self, child: Child, name: str) -> None:
        self._set_adapters(child, {key: each for key, each in self._adapters.items() if key != name})

    def _set_adapters(self, child: Child, adapters: dict[str, LoadedWeights]) -> None:
        self._adapters = adapters
        found = {key: LoadedAdapter(each.path, each.version, key in self._replaced) for key, each in adapters.items()}
        child.set_adapters(found)

    # --- after a restart ----------------------------------------------------------------------------------------------

    async def restore(self, child: Child) -> None:
        """Bring a new engine to the state of the last one; raises UserError if its weights cannot be loaded."""
        await self._restore_adapters(child)
        depth = 2 if self._dropped else self._level
        if not self._dropped and not self._loaded_asleep:
            await self._load(child)
        if depth:
            await child.call("sleep", level=depth)
        if self._loaded_asleep:
            await self._load(child)
        if depth and not self._level:
            await child.call("wake_up")
        if self._paused:
            await child.call("pause")

    async def _restore_adapters(self, child: Child) -> None:
        """Load the adapters again; leave out those whose files are gone, so that requests for them are refused."""
        found: dict[str, LoadedWeights] = {}
        for name, (path, version, stamp) in self._adapters.items():
            now = stamp_of(path)
            same = version if now == stamp else None
            try:
                version = await child.call("load_adapter", name=name, path=path, version=same)
                found[name] = LoadedWeights(path, version, now)
            except UserError as error:
                log.error("adapter %s is no longer served: %s", name, error)
        self._set_adapters(child, found)

    async def _load(self, child: Child) -> None:
        if self._weights is None:
            return
        path, version, stamp = self._weights
        now = stamp_of(path)
        if now != stamp:
            version += 1
            log.warning("weights in %s have changed since they were loaded: now version %d", path, version)
        self.lost = True
        await child.call("update_weights", path=path, version=version)
        self.lost, self._weights = False, LoadedWeights(path, version, now)
        child.set_version(version)


def stamp_of(path: str) -> tuple:
    """Return names, times and sizes of the files, which change with them; empty if they cannot be read."""
    folder = Path(path)
    try:
        files = sorted(folder.iterdir()) if folder.is_dir() else [folder]
        return tuple((file.name, file.stat().st_mtime_ns, file.stat().st_size) for file in files if file.is_file())
    except OSError:  # loading reports it
        return ()
