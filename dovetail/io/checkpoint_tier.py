"""Checkpoints in one folder (or bucket): written completely or not at all, and verified when they are read.

FOLDER/step_500 is a checkpoint if it has a manifest. Orbax writes under a temporary name and renames; remains of a
crash are removed before the next save. When a step is saved a second time, the first is step_500.old until then.

Orbax's order of one save: each process writes its shards (a future), all meet at a barrier, process 0 calls `finalize`
and renames the folder from its temporary name, all meet again. A process that raised in between would leave the others
at the barrier until it times out. So a Writer raises nothing: it notes the problem and writes no manifest, and a
folder without a manifest does not count as a checkpoint.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from dovetail.core.errors import FileError, UserError
from dovetail.io import manifest
from dovetail.io.manifest import Damaged, Leaf, Manifest, NotOurs, digest

# How storage fails: tensorstore raises ValueError for a full disk, jax RuntimeError for a barrier. The rest are bugs.
FAILURES = (OSError, ValueError, RuntimeError)
FOLDER = re.compile(r"step_(\d+)(\.old)?")
PROBE = ".writable"  # written before each save
TIMEOUT_S = 1200  # for one save, all processes together
MIN_SLICE_BYTES = 1 << 20  # of a replicated array, for each replica to write a part: cutting it compiles a program
Report = Callable[[str], None]
Seal = Callable[[Any], None]  # writes the manifest into a folder whose arrays are all there


class Writer(ocp.PyTreeCheckpointHandler):
    """Write arrays, then the manifest; note a failure in `problem`."""

    def __init__(self) -> None:
        arrays = ocp.type_handlers.ArrayHandler(min_slice_bytes_for_replica_parallel=MIN_SLICE_BYTES)
        handlers = ocp.type_handlers.create_type_handler_registry((jax.Array, arrays))
        # Measured on 256 MiB of f32 weights: compression saves 8% of the bytes and costs 7 times the processor time.
        super().__init__(use_compression=False, type_handler_registry=handlers)
        _hush()
        self.seal: Seal | None = None
        self.problem: Exception | None = None

    async def async_save(self, directory: Any, *args: Any, **kwargs: Any) -> list[Any]:
        """Start the write, and note failures instead of raising them."""
        futures = await super().async_save(directory, *args, **kwargs) or []
        return [_Noted(self, future.result) for future in futures] + [_Noted(self, lambda _: self._mark(directory))]

    def _mark(self, directory: Any) -> None:
        """Tell process 0 that this process's shards are written."""
        if self.problem is None:
            _marker(directory, jax.process_index()).write_text("")

    def finalize(self, directory: Any) -> None:
        """Write the manifest if every process has written its shards; else empty the folder."""
        try:
            if self.problem is None:
                self._finish(directory)
        except Exception as error:  # whatever Orbax or the file system says: this save failed, and the run goes on
            self.problem = error
        if self.problem is not None:
            _empty(directory)  # makes room on a full disk for what Orbax still has to write

    def _finish(self, directory: Any) -> None:
        silent = [i for i in range(jax.process_count()) if not _marker(directory, i).exists()]
        if silent:
            raise FileError(f"processes {silent} could not write their part")
        super().finalize(directory)
        assert self.seal is not None, "a save sets the seal first"
        self.seal(directory)


@ocp.args.register_with_handler(Writer, for_save=True, for_restore=True)
@dataclass
class Arrays(ocp.args.PyTreeSave):
    """Hold what to save; Orbax finds the handler of a save by the type of its argument."""


@dataclass
class _Noted:
    """Wrap a future of Orbax's protocol so that its failure is noted in the writer."""

    writer: Writer
    work: Callable[[float | None], Any]

    def result(self, timeout: float | None = None) -> None:
        try:
            self.work(timeout)
        except Exception as error:  # tensorstore reports a full disk as ValueError, others as OSError
            self.writer.problem = self.writer.problem or error

    def cancel(self) -> None:
        """Do nothing: the folder without a manifest is removed later."""


def _marker(directory: Any, process: int) -> Any:
    return directory / f"written.process_{process}"


def _empty(directory: Any) -> None:
    for path in directory.iterdir():
        if path.is_dir():
            path.rmtree(missing_ok=True)
        elif path.name != "_CHECKPOINT_METADATA":
            path.unlink(missing_ok=True)


# --- what a failed write prints ---------------------------------------------------------------------------------------


@cache
def _hush() -> None:
    """Silence tracebacks of each array of a failed write; the failure itself reaches the user as one sentence.

    They come from Orbax's log, from the event loops that it leaves, and from tensorstore, which calls a closed one.
    """
    for name, text in (("absl", "_SignalingThread.run() raised"), ("asyncio", "exception was never retrieved")):
        logging.getLogger(name).addFilter(lambda record, text=text: text not in record.getMessage())
    before = sys.unraisablehook

    def hook(args: Any) -> None:
        if not (isinstance(args.exc_value, RuntimeError) and str(args.exc_value) == "Event loop is closed"):
            before(args)

    sys.unraisablehook = hook


def steps_to_keep(steps: Iterable[int], keep: int, keep_every: int) -> set[int]:
    """Return the newest `keep` steps, and every multiple of `keep_every`."""
    ordered = sorted(steps)
    return set(ordered[-keep:]) | {s for s in ordered if keep_every and s % keep_every == 0}


class Tier:
    """Write and read the checkpoints of one folder, one save at a time.

    All processes call the same methods in the same order.
    """

    def __init__(self, name: str, folder: str, keep: int, keep_every: int, report: Report) -> None:
        self.name, self.folder = name, _path(folder)
        self.failures, self.problem = 0, ""  # in a row; why the last one failed
        self.damaged: set[int] = set()  # found so by a restore: removed, and not counted among the newest `keep`
        self._keep, self._keep_every, self._report = keep, keep_every, report
        self._pending: int | None = None
        self._good: tuple[int, dict] | None = None  # the newest that this process knows to be whole, with its meta
        self._handler = Writer()
        self._saver = ocp.AsyncCheckpointer(
            self._handler,
            async_options=ocp.options.AsyncOptions(timeout_secs=TIMEOUT_S),
            multiprocessing_options=ocp.options.MultiprocessingOptions(barrier_sync_key_prefix=name),
        )

    # --- what is there ------------------------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """Return the steps with a complete checkpoint that is not known to be damaged, oldest first."""
        return sorted({int(match[1]) for match in self._matches() if self._is_whole(self.folder / match[0])})

    def _matches(self) -> list[re.Match[str]]:
        return [match for path in self._entries() if (match := FOLDER.fullmatch(path.name))]

    def _entries(self) -> list[Any]:
        return list(self.folder.iterdir()) if self.folder.is_dir() else []

    @staticmethod
    def _is_whole(path: Any) -> bool:
        return (path / manifest.NAME).exists()

    def _at(self, step: int) -> Any:
        """Return the folder of a step; the one set aside if the second save of that step never ended."""
        path = self.folder / f"step_{step}"
        return path if self._is_whole(path) else self.folder / f"step_{step}.old"

    # --- writing ------------------------------------------------------------------------------------------------------

    def save(self, step: int, arrays: dict[str, jax.Array], meta: dict[str, Any]) -> None:
        """Start a save; when it returns the arrays are on the host and may be donated. Call `settle` first."""
        if self._good == (step, meta):
            return
        try:
            self._prepare(step)
            # one digest after the other, as in Manifest.check_arrays
            leaves = {name: Leaf(x.shape, str(x.dtype), int(digest(x))) for name, x in arrays.items()}
            self._handler.problem = None
            self._handler.seal = lambda folder: _seal(folder, step, meta, leaves)
            self._saver.save(self.folder / f"step_{step}", args=Arrays(arrays))
        except OSError as error:
            self._failed(step, error)
        else:
            self._pending, self._good = step, (step, meta)

    def settle(self) -> int | None:
        """Wait for the current save and return its step if it is complete.

        Then remove checkpoints that are not to be kept.
        """
        if self._pending is None:
            return None
        step, self._pending = self._pending, None
        try:
            self._saver.wait_until_finished()
            problem = self._handler.problem
        except Exception as error:  # what Orbax does around the writer: making the folder, renaming it, barriers
            problem = error
        if problem is not None:
            if not isinstance(problem, FAILURES):
                raise problem
            self._failed(step, problem)
            return None
        self.failures = 0
        self.drop_after(step)
        self.damaged.discard(step)
        steps = set(self.steps())
        self._drop(steps - steps_to_keep(steps - self.damaged, self._keep, self._keep_every))
        self._tidy(self._sweep)
        return step

    def drop_after(self, newest: int) -> None:
        """Remove later steps once `newest` is complete.

        The run went back to before them, by rollback or because of damage.
        """
        self._drop({step for step in self.steps() if step > newest})

    def _drop(self, steps: set[int]) -> None:
        for step in steps:
            self._tidy(lambda step=step: _remove(self._at(step)))

    def _tidy(self, work: Callable[[], None]) -> None:
        """Remove files on process 0 for all; a failure is reported, and the next save tries again."""
        try:
            if jax.process_index() == 0:
                work()
        except OSError as error:
            self._report(f"old checkpoints in {self.folder} could not be removed: {_reason(error)}")

    def _failed(self, step: int, error: Exception) -> None:
        self._good = None
        self.failures, self.problem = self.failures + 1, _reason(error)
        self._tidy(self._sweep)
        left = self.steps()
        last = f"the last good one there is step {left[-1]}" if left else "there is no good one there yet"
        self._report(
            f"the checkpoint of step {step} was not written to {self.folder}: {self.problem}; "
            f"{last}; the next save will try again"
        )

    def _prepare(self, step: int) -> None:
        """Prepare the folder on process 0; if that fails, no process waits for it in Orbax."""
        problem = None
        try:
            if jax.process_index() == 0:
                self._make_ready(step)
        except OSError as error:
            problem = error
        if not every_process(problem is None):
            raise problem or OSError("process 0 could not make the folder ready")
        # Every process writes into it. Find out at the first save, and not when a restore misses half.
        if not every_process((self.folder / PROBE).exists()):
            raise UserError(
                f"checkpoints need a folder that every process sees, and {self.folder} is not one; "
                "put the run directory on a shared file system or in a bucket"
            )

    def _make_ready(self, step: int) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / PROBE).write_text("")
        self._sweep()
        again = self.folder / f"step_{step}"
        if again.exists():
            again.rename(self.folder / f"step_{step}.old")

    def _sweep(self) -> None:
        """Remove what a crash or a failure left: temporary folders, and those without a manifest."""
        for path in self._entries():
            match = FOLDER.fullmatch(path.name)
            half = path.name.startswith("step_") and ".orbax-checkpoint-tmp" in path.name
            replaced = match and match[2] and self._is_whole(self.folder / f"step_{match[1]}")
            if half or replaced or (match and not self._is_whole(path)):
                _remove(path)

    # --- reading ------------------------------------------------------------------------------------------------------

    def read(self, step: int, target: dict[str, jax.ShapeDtypeStruct]) -> tuple[dict[str, jax.Array], dict[str, Any]]:
        """Return the arrays, laid out as in `target`, and the meta.

        Raise CheckpointError if they are not the target's.
        """
        folder = self._at(step)
        found = manifest.read(folder)
        found.check_target(target)
        found.check_files(folder)
        wanted = {n: ocp.ArrayRestoreArgs(sharding=x.sharding, global_shape=x.shape, dtype=x.dtype)
                  for n, x in target.items()}  # fmt: skip
        # Not through the checkpointer: it ends with a barrier, at which a process that met a damaged file is missing.
        arrays = self._handler.restore(folder, args=ocp.args.PyTreeRestore(restore_args=wanted))
        found.check_arrays(arrays)
        self._good = (step, found.meta)
        return arrays, found.meta

    def close(self) -> None:
        """Release Orbax's threads."""
        self._saver.close()


def manifests(folder: str) -> list[Manifest]:
    """Return the manifests of the complete checkpoints in a folder, without reading their arrays."""
    where, found = _path(folder), []
    for path in where.iterdir() if where.is_dir() else ():
        if FOLDER.fullmatch(path.name) and Tier._is_whole(path):
            try:
                found.append(manifest.read(path))
            except (Damaged, NotOurs):  # a restore says so
                continue
    return found


def _seal(folder: Any, step: int, meta: dict[str, Any], leaves: dict[str, Leaf]) -> None:
    Manifest(step, meta, leaves, manifest.sizes(folder)).write(folder)


def _path(folder: str) -> Any:
    from etils import epath  # a dependency of Orbax's: local paths, and buckets by their URL

    return epath.Path(folder if "://" in folder else os.path.abspath(os.path.expanduser(folder)))


def _remove(path: Any) -> None:
    """Remove a checkpoint, the manifest first: without it the rest does not count as a checkpoint."""
    (path / manifest.NAME).unlink(missing_ok=True)
    path.rmtree(missing_ok=True)


def every_process(ok: bool) -> bool:
    """Return whether `ok` holds for every process. All processes call it, in the same order."""
    if jax.process_count() == 1:
        return ok
    from jax.experimental import multihost_utils

    return bool(np.asarray(multihost_utils.process_allgather(np.asarray(ok))).all())


def _reason(error: Exception) -> str:
    text = str(error)
    full = getattr(error, "errno", None) == errno.ENOSPC or "No space left" in text or "RESOURCE_EXHAUSTED" in text
    return "no space is left there" if full else f"{type(error).__name__}: {text.splitlines()[0] if text else ''}"
