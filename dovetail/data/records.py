"""Whole records, for fine-tuning: the objects of JSONL files, the rows of Parquet files and Hugging Face datasets on
disk, and the dicts of a Python list. The files are found, and read, as those of a corpus are.

Records that cannot be used: all of them are named at once, or left out and listed where a recipe says so.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

from dovetail.core.errors import UserError
from dovetail.core.reporter import Progress
from dovetail.data import readers, sources
from dovetail.data.readers import FileSpan, Where
from dovetail.data.settings import Keys, Source, TuningData


class Record(NamedTuple):
    fields: dict[str, Any]
    where: Where
    error: str = ""  # why there are no fields


def from_path(path: str, progress: Progress | None = None) -> Iterator[Record]:
    """All records below a path, in the order of the files' names."""
    source = Source(path)
    files = sources.find(source)
    if files.kind not in _READERS:
        raise UserError(
            f"expected records with fields (.jsonl, .parquet, or a Hugging Face dataset's folder) at {path!r}, "
            f"found {files.kind}; write each example as a line of a .jsonl file"
        )
    spans = sources.split(files, source, sys.maxsize)
    total, before = max(1, sum(span.size for span in spans)), 0
    for span in spans:
        for record, done in _READERS[span.kind](span):
            if progress:
                progress(files.name, before + min(done, span.size), total)
            yield record
        before += span.size


def from_list(records: Iterable[Any]) -> Iterator[Record]:
    """Dicts from a program."""
    if isinstance(records, str | bytes | Mapping):
        raise UserError(
            f"expected a list of records, each a dict, got {type(records).__name__}; put a single record into a list, "
            "and name files by path"
        )
    for number, record in enumerate(records):
        where: Where = lambda n=number: f"record {n}"  # noqa: E731
        yield _record(lambda record=record: record, where)


Found = Iterator[tuple[Record, int]]  # and the bytes of the span behind it


def _json_rows(span: FileSpan) -> Found:
    for line, where, done in readers.json_lines(span):
        yield _parsed(line, where), done


def _array_record_rows(span: FileSpan) -> Found:
    for raw, where, done in readers.array_record_bytes(span):
        yield _parsed(raw, where), done


def _parquet_rows(span: FileSpan) -> Found:
    number = 0
    for batch, done in readers.parquet_batches(span):
        for at, row in enumerate(batch.to_pylist(), 1):
            number += 1
            yield _row(span, row, number), done(at)


def _arrow_rows(span: FileSpan) -> Found:
    number = 0
    for batch, done in readers.arrow_batches(span):
        for row in batch.to_pylist():
            number += 1
            yield _row(span, row, number), done


def _row(span: FileSpan, row: dict[str, Any], number: int) -> Record:
    return Record(_given(row), lambda: f"{span.path} row {number}")


def _given(value: Any) -> Any:
    """Without nulls: a column gives every struct all keys, and writes null for those that a record did not have."""
    if isinstance(value, dict):
        return {key: _given(item) for key, item in value.items() if item is not None}
    return [_given(item) for item in value] if isinstance(value, list) else value


def _parsed(raw: bytes, where: Where) -> Record:
    return _record(lambda: readers.parsed(raw, where), where)


def _record(read: Callable[[], Any], where: Where) -> Record:
    """Go on with the next record after one that cannot be read."""
    try:
        return Record(_object(read(), where), where)
    except ValueError as error:
        return Record({}, where, str(error))


def _object(found: Any, where: Where) -> dict[str, Any]:
    if not isinstance(found, Mapping):
        raise UserError(
            f"{where()}: expected a record with keys, such as {{'messages': [...]}}, got {type(found).__name__}"
        )
    return dict(found)


_READERS = {
    "jsonl": _json_rows,
    "parquet": _parquet_rows,
    "arrayrecord": _array_record_rows,
    "hf": _arrow_rows,
}


T = TypeVar("T")
MOST = 20  # that an error lists; reading stops there


class BadRecords:
    """Collects the errors of one source. `skip`: data.skip_bad_records."""

    def __init__(self, skip: bool, name: str):
        self.skip, self.name, self.errors = skip, name, []

    def read(self, work: Callable[[], T]) -> T | None:
        """Return what `work` makes of a record; None where the record is bad, which is kept as an error."""
        try:
            return work()
        except ValueError as error:
            self.errors.append(str(error))
        if not self.skip and len(self.errors) == MOST:
            self.check()
        return None

    def check(self) -> None:
        """Raise a ValueError that names every bad record, unless they are to be left out."""
        if self.skip or not self.errors:
            return
        hint = "mend them, or set data.skip_bad_records=true to leave them out"
        if len(self.errors) == 1:
            raise UserError(f"{self.errors[0]} (or set data.skip_bad_records=true to leave the record out)")
        least = "at least " if len(self.errors) == MOST else ""
        listed = "\n".join(f"  {error}" for error in self.errors)
        raise UserError(f"{least}{len(self.errors)} records of {self.name} cannot be used: {hint}\n{listed}")


def open_records(
    settings: TuningData, records: Iterable[Any] | None = None, progress: Progress | None = None
) -> list[tuple[str, Keys, Iterator[Record]]]:
    """(name, keys, records) of each source."""
    if records is not None:
        return [("the list of records", settings.keys, from_list(records))]
    if not settings.all_sources:
        raise UserError("path must name a file or a folder of records, or sources list some; both are empty")
    return [(s.path, s.keys, from_path(s.path, progress)) for s in settings.all_sources]
