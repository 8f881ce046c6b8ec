"""Read whole records, for fine-tuning and RL: from files, or from a program's list of dicts."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

from dovetail.core.errors import RecipeError, UserError
from dovetail.core.reporter import Progress
from dovetail.data import readers, sources
from dovetail.data.readers import FileRow, Where
from dovetail.data.settings import Keys, Source, TuningData

KINDS = ("jsonl", "parquet", "arrayrecord", "hf")  # of files whose rows have fields
MOST = 20  # bad records that an error lists; reading stops there
FROM_PROGRAM = "the list of records"
T = TypeVar("T")


class Record(NamedTuple):
    """Hold one record of a source; `error` says why there are no fields."""

    fields: dict[str, Any]
    where: Where
    error: str = ""


def open_records(
    settings: TuningData, records: Iterable[Any] | None = None, progress: Progress | None = None
) -> list[tuple[str, Keys, Iterator[Record]]]:
    """Return (name, keys, records) of each source; `records`: dicts, in place of files."""
    if records is not None:
        return [(FROM_PROGRAM, settings.keys, from_list(records))]
    if not settings.all_sources:
        raise RecipeError(
            "path must name a file or a folder of records, or sources list some; both are empty", param="data.path"
        )
    return [(s.path, s.keys, from_path(s.path, progress)) for s in settings.all_sources]


def find_files(path: str) -> sources.Files:
    """Return the files below a path; refuse files whose rows are not records."""
    files = sources.find(Source(path))
    if files.kind not in KINDS:
        raise UserError(
            f"expected records with fields (.jsonl, .parquet, or a Hugging Face dataset's folder) at {path!r}, found "
            f"{files.kind}; write each example as a line of a .jsonl file",
            param="data.path",
        )
    return files


def from_path(path: str, progress: Progress | None = None) -> Iterator[Record]:
    """Yield all records below a path, in the order of the files' names."""
    files = find_files(path)
    spans = sources.split(files, Source(path), sys.maxsize)
    total, before = max(1, sum(span.size for span in spans)), 0
    for span in spans:
        for row in readers.rows(span):
            if progress:
                progress(files.name, before + min(row.done, span.size), total)
            yield _from_row(row)
        before += span.size


def from_list(records: Iterable[Any]) -> Iterator[Record]:
    """Yield a program's dicts as records."""
    if isinstance(records, str | bytes | Mapping):
        raise UserError(
            f"expected a list of records, each a dict, got {type(records).__name__}; put a single record into a list, "
            "and give files by path",
            param="data",
        )
    for number, record in enumerate(records):
        where: Where = lambda n=number: f"record {n}"  # noqa: E731
        yield _record(lambda record=record: record, where)


def _from_row(row: FileRow) -> Record:
    if isinstance(row.raw, dict):
        return Record(_given(row.raw), row.where)
    return _record(lambda: readers.parse_json(row.raw, row.where), row.where)


def _given(value: Any) -> Any:
    """Return a value without nulls: a column gives every struct all keys, with null for those that a record lacks."""
    if isinstance(value, dict):
        return {key: _given(item) for key, item in value.items() if item is not None}
    return [_given(item) for item in value] if isinstance(value, list) else value


def _record(read: Callable[[], Any], where: Where) -> Record:
    """Return a record, or one with an error: reading goes on with the next."""
    try:
        found = read()
    except UserError as error:
        return Record({}, where, str(error))
    if isinstance(found, Mapping):
        return Record(dict(found), where)
    wanted = "expected a record with keys, such as {'messages': [...]}"
    return Record({}, where, f"{where()}: {wanted}, got {type(found).__name__}")


class BadRecords:
    """Collect the errors of one source: to raise them all at once, or with `skip` to list what was left out."""

    def __init__(self, skip: bool, name: str):
        self.skip, self.name, self.errors = skip, name, []

    def read(self, work: Callable[[], T]) -> T | None:
        """Return what `work` makes of a record; None where the record is bad."""
        try:
            return work()
        except UserError as error:
            self.errors.append(str(error))
        if not self.skip and len(self.errors) == MOST:
            self.check()
        return None

    def check(self) -> None:
        """Raise a UserError that names every bad record, unless they are skipped."""
        if self.skip or not self.errors:
            return
        if len(self.errors) == 1:
            message = f"{self.errors[0]} (or set data.skip_bad_records=true to leave the record out)"
        else:
            least = "at least " if len(self.errors) == MOST else ""
            listed = "\n".join(f"  {error}" for error in self.errors)
            message = (
                f"{least}{len(self.errors)} records of {self.name} cannot be used: correct them, or set "
                f"data.skip_bad_records=true to leave them out\n{listed}"
            )
        raise UserError(message, code="bad_records")
