"""ControlState: what an engine was told since its start (weights, adapters, pause, sleep), so that one started in its
place is brought to the same state. Weights are loaded again from their path; where that fails, the new engine is not
used: it would answer with older weights without telling anyone."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from dovetail.engine.controls import CONTROLS, InUse
from dovetail.serve.remote.child import Child
from dovetail.serve.remote.wire import LoadedAdapter

log = logging.getLogger(__name__)


class LoadedWeights(NamedTuple):
    path: str
    version: int
    stamp: tuple  # of the files when they were loaded: see stamp_of


class ControlState:
    def __init__(self):
        self._paused = False
        self.changing: str | None = None  # what it is changing to, until the engine has done it
        self.lost = False  # the last weights could not be loaded after a restart
        self._weights: LoadedWeights | None = None  # None: those of the start
        self._level = 0  # of its sleep; 0: awake
        self._dropped = False  # a sleep of level 2 dropped the weights, and none were loaded since
        self._loaded_asleep = False
        self._adapters: dict[str, LoadedWeights] = {}
        self._replaced: set[str] = set()  # those that wait for a slot: requests for them are refused meanwhile

    def begin(self, child: Child) -> None:
        """Take down what the first engine was started with."""
        for name, given in child.info.adapters.items():
            self._adapters[name] = LoadedWeights(given.path, given.version, stamp_of(given.path))

    @property
    def rest(self) -> str | None:
        """Why a request would wait, and the route that ends that; None: it would be answered."""
        if self.changing is not None:
            return self.changing
        if self._level:
            return f"the engine sleeps (level {self._level}) until /wake_up"
        if self._dropped:
            return "the engine has no weights, because sleep level 2 dropped them; /update_weights loads new ones"
        return "the engine is paused until /resume" if self._paused else None

    async def control(self, child: Child, name: str, *args: Any) -> Any:
        """Have the engine carry out a control (see engine.controls), and remember the state that leaves it in."""
        if name == "load_adapter":
            return await self._load_adapter(child, *args)
        if name == "unload_adapter":
            return await self._unload_adapter(child, *args)
        stamp = stamp_of(args[0]) if name == "update_weights" else ()
        with self._change(CONTROLS[name].change):
            answer = await child.call(name, *args)
            self._remember(child, name, args, answer, stamp)
        return answer

    @contextmanager
    def _change(self, what: str | None) -> Iterator[None]:
        """During the change no request is taken: it would reach the engine after it."""
        self.changing = what or self.changing
        try:
            yield
        finally:
            self.changing = None if what else self.changing

    def _remember(self, child: Child, name: str, args: tuple, answer: Any, stamp: tuple) -> None:
        match name:
            case "sleep":
                level = args[0] if args else 1
                self._level, self._loaded_asleep = max(level, self._level), False
                self._dropped |= level == 2
            case "wake_up":
                self._level, self._loaded_asleep = 0, False
            case "pause" | "resume":
                self._paused = name == "pause"
            case "update_weights":
                self._weights = LoadedWeights(args[0], answer, stamp)
                self._dropped, self._loaded_asleep = False, self._level > 0
                child.set_version(answer)

    # --- adapters -----------------------------------------------------------------------------------------------------

    async def _load_adapter(self, child: Child, name: str, path: str, wait: bool = True) -> int:
        """Load an adapter, and return its version. Requests under way keep one of the same name; where that leaves no
        slot, new requests for it are refused until one is free."""
        stamp = stamp_of(path)
        version = await child.call("load_adapter", name, path)
        while not version:
            if not wait:
                raise InUse(
                    f"requests under way need every place for adapters, and {name!r} gets one when they have ended: "
                    "ask again, or wait"
                )
            version = await self._replace_adapter(child, name, path)
        self._set_adapters(child, self._adapters | {name: LoadedWeights(path, version, stamp)})
        return version

    async def _replace_adapter(self, child: Child, name: str, path: str) -> int:
        """Unload the adapter of that name, wait for a slot, and load the new one there; 0: others were faster."""
        self._replaced.add(name)
        self._set_adapters(child, self._adapters)
        try:
            with suppress(ValueError):  # it is not loaded, or was unloaded while this waited
                await child.call("unload_adapter", name)
            await child.call("adapter_place", name)
            return await child.call("load_adapter", name, path)
        except ValueError:  # its files have changed since they were read: the old one is gone
            self._forget_adapter(child, name)
            raise
        finally:
            self._replaced.discard(name)

    async def _unload_adapter(self, child: Child, name: str, wait: bool = True) -> None:
        """Unload an adapter at once for new requests, and return when those under way have ended."""
        version, users = await child.call("unload_adapter", name)
        self._forget_adapter(child, name)
        if users and not wait:
            raise InUse(f"adapter {name!r} gets no more requests, and is gone when those under way have ended: {users}")
        await child.call("adapter_unused", name, version)

    def _forget_adapter(self, child: Child, name: str) -> None:
        self._set_adapters(child, {key: each for key, each in self._adapters.items() if key != name})

    def _set_adapters(self, child: Child, adapters: dict[str, LoadedWeights]) -> None:
        self._adapters = adapters
        found = {key: LoadedAdapter(each.path, each.version, key in self._replaced) for key, each in adapters.items()}
        child.set_adapters(found)

    async def restore(self, child: Child) -> None:
        """Bring a new engine to the state of the last one; ValueError where that fails."""
        await self._restore_adapters(child)
        depth = 2 if self._dropped else self._level
        if not self._dropped and not self._loaded_asleep:
            await self._load(child)
        if depth:
            await child.call("sleep", depth)
        if self._loaded_asleep:
            await self._load(child)
        if depth and not self._level:
            await child.call("wake_up")
        if self._paused:
            await child.call("pause")

    async def _restore_adapters(self, child: Child) -> None:
        """One whose files are gone is left out: requests for it are refused."""
        found: dict[str, LoadedWeights] = {}
        for name, (path, version, stamp) in self._adapters.items():
            now = stamp_of(path)
            try:
                version = await child.call("load_adapter", name, path, version if now == stamp else None)
                found[name] = LoadedWeights(path, version, now)
            except ValueError as error:
                log.error("adapter %s is not served any more: %s", name, error)
        self._set_adapters(child, found)

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
        self.lost, self._weights = False, LoadedWeights(path, version, now)
        child.set_version(version)


def stamp_of(path: str) -> tuple:
    """Names, times and sizes, which change when the files do; empty if they cannot be read: loading reports that."""
    folder = Path(path)
    try:
        files = sorted(folder.iterdir()) if folder.is_dir() else [folder]
        return tuple((file.name, file.stat().st_mtime_ns, file.stat().st_size) for file in files if file.is_file())
    except OSError:
        return ()
