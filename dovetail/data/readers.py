"""Documents out of a span, one reader a format. Each yields (text, how many bytes of the span are behind it).

Each takes the text out of a line, a row or a record; `data.records` takes the same ones whole. What cannot be read is a
ValueError that names the file and the line or record, and says what to do.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from dovetail.core.errors import UserError
from dovetail.data import corpus

RECORDS = 256  # read from an ArrayRecord file at a time
ROWS = 1024  # of a column made into Python strings at a time

Documents = Iterator[tuple[str, int]]
Where = Callable[[], str]  # names the place of a line or a row; called only for a message


@dataclass(frozen=True)
class FileSpan:
    """A part of one file. What start and stop count depends on the kind: bytes of a plain JSONL file, row groups of a
    Parquet file, records of an ArrayRecord file, documents of a corpus; nothing for what is only read whole."""

    kind: str
    path: str
    start: int
    stop: int
    size: int  # bytes of the file, for the progress bar


def read(span: FileSpan, text_key: str) -> Documents:
    return READERS[span.kind](span, text_key)


def _text(span: FileSpan, text_key: str) -> Documents:
    raw = Path(span.path).read_bytes()
    yield _decode(raw, span.path), span.size


def _corpus(span: FileSpan, text_key: str) -> Documents:
    done = 0
    for text in corpus.documents(span.path, span.start, span.stop):
        done += len(text)
        yield text, done


# --- lines of JSON ----------------------------------------------------------------------------------------------------


def _jsonl(span: FileSpan, text_key: str) -> Documents:
    for line, where, done in json_lines(span):
        yield _text_of(parsed(line, where), text_key, where, b"\\u" in line), done


def json_lines(span: FileSpan) -> Iterator[tuple[bytes, Where, int]]:
    """The lines that are not blank: (line, its place, bytes of the span behind it)."""
    if span.path.endswith(".gz"):
        yield from _gz_lines(span)
        return
    with open(span.path, "rb") as file:
        _seek_line(file, span.start)
        while (start := file.tell()) < span.stop and (line := file.readline()):
            if line.strip():
                where = lambda at=start: f"{span.path} line {_line(span.path, at)}"  # noqa: E731
                yield line, where, start + len(line) - span.start


def _gz_lines(span: FileSpan) -> Iterator[tuple[bytes, Where, int]]:
    with open(span.path, "rb") as raw, gzip.open(raw) as file:
        try:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield line, lambda n=number: f"{span.path} line {n}", raw.tell()
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise UserError(f"{span.path} is not a whole gzip file ({error}); copy or compress it again") from None


def _seek_line(file: IO[bytes], start: int) -> None:
    """To the first line that begins at `start` or after: the one that `start` falls into belongs to the span before."""
    if start:
        file.seek(start - 1)
        file.readline()


def _line(path: str, start: int) -> int:
    """The number of the line at this byte; counted only for a message."""
    with open(path, "rb") as file:
        left, lines = start, 1
        while left > 0 and (block := file.read(min(left, 1 << 20))):
            left -= len(block)
            lines += block.count(b"\n")
    return lines


def parsed(line: bytes, where: Where) -> Any:
    """What a line of JSON holds."""
    try:
        return json.loads(line)
    except UnicodeDecodeError as error:
        raise UserError(f"{where()}: expected UTF-8, got byte {_hex(error)}; convert the file to UTF-8") from None
    except ValueError as error:
        raise UserError(
            f"{where()}: expected one JSON object per line, got {_short(line)} ({error}); mend or remove the line, "
            "or set format to what the file is"
        ) from None


def _text_of(record: Any, text_key: str, where: Where, escaped: bool) -> str:
    if not isinstance(record, dict):
        raise UserError(f"{where()}: expected a JSON object with the key {text_key!r}, got {type(record).__name__}")
    if text_key not in record:
        keys = ", ".join(map(repr, record)) or "no keys"
        raise UserError(f"{where()}: expected text under the key {text_key!r}, got {keys}; set text_key to one of them")
    text = record[text_key] if record[text_key] is not None else ""  # null: an empty document, as in a column
    if not isinstance(text, str):
        raise UserError(
            f"{where()}: expected text under the key {text_key!r}, got {type(text).__name__}; set text_key to another"
        )
    if escaped:  # only an escape can write half a surrogate pair
        try:
            text.encode()
        except UnicodeEncodeError:
            raise UserError(
                f"{where()}: expected valid Unicode, got half a surrogate pair; write it again with errors='replace'"
            ) from None
    return text


# --- columns: Parquet, Arrow ------------------------------------------------------------------------------------------


def parquet_groups(path: Path) -> int:
    return _parquet(str(path)).num_row_groups


def _parquet(path: str):
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.ParquetFile(path)
    except pa.ArrowInvalid as error:
        raise UserError(f"{path} is not a whole Parquet file ({str(error).splitlines()[0]}); copy it again") from None


def _parquet_rows(span: FileSpan, text_key: str) -> Documents:
    _check_column(_parquet(span.path).schema_arrow, text_key, span.path)
    for batch, done in parquet_batches(span, [text_key]):
        for at, text in enumerate(batch.column(0).to_pylist(), 1):
            yield text or "", done(at)


def parquet_batches(span: FileSpan, columns: list[str] | None = None) -> Iterator[tuple[Any, Callable[[int], int]]]:
    """Some rows at a time, of these columns or of all; and the bytes of the span behind so many rows of them."""
    file = _parquet(span.path)
    groups = range(span.start, span.stop)
    rows = sum(file.metadata.row_group(group).num_rows for group in groups)
    before = 0
    for batch in file.iter_batches(ROWS, row_groups=list(groups), columns=columns):
        yield batch, lambda at, before=before: span.size * (before + at) // rows
        before += batch.num_rows


def _arrow_rows(span: FileSpan, text_key: str) -> Documents:
    for batch, done in arrow_batches(span, text_key):
        for text in batch.column(text_key).to_pylist():
            yield text or "", done


def arrow_batches(span: FileSpan, text_key: str = "") -> Iterator[tuple[Any, int]]:
    """Some rows at a time, and the bytes behind them; `text_key` is a column that must be there and hold text.

    `datasets` writes Arrow's streaming format; older versions wrote its file format."""
    import pyarrow as pa

    with pa.memory_map(span.path) as file:
        try:
            try:
                stream = pa.ipc.open_stream(file)
            except pa.ArrowInvalid:
                whole = pa.ipc.open_file(file)
                stream = pa.RecordBatchReader.from_batches(
                    whole.schema, (whole.get_batch(i) for i in range(whole.num_record_batches))
                )
            if text_key:
                _check_column(stream.schema, text_key, span.path)
            for batch in stream:
                yield batch, min(file.tell(), span.size)
        except pa.ArrowInvalid as error:
            raise UserError(f"{span.path} is not a whole Arrow file ({error}); copy it again") from None


def _check_column(schema: Any, text_key: str, path: str) -> None:
    import pyarrow.types as types

    if text_key not in schema.names:
        raise UserError(
            f"{path}: expected a column {text_key!r}, got {', '.join(map(repr, schema.names))}; set text_key to another"
        )
    kind = schema.field(text_key).type
    kind = kind.value_type if types.is_dictionary(kind) else kind
    if not (types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)):
        raise UserError(
            f"{path}: expected text in the column {text_key!r}, got {kind}; set text_key to a column of text"
        )


# --- ArrayRecord ------------------------------------------------------------------------------------------------------


def array_records(path: Path) -> int:
    with _array_record(str(path)) as reader:
        return reader.num_records()


@contextmanager
def _array_record(path: str) -> Iterator[Any]:
    """A reader, whose complaints (it makes them when it is closed, too) become a sentence."""
    from array_record.python.array_record_module import ArrayRecordReader

    try:
        with closing(ArrayRecordReader(path)) as reader:
            yield reader
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{path} is not a whole ArrayRecord file ({reason}); copy it again") from None


def _array_record_rows(span: FileSpan, text_key: str) -> Documents:
    for record, where, done in array_record_bytes(span):
        yield _record(record, text_key, where), done


def array_record_bytes(span: FileSpan) -> Iterator[tuple[bytes, Where, int]]:
    """(record, its place, bytes of the span behind it)."""
    with _array_record(span.path) as reader:
        for start in range(span.start, span.stop, RECORDS):
            stop = min(start + RECORDS, span.stop)
            for index, record in enumerate(reader.read(start, stop), start):
                done = span.size * (index + 1 - span.start) // (span.stop - span.start)
                yield record, lambda i=index: f"{span.path} record {i}", done


def _record(record: bytes, text_key: str, where: Where) -> str:
    """UTF-8 text, or a JSON object with the text under its key."""
    if record.lstrip().startswith(b"{"):
        try:
            found = json.loads(record)
        except ValueError:
            pass  # a text that begins with a brace
        else:
            return _text_of(found, text_key, where, b"\\u" in record)
    return _decode(record, where())


# --- text -------------------------------------------------------------------------------------------------------------


def _decode(raw: bytes, where: str) -> str:
    try:
        return raw.decode("utf-8-sig")  # without the mark that some editors put first
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise UserError(
            f"{where} line {line}: expected UTF-8, got byte {_hex(error)} (byte {error.start} of it); convert it to "
            "UTF-8, or leave it out if it is no text"
        ) from None


def _hex(error: UnicodeDecodeError) -> str:
    return f"0x{error.object[error.start]:02x}"


def _short(line: bytes, width: int = 40) -> str:
    text = line.decode(errors="replace").strip()
    return repr(text if len(text) <= width else text[:width] + "…")


READERS = {
    "text": _text,
    "jsonl": _jsonl,
    "parquet": _parquet_rows,
    "arrayrecord": _array_record_rows,
    "hf": _arrow_rows,
    "corpus": _corpus,
}
