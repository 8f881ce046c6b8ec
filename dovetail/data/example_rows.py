"""Open the examples of fine-tuning as rows by number: whole examples, a loss mask, and further columns."""

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
from dovetail.data.example_encoder import example_encoder
from dovetail.data.example_store import Examples, ExampleStats, ExampleStore, open_stores
from dovetail.data.loader import Loader, Mixture, check_length, held_out, held_out_each
from dovetail.data.pack import BestFit, Piece, key
from dovetail.data.pictures import PictureRows, distinct, picture_reader
from dovetail.data.settings import TrainedTokens, TuningData
from dovetail.io.images.processor import ImageProcessor
from dovetail.io.tokenizer import Tokenizer
from dovetail.models.towers.vision import Vision

KINDS = ("sft", "preference", "unpaired")
COLUMNS = ("document", "label", "margin")  # those that examples bring themselves
BLOCK = 128  # tokens of a block of the TPU's attention kernels
COUNTED_ROWS = 1000  # of which the images are counted for the plan of memory


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
    vision: tuple[ImageProcessor, Vision] | None = None,
) -> tuple[ExampleLoader, ExampleLoader | None, ExampleStats]:
    """Open the examples of fine-tuning; a source whose token cache is missing is tokenised first.

    Args:
        settings: The data section of a recipe.
        length: The most tokens of an example; with `packing`, the tokens of a row.
        batch: The rows of a step, over all hosts.
        tokenizer: The model's tokenizer.
        kind: sft, preference or unpaired. Unpaired rows have the column `label`: +1, -1, or 0 for the mismatched
            document that follows each document.
        host_index: The number of this host.
        host_count: The number of hosts.
        columns: `document`, the number of a token's document plus 1; `margin`, that of a preference.
        records: Dicts, in place of files.
        progress: Called with (name, bytes read, bytes in all).
        packing: Whether several examples share a row. Otherwise each has a row of its own, and rows are as long as the
            longest example needs.
        trained: Which tokens are trained.
        vision: The model's image processor and how it sees images; None: records with images are refused.

    Returns:
        The training rows, the held-out rows (None where `settings.held_out` is 0), and the counts of the records.
    """
    one_of("kind", kind, KINDS)
    for name in columns:
        one_of("a column", name, COLUMNS)
    check_length(length)
    encoder = example_encoder(settings, tokenizer, trained, vision and vision[0])
    stores = open_stores(settings, encoder, kind, length, records, progress)
    examples = Examples(stores, per_unit=1 if kind == "sft" else 2)
    pictures = None
    if vision and examples.max_patches:
        pictures = PictureRows(picture_reader(vision[0]), vision[1], examples.max_patches)
    wanted = {*columns, "label"} if kind == "unpaired" else set(columns)
    brought = {name: own_column(name, examples) for name in sorted(wanted)}
    weights = [source.weight for source in settings.all_sources] if records is None else [1.0]
    apart = _apart(settings.held_out, stores, examples.per_unit, weights, length, packing)
    length = length if packing else min(length, _rounded(int(examples.lengths.max())))

    def rows(held: bool) -> ExampleLoader:
        packed, first = [], 0
        for i, mask in enumerate(apart):
            units = np.flatnonzero(mask == held) + first
            packed.append(ExamplePacking(examples, units, length, key(settings.seed, i), brought, packing))
            first += len(mask)
        mixture = Mixture(packed, weights, settings.seed)
        return ExampleLoader(mixture, examples, batch, host_index, host_count, tokenizer.vocab_size, pictures)

    stats = sum((store.stats for store in stores), ExampleStats())
    return rows(False), rows(True) if settings.held_out else None, stats


def _rounded(tokens: int) -> int:
    """Return the smallest row length for this many tokens: a whole number of blocks if there are several."""
    size = BLOCK if tokens > BLOCK else 32
    return -(-tokens // size) * size


def _apart(
    wanted: float, stores: Sequence[ExampleStore], per_unit: int, weights: list[float], length: int, packing: bool
) -> list[np.ndarray]:
    """Return of each source [units] whether each is held out; the turns of one conversation stay together."""
    found = []
    for store, each in zip(stores, held_out_each(wanted, weights), strict=True):
        # Without packing every unit fills a row.
        sizes = store.lengths.reshape(-1, per_unit).sum(1) if packing else np.full(len(store.records), length)
        found.append(held_out(sizes, each, length, store.name, groups=np.asarray(store.records)))
    return found


class ExamplePacking(BestFit):
    """Rows of whole examples: one per row, or with `packing` as many as fit.

    The two documents of a preference are neighbours, as segments 2k - 1 and 2k. A column has one value per document, or
    one per token of all documents [tokens, ...].
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
        """Yield the documents of row i."""
        each, offsets = self.examples.per_unit, self.examples.offsets
        for unit in super().pieces(i):
            for document in range(unit.document * each, (unit.document + 1) * each):
                yield Piece(document, 0, int(offsets[document + 1] - offsets[document]))

    def empty(self) -> Batch:
        """Return a row of padding."""
        return dataclasses.replace(super().empty(), columns=self._no_columns())

    def _no_columns(self) -> Any:
        return {name: np.zeros((self.length, *values.shape[1:]), values.dtype) for name, values in self.columns.items()}

    def row(self, i: int) -> Batch:
        """Return row i: numpy arrays [T]."""
        row: Any = super().row(i)
        columns, at = self._no_columns(), 0
        for document, _, size in self.pieces(i):
            row.loss_mask[at : at + size - 1] = self.examples.trained(document)[1:]  # the weight of the next token
            start = int(self.examples.offsets[document])
            for name, values in self.columns.items():
                per_document = len(values) == len(self.examples)
                columns[name][at : at + size] = values[document] if per_document else values[start : start + size]
            at += size
        return dataclasses.replace(row, columns=columns)


class ExampleLoader(Loader):
    """Batches of examples by number. The column `document` holds the number of a document in `examples`, plus 1.

    A pass over the examples of one source is a whole number of batches: the last one is filled up with padding, so that
    no example is seen twice before all were seen once. Several sources are one stream, by their weights.
    """

    def __init__(
        self,
        rows: Mixture,
        examples: Examples,
        batch: int,
        host_index: int,
        host_count: int,
        vocab_size: int,
        pictures: PictureRows | None = None,
    ):
        super().__init__(rows, batch, host_index, host_count, vocab_size=vocab_size, fingerprints=examples.fingerprints)
        self.examples, self._pictures = examples, pictures

    def batch(self, step: int) -> Batch:
        """Return this host's rows of a step's batch, with the columns of images if the examples have any."""
        found = super().batch(step)
        if self._pictures is None:
            return found
        rows = [[p.document for p in self.rows.pieces(i)] if i is not None else [] for i in self.rows_of(step)]
        items = max(map(self._num_items, rows))  # over all hosts: their shapes are equal
        own = rows[self._first : self._first + self._share]
        return self._pictures.add(found, [[self.examples.images(document) for document in row] for row in own], items)

    def _num_items(self, documents: Sequence[int]) -> int:
        """Return the number of items of a row; the documents of a pair share their images."""
        if self.examples.per_unit == 1:
            return sum(count for document in documents for count in self.examples.items(document))
        found = {}
        for document in documents:
            keys = distinct(self.examples.images(document))
            found |= dict(zip(keys, self.examples.items(document), strict=True))
        return sum(found.values())

    def max_items(self) -> int:
        """Return the most items of images in a row, among the first rows, for the plan of memory."""
        if self._pictures is None:
            return 0
        first = range(min(self.rows_per_epoch, COUNTED_ROWS))
        return max(self._num_items([piece.document for piece in self.rows.pieces(i)]) for i in first)

    @property
    def steps_per_epoch(self) -> int:
        """Return the number of batches of a pass over one source; with several sources, see every_document."""
        return -(-self.rows_per_epoch // self._batch)

    @property
    def examples_per_epoch(self) -> int:
        """Return the examples of all sources, each counted once; a pair of a preference is one."""
        return sum(source.documents for source in self.rows.sources)

    def epochs(self, step: int) -> tuple[float, ...]:
        """Return the number of passes over each source before `step`."""
        return super().epochs(step) if len(self.rows.sources) > 1 else (step / self.steps_per_epoch,)

    def rows_of(self, step: int) -> Sequence[int | None]:
        """Return the numbers of the rows of a step's batch, over all hosts; None is a row of padding."""
        if len(self.rows.sources) > 1:
            return super().rows_of(step)
        epoch, at = divmod(step, self.steps_per_epoch)
        in_epoch = range(at * self._batch, (at + 1) * self._batch)
        return [epoch * self.rows_per_epoch + i if i < self.rows_per_epoch else None for i in in_epoch]

    def notes(self, step: int) -> dict[str, float]:
        """Return the number of examples (or pairs) and tokens of the batch, over all hosts."""
        pieces = [piece for i in self.rows_of(step) if i is not None for piece in self.rows.pieces(i)]
        tokens = sum(piece.stop - piece.start for piece in pieces)
        each = self.examples.per_unit
        return {"pairs" if each == 2 else "examples": len(pieces) // each, "tokens": tokens}

    def of_host(self, index: int, count: int) -> ExampleLoader:
        """Return the same rows for one of `count` hosts."""
        return ExampleLoader(self.rows, self.examples, self._batch, index, count, self.vocab_size, self._pictures)

    def every_document(self) -> ExampleLoader:
        """Return rows of all documents, held out or not, each once per epoch, with the column `document`."""
        units = np.arange(len(self.examples) // self.examples.per_unit)
        column = {"document": own_column("document", self.examples)}
        packing = ExamplePacking(self.examples, units, self.length, 0, column)
        hosts = self._first // self._share, self._batch // self._share
        mixture = Mixture([packing], [1.0], 0)
        return ExampleLoader(mixture, self.examples, self._batch, *hosts, self.vocab_size, self._pictures)

    def with_column(self, name: str, values: np.ndarray) -> ExampleLoader:
        """Return the same rows with a further column.

        Args:
            name: The column's name.
            values: [documents] one number per document, which all of its tokens get; or [tokens, ...] one entry per
                token of all documents, at the token whose target it describes.
        """
        sizes = len(self.examples), int(self.examples.offsets[-1])
        assert len(values) in sizes, f"column {name!r}: expected {sizes[0]} or {sizes[1]} entries, got {len(values)}"
        found, rows = copy.copy(self), copy.copy(self.rows)
        rows.sources = tuple(_with_column(packing, name, _column(values)) for packing in rows.sources)
        found.rows = rows
        return found


def _with_column(packing: Any, name: str, column: np.ndarray) -> ExamplePacking:
    found = copy.copy(packing)
    found.columns = {**packing.columns, name: column}
    return found


def own_column(name: str, examples: Examples) -> np.ndarray:
    """Return [documents] one of COLUMNS."""
    if name == "document":
        return np.arange(1, len(examples) + 1, dtype=np.int32)
    if name == "label":
        return examples.labels
    if lacking := int(np.isnan(examples.margins).sum()) // examples.per_unit:
        raise UserError(
            f"margin must be a number in each record, and {lacking:,} have none: add it, or name its key, as "
            "data.keys.margin=KEY",
            param="data.keys.margin",
        )
    return examples.margins


def _column(values: np.ndarray) -> np.ndarray:
    """Return the values as f32 or int32."""
    return values.astype(np.float32 if np.issubdtype(values.dtype, np.floating) else np.int32, copy=False)
