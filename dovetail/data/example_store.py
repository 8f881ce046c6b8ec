"""Tokenised examples on disk: a token cache with a mask of the trained tokens, labels and margins.

Records are read, encoded and written one after another, so that memory does not grow with the files. The cache of files
is kept (`data.cache`), keyed by their content, the tokenizer, the template and the settings; that of a program's list
of records is temporary.

A unit is what a row holds whole: a document, the two documents of a preference, or an unpaired document and its
mismatched one.

<name>-<fingerprint>/  as in `data.cache`, and mask.bin [tokens] bool, labels.npy and margins.npy [documents] f32,
                       records.npy [units] int64, stats.json; with images, images.bin and images.npz (data.pictures)
"""

from __future__ import annotations

import functools
import json
import tempfile
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

import numpy as np

from dovetail.core.errors import UserError
from dovetail.core.fingerprint import of_sources
from dovetail.core.reporter import Progress
from dovetail.data.cache import CacheMeta, TokenStore, cached, part_path, token_dtype
from dovetail.data.example_encoder import (
    LEFT_OUT,
    WHOLE,
    ExampleEncoder,
    MaskedTokens,
    begins_with_assistant,
    fit,
    shortened,
)
from dovetail.data.examples import Example, example
from dovetail.data.pictures import PictureWriter, StoredPictures
from dovetail.data.records import FROM_PROGRAM, BadRecords, Record, find_files, open_records
from dovetail.data.settings import Keys, Source, TuningData

MASK, LABELS, MARGINS, UNIT_RECORDS, STATS = "mask.bin", "labels.npy", "margins.npy", "records.npy", "stats.json"
COUNTED = ("records", "unanswered", "shortened", "cut", "left_out", "split", "opening")
OWN_SHARE = 3, 4  # of a row, that an unpaired example may fill: the rest is for the mismatched document beside it


@dataclass(frozen=True)
class ExampleStats:
    """Counts of the records and of the documents made from them; `str` gives one line."""

    records: int = 0
    documents: int = 0
    tokens: int = 0
    trained: int = 0  # of the tokens
    unanswered: int = 0  # records without an assistant's turn, left out
    shortened: int = 0  # lost their oldest turns
    cut: int = 0
    left_out: int = 0  # too long
    split: int = 0  # conversations with turns that are documents of their own
    opening: int = 0  # conversations that the assistant begins, whose first turn is not trained
    bad: tuple[str, ...] = ()  # records that were left out, and why

    def __str__(self) -> str:
        counts = {
            "without an assistant's turn, left out": self.unanswered, "shortened by turns": self.shortened,
            "cut at the end": self.cut, "left out as too long": self.left_out,
            "split, because the template renders earlier turns differently": self.split,
            "begin with the assistant: that turn is read and not trained": self.opening,
            "bad records left out": len(self.bad),
        }  # fmt: skip
        rest = "".join(f"; {count:,} {what}" for what, count in counts.items() if count)
        share = self.trained / max(self.tokens, 1)
        kept = f"{self.documents:,} documents, {self.tokens:,} tokens, {self.trained:,} of them trained ({share:.0%})"
        return f"{self.records:,} records: {kept}{rest}"

    def __add__(self, other: ExampleStats) -> ExampleStats:
        return ExampleStats(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


class ExampleStore(TokenStore):
    """Read the tokenised examples of one source."""

    def __init__(self, folder: Path, name: str):
        super().__init__(folder)
        self.name = name
        self.mask = np.memmap(folder / MASK, bool, "r") if self.meta.tokens else np.zeros(0, bool)
        self.labels, self.margins = (np.load(folder / file, mmap_mode="r") for file in (LABELS, MARGINS))  # [documents]
        self.records = np.load(folder / UNIT_RECORDS, mmap_mode="r")  # [units] the record of each, among those kept
        self.pictures = StoredPictures.of(folder)
        found = json.loads((folder / STATS).read_text())
        self.stats = ExampleStats(**found | {"bad": tuple(found["bad"])})

    @property
    def fingerprint(self) -> str:
        """Return a fingerprint of the tokens, masks, labels and margins.

        It does not depend on how the file was written; another chat template or tokenizer gives another one.
        """
        images = self.pictures.arrays if self.pictures else ()
        return self._digest(*self._parts, self.mask, self.lengths, self.labels, self.margins, *images)

    def trained(self, document: int) -> np.ndarray:
        """Return [n] whether each token of a document is trained."""
        return self.mask[int(self.offsets[document]) : int(self.offsets[document + 1])]

    def __getitem__(self, document: int) -> MaskedTokens:
        size = int(self.offsets[document + 1]) - int(self.offsets[document])
        images = self.pictures.pictures(document) if self.pictures else ()
        return MaskedTokens(self.read(document, 0, size), self.trained(document), images)


class Examples:
    """Number the documents of all sources; pair k is the documents 2k (chosen) and 2k + 1."""

    def __init__(self, stores: Sequence[ExampleStore], per_unit: int):
        self._stores, self.per_unit = tuple(stores), per_unit
        self._first = np.cumsum([0, *(len(store) for store in stores)])  # the first document of each store
        sizes = np.concatenate([store.lengths for store in stores])
        self.offsets = np.concatenate([[0], np.cumsum(sizes)])  # [documents + 1] where each starts among all tokens
        self.labels = np.concatenate([store.labels for store in stores])  # +1, -1 to avoid, 0 of a mismatched one
        self.margins = np.concatenate([store.margins for store in stores])  # of its pair; NaN where there is none

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @functools.cached_property
    def fingerprints(self) -> dict[str, str]:
        """Return the fingerprint of each source, by its name."""
        return of_sources((store.name, store.fingerprint) for store in self._stores)

    @property
    def lengths(self) -> np.ndarray:
        """Return [units] the tokens of each."""
        return np.diff(self.offsets).reshape(-1, self.per_unit).sum(1)

    def read(self, document: int, start: int, stop: int) -> np.ndarray:
        """Return the tokens start..stop-1 of a document, fewer where it ends before."""
        store, own = self._locate(document)
        return store.read(own, start, stop)

    def trained(self, document: int) -> np.ndarray:
        """Return [n] whether each token of a document is trained."""
        store, own = self._locate(document)
        return store.trained(own)

    @property
    def max_patches(self) -> int:
        """Return the most patches of an image's item; 0 if there are no images."""
        return max((store.pictures.max_patches for store in self._stores if store.pictures), default=0)

    def items(self, document: int) -> list[int]:
        """Return the number of items of each image of a document."""
        store, own = self._locate(document)
        return store.pictures.items(own) if store.pictures else []

    def images(self, document: int) -> list[bytes]:
        """Return the files of a document's images."""
        store, own = self._locate(document)
        return store.pictures.files(own) if store.pictures else []

    def _locate(self, document: int) -> tuple[ExampleStore, int]:
        at = int(np.searchsorted(self._first, document, "right")) - 1
        return self._stores[at], document - int(self._first[at])


# --- from records to a store ------------------------------------------------------------------------------------------


def open_stores(
    settings: TuningData,
    encoder: ExampleEncoder,
    kind: str,
    length: int,
    records: Iterable[Any] | None = None,
    progress: Progress | None = None,
) -> list[ExampleStore]:
    """Return the examples of each source: from its cache, or tokenised now.

    Args:
        settings: The data section of a recipe.
        encoder: The encoder of examples.
        kind: sft, preference or unpaired.
        length: The most tokens of a unit.
        records: Dicts, in place of files.
        progress: Called with (name, bytes read, bytes in all).
    """
    make = functools.partial(_write, encoder=encoder, settings=settings, kind=kind, length=length)
    opened = open_records(settings, records, progress)
    if records is not None:
        return [
            _temporary(functools.partial(make, records=found, name=name, keys=keys)) for name, keys, found in opened
        ]
    how = [settings.format, settings.overlong, settings.skip_bad_records, kind, length, encoder.identity]
    stores = []
    for path, keys, found in opened:
        find_files(path)  # refuse files without records

        def write(folder: Path, files: Any, mark: str, path=path, keys=keys, found=found) -> None:
            make(folder, records=found, name=path, keys=keys, mark=mark)

        place = cached(Source(path), ["examples", asdict(keys), *how], settings.cache, write, progress)
        stores.append(ExampleStore(place, path))
    return stores


def _temporary(make: Callable[[Path], None]) -> ExampleStore:
    """Return a store whose files are removed at once: the memory maps keep their content."""
    with tempfile.TemporaryDirectory(prefix="dovetail-examples-") as folder:
        make(Path(folder))
        return ExampleStore(Path(folder), FROM_PROGRAM)


class _Writer:
    """Write documents one after another into the files of a store."""

    def __init__(self, folder: Path, vocab_size: int):
        self._folder, self._vocab_size, self._dtype = folder, vocab_size, token_dtype(vocab_size)
        self._lengths, self._labels, self._margins, self._records = array("q"), array("f"), array("f"), array("q")
        self._files, self._pictures = ExitStack(), PictureWriter(folder)

    def __enter__(self) -> Self:
        self._tokens, self._mask = (
            self._files.enter_context(path.open("wb")) for path in (part_path(self._folder, 0), self._folder / MASK)
        )
        return self

    def __exit__(self, *raised: Any) -> None:
        self._files.close()
        self._pictures.close()

    def add(self, document: MaskedTokens, label: float, margin: float) -> None:
        """Write one document."""
        document.tokens.astype(self._dtype).tofile(self._tokens)
        document.mask.astype(bool).tofile(self._mask)
        self._lengths.append(len(document.tokens))
        self._labels.append(label)
        self._margins.append(margin)
        self._pictures.add(document.images)

    def add_units(self, record: int, count: int) -> None:
        """Note that the next units belong to a record."""
        self._records.extend([record] * count)

    def finish(self, name: str, mark: str, stats: ExampleStats) -> None:
        """Write the counts; the folder is then a store."""
        self._files.close()
        self._pictures.finish()
        offsets = np.concatenate([[0], np.cumsum(np.asarray(self._lengths, np.int64))]).astype(np.int64)
        np.save(self._folder / LABELS, np.asarray(self._labels, np.float32))
        np.save(self._folder / MARGINS, np.asarray(self._margins, np.float32))
        np.save(self._folder / UNIT_RECORDS, np.asarray(self._records, np.int64))
        (self._folder / STATS).write_text(json.dumps(asdict(stats)))
        count, tokens = len(self._lengths), int(offsets[-1])
        meta = CacheMeta(name, mark, self._dtype, -1, self._vocab_size, [count], documents=count, tokens=tokens)
        meta.write(self._folder, offsets)


def _write(
    folder: Path, records: Iterable[Record], encoder: ExampleEncoder, settings: TuningData, keys: Keys, kind: str,
    length: int, name: str, mark: str = "",
) -> None:  # fmt: skip
    """Write the store of a source's examples; an error names the record."""
    vocab_size, counts = encoder.tokenizer.vocab_size, Counter[str]()
    bad = BadRecords(settings.skip_bad_records, name)
    room = length * OWN_SHARE[0] // OWN_SHARE[1] if kind == "unpaired" else length
    with _Writer(folder, vocab_size) as out:
        for found, documents in _read(records, encoder, settings, keys, kind, room, counts, bad, folder_of(name)):
            out.add_units(counts["kept"], len(documents) // len(found.sides))
            for document in documents:
                out.add(document, -1.0 if found.label is False else 1.0, found.margin)
                counts["documents"] += 1
                counts["tokens"] += len(document.tokens)
                counts["trained"] += int(document.mask[1:].sum())
            counts["kept"] += len(documents) > 0
        bad.check()
        known = {what: counts[what] for what in (*COUNTED, "documents", "tokens", "trained")}
        stats = ExampleStats(bad=tuple(bad.errors), **known)
        _check_some(name, stats, length)
        out.finish(name, mark, stats)
    if kind == "unpaired":
        _add_mismatched(folder, vocab_size, length, name, mark, encoder.image_id)


def _read(
    records: Iterable[Record], encoder: ExampleEncoder, settings: TuningData, keys: Keys, kind: str, length: int,
    counts: Counter[str], bad: BadRecords, folder: Path,
) -> Iterator[tuple[Example, list[MaskedTokens]]]:  # fmt: skip
    """Yield each example with its documents, and count what becomes of the records."""

    def read(record: Record) -> tuple[Example | None, list[MaskedTokens]]:
        found = example(record, kind, settings.format, keys)
        try:
            found = found and encoder.with_pictures(found, folder)
            return found, _documents(found, encoder, settings.overlong, length, counts) if found else []
        except UserError as error:
            raise UserError(f"{record.where()}: {error}", param=error.param) from error

    for record in records:
        counts["records"] += 1
        result = bad.read(lambda record=record: read(record))
        if result is None:
            continue
        found, documents = result
        if found is None:
            counts["unanswered"] += 1
            continue
        units = len(documents) // len(found.sides)
        counts["opening"] += units > 0 and any(begins_with_assistant(side) for side in found.sides)
        counts["split"] += units > 1
        yield found, documents


def folder_of(name: str) -> Path:
    """Return the folder that relative paths in a source's records start from."""
    path = Path("." if name == FROM_PROGRAM else name).expanduser()
    return path if path.is_dir() else path.parent


def _documents(
    found: Example, encoder: ExampleEncoder, overlong: str, length: int, counts: Counter[str]
) -> list[MaskedTokens]:
    """Return the documents of an example; of a preference: chosen, rejected."""
    sides, outcome = fit(encoder, found.sides, length, overlong)
    if outcome != WHOLE:
        counts[outcome.replace(" ", "_")] += 1
    if outcome == LEFT_OUT:
        return []
    if not all(sides):  # the template marks none of the assistant's text
        counts["unanswered"] += 1
        return []
    if len(sides) > 1 and any(len(side) > 1 for side in sides):
        raise UserError(
            f"{encoder.name} renders the earlier turns of a completion differently: give chosen and rejected one "
            "assistant's turn each, or set data.template to one with {% generation %} marks",
            param="data.template",
        )
    return [document for side in sides for document in side]


def _check_some(name: str, stats: ExampleStats, length: int) -> None:
    """Refuse a source without any example, and say why it has none."""
    if stats.documents:
        return
    if not stats.records:
        message = f"expected at least one record to train on, and {name} holds none; name another path"
    elif len(stats.bad) == stats.records:
        message = f"none of the {stats.records:,} records of {name} can be used; the first: {stats.bad[0]}"
    elif stats.unanswered == stats.records:
        message = (
            f"expected records with an assistant's turn, and none of the {stats.records:,} of {name} has one: check "
            "the roles, or set data.keys"
        )
    else:
        message = (
            f"expected examples that fit rows of {length:,} tokens, and all of {name} were left out ({stats}): raise "
            "length, or set data.overlong=turns"
        )
    raise UserError(message, param="data.path", code="no_examples")


# --- mismatched documents, for KTO ------------------------------------------------------------------------------------


def _add_mismatched(folder: Path, vocab_size: int, length: int, name: str, mark: str, image_id: int) -> None:
    """Write the store again, with a mismatched document (label 0) after each document."""
    own = folder / "own"
    own.mkdir(exist_ok=True)
    for file in [path for path in folder.iterdir() if path.is_file()]:
        file.replace(own / file.name)
    store = ExampleStore(own, name)
    with _Writer(folder, vocab_size) as out:
        for i, other in enumerate(mismatched(store, length, image_id)):
            out.add_units(int(store.records[i]), 1)
            out.add(store[i], float(store.labels[i]), float(store.margins[i]))
            out.add(other, 0.0, float(store.margins[i]))
        out.finish(name, mark, store.stats)
    for file in own.iterdir():
        file.unlink()
    own.rmdir()


def mismatched(documents: ExampleStore, length: int, image_id: int = -1) -> Iterator[MaskedTokens]:
    """Yield for each document its prompt with the completion of another document, from which KTO estimates the KL.

    The completion is that of the nearest document before it (the last ones come before the first) with another prompt.
    Where both documents together are longer than `length`, the mismatched one loses the end of its completion, then the
    start of its prompt with all of its images. The completion ends before an image.
    """
    for i in range(len(documents)):
        document = documents[i]
        other = documents[_other(documents, i, image_id)]
        yield _joined(_prompt(document, image_id), other, length - len(document.tokens), image_id)


def _prompt(document: MaskedTokens, image_id: int) -> MaskedTokens:
    """Return a document up to its first trained token, with the images that are before it."""
    return shortened(document, int(np.argmax(document.mask)), image_id)


def _other(documents: ExampleStore, i: int, image_id: int) -> int:
    count, own = len(documents), _prompt(documents[i], image_id)
    for back in range(1, count):
        other = _prompt(documents[(i - back) % count], image_id)
        if other.images != own.images or not np.array_equal(other.tokens, own.tokens):
            return (i - back) % count
    return (i - 1) % count  # all prompts are the same


def _joined(prompt: MaskedTokens, other: MaskedTokens, room: int, image_id: int) -> MaskedTokens:
    start, before = int(np.argmax(other.mask)), prompt.tokens
    shown = np.flatnonzero(other.tokens[start:] == image_id)
    end = start + int(shown[0]) if len(shown) else None
    answer, mask = other.tokens[start:end], other.mask[start:end]
    answered = min(len(answer), max(room - len(before), room // 2))
    cut = max(0, len(before) - (room - answered))
    if cut and prompt.images:
        cut = max(cut, int(np.flatnonzero(before == image_id)[-1]) + 1)
    tokens = np.concatenate([before[cut:], answer[:answered]])
    images = () if cut else prompt.images
    return MaskedTokens(tokens, np.concatenate([np.zeros(len(before) - cut, bool), mask[:answered]]), images)
