"""The rows that a run trains on, by the number of their batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

from dovetail.core.errors import UserError
from dovetail.core.types import Batch, Params
from dovetail.io.tokenizer import Tokenizer
from dovetail.train.position import Position
from dovetail.train.report.metrics import Passage


class Rows(Protocol):
    """Batches by their number (data.loader.Loader): this process's share of the rows (Ready.rows_here)."""

    def batch(self, step: int) -> Batch: ...
    def iterate(self, start_step: int = 0) -> Iterator[Batch]: ...
    def documents(self, step: int) -> int: ...
    def notes(self, step: int) -> Mapping[str, float]: ...


@runtime_checkable
class Source(Protocol):
    """Where the loop has its batches from: `Batches` of rows that are there, or rows that the weights of the moment
    make (tune.rl)."""

    @property
    def ahead(self) -> int:
        """Steps that may be dispatched before the first of them is looked at."""
        ...

    @property
    def waits(self) -> bool:
        """Whether the time that `get` takes is a wait for data; else it is the step's own."""
        ...

    def get(self, at: Position) -> Batch:
        """The batch of number `at.cursor`: this process's share of the rows."""
        ...

    def documents(self, index: int) -> int:
        """The most that a row of the batch holds."""
        ...

    def settle(self) -> None:
        """A boundary comes: nothing that a checkpoint must know of is under way when this returns."""
        ...

    def notes(self, index: int) -> Mapping[str, float]:
        """What to report of a batch beside its step's own metrics; `tokens`: how many it has, unless all of its rows
        are full."""
        ...

    def passage(self, index: int) -> Passage | None:
        """What to show of a batch once its step is done, if anything."""
        ...


class Sampled(NamedTuple):
    lines: list[dict[str, Any]]  # a prompt and its answer each
    measures: Mapping[str, float] = {}  # of all of them, where they were judged


class Samples(Protocol):
    """What the model answers to some prompts, every so many steps, for the report."""

    @property
    def every(self) -> int: ...
    def __call__(self, params: Params, step: int) -> Sampled: ...


@dataclass(frozen=True)
class Opened:
    """What a run reads, opened."""

    rows: Rows | Source
    held_out: Rows | None = None
    tokenizer: Tokenizer | None = None  # what exports carry, so that their folders can be served
    samples: Samples | None = None
    inputs: Mapping[str, str] = field(default_factory=dict)  # fingerprints of what is read, by name: see train.inputs


class Batches:
    """Rows read ahead: asked for anything but the next batch, it starts anew there."""

    ahead, waits = 2, True

    def __init__(self, rows: Rows):
        self._rows, self._next, self._found = rows, -1, None

    def get(self, at: Position) -> Batch:
        index = at.cursor
        if index != self._next or self._found is None:
            if self._found is not None:
                self._found.close()  # type: ignore[attr-defined]
            self._found = self._rows.iterate(index)
        self._next = index + 1
        return next(self._found)

    def documents(self, index: int) -> int:
        return self._rows.documents(index)

    def settle(self) -> None:
        pass

    def notes(self, index: int) -> Mapping[str, float]:
        return self._rows.notes(index)

    def passage(self, index: int) -> Passage | None:
        return None


def check_columns(rows: Batch, form: Batch) -> None:
    """Refuse rows without a column that the objective declares, or with one that it does not; `form` is the batch that
    the step is compiled for."""
    declared, brought = set(form.columns), set(rows.columns)
    for name in sorted(declared - brought):
        raise UserError(
            f"the objective declares the column {name!r} and the rows do not have it: they bring {_list(brought)}; "
            "put it into each batch's `columns`"
        )
    for name in sorted(brought - declared):
        raise UserError(
            f"the rows bring the column {name!r} and the objective does not declare it: it declares {_list(declared)}; "
            "declare it (Objective.columns), or leave it out of the rows"
        )
    for name, column in rows.columns.items():
        wanted = (rows.tokens.shape[0], *form.columns[name].shape[1:])
        if column.shape != wanted:
            raise UserError(f"the column {name!r} must have the shape {wanted}, as declared; got {column.shape}")


def _list(names: set[str]) -> str:
    return ", ".join(sorted(names)) or "no further columns"
