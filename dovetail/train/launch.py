"""Run a training from its settings to its end: join the processes, lock the folder, open the time ledger, train.

The order matters. Signals are handled before jax is imported (the import takes seconds and cannot be interrupted), and
the time ledger is open by then too: a process that is killed meanwhile still counts as a start. So this module imports
neither jax nor modules that import it, and takes the objective and the rows as functions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from dovetail.core.errors import FileError, RecipeError
from dovetail.core.files import locked
from dovetail.core.reporter import Reporter
from dovetail.core.training import Training
from dovetail.train.distributed import Cluster, start
from dovetail.train.guard.stop import Stop
from dovetail.train.report.goodput import Goodput
from dovetail.train.report.loggers import check_loggers

if TYPE_CHECKING:
    from dovetail.train.guard.watch import Peers
    from dovetail.train.objective import Objective
    from dovetail.train.prepare import Ready
    from dovetail.train.rows import Opened

S = TypeVar("S", bound=Training)


@dataclass(frozen=True)
class Ended:
    """Report how a training ended.

    Attributes:
        code: 0: all steps are done; 130: ctrl-C; for others see train.guard.exits.
        folder: The run's folder: metrics.jsonl, checkpoints, exports, report.html.
        step: The last update.
        metrics: Metrics of the last reported step, with the last held-out metrics.
        trained: Steps of this start; 0 if the run was complete already.
    """

    code: int
    folder: Path
    step: int
    metrics: dict[str, Any]
    trained: int = 0


def launch(
    settings: S,
    folder: Path,
    objective: Callable[[S], Objective],
    open_rows: Callable[[S, Ready], Opened],
    *,
    settle: Callable[[S], S] = lambda settings: settings,
    stop: Stop | None = None,
    since: float | None = None,
    reporter: Reporter | None = None,
) -> Ended:
    """Train in this process, together with the other processes that the environment names.

    Args:
        settings: The recipe.
        folder: The run's folder.
        objective: Returns the objective of a recipe.
        open_rows: Opens the data of a recipe.
        settle: Fills in keys that depend on the data, such as the number of steps of its epochs, before anything is
            derived.
        stop: Handles signals; default: a new Stop.
        since: When the run's time began, by time.monotonic.
        reporter: Shows lines and progress; only the first process reports.
    """
    check_loggers(settings.report_to)
    began = time.monotonic() if since is None else since
    reporter = reporter or Reporter()
    with stop or Stop() as stop:
        cluster = start()
        first = cluster is None or _is_first()
        if not first:
            reporter.mute()
        with ExitStack() as stack:
            with stop.deferred():  # a process that has joined the others does not leave without telling them
                peers = stack.enter_context(_peers(cluster, settings))
                if peers:
                    stop.tell = peers.tell
            stack.enter_context(only_run(folder, first))
            with Goodput(folder / "goodput.json" if first else None, age=time.monotonic() - began) as goodput:
                with goodput.span("prepare"):
                    settings, kept = _as_begun(settings, folder)
                    settings = settle(settings)
                if not settings.total_steps:
                    raise RecipeError("`steps` must be set: no examples are read whose epochs could be counted")
                ready = _prepared(settings, objective)
                reporter.line("\n".join([*kept, *ready.derived.explain()]))
                with goodput.span("prepare"):
                    opened = open_rows(settings, ready)
                from dovetail.train.run import run

                ran = run(ready, folder, opened, goodput=goodput, reporter=reporter, stop=stop, peers=peers)
    return Ended(ran.code, folder, ran.at.step, _last_metrics(folder), ran.at.step - ran.began)


def _is_first() -> bool:
    import jax

    return jax.process_index() == 0


def _as_begun(settings: S, folder: Path) -> tuple[S, list[str]]:
    """Return the settings with the recorded defaults of the run in `folder` (train.saves.as_begun).

    Every process reads the same files, and no process writes before all have read them.
    """
    from dovetail.train.saves import as_begun, newest_meta

    return as_begun(settings, newest_meta(folder, settings.checkpoint.durable))


def _peers(cluster: Cluster | None, settings: Training) -> AbstractContextManager[Peers | None]:
    if cluster is None:
        return nullcontext()
    from dovetail.train.guard.watch import Peers

    return Peers(settings.health.lost_seconds)


def _prepared(settings: S, objective: Callable[[S], Objective]) -> Ready:
    from dovetail.io.compiled import keep_compiled
    from dovetail.train.prepare import prepare

    keep_compiled()
    return prepare(settings, objective(settings))


def _last_metrics(folder: Path) -> dict[str, Any]:
    from dovetail.train.report.summary import FILE, read

    if not (folder / FILE).is_file():
        return {}
    found = read(folder)
    held_out = {name: value for line in found.evals[-1:] for name, value in line.items() if name.startswith("held_out")}
    return {**(found.steps[-1] if found.steps else {}), **held_out}


@contextmanager
def only_run(folder: Path, first: bool) -> Iterator[None]:
    """Lock a run's folder in its first process: two runs would delete each other's checkpoints.

    Raises:
        FileError: Another run holds the lock.
    """
    if not first:
        yield
        return

    def refuse(holder: str) -> NoReturn:
        raise FileError(
            f"another run writes into {folder}: {holder}. Stop it or wait for its end to continue from there, or use "
            "another folder with --run-dir",
            param="run_dir",
        )

    with locked(folder / ".lock", refuse):
        yield
