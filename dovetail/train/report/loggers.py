"""Where a run's numbers are sent besides metrics.jsonl: TensorBoard, Weights & Biases (`report_to`)."""

from __future__ import annotations

import contextlib
import os
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, cast

from dovetail.core.errors import UserError
from dovetail.core.files import write_atomic

PROJECT = "dovetail"  # of Weights & Biases, unless WANDB_PROJECT says another
WANDB_ID = "wandb_id.txt"  # in a run's folder: a run that goes on is the same run there


class Logger(Protocol):
    def scalars(self, kind: str, values: Mapping[str, float], step: int) -> None: ...
    def text(self, name: str, markdown: str, step: int) -> None: ...
    def close(self) -> None: ...


def check_loggers(names: Sequence[str]) -> None:
    """Raise a ValueError where one that a recipe names is not installed."""
    if "wandb" in names and find_spec("wandb") is None:
        raise UserError(
            "report_to names wandb, and the package is not installed: `pip install wandb`, or leave it out of report_to"
        )


def open_loggers(
    names: Sequence[str], folder: Path, step: int, config: Mapping[str, Any], remark: Callable[[str], None]
) -> list[Logger]:
    """`step`: the last one done, of a run that goes on; `config`: its recipe."""
    check_loggers(names)
    found: list[Logger] = []
    if "tensorboard" in names and (board := _tensorboard(folder / "tensorboard", step, remark)):
        found.append(board)
    if "wandb" in names:
        found.append(Wandb(folder, config))
    return found


class TensorBoard:
    def __init__(self, writer: Any):
        self._writer = writer

    def scalars(self, kind: str, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(f"{kind}/{name}", value, step)

    def text(self, name: str, markdown: str, step: int) -> None:
        self._writer.add_text(name, markdown, step)

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """A run of Weights & Biases. WANDB_PROJECT, WANDB_ENTITY and WANDB_MODE (offline) are read from the environment."""

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
                f"Weights & Biases could not be started: {error}. Run `wandb login`, set WANDB_MODE=offline, or leave "
                "wandb out of report_to"
            ) from error
        # A step of its own: a run that went back reports some steps again, which wandb's own counter would refuse.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def scalars(self, kind: str, values: Mapping[str, float], step: int) -> None:
        self._run.log({"step": step} | {f"{kind}/{name}": value for name, value in values.items()})

    def text(self, name: str, markdown: str, step: int) -> None:
        self._run.log({"step": step, name: self._wandb.Html(f"<pre>{_escaped(markdown)}</pre>")})

    def close(self) -> None:
        self._run.finish()


def _escaped(text: str) -> str:
    from html import escape

    return escape(text)


def _kept_id(folder: Path) -> str:
    path = folder / WANDB_ID
    if not path.is_file():
        write_atomic(path, uuid.uuid4().hex[:12])
    return path.read_text().strip()


def _tensorboard(folder: Path, step: int, remark: Callable[[str], None]) -> TensorBoard | None:
    try:
        with _no_torch():
            from tensorboardX import SummaryWriter
    except ImportError:
        remark("no TensorBoard scalars: `pip install tensorboardX` if you want them")
        return None
    return TensorBoard(SummaryWriter(str(folder), purge_step=step + 1 if step else None, max_queue=1000, flush_secs=20))


@contextlib.contextmanager
def _no_torch() -> Iterator[None]:
    """tensorboardX loads torch where it is installed, which takes seconds, for tensors that are not written here."""
    hidden = "torch" not in sys.modules
    if hidden:
        sys.modules["torch"] = cast(Any, None)  # Python's own word for "cannot be imported"
    try:
        yield
    finally:
        if hidden:
            del sys.modules["torch"]
