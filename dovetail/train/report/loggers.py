"""Send a run's metrics to TensorBoard and Weights & Biases (`report_to`), besides metrics.jsonl."""

from __future__ import annotations

import contextlib
import os
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, cast

from dovetail.core.errors import MissingPackageError, UserError
from dovetail.core.files import write_atomic
from dovetail.core.reporter import Reporter

PROJECT = "dovetail"  # the Weights & Biases project, unless WANDB_PROJECT is set
WANDB_ID = "wandb_id.txt"  # in a run's folder: a resumed run stays the same run there


class Logger(Protocol):
    """Define the interface of a destination of metrics."""

    def scalars(self, kind: str, values: Mapping[str, float], step: int) -> None:
        """Log the metrics of a step under `kind/`."""
        ...

    def text(self, name: str, markdown: str, step: int) -> None:
        """Log a text."""
        ...

    def close(self) -> None:
        """Flush and close."""
        ...


def check_loggers(names: Sequence[str]) -> None:
    """Raise MissingPackageError if a logger that the recipe names is not installed."""
    if "wandb" in names and find_spec("wandb") is None:
        raise MissingPackageError(
            "`report_to` names wandb, and the package is not installed: `pip install wandb`, or remove it from "
            "report_to",
            param="report_to",
        )


def open_loggers(
    names: Sequence[str], folder: Path, step: int, config: Mapping[str, Any], reporter: Reporter
) -> list[Logger]:
    """Return the named loggers. `step`: the last completed step of a resumed run; `config`: its recipe."""
    check_loggers(names)
    found: list[Logger] = []
    if "tensorboard" in names and (board := _tensorboard(folder / "tensorboard", step, reporter)):
        found.append(board)
    if "wandb" in names:
        found.append(Wandb(folder, config))
    return found


class TensorBoard:
    """Write TensorBoard event files."""

    def __init__(self, writer: Any):
        self._writer = writer

    def scalars(self, kind: str, values: Mapping[str, float], step: int) -> None:
        """Log the metrics of a step under `kind/`."""
        for name, value in values.items():
            self._writer.add_scalar(f"{kind}/{name}", value, step)

    def text(self, name: str, markdown: str, step: int) -> None:
        """Log a text."""
        self._writer.add_text(name, markdown, step)

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()


class Wandb:
    """Log to a Weights & Biases run; the environment may set WANDB_PROJECT, WANDB_ENTITY and WANDB_MODE (offline)."""

    def __init__(self, folder: Path, config: Mapping[str, Any]):
        wandb: Any = import_module("wandb")  # an extra: type checkers may not find it
        self._wandb = wandb
        try:
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", PROJECT), name=folder.resolve().name, id=_kept_id(folder),
                resume="allow", dir=str(folder), config=dict(config),
            )  # fmt: skip
        except wandb.errors.Error as error:
            raise UserError(
                f"Weights & Biases could not be started: {error}. Run `wandb login`, set WANDB_MODE=offline, or remove "
                "wandb from report_to",
                param="report_to",
            ) from error
        # Our own step metric: a rolled back run logs some steps again, which wandb's own counter would refuse.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def scalars(self, kind: str, values: Mapping[str, float], step: int) -> None:
        """Log the metrics of a step under `kind/`."""
        self._run.log({"step": step} | {f"{kind}/{name}": value for name, value in values.items()})

    def text(self, name: str, markdown: str, step: int) -> None:
        """Log a text."""
        self._run.log({"step": step, name: self._wandb.Html(f"<pre>{_escaped(markdown)}</pre>")})

    def close(self) -> None:
        """Flush and close."""
        self._run.finish()


def _escaped(text: str) -> str:
    from html import escape

    return escape(text)


def _kept_id(folder: Path) -> str:
    path = folder / WANDB_ID
    if not path.is_file():
        write_atomic(path, uuid.uuid4().hex[:12])
    return path.read_text().strip()


def _tensorboard(folder: Path, step: int, reporter: Reporter) -> TensorBoard | None:
    try:
        with _no_torch():
            from tensorboardX import SummaryWriter
    except ImportError:
        reporter.note("no TensorBoard scalars: tensorboardX is not installed (pip install tensorboardX)")
        return None
    return TensorBoard(SummaryWriter(str(folder), purge_step=step + 1 if step else None, max_queue=1000, flush_secs=20))


@contextlib.contextmanager
def _no_torch() -> Iterator[None]:
    """Keep tensorboardX from importing torch, which takes seconds and is not needed here."""
    hidden = "torch" not in sys.modules
    if hidden:
        sys.modules["torch"] = cast(Any, None)  # makes `import torch` fail
    try:
        yield
    finally:
        if hidden:
            del sys.modules["torch"]
