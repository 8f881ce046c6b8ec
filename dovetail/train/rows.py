"""The rows that a run trains on, by the number of their batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from dovetail.core.types import Batch, Params
from dovetail.io.tokenizer import Tokenizer


class Rows(Protocol):
    """Batches by their number (data.loader.Loader): this process's share of the rows (Ready.rows_here)."""

    def batch(self, step: int) -> Batch: ...
    def iterate(self, start_step: int = 0) -> Iterator[Batch]: ...
    def documents(self, step: int) -> int: ...


class Samples(Protocol):
    """What the model answers to a few prompts, every so many steps, for the report."""

    @property
    def every(self) -> int: ...
    def __call__(self, params: Params) -> list[dict[str, str]]: ...


@dataclass(frozen=True)
class Opened:
    """What a run reads, opened."""

    rows: Rows
    held_out: Rows | None = None
    tokenizer: Tokenizer | None = None  # what exports carry, so that their folders can be served
    samples: Samples | None = None


class Batches:
    """Rows read ahead: asked for anything but the next batch, it starts anew there."""

    def __init__(self, rows: Rows):
        self.rows, self._next, self._found = rows, -1, None

    def get(self, index: int) -> Batch:
        if index != self._next or self._found is None:
            if self._found is not None:
                self._found.close()  # type: ignore[attr-defined]
            self._found = self.rows.iterate(index)
        self._next = index + 1
        return next(self._found)


def check_columns(rows: Batch, form: Batch) -> None:
    """Refuse rows without a column that the objective declares, or with one that it does not; `form` is the batch that
    the step is compiled for."""
    declared, brought = set(form.columns), set(rows.columns)
    for name in sorted(declared - brought):
        raise ValueError(
            f"the objective declares the column {name!r} and the rows do not have it: they bring {_list(brought)}; "
            "put it into each batch's `columns`"
        )
    for name in sorted(brought - declared):
        raise ValueError(
            f"the rows bring the column {name!r} and the objective does not declare it: it declares {_list(declared)}; "
            "declare it (Objective.columns), or leave it out of the rows"
        )
    for name, column in rows.columns.items():
        wanted = (rows.tokens.shape[0], *form.columns[name].shape[1:])
        if column.shape != wanted:
            raise ValueError(f"the column {name!r} must have the shape {wanted}, as declared; got {column.shape}")


def _list(names: set[str]) -> str:
    return ", ".join(sorted(names)) or "no further columns"
