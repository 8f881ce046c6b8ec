"""Read the rows of data files, one reader per format: lines of JSON, rows of a table, records, whole texts.

`rows` is the only way to read a file. Pretraining takes the text out of each row (`documents`); fine-tuning and RL take
whole rows (`data.records`). An error names the file and the line or record.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

from dovetail.core.errors import FileError, UserError
from dovetail.data import corpus

RECORDS = 256  # records of an ArrayRecord file read at a time
ROWS = 1024  # table rows converted to Python objects at a time

Where = Callable[[], str]  # names the place of a row; called only for a message


@dataclass(frozen=True)
class FileSpan:
    """Hold a part of one file.

    The unit of `start` and `stop` depends on the kind: bytes of a plain JSONL file, row groups of a Parquet file,
    records of an ArrayRecord file, documents of a corpus; unused for files that are read whole.
    """

    kind: str
    path: str
    start: int
    stop: int
    size: int  # bytes of the span, for the progress bar


class FileRow(NamedTuple):
    """Hold one row of a file."""

    raw: Any  # bytes of JSON or text, a str, the dict of a table's row, or the value of one column
    where: Where
    done: int  # bytes of the span up to the end of this row


def rows(span: FileSpan, column: str = "") -> Iterator[FileRow]:
    """Yield the rows of a span; `column`: of a table, read only this column, which must hold text."""
    return _READERS[span.kind](span, column)


def documents(span: FileSpan, text_key: str) -> Iterator[tuple[str, int]]:
    """Yield the text of each row, and the bytes of the span up to its end."""
    for row in rows(span, text_key):
        yield _text(row, text_key, is_json=span.kind == "jsonl"), row.done


def parse_json(raw: bytes, where: Where) -> Any:
    """Return the value of a line of JSON."""
    try:
        return json.loads(raw)
    except UnicodeDecodeError as error:
        raise UserError(f"{where()}: expected UTF-8, got byte {_hex(error)}; convert the file to UTF-8") from None
    except ValueError as error:
        raise UserError(
            f"{where()}: expected one JSON object per line, got {_short(raw)} ({error}); correct or remove the line, "
            "or set format to the format of the file"
        ) from None


# --- text -------------------------------------------------------------------------------------------------------------


def _text(row: FileRow, text_key: str, is_json: bool) -> str:
    raw, where = row.raw, row.where
    if raw is None or isinstance(raw, str):  # of a text, or of a column
        return raw or ""
    if is_json:
        return _text_of(parse_json(raw, where), text_key, where, b"\\u" in raw)
    if raw.lstrip().startswith(b"{"):  # a record: text, or a JSON object with the text under its key
        try:
            found = json.loads(raw)
        except ValueError:
            pass  # text that begins with a brace
        else:
            return _text_of(found, text_key, where, b"\\u" in raw)
    return _decode(raw, where())


def _text_of(record: Any, text_key: str, where: Where, escaped: bool) -> str:
    if not isinstance(record, dict):
        raise UserError(f"{where()}: expected a JSON object with the key {text_key!r}, got {type(record).__name__}")
    if text_key not in record:
        keys = ", ".join(map(repr, record)) or "no keys"
        raise UserError(
            f"{where()}: expected text under the key {text_key!r}, got {keys}; set text_key to one of them",
            param="text_key",
        )
    text = record[text_key] if record[text_key] is not None else ""  # null: an empty document, as in a column
    if not isinstance(text, str):
        raise UserError(
            f"{where()}: expected text under the key {text_key!r}, got {type(text).__name__}; set text_key to another",
            param="text_key",
        )
    if escaped:  # only an escape can write half a surrogate pair
        try:
            text.encode()
        except UnicodeEncodeError:
            raise UserError(
                f"{where()}: expected valid Unicode, got half a surrogate pair; write it again with errors='replace'"
            ) from None
    return text


def _decode(raw: bytes, where: str) -> str:
    try:
        return raw.decode("utf-8-sig")  # without the mark that some editors put first
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise UserError(
            f"{where} line {line}: expected UTF-8, got byte {_hex(error)} (byte {error.start} of it); convert it to "
            "UTF-8, or leave it out if it is not text"
        ) from None


def _hex(error: UnicodeDecodeError) -> str:
    return f"0x{error.object[error.start]:02x}"


def _short(line: bytes, width: int = 40) -> str:
    text = line.decode(errors="replace").strip()
    return repr(text if len(text) <= width else text[:width] + "…")


# --- texts, lines of JSON ---------------------------------------------------------------------------------------------


def _text_file(span: FileSpan, column: str) -> Iterator[FileRow]:
    yield FileRow(_decode(Path(span.path).read_bytes(), span.path), lambda: span.path, span.size)


def _corpus(span: FileSpan, column: str) -> Iterator[FileRow]:
    done = 0
    for text in corpus.documents(span.path, span.start, span.stop):
        done += len(text)
        yield FileRow(text, lambda: span.path, done)


def _json_lines(span: FileSpan, column: str) -> Iterator[FileRow]:
    if span.path.endswith(".gz"):
        yield from _gz_lines(span)
        return
    with open(span.path, "rb") as file:
        _seek_line(file, span.start)
        while (start := file.tell()) < span.stop and (line := file.readline()):
            if line.strip():
                where = lambda at=start: f"{span.path} line {_line(span.path, at)}"  # noqa: E731
                yield FileRow(line, where, start + len(line) - span.start)


def _gz_lines(span: FileSpan) -> Iterator[FileRow]:
    with open(span.path, "rb") as raw, gzip.open(raw) as file:
        try:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield FileRow(line, lambda n=number: f"{span.path} line {n}", raw.tell())
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise FileError(f"{span.path} is not a complete gzip file ({error}); copy or compress it again") from None


def _seek_line(file: IO[bytes], start: int) -> None:
    """Seek the first line that begins at `start` or after: a line across `start` belongs to the span before."""
    if start:
        file.seek(start - 1)
        file.readline()


def _line(path: str, start: int) -> int:
    """Return the number of the line at this byte; counted only for a message."""
    with open(path, "rb") as file:
        left, lines = start, 1
        while left > 0 and (block := file.read(min(left, 1 << 20))):
            left -= len(block)
            lines += block.count(b"\n")
    return lines


# --- tables: Parquet, Arrow -------------------------------------------------------------------------------------------


def parquet_groups(path: Path) -> int:
    """Return the number of row groups of a Parquet file."""
    return _parquet(str(path)).num_row_groups


def _parquet(path: str):
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.ParquetFile(path)
    except pa.ArrowInvalid as error:
        reason = str(error).splitlines()[0]
        raise FileError(f"{path} is not a complete Parquet file ({reason}); copy it again") from None


def _parquet_rows(span: FileSpan, column: str) -> Iterator[FileRow]:
    file = _parquet(span.path)
    if column:
        _check_column(file.schema_arrow, column, span.path)
    groups = range(span.start, span.stop)
    total, number = sum(file.metadata.row_group(group).num_rows for group in groups), 0
    for batch in file.iter_batches(ROWS, row_groups=list(groups), columns=[column] if column else None):
        for row in batch.column(0).to_pylist() if column else batch.to_pylist():
            number += 1
            yield FileRow(row, lambda n=number: f"{span.path} row {n}", span.size * number // total)


def _arrow_rows(span: FileSpan, column: str) -> Iterator[FileRow]:
    """Yield the rows of a file in Arrow's streaming format, or in its file format (older versions of `datasets`)."""
    import pyarrow as pa

    number = 0
    with pa.memory_map(span.path) as file:
        try:
            try:
                stream = pa.ipc.open_stream(file)
            except pa.ArrowInvalid:
                whole = pa.ipc.open_file(file)
                stream = pa.RecordBatchReader.from_batches(
                    whole.schema, (whole.get_batch(i) for i in range(whole.num_record_batches))
                )
            if column:
                _check_column(stream.schema, column, span.path)
            for batch in stream:
                done = min(file.tell(), span.size)
                for row in batch.column(column).to_pylist() if column else batch.to_pylist():
                    number += 1
                    yield FileRow(row, lambda n=number: f"{span.path} row {n}", done)
        except pa.ArrowInvalid as error:
            raise FileError(f"{span.path} is not a complete Arrow file ({error}); copy it again") from None


def _check_column(schema: Any, column: str, path: str) -> None:
    import pyarrow.types as types

    if column not in schema.names:
        names = ", ".join(map(repr, schema.names))
        raise UserError(f"{path}: expected a column {column!r}, got {names}; set text_key to another", param="text_key")
    kind = schema.field(column).type
    kind = kind.value_type if types.is_dictionary(kind) else kind
    if not (types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)):
        raise UserError(
            f"{path}: expected text in the column {column!r}, got {kind}; set text_key to a column of text",
            param="text_key",
        )


# --- ArrayRecord ------------------------------------------------------------------------------------------------------


def array_records(path: Path) -> int:
    """Return the number of records of an ArrayRecord file."""
    with _array_record(str(path)) as reader:
        return reader.num_records()


@contextmanager
def _array_record(path: str) -> Iterator[Any]:
    """Open a reader; its errors, which it may also raise when it is closed, become a FileError."""
    from array_record.python.array_record_module import ArrayRecordReader

    try:
        with closing(ArrayRecordReader(path)) as reader:
            yield reader
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise FileError(f"{path} is not a complete ArrayRecord file ({reason}); copy it again") from None


def _array_record_rows(span: FileSpan, column: str) -> Iterator[FileRow]:
    with _array_record(span.path) as reader:
        for start in range(span.start, span.stop, RECORDS):
            stop = min(start + RECORDS, span.stop)
            for index, record in enumerate(reader.read(start, stop), start):
                done = span.size * (index + 1 - span.start) // (span.stop - span.start)
                yield FileRow(record, lambda i=index: f"{span.path} record {i}", done)


_READERS: dict[str, Callable[[FileSpan, str], Iterator[FileRow]]] = {
    "text": _text_file,
    "jsonl": _json_lines,
    "parquet": _parquet_rows,
    "arrayrecord": _array_record_rows,
    "hf": _arrow_rows,
    "corpus": _corpus,
}
