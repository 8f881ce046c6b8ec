"""Keep compiled programs on disk, so that a second start takes seconds.

XLA's own cache saves compilation. A whole program on disk (`compile_program`) also saves tracing, which holds Python's
lock and takes as long; it is found by a key of everything it depends on (`program_key`). Loading one executes it, so
programs are kept in a folder of this user, and only the user's own files are loaded.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import pickle
import platform
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import jax

from dovetail.core.files import own_folder, read_own
from dovetail.io.hub import home

log = logging.getLogger(__name__)
NEVER = 1e9  # seconds of compilation from which on XLA's cache keeps a program
UNUSED_S = 30 * 24 * 3600  # after which a program is deleted
ROOMS = ("core", "engine", "models", "ops")  # whose code decides what a kept program does


def keep_compiled() -> None:
    """Keep compiled programs on disk, unless the user has set a folder for them or turned that off."""
    if jax.config.jax_compilation_cache_dir is None and (folder := _own_cache()):  # type: ignore[attr-defined]
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)


def _own_cache() -> Path | None:
    """Return XLA's cache, which holds machine code: each of several users that share DOVETAIL_HOME has its own."""
    for name in ("xla", f"xla-{os.getuid()}"):
        try:
            return own_folder(home() / name)
        except OSError as error:
            log.info("compiled programs are not kept in %s: %s", home() / name, error)
    return None


@contextmanager
def without_cache() -> Iterator[None]:
    """Compile without XLA's cache, for a compiler that writes dumps only when it compiles."""
    from jax.experimental.compilation_cache.compilation_cache import reset_cache

    was = jax.config.jax_enable_compilation_cache  # type: ignore[attr-defined]
    jax.config.update("jax_enable_compilation_cache", False)
    reset_cache()  # whether there is one is else asked once per process
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", was)
        reset_cache()


def program_key(*parts: Any) -> str:
    """Return a program's key: these values (by their repr), this code, the libraries, the device and its flags."""
    text = repr((parts, _surroundings()))
    return hashlib.sha256(text.encode()).hexdigest()


def compile_program(key: str, compile: Callable[[], Any]) -> Any:
    """Return the result of `compile`, and keep it on disk under the key.

    It is not put into XLA's cache too: on a CPU a program from that cache cannot be serialised again (its functions are
    lost).
    """
    from jax._src import config  # the setting for this thread alone has no public name

    _from_cache.hit = False
    with config.persistent_cache_min_compile_time_secs(NEVER) if _folder() else nullcontext():
        program = compile()
    if not _from_cache.hit:
        _save(key, program)
    return program


class _FromCache(threading.local):
    """Record whether XLA's cache gave this thread a program."""

    hit = False


_from_cache = _FromCache()


def _on_event(event: str, **_: Any) -> None:
    _from_cache.hit |= event == "/jax/compilation_cache/cache_hits"


jax.monitoring.register_event_listener(_on_event)


def _save(key: str, compiled: Any) -> None:
    """Save a program; a failure is only logged, and the program is compiled again next time."""
    from jax.experimental.serialize_executable import serialize

    folder = _folder()
    if folder is None:
        return
    try:
        own_folder(folder)
        part = folder / f"{key}.{os.getpid()}.{threading.get_ident()}.part"
        part.write_bytes(pickle.dumps(serialize(compiled)))
        part.chmod(0o600)
        part.replace(folder / key)
        _forget_unused(folder)
    except Exception as error:
        log.info("a compiled program was not kept: %s", error)


def has_program(key: str) -> bool:
    """Return whether a program of this key is on disk."""
    folder = _folder()
    return folder is not None and (folder / key).is_file()


def once(key: str, work: Callable[[], None]) -> None:
    """Do work whose result another cache keeps, if this key's has not been done; without a folder it is not done."""
    folder = _folder()
    if folder is None:
        return
    try:
        done = own_folder(folder) / key
        if not done.is_file():
            work()
        done.touch(0o600)  # it is of use
    except OSError as error:
        log.info("%s: nothing was compiled ahead", error)


def load_program(key: str, devices: list[Any]) -> Any | None:
    """Return the program, loaded onto these devices; None if it is missing or unusable."""
    from jax.experimental.serialize_executable import deserialize_and_load

    folder = _folder()
    if folder is None or not (folder / key).is_file():
        return None
    try:
        payload, in_tree, out_tree = pickle.loads(read_own(own_folder(folder) / key))
        os.utime(folder / key)  # it is of use
        return deserialize_and_load(payload, in_tree, out_tree, devices[0].client, devices)
    except Exception as error:
        log.info("a kept program could not be used and is compiled again: %s", error)
        return None


@functools.cache
def _forget_unused(folder: Path) -> None:
    """Remove, once per process, programs of other versions of this package, which no key finds any more."""
    for path in folder.iterdir():
        with suppress(FileNotFoundError):  # another thread has given its part its name
            if time.time() - path.stat().st_mtime > UNUSED_S:
                path.unlink()


def _folder() -> Path | None:
    """Return the folder of programs in XLA's cache; None if the user wants none, or has it in a bucket."""
    root = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    if not root or "://" in root or not jax.config.jax_enable_compilation_cache:  # type: ignore[attr-defined]
        return None
    return Path(root) / f"programs-{os.getuid()}"


def _surroundings() -> tuple[Any, ...]:
    device = jax.devices()[0]
    settings = [getattr(jax.config, name) for name in ("jax_enable_x64", "jax_default_matmul_precision")]
    settings += [jax.config.jax_threefry_partitionable, os.environ.get("XLA_FLAGS")]  # type: ignore[attr-defined]
    versions = jax.__version__, device.client.platform_version
    return versions, device.platform, device.device_kind, settings, _host(), _code()


@functools.cache
def _host() -> tuple[str, ...]:
    """Return the features of the host: a CPU's program uses what that CPU can do."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return platform.machine(), platform.processor(), *sorted({x for x in lines if x.startswith(("flags", "Features"))})


@functools.cache
def _code() -> str:
    digest = hashlib.sha256()
    root = Path(__file__).parent.parent
    for path in sorted(path for room in ROOMS for path in (root / room).rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
