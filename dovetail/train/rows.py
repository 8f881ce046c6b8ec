"""Define where the training loop gets its batches from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

from dovetail.core.errors import UserError
from dovetail.core.types import Batch, Params, num_rows
from dovetail.io.tokenizer import Tokenizer
from dovetail.train.report.metrics import Passage
from dovetail.train.settings import shape_key
from dovetail.train.state import Position


class Rows(Protocol):
    """Batches by number (data.loader.Loader), each with this process's share of the rows (Ready.rows_here)."""

    def batch(self, step: int) -> Batch:
        """Return the batch of a number."""
        ...

    def iterate(self, start_step: int = 0) -> Iterator[Batch]:
        """Yield the batches from a number on."""
        ...

    def documents(self, step: int) -> int:
        """Return the most documents that a row of the batch holds."""
        ...

    def notes(self, step: int) -> Mapping[str, float]:
        """Return metrics of the batch itself: see BatchSource.notes."""
        ...


@runtime_checkable
class BatchSource(Protocol):
    """Batches for the loop: `Batches` of existing rows, or rows that the current weights generate (tune.rl)."""

    @property
    def ahead(self) -> int:
        """Steps that may be launched before the first of them is read."""
        ...

    @property
    def waits(self) -> bool:
        """Return whether the time of `get` is a wait for data; otherwise it belongs to the step."""
        ...

    def get(self, at: Position) -> Batch:
        """Return batch number `at.cursor`: this process's share of the rows."""
        ...

    def documents(self, index: int) -> int:
        """Return the most documents that a row of the batch holds."""
        ...

    def settle(self) -> None:
        """Finish what a checkpoint must include: a boundary follows."""
        ...

    def notes(self, index: int) -> Mapping[str, float]:
        """Return metrics of the batch itself; `tokens`: its number of tokens, if its rows are not all full."""
        ...

    def passage(self, index: int) -> Passage | None:
        """Return text to show after the batch's step, if any."""
        ...


class Sampled(NamedTuple):
    """Answers to sample prompts."""

    lines: list[dict[str, Any]]  # one prompt and its answer each
    measures: Mapping[str, float] = {}  # metrics over all answers, if they were judged


class SampleFn(Protocol):
    """Generate the model's answers to some prompts, every `every` steps, for the report."""

    @property
    def every(self) -> int:
        """Steps between two calls."""
        ...

    def __call__(self, params: Params, step: int) -> Sampled:
        """Return the answers of these weights."""
        ...


@dataclass(frozen=True)
class Opened:
    """Hold the opened inputs of a run."""

    rows: Rows | BatchSource
    held_out: Rows | None = None
    tokenizer: Tokenizer | None = None  # written into exports, so that their folders can be served
    samples: SampleFn | None = None
    inputs: Mapping[str, str] = field(default_factory=dict)  # fingerprints by name: see train.saves
    # (settings) -> the keys that determine the rows of a batch: a run resumes only if they are the same
    rows_key: Callable[[Any], dict[str, Any]] = shape_key


class Batches:
    """Read rows ahead. Any other batch than the next one restarts the reading there."""

    ahead, waits = 2, True

    def __init__(self, rows: Rows):
        self._rows, self._next, self._found = rows, -1, None

    def get(self, at: Position) -> Batch:
        """Return batch number `at.cursor`."""
        index = at.cursor
        if index != self._next or self._found is None:
            if self._found is not None:
                self._found.close()  # type: ignore[attr-defined]
            self._found = self._rows.iterate(index)
        self._next = index + 1
        return next(self._found)

    def documents(self, index: int) -> int:
        """Return the most documents that a row of the batch holds."""
        return self._rows.documents(index)

    def settle(self) -> None:
        """Do nothing: reading ahead is not part of a checkpoint."""

    def notes(self, index: int) -> Mapping[str, float]:
        """Return metrics of the batch itself."""
        return self._rows.notes(index)

    def passage(self, index: int) -> Passage | None:
        """Return None: there is nothing to show."""
        return None


def check_columns(rows: Batch, declared: Batch) -> None:
    """Refuse rows whose columns differ from those that the objective declares.

    Args:
        rows: The rows of this process.
        declared: The abstract batch that the step is compiled for.

    Raises:
        UserError: A column is missing, not declared, or has another shape; `param` is its name.
    """
    wanted, given = set(declared.columns), set(rows.columns)
    for name in sorted(wanted - given):
        raise UserError(
            f"the objective declares the column {name!r} and the rows do not have it: they have {_list(given)}; add it "
            "to each batch's `columns`",
            param=name,
        )
    for name in sorted(given - wanted):
        raise UserError(
            f"the rows have the column {name!r} and the objective does not declare it: it declares {_list(wanted)}; "
            "declare it (Objective.columns), or remove it from the rows",
            param=name,
        )
    for name, column in rows.columns.items():
        shape = (num_rows(rows), *declared.columns[name].shape[1:])
        if column.shape != shape:
            raise UserError(f"the column {name!r} must have the declared shape {shape}, got {column.shape}", param=name)


def _list(names: set[str]) -> str:
    return ", ".join(sorted(names)) or "no further columns"
