"""Decide what to do about a bad step. Plain Python, without jax.

The loop replays the bad step on the same batch and state, and passes both results. If they are equal, the batch is at
fault and is skipped. If they differ, the hardware is at fault and the host is named. After too many bad batches the
state itself is in doubt: the run goes back to its last good checkpoint and skips the batches up to here, at most
`max_rollbacks` times.

RUN_DIR/health.jsonl has one line per finding. It is read at the start, so that a killed run skips the same batches and
has the same budget left.
"""

from __future__ import annotations

import enum
import json
import logging
import math
import os
import platform
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dovetail.core.training import Health
from dovetail.train.guard.exits import PREEMPTED, QUARANTINE, TROUBLE

log = logging.getLogger(__name__)

FILE = "health.jsonl"
WINDOW = 1000  # batches among which max_skips are counted
IN_A_ROW = 3  # consecutive bad batches: the state is at fault, not the data
NEAR = 1e-2  # relative tolerance between two runs of a step on platforms that are not deterministic


class Decision(enum.Enum):
    """Name what to do about a bad step."""

    SKIP = "skip"  # skip the batch and continue
    QUARANTINE = "quarantine"  # exit: faulty hardware
    ROLLBACK = "rollback"  # restore the last good checkpoint; `Doctor.skips` then skips the batches at fault
    STOP = "stop"  # exit: the budget is used up


@dataclass(frozen=True)
class StepResult:
    """Hold the result of one run of a step."""

    loss: float
    grad_norm: float
    checksums: Mapping[int, int] = field(default_factory=dict)  # device id -> train.guard.health.checksums

    @property
    def bits(self) -> tuple[bytes, bytes]:
        """Return the bits of loss and gradient norm."""
        return struct.pack("<f", self.loss), struct.pack("<f", self.grad_norm)

    @property
    def kind(self) -> str:
        """Return what is bad, for the record."""
        finite = math.isfinite(self.loss), math.isfinite(self.grad_norm)
        return "spike" if all(finite) else "non-finite loss" if not finite[0] else "non-finite gradient"


@dataclass(frozen=True)
class Verdict:
    """Hold a decision with its reason."""

    decision: Decision
    reason: str  # a sentence for the user
    exit_code: int | None = None  # for QUARANTINE and STOP
    hosts: tuple[str, ...] = ()
    processes: tuple[int, ...] = ()
    devices: tuple[int, ...] = ()


class Doctor:
    """Judge bad steps. Every process has one and reaches the same verdict from the same numbers; process 0 records it.

    Args:
        settings: The recipe's health settings.
        run_dir: The run's folder.
        process: Index of this process.
        owners: Device id -> (process index, host name) of all devices.
        replicas: Groups of ids whose checksums must be equal (health.replicas).
        exact: Whether the platform is deterministic; if not, results are compared with a tolerance.
    """

    def __init__(
        self,
        settings: Health,
        run_dir: str | os.PathLike,
        *,
        process: int = 0,
        owners: Mapping[int, tuple[int, str]] | None = None,
        replicas: Sequence[Sequence[int]] = (),
        exact: bool = True,
    ) -> None:
        self.settings, self.process, self.exact = settings, process, exact
        self.host = platform.node()
        self._owners = dict(owners or {})
        self._replicas = [list(group) for group in replicas]
        self._path = Path(run_dir) / FILE
        self._skipped: list[tuple[int, int]] = []  # first and last batch of each skipped range
        self._recent: list[int] = []  # single batches skipped since the last rollback
        self._rollbacks = 0
        for record in read(run_dir):
            self._remember(record)

    def skips(self, batch: int) -> bool:
        """Return whether a batch was found at fault and must be skipped."""
        return any(first <= batch <= last for first, last in self._skipped)

    def examine(self, step: int, batch: int, results: Sequence[StepResult], back_to: int | None = None) -> Verdict:
        """Return and record the verdict on a bad step.

        Args:
            step: The step's number.
            batch: The batch's number.
            results: The step's own result, then those of its replays.
            back_to: The batch at which the last good checkpoint continues; None without a checkpoint.
        """
        step, batch = int(step), int(batch)
        first, *replays = results
        changed = [again for again in replays if not self._equal(first, again)]
        split = {device for result in results for device in self.outliers(result)}
        if changed or split:
            verdict = self._hardware(first, changed, split)
        else:
            verdict = self._data(first, batch, back_to)
        record = self._record(step, batch, verdict, results, back_to)
        self._remember(record)
        if self.process == 0:
            append(self._path, record)
        return verdict

    # --- hardware -----------------------------------------------------------------------------------------------------

    def _equal(self, a: StepResult, b: StepResult) -> bool:
        if self.exact:
            return a.bits == b.bits and dict(a.checksums) == dict(b.checksums)
        return all(_near(x, y) for x, y in ((a.loss, b.loss), (a.grad_norm, b.grad_norm)))

    def outliers(self, result: StepResult) -> list[int]:
        """Return the devices whose values differ from their replicas'."""
        groups = [{d: result.checksums[d] for d in group if d in result.checksums} for group in self._replicas]
        return [device for group in groups for device in disagreement(group)]

    def _hardware(self, first: StepResult, changed: list[StepResult], split: set[int]) -> Verdict:
        moved = {d for again in changed for d, value in again.checksums.items() if first.checksums.get(d) != value}
        # Of two replicas that disagree, the faulty one changed between runs.
        devices = sorted((split & moved) or split or moved)
        owners = sorted({self._owners.get(device, (self.process, self.host)) for device in devices})
        processes, hosts = [p for p, _ in owners], [h for _, h in owners]
        mine = not devices or self.process in processes
        hosts = list(dict.fromkeys(hosts)) or [self.host]
        named = f"devices {devices} of {', '.join(hosts)}" if devices else f"the device is not known ({self.host})"
        what = "the same step on the same batch gave two results" if changed else "replicas hold different values"
        return Verdict(
            Decision.QUARANTINE,
            f"{what}: faulty hardware, {named}",
            QUARANTINE if mine else PREEMPTED,  # the other processes start again
            tuple(hosts),
            tuple(processes) or (self.process,),
            tuple(devices),
        )

    # --- data ---------------------------------------------------------------------------------------------------------

    def _data(self, first: StepResult, batch: int, back_to: int | None) -> Verdict:
        trouble = self._trouble(batch)
        if not trouble:
            return Verdict(Decision.SKIP, f"{first.kind} on batch {batch}, also when replayed: the batch is skipped")
        if self._rollbacks < self.settings.max_rollbacks and back_to is not None:
            return Verdict(
                Decision.ROLLBACK, f"{trouble}: going back to the last good checkpoint and skipping up to batch {batch}"
            )
        spent = "there is no checkpoint to go back to"
        if back_to is not None:
            spent = f"the run went back {self._rollbacks} times already (health.max_rollbacks)"
        return Verdict(Decision.STOP, f"{trouble}, and {spent}", TROUBLE)

    def _trouble(self, batch: int) -> str:
        """Return why skipping one more batch is not enough; empty if it is."""
        recent = {b for b in self._recent if batch - WINDOW < b < batch} | {batch}
        if all(batch - i in recent for i in range(IN_A_ROW)):
            return f"{IN_A_ROW} bad batches in a row, the last being {batch}"
        if len(recent) > self.settings.max_skips:
            return f"{len(recent)} bad batches among the last {WINDOW} (health.max_skips {self.settings.max_skips})"
        return ""

    # --- the record ---------------------------------------------------------------------------------------------------

    def _record(
        self, step: int, batch: int, verdict: Verdict, results: Sequence[StepResult], back_to: int | None
    ) -> dict[str, Any]:
        record: dict[str, Any] = {
            "time": time.time(),
            "host": self.host,
            "process": self.process,
            "step": step,
            "batch": batch,
            "what": verdict.decision.value,
            "kind": results[0].kind,
            "reason": verdict.reason,
            "values": [_values(result) for result in results],
        }
        if verdict.decision is Decision.QUARANTINE:
            record["at_fault"] = {"hosts": verdict.hosts, "processes": verdict.processes, "devices": verdict.devices}
        if verdict.decision is Decision.ROLLBACK:
            record["back_to"] = back_to
        return record

    def _remember(self, record: Mapping[str, Any]) -> None:
        what, batch = record.get("what"), record.get("batch")
        if not isinstance(batch, int):
            return
        if what == Decision.SKIP.value:
            self._skipped.append((batch, batch))
            self._recent.append(batch)
        elif what == Decision.ROLLBACK.value:
            self._skipped.append((int(record["back_to"]), batch))
            self._recent, self._rollbacks = [], self._rollbacks + 1


def disagreement(found: Mapping[int, int]) -> list[int]:
    """Return the devices whose checksum is not that of the majority; all of them without a majority."""
    values = list(found.values())
    most = max(set(values), key=values.count, default=None)
    if most is None or len(set(values)) == 1:
        return []
    if values.count(most) * 2 <= len(values):
        return sorted(found)
    return sorted(device for device, value in found.items() if value != most)


def _near(x: float, y: float) -> bool:
    """Return whether two values are close; two non-finite values are (inf or nan depends on the order)."""
    if not (math.isfinite(x) and math.isfinite(y)):
        return math.isfinite(x) == math.isfinite(y)
    return math.isclose(x, y, rel_tol=NEAR)


def _values(result: StepResult) -> dict[str, Any]:
    """Return the values with their bits: JSON has no nan, and the bits were compared."""
    plain = {
        name: value if math.isfinite(value) else repr(value)
        for name, value in (("loss", result.loss), ("grad_norm", result.grad_norm))
    }
    bits = dict(zip(("loss_bits", "grad_norm_bits"), (b[::-1].hex() for b in result.bits), strict=True))
    return plain | bits | {"checksums": {str(device): value for device, value in result.checksums.items()}}


def append(path: Path, record: Mapping[str, Any]) -> None:
    """Append one line with one write, so that readers never see half of it. A full disk does not stop a run."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            torn = bool(end := os.fstat(file).st_size) and os.pread(file, 1, end - 1) != b"\n"
            os.write(file, ("\n" * torn + json.dumps(record) + "\n").encode())
            os.fsync(file)
        finally:
            os.close(file)
    except OSError as error:
        log.warning("could not write to %s (%s): %s", path, error, record)


def read(run_dir: str | os.PathLike) -> list[dict[str, Any]]:
    """Return the records of a run; incomplete lines are skipped."""
    path = Path(run_dir) / FILE
    found = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            log.warning("a line of %s cannot be read: %.80s", path, line)
    return found
