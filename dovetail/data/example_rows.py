"""Rows of examples by number, for fine-tuning: as `data.loader` gives those of a corpus, with the loss on what is
trained, and columns besides.

Fine-tuning's data, opened: from settings, or a program's records, to rows by number and what became of them.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dovetail.core.choice import one_of
from dovetail.core.errors import UserError
from dovetail.core.reporter import Progress
from dovetail.core.types import Batch
from dovetail.data.example_encoder import ExampleEncoder, example_encoder
from dovetail.data.example_store import Examples, ExampleStats, Made, make
from dovetail.data.loader import Loader, Mixture, held_out, held_out_each
from dovetail.data.pack import BestFit, Piece, key
from dovetail.data.records import open_records
from dovetail.data.settings import TrainedTokens, TuningData
from dovetail.io.tokenizer import Tokenizer

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


class ExampleLoader(Loader):
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

    def of_host(self, index: int, count: int) -> ExampleLoader:
        """The same rows as one of `count` hosts has them."""
        return ExampleLoader(self.rows, self.examples, self._batch, index, count, self.vocab_size)

    def every_document(self) -> ExampleLoader:
        """Rows of all documents, those held out too, whatever their sources weigh, with the column `document`: one
        epoch of them is what is needed to compute something once for each."""
        units = np.arange(len(self.examples) // self.examples.per_unit)
        column = {"document": own_column("document", self.examples)}
        packing = ExamplePacking(self.examples, units, self.length, 0, column)
        hosts = self._first // self._share, self._batch // self._share
        return ExampleLoader(Mixture([packing], [1.0], 0), self.examples, self._batch, *hosts, self.vocab_size)

    def with_column(self, name: str, values: np.ndarray | Sequence[float] | Sequence[np.ndarray]) -> ExampleLoader:
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


KINDS = ("sft", "preference", "unpaired")
BLOCK = 128  # tokens of a block of the TPU's attention kernels


def open_examples(
    settings: TuningData,
    length: int,
    batch: int,
    tokenizer: Tokenizer,
    kind: str,
    host_index: int = 0,
    host_count: int = 1,
    columns: Sequence[str] = (),
    records: Iterable[Any] | None = None,
    progress: Progress | None = None,
    packing: bool = True,
    trained: TrainedTokens = TrainedTokens(),
) -> tuple[ExampleLoader, ExampleLoader | None, ExampleStats]:
    """The training rows, those held out where settings.held_out sets some apart, and what became of the records.

    kind: sft, preference or unpaired (which has the column `label` at each of a document's tokens: +1, -1, or 0 of the
    mismatched document that follows each: see example_store.mismatched).
    columns: `document`, the number of a token's document plus 1; `margin`, that of a preference. records: dicts, in
    place of files. packing: several examples share a row; without it each has a row of its own, and rows are no longer
    than the longest example needs.
    """
    one_of("kind", kind, KINDS)
    for name in columns:
        one_of("a column", name, COLUMNS)
    if length < 2:
        raise UserError(f"expected rows of 2 tokens or more, got length {length}")
    made, weights = _read(settings, example_encoder(settings, tokenizer, trained), kind, length, records, progress)
    examples = Examples(made, per_unit=1 if kind == "sft" else 2)
    wanted = {*columns, "label"} if kind == "unpaired" else set(columns)
    brought = {name: own_column(name, examples) for name in sorted(wanted)}
    apart = _apart(settings, made, weights, length, packing)
    length = length if packing else min(length, _rounded(int(examples.lengths.max())))

    def rows(held: bool) -> ExampleLoader:
        packed = [
            ExamplePacking(
                examples, np.flatnonzero(mask == held) + first, length, key(settings.seed, i), brought, packing
            )
            for i, (first, mask) in enumerate(apart)
        ]
        mixture = Mixture(packed, weights, settings.seed)
        return ExampleLoader(mixture, examples, batch, host_index, host_count, tokenizer.vocab_size)

    stats = sum((each.stats for each in made), ExampleStats())
    return rows(False), rows(True) if settings.held_out else None, stats


def _read(
    settings: TuningData, encoder: ExampleEncoder, kind: str, length: int, records: Any, progress: Progress | None
) -> tuple[list[Made], list[float]]:
    """The documents of each source, and its weight."""
    made = []
    for name, keys, found in open_records(settings, records, progress):
        made.append(make(found, encoder, settings, keys, kind, length, name))
        _check_some(made[-1], length)
    return made, [source.weight for source in settings.all_sources] if records is None else [1.0]


def _check_some(made: Made, length: int) -> None:
    name, stats = made.name, made.stats
    if stats.documents:
        return
    if not stats.records:
        raise UserError(f"expected at least one record to train on, and {name} holds none; name another path")
    if len(stats.bad) == stats.records:
        raise UserError(f"none of the {stats.records:,} records of {name} can be used; the first: {stats.bad[0]}")
    if stats.unanswered == stats.records:
        raise UserError(
            f"expected records in which the assistant speaks, and none of the {stats.records:,} of {name} has an "
            "assistant's turn; check the roles, or name the right keys"
        )
    raise UserError(
        f"expected examples that fit rows of {length:,} tokens, and all of {name} were left out ({stats}); "
        "raise length, or set data.overlong to turns"
    )


def _rounded(tokens: int) -> int:
    """Return a row length that holds so many tokens: a whole number of blocks, where there are several."""
    size = BLOCK if tokens > BLOCK else 32
    return -(-tokens // size) * size


def _apart(
    settings: TuningData, made: list[Made], weights: list[float], length: int, packing: bool
) -> list[tuple[int, np.ndarray]]:
    """Of each source: the number of its first unit among all, and [units] whether each is held out. It is chosen by
    records, so that the turns of one conversation stay together."""
    found, first = [], 0
    for one, wanted in zip(made, held_out_each(settings.held_out, weights), strict=True):
        of_unit = np.asarray(one.records)
        # a number of rows: without packing each unit fills one
        sizes = one.lengths if packing else np.full(len(of_unit), length)
        lengths = np.bincount(of_unit, weights=sizes).astype(np.int64)
        found.append((first, held_out(lengths, wanted, length, one.name)[of_unit]))
        first += len(of_unit)
    return found
