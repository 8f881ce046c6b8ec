"""Save and restore the checkpoints of a run in two tiers.

A fast folder at every save, a durable one (a bucket) less often.

    with Checkpoints(run / "checkpoints", durable="gs://bucket/run", durable_every=5000) as checkpoints:
        checkpoints.save(step, state, {"cursor": 123})          # returns at once; writes in the background
        state, meta, step = checkpoints.restore(target)         # the newest intact one, of both tiers

Crashes, full disks and damaged files are handled in `checkpoint_tier`. The state is any tree of jax arrays; it is
stored by the names of its leaves, so that Orbax sees a flat dict and neither tree types nor their order matter.
"""

from __future__ import annotations

import json
import logging
import os
from typing import Any

import jax
import numpy as np

from dovetail.core.errors import FileError, UserError
from dovetail.io.checkpoint_tier import Report, Tier, every_process
from dovetail.io.manifest import NotOurs

log = logging.getLogger(__name__)


class Checkpoints:
    """Manage the checkpoints of a run.

    All processes of a run create one and call the same methods in the same order; process 0 alone cleans up.

    Args:
        directory: The local folder.
        durable: A second folder or bucket.
        keep: How many of the newest checkpoints to keep.
        keep_every: Also keep every multiple of this step; 0 for none.
        durable_every: Steps between saves to the durable folder.
        on_problem: Called with a sentence if a save failed or a checkpoint is damaged; the default logs it.
    """

    def __init__(
        self,
        directory: str | os.PathLike,
        *,
        durable: str = "",
        keep: int = 3,
        keep_every: int = 0,
        durable_every: int = 0,
        on_problem: Report | None = None,
    ) -> None:
        if keep < 1:
            raise UserError(
                f"keep must be at least 1: a run that keeps no checkpoint cannot resume; got {keep}", param="keep"
            )
        if bool(durable) != bool(durable_every):
            raise UserError(
                f"durable and durable_every belong together; got {durable!r} and {durable_every}", param="durable"
            )
        self._report = on_problem or log.warning
        self._durable_every = durable_every
        self._tiers = [Tier("local", os.fspath(directory), keep, keep_every, self._report)]
        if durable:
            self._tiers.append(Tier("durable", durable, keep, keep_every, self._report))

    # --- writing ------------------------------------------------------------------------------------------------------

    def save(self, step: int, state: Any, meta: dict[str, Any], durable: bool | None = None) -> None:
        """Start a save. When this returns the arrays are on the host, and the caller may donate them.

        It first waits for the save before. A save that fails is reported (here or at the next call that waits) and does
        not raise.

        Args:
            step: The step of the state.
            state: A tree of jax arrays.
            meta: JSON values to store with it.
            durable: Whether to save to the durable folder; None for multiples of `durable_every`.
        """
        if durable and len(self._tiers) == 1:
            raise UserError(
                "there is no durable folder to save to: give Checkpoints durable= and durable_every=", param="durable"
            )
        meta = _plain(meta)
        arrays = _named(state)
        for name, leaf in arrays.items():
            if not isinstance(leaf, jax.Array):
                raise UserError(
                    f"a checkpoint holds jax arrays; {name} is {type(leaf).__name__}: wrap it in jnp.asarray",
                    param="state",
                )
        wanted = durable if durable is not None else bool(self._durable_every) and step % self._durable_every == 0
        self.wait()
        for tier in self._tiers if wanted else self._tiers[:1]:
            tier.save(step, arrays, meta)

    def wait(self) -> None:
        """Wait until the last save is on disk, or was reported as failed."""
        done = [step for tier in self._tiers if (step := tier.settle()) is not None]
        for tier in self._tiers if done else []:  # later steps are from before the run went back to an older one
            tier.drop_after(max(done))

    @property
    def failures(self) -> int:
        """Return the number of saves that failed in a row, in the worse tier."""
        return max(tier.failures for tier in self._tiers)

    def has_failed(self) -> bool:
        """Return whether the last save is missing in some tier, for any process. All processes must call it."""
        return not every_process(self.failures == 0)

    @property
    def problem(self) -> str:
        """Return why the last save failed, if this process knows."""
        return next((tier.problem for tier in self._tiers if tier.failures), "another process could not write its part")

    def close(self) -> None:
        """Wait for the last save and release Orbax's threads."""
        self.wait()
        for tier in self._tiers:
            tier.close()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # --- reading ------------------------------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """Return the steps with a complete checkpoint in either tier, oldest first, as this process sees them."""
        return sorted({step for tier in self._tiers for step in tier.steps()})

    def latest(self) -> int | None:
        """Return the newest step, the same for every process; damage shows only when it is read."""
        found = self._candidates(None)
        return found[0][0] if found else None

    def restore(self, target: Any, step: int | None = None) -> tuple[Any, dict[str, Any], int]:
        """Restore the newest intact checkpoint, or that of `step`.

        A damaged checkpoint is reported and the next older one is used.

        Args:
            target: A tree of jax.ShapeDtypeStruct with shardings, of any mesh and any number of processes.
            step: The step; None for the newest.

        Returns:
            (state, meta, step).

        Raises:
            CheckpointError: The checkpoint is of another model.
            FileError: There is no intact checkpoint.
        """
        self.wait()
        names = {name: _placed(name, leaf) for name, leaf in _named(target).items()}
        faults: list[str] = []
        for at, tier in self._candidates(step):
            found, fault = _attempt(tier, at, names)
            if every_process(found is not None):
                assert found is not None, "every process has read it, this one too"
                arrays, meta = found
                return jax.tree.unflatten(jax.tree.structure(target), [arrays[name] for name in names]), meta, at
            del found  # its memory is needed for the next one
            tier.damaged.add(at)
            faults.append(f"step {at} in {tier.folder} ({fault or 'damaged for another process'})")
            self._report(f"the checkpoint of {faults[-1]} is damaged; trying the next older one")
        where = " and ".join(str(tier.folder) for tier in self._tiers)
        wanted = "checkpoint" if step is None else f"checkpoint of step {step}"
        damaged = f": damaged are {'; '.join(faults)}" if faults else ""
        raise FileError(f"there is no good {wanted} in {where}{damaged}")

    def _candidates(self, step: int | None) -> list[tuple[int, Tier]]:
        """Return (step, tier), newest first and the faster tier first. Process 0 decides for all."""
        found = [(s, i) for i, tier in enumerate(self._tiers) for s in tier.steps() if step in (None, s)]
        ordered = sorted(found, key=lambda pair: (-pair[0], pair[1]))
        if jax.process_count() > 1:
            from jax.experimental import multihost_utils

            count = int(multihost_utils.broadcast_one_to_all(np.int32(len(ordered))))
            if count == 0:  # a new run
                return []
            table = np.zeros((count, 2), np.int32)
            if jax.process_index() == 0:
                table[:] = ordered
            ordered = [(int(s), int(i)) for s, i in multihost_utils.broadcast_one_to_all(table)]
        return [(s, self._tiers[i]) for s, i in ordered]


def _attempt(tier: Tier, step: int, target: dict[str, jax.ShapeDtypeStruct]) -> tuple[tuple | None, str]:
    """Return (arrays and meta, "") or (None, why not)."""
    try:
        return tier.read(step, target), ""
    except NotOurs:
        raise
    except Exception as error:  # Orbax and tensorstore meet a damaged file with errors of many types
        return None, f"{type(error).__name__}: {error}"


def _named(tree: Any) -> dict[str, Any]:
    """Return leaves by their path, such as params.layers.0.q."""
    pairs, _ = jax.tree_util.tree_flatten_with_path(tree)
    named = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in pairs}
    assert len(named) == len(pairs), "two leaves of a state have the same path"
    return named


def _placed(name: str, leaf: Any) -> jax.ShapeDtypeStruct:
    sharding = getattr(leaf, "sharding", None)
    if sharding is None:
        raise UserError(f"restore needs to know where each array goes; {name} has no sharding")
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _plain(meta: dict[str, Any]) -> dict[str, Any]:
    """Return a copy that is JSON: the caller may change its own while it is being written."""
    try:
        return json.loads(json.dumps(meta))
    except TypeError as error:
        raise UserError(
            f"a checkpoint's meta must be JSON (numbers, strings, lists, dicts): {error}", param="meta"
        ) from error
