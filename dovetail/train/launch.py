"""A training from its settings to its end: processes meet, the folder is taken, the ledger opened, the run goes.

The order matters. Signals are watched for before jax is imported (its import takes seconds and cannot be broken off),
and the ledger of time is open by then too: a process that is killed meanwhile was a start all the same. So this module
imports neither jax nor what imports it, and takes the objective and the rows as functions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from dovetail.core.errors import FileError, UserError
from dovetail.core.files import locked
from dovetail.core.training import Training
from dovetail.train.distributed import Cluster, start
from dovetail.train.guard.exits import HUNG
from dovetail.train.guard.stop import Stop
from dovetail.train.report.goodput import Goodput
from dovetail.train.report.loggers import check_loggers

if TYPE_CHECKING:
    from dovetail.train.guard.peers import Peers
    from dovetail.train.objective import Objective
    from dovetail.train.prepare import Ready
    from dovetail.train.rows import Opened

S = TypeVar("S", bound=Training)
LastWords = Callable[[BaseException], tuple[int, str]]


@dataclass(frozen=True)
class Ended:
    """How a training ended."""

    code: int  # 0: all steps are done; 130: ctrl-C; else train.guard.exits says what it means
    folder: Path  # metrics.jsonl, checkpoints, exports, report.html
    step: int  # the last update
    metrics: dict[str, Any]  # of the last step reported, with the last held-out measures
    trained: int = 0  # steps of this start; 0 where the run was done already


def _last_words(error: BaseException) -> tuple[int, str]:
    code = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1
    return code, f"error: {type(error).__name__}: {error}"


def launch(
    settings: S,
    folder: Path,
    objective: Callable[[S], Objective],
    open_rows: Callable[[S, Ready], Opened],
    *,
    settle: Callable[[S], S] = lambda settings: settings,
    stop: Stop | None = None,
    since: float | None = None,
    show: bool = True,
    explain: Callable[[list[str]], object] = lambda lines: None,
    last_words: LastWords = _last_words,
) -> Ended:
    """Train in this process, and with the others where the environment says that there are others.

    `settle` fills in what only the data says, before anything is derived: how many steps its epochs are. `since`: when
    the time of this run began, by time.monotonic. `explain` is given what was derived, in the first
    process. `last_words`: exit code and line of a process that fails while others wait for it (then all end).
    """
    check_loggers(settings.report_to)
    began = time.monotonic() if since is None else since
    with stop or Stop() as stop:
        cluster = start()
        first = cluster is None or _is_first()
        with ExitStack() as stack:
            with stop.deferred():  # a process that knows the others does not leave without telling them
                peers = stack.enter_context(_peers(cluster, settings, last_words))
                if peers:
                    stop.tell = peers.tell
            stack.enter_context(only_run(folder, first))
            with Goodput(folder / "goodput.json" if first else None, age=time.monotonic() - began) as goodput:
                with goodput.span("prepare"):
                    settings, kept = _as_begun(settings, folder)
                    settings = settle(settings)
                if not settings.total_steps:
                    raise UserError("epochs are counted in examples that are read, and here none are: set steps")
                ready = _prepared(settings, objective)
                if first:
                    explain([*kept, *ready.derived.explain()])
                with goodput.span("prepare"):
                    opened = open_rows(settings, ready)
                from dovetail.train.run import run

                ran = run(
                    ready, folder, opened.rows, opened.held_out, opened.tokenizer, opened.samples,
                    inputs=opened.inputs, goodput=goodput, show=show, stop=stop,
                    on_hang=(lambda line: peers.tell(HUNG, line)) if peers else None,
                )  # fmt: skip
    return Ended(ran.code, folder, ran.at.step, _last_metrics(folder), ran.at.step - ran.began)


def _is_first() -> bool:
    import jax

    return jax.process_index() == 0


def _as_begun(settings: S, folder: Path) -> tuple[S, list[str]]:
    """With the defaults of the run that `folder` holds (train.recorded). Every process reads the same files, and none
    writes before all have done so."""
    from dovetail.train.recorded import as_begun, newest_meta

    return as_begun(settings, newest_meta(folder, settings.checkpoint.durable))


def _peers(cluster: Cluster | None, settings: Training, last_words: LastWords) -> AbstractContextManager[Peers | None]:
    if cluster is None:
        return nullcontext()
    from dovetail.train.guard.peers import Peers

    return Peers(last_words, settings.health.lost_seconds)


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
    """Held while a run writes into its folder, by its first process: two would delete each other's checkpoints."""
    if not first:
        yield
        return

    def refuse(holder: str) -> NoReturn:
        raise FileError(
            f"another run writes into {folder}: {holder}. Stop it or wait for its end to go on from there, or give "
            "this one a folder of its own with --run-dir"
        )

    with locked(folder / ".lock", refuse):
        yield
