"""The program of an attempt on all VMs of its slices: started where it is not, looked at, stopped; its logs fetched.

A slice that is taken away takes its logs with it, so each look brings what was written since the last.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from dovetail.jobs.attempt import Attempt
from dovetail.jobs.backends import log_copy, tpu_worker
from dovetail.jobs.backends.backend import LogPart, Observed, Unavailable
from dovetail.jobs.backends.log_file import read
from dovetail.jobs.backends.tpu_ssh import Done, Run, Ssh, Worker, on_all
from dovetail.jobs.backends.tpu_worker import CHUNK, Standing
from dovetail.jobs.outcome import NO_ENVIRONMENT, NO_FOLDER, deciding

SETTLE_S = 60.0  # for the others to end, once one rank has failed: they save, or notice that it is gone
LOOK_S = 30.0  # for a worker's answer
SEND_S = 300.0  # for the code to arrive
NO_SSH = 255
TAR_FINE = (0, 1)  # 1: a file grew as it was read, for another rank goes on
MOST = 200  # chunks of one log that its end brings here: the last 50 MB


class Program:
    def __init__(self, attempt: Attempt, workers: Sequence[Worker], ssh: Ssh, run: Run) -> None:
        self._attempt, self._workers, self._ssh, self._run = attempt, list(workers), ssh, run

    def observe(self) -> Observed:
        """Starts it where it is not; for a slice whose VMs are there."""
        found = self._look(self._workers)
        hosts = tuple(worker.address or f"{worker.node}/{worker.index}" for worker in self._workers)
        silent = [worker.rank for worker, one in zip(self._workers, found, strict=True) if isinstance(one, Done)]
        if silent:
            first = found[silent[0]]
            why = first.err.splitlines()[-1:] if isinstance(first, Done) else []
            return Observed("unknown", f"{_ranks(silent)} not reached over ssh: {''.join(why)[:200]}", hosts)
        standings = [one for one in found if isinstance(one, Standing)]
        absent = [worker for worker, one in zip(self._workers, standings, strict=True) if one.state == "absent"]
        if absent:
            return self._start(absent, hosts)
        return self._told(standings, hosts)

    def _look(self, workers: Sequence[Worker]) -> list[Standing | Done]:
        """Of each how it stands, or the ssh that failed. What its log has got is added to the log here."""
        paths = [self._attempt.log(worker.rank) for worker in workers]
        here = [log_copy.size(path) for path in paths]
        lines = [tpu_worker.poll(self._attempt.name, since) for since in here]
        done = on_all(workers, lines, self._ssh, self._run, timeout=LOOK_S)
        found: list[Standing | Done] = []
        for path, since, one in zip(paths, here, done, strict=True):
            standing = tpu_worker.standing(one.out)
            if standing is not None:
                log_copy.append(path, since, standing.log)
            found.append(one if standing is None else standing)
        return found

    def _start(self, workers: Sequence[Worker], hosts: tuple[str, ...]) -> Observed:
        attempt = self._attempt
        files = tpu_worker.files(attempt)
        sent = self._on_all(workers, tpu_worker.unpack(attempt.name), [files] * len(workers), SEND_S)
        refused = next(((worker.rank, one) for worker, one in zip(workers, sent, strict=True) if one.code), None)
        if refused is None:
            scripts = [tpu_worker.start(attempt, worker.rank).encode() for worker in workers]
            started = self._on_all(workers, "sh -s", scripts, LOOK_S)
            refused = next(((worker.rank, one) for worker, one in zip(workers, started, strict=True) if one.code), None)
        if refused is None:
            return Observed("running", f"started on {len(workers)} of {len(self._workers)} hosts", hosts)
        rank, one = refused
        if one.code in (NO_FOLDER, NO_ENVIRONMENT):  # the host's own word, and the same the next time
            return Observed("failed", f"rank {rank} could not be started: {one.err[-200:]}", hosts, one.code, rank)
        return Observed("waiting", f"rank {rank} could not be started yet: {one.err[-200:]}", hosts)

    def _on_all(self, workers: Sequence[Worker], line: str, given: Sequence[bytes], timeout: float) -> list[Done]:
        return on_all(workers, [line] * len(workers), self._ssh, self._run, given, timeout)

    def _told(self, standings: Sequence[Standing], hosts: tuple[str, ...]) -> Observed:
        lost = [rank for rank, one in enumerate(standings) if one.state == "lost"]
        codes = [one.code or 0 for one in standings]
        ended = sorted(
            (rank for rank, one in enumerate(standings) if one.code is not None), key=lambda r: standings[r].ended
        )
        failed = [rank for rank in ended if codes[rank]]
        if len(ended) + len(lost) < len(standings) and not self._is_time(standings, failed):
            detail = f"rank {failed[0]} ended with {codes[failed[0]]}; the others go on" if failed else ""
            return Observed("running", detail, hosts)
        self._drain(standings)
        code, rank = deciding(codes, failed)
        if not self._has_answers({0, rank or 0}):
            return Observed("unknown", "it is over, and what it left could not be fetched yet", hosts)
        if failed:
            return Observed("failed", f"rank {rank} ended with {code}", hosts, code, rank)
        if lost:
            return Observed("failed", f"{_ranks(lost)} gone without an end: the machine was restarted", hosts)
        return Observed("succeeded", "", hosts, 0)

    def _is_time(self, standings: Sequence[Standing], failed: Sequence[int]) -> bool:
        """Whether the others have had theirs since the first failed."""
        return bool(failed) and time.time() - standings[failed[0]].ended > SETTLE_S

    def _drain(self, standings: Sequence[Standing]) -> None:
        """What is left of the logs, before the slice is given back."""
        left = [worker for worker, one in zip(self._workers, standings, strict=True) if len(one.log) == CHUNK]
        for _ in range(MOST):
            found = self._look(left) if left else []
            pairs = zip(left, found, strict=True)
            left = [worker for worker, one in pairs if isinstance(one, Standing) and len(one.log) == CHUNK]

    def _has_answers(self, ranks: set[int]) -> bool:
        """Bring what is to be kept, before the slice is given back; without a function's value the job is not over."""
        asked = [worker for worker in self._workers if worker.rank in ranks]
        done = self._on_all(asked, tpu_worker.answers(self._attempt), (), SEND_S)
        whole = [
            one.code in TAR_FINE and tpu_worker.take(self._attempt, one.out, worker.rank)
            for worker, one in zip(asked, done, strict=True)
        ]
        return all(whole) or (not self._attempt.is_call and all(one.code != NO_SSH for one in done))

    def stop(self, grace: float) -> None:
        done = self._on_all(self._workers, tpu_worker.stop(self._attempt.name, grace), (), LOOK_S)
        failed = [one for one in done if one.code]
        if failed:
            raise Unavailable(f"{len(failed)} of {len(done)} hosts could not be told to stop: {failed[0].err[-200:]}")

    def logs(self, rank: int, since: int) -> LogPart:
        """Of the copy here, once what is new has been added to it."""
        self._look([worker for worker in self._workers if worker.rank == rank])
        return read(self._attempt.log(rank), since)


def _ranks(ranks: Sequence[int]) -> str:
    named = ", ".join(map(str, ranks[:5])) + (", ..." if len(ranks) > 5 else "")
    return f"rank {named}" if len(ranks) == 1 else f"ranks {named}"
