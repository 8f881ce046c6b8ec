"""Rows of examples by number, for fine-tuning: as `data.loader` gives those of a corpus, with the loss on what is
trained, and columns besides."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dovetail.core.errors import UserError
from dovetail.core.types import Batch
from dovetail.data.example_store import Examples
from dovetail.data.loader import Loader
from dovetail.data.mixture import Mixture
from dovetail.data.pack import BestFit, Piece

COLUMNS = ("document", "label", "margin")  # those that examples bring themselves


class ExamplePacking(BestFit):
    """Examples whole, one to a row, or with `packing` as many as fit; the two of a preference lie side by side, as
    segments 2k - 1 and 2k.

    columns: by name, what each token of the examples has [tokens].
    """

    def __init__(
        self,
        examples: Examples,
        units: np.ndarray,
        length: int,
        seed: int,
        columns: Mapping[str, np.ndarray],
        packing: bool = True,
    ):
        self._packing = packing
        super().__init__(examples, units, length, seed)
        self.examples, self.columns = examples, dict(columns)

    def _assign(self, sizes: np.ndarray) -> tuple[np.ndarray, int]:
        return super()._assign(sizes) if self._packing else (np.arange(len(sizes)), len(sizes))

    def pieces(self, i: int) -> Iterator[Piece]:
        each = self.examples.per_unit
        for unit in super().pieces(i):
            for document in range(unit.document * each, (unit.document + 1) * each):
                span = self.examples.span(document)
                yield Piece(document, 0, span.stop - span.start)

    def empty(self) -> Batch:
        return dataclasses.replace(super().empty(), columns=self._no_columns())

    def _no_columns(self) -> Any:
        return {name: np.zeros((self.length, *values.shape[1:]), values.dtype) for name, values in self.columns.items()}

    def row(self, i: int) -> Batch:
        row: Any = super().row(i)
        columns, at = self._no_columns(), 0
        for document, _, size in self.pieces(i):
            span = self.examples.span(document)
            row.loss_mask[at : at + size - 1] = self.examples.mask[span][1:]  # what a target weighs: the next token
            for name, values in self.columns.items():
                columns[name][at : at + size] = values[span]
            at += size
        return dataclasses.replace(row, columns=columns)


class ExampleRows(Loader):
    """Batches by their number. `examples` has the documents by theirs; the column `document` holds that number + 1.

    A pass over the examples of one source is a whole number of batches: the last one is filled up with padding, so that
    no example is seen twice before all were seen once. Several sources are one stream, by their weights.
    """

    def __init__(
        self, rows: Mixture, examples: Examples, batch: int, host_index: int, host_count: int, vocab_size: int
    ):
        super().__init__(rows, batch, host_index, host_count, vocab_size=vocab_size, fingerprints=examples.fingerprints)
        self.examples = examples

    @property
    def steps_per_epoch(self) -> int:
        """The batches that hold every document at least once; with several sources, see every_document."""
        return -(-self.rows_per_epoch // self._batch)

    @property
    def examples_per_epoch(self) -> int:
        """Of all sources, each once; a pair of a preference is one."""
        return sum(source.documents for source in self.rows.sources)

    def epochs(self, step: int) -> tuple[float, ...]:
        return super().epochs(step) if len(self.rows.sources) > 1 else (step / self.steps_per_epoch,)

    def rows_of(self, step: int) -> Sequence[int | None]:
        if len(self.rows.sources) > 1:
            return super().rows_of(step)
        epoch, at = divmod(step, self.steps_per_epoch)
        in_epoch = range(at * self._batch, (at + 1) * self._batch)
        return [epoch * self.rows_per_epoch + i if i < self.rows_per_epoch else None for i in in_epoch]

    def notes(self, step: int) -> dict[str, float]:
        """Return how many examples (or pairs) and tokens the batch has, over all hosts."""
        pieces = [piece for i in self.rows_of(step) if i is not None for piece in self.rows.pieces(i)]
        tokens = sum(piece.stop - piece.start for piece in pieces)
        each = self.examples.per_unit
        return {"pairs" if each == 2 else "examples": len(pieces) // each, "tokens": tokens}

    def of_host(self, index: int, count: int) -> ExampleRows:
        """The same rows as one of `count` hosts has them."""
        return ExampleRows(self.rows, self.examples, self._batch, index, count, self.vocab_size)

    def every_document(self) -> ExampleRows:
        """Rows of all documents, those held out too, whatever their sources weigh, with the column `document`: one
        epoch of them is what is needed to compute something once for each."""
        units = np.arange(len(self.examples) // self.examples.per_unit)
        column = {"document": own_column("document", self.examples)}
        packing = ExamplePacking(self.examples, units, self.length, 0, column)
        hosts = self._first // self._share, self._batch // self._share
        return ExampleRows(Mixture([packing], [1.0], 0), self.examples, self._batch, *hosts, self.vocab_size)

    def with_column(self, name: str, values: np.ndarray | Sequence[float] | Sequence[np.ndarray]) -> ExampleRows:
        """The same rows with a further column: a number for each document [documents], which all its tokens get; or an
        array for each document, with a number, or several, for each of its tokens (at the token whose target it is
        about)."""
        column = _per_token(name, values, self.examples)
        found, rows = copy.copy(self), copy.copy(self.rows)
        rows.sources = tuple(_with_column(packing, name, column) for packing in rows.sources)
        found.rows = rows
        return found


def _with_column(packing: Any, name: str, column: np.ndarray) -> ExamplePacking:
    found = copy.copy(packing)
    found.columns = {**packing.columns, name: column}
    return found


def own_column(name: str, examples: Examples) -> np.ndarray:
    """[tokens] one of COLUMNS."""
    if name == "document":
        numbers = np.arange(1, len(examples) + 1, dtype=np.int32)
    elif name == "margin":
        numbers = examples.margins
        if lacking := int(np.isnan(numbers).sum()) // examples.per_unit:
            raise UserError(
                f"expected a number as margin in each record, and {lacking:,} have none; add it, or name its key, as "
                "keys: {margin: ...}"
            )
    else:
        numbers = examples.labels
    return _per_token(name, numbers, examples)


def _per_token(name: str, values: Any, examples: Examples) -> np.ndarray:
    sizes = np.diff(examples.offsets)
    if len(values) != len(examples):
        raise UserError(
            f"the column {name!r} must have one entry for each of the {len(examples):,} documents; got {len(values):,}"
        )
    if np.ndim(values[0]) == 0:
        flat = np.repeat(np.asarray(values), sizes)
    else:
        wrong = next((i for i, each in enumerate(values) if len(each) != sizes[i]), None)
        if wrong is not None:
            raise UserError(
                f"the column {name!r} must have {sizes[wrong]:,} numbers for document {wrong}, one for each of its "
                f"tokens; got {len(values[wrong]):,}"
            )
        flat = np.concatenate(list(values))
    return flat.astype(np.float32 if np.issubdtype(flat.dtype, np.floating) else np.int32)
