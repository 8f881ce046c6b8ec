"""Find the files of a source, and split them into spans.

A source's path is a file, a folder, a pattern, a built-in corpus, a shipped sample, or a dataset of the hub: `org/name`
or `hf://datasets/org/name/FILES`. A text file is one document. A line of a JSONL file, a row of a Parquet file or of a
Hugging Face dataset, and a record of an ArrayRecord file are one document each. Files are read in order of their names.
"""

from __future__ import annotations

import fnmatch
import glob
import itertools
import json
import re
from dataclasses import dataclass
from pathlib import Path

from dovetail.core.errors import FileError, MissingFileError, UserError
from dovetail.core.recipe import SHIPPED
from dovetail.data import corpus
from dovetail.data.readers import FileSpan, array_records, parquet_groups
from dovetail.data.settings import Source
from dovetail.io.hub import HUB_ID, fetch_dataset

ENDINGS = {
    "text": (".txt", ".text", ".md"),
    "jsonl": (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz"),
    "parquet": (".parquet",),
    "arrayrecord": (".array_record", ".arrayrecord"),
    "hf": (".arrow",),
}
ALL_ENDINGS = [end for ends in ENDINGS.values() for end in ends]
SPLITS = "dataset_dict.json"  # at the top of a Hugging Face dataset that was saved with several splits
STATE = "state.json"  # in a Hugging Face dataset that was saved
PREFIX = "hf://datasets/"
CARD = ".md"  # of a dataset on the hub: its description, not text to train on
SPLIT = re.compile(r"(?:^|[-_./])(train|validation|valid|dev|test)(?=[-_./]|$)")


@dataclass(frozen=True)
class Files:
    """Hold the files of a source."""

    kind: str  # of ENDINGS, or corpus
    name: str  # for messages, and for the cache's folder
    paths: tuple[Path, ...]


def find(source: Source) -> Files:
    """Return the files of a source, in order. Raise a UserError where there is nothing to read."""
    if source.format == "corpus" or (source.format == "auto" and _is_corpus(source.path)):
        corpus.size(source.path)
        return Files("corpus", source.path.replace(":", "-"), ())
    if _is_hub_dataset(source.path):
        kind, paths = _by_ending(source, _fetch(source.path))
        return Files(kind, _name(Path(source.path)), tuple(paths))
    if "://" in source.path:
        raise UserError(
            f"path must be on this machine, got {source.path!r}: mount the bucket or copy the files here", param="path"
        )
    path = _sample(source.path) or Path(source.path).expanduser()
    found = _hf_files(path) if source.format in ("auto", "hf") else None
    kind, paths = found or _by_ending(source, _candidates(path))
    return Files(kind, _name(path), tuple(paths))


def split(files: Files, source: Source, largest: int) -> list[FileSpan]:
    """Return the spans of all files in order, each of about `largest` bytes where the format can be split."""
    if files.kind == "corpus":
        count = corpus.size(source.path)
        return _even("corpus", source.path, count, count * corpus.BYTES, largest)
    return [span for path in files.paths for span in _split_file(files.kind, path, largest)]


def samples() -> tuple[str, ...]:
    """Return the names of the record files that come with the package, for the shipped recipes of fine-tuning."""
    return tuple(sorted(path.stem for path in (SHIPPED / "samples").glob("*.jsonl")))


def _is_corpus(path: str) -> bool:
    """Return whether a path is a built-in name, and there is no file or folder of that name."""
    return path.partition(":")[0] in corpus.CORPORA and not Path(path).exists()


def _sample(name: str) -> Path | None:
    """Return the shipped file of this name, unless there is a file or folder of the user's at that path."""
    return SHIPPED / "samples" / f"{name}.jsonl" if name in samples() and not Path(name).exists() else None


def _name(path: Path) -> str:
    stem = path.name if not glob.has_magic(path.name) else path.parent.name
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in stem).strip("._") or "data"


# --- files on this machine --------------------------------------------------------------------------------------------


def _candidates(path: Path) -> list[Path]:
    """Return every visible file of a path: itself, those below a folder, or those that a pattern matches."""
    if path.is_file():
        return [path]
    if path.is_dir():
        below = sorted(p for p in path.rglob("*") if p.is_file())
        return [p for p in below if not any(part.startswith(".") for part in p.relative_to(path).parts)]
    if glob.has_magic(str(path)):
        return sorted(Path(p) for p in glob.glob(str(path), recursive=True) if Path(p).is_file())
    raise MissingFileError(
        f"path must be a file, a folder, a pattern such as data/*.jsonl, or built-in data "
        f"({', '.join((*corpus.CORPORA, *samples()))}); there is no {str(path)!r}",
        param="path",
    )


def _by_ending(source: Source, paths: list[Path]) -> tuple[str, list[Path]]:
    """Return the kind of the files, and the files of that kind.

    Where `format` is given and no file has its endings, all files are taken.
    """
    kinds: dict[str, list[Path]] = {}
    for path in paths:
        if kind := _kind(path):
            kinds.setdefault(kind, []).append(path)
    if source.format != "auto":
        chosen = kinds.get(source.format, paths)
        if not chosen:
            raise MissingFileError(f"expected {source.format} files in {source.path!r}, and it holds no files")
        return source.format, chosen
    if len(kinds) == 1:
        return next(iter(kinds.items()))
    if not kinds:
        raise MissingFileError(
            f"expected files ending in {' '.join(ALL_ENDINGS)} at {source.path!r}, found none; set format",
            param="format",
        )
    raise UserError(
        f"{source.path!r} holds files of several formats ({', '.join(sorted(kinds))}); set format to one of them, or "
        "use a pattern such as data/*.jsonl",
        param="format",
    )


def _kind(path: Path) -> str | None:
    name = path.name.lower()
    for kind, ends in ENDINGS.items():
        # Shards are often numbered after the ending: part.array_record-00000-of-00010.
        if name.endswith(ends) or (kind == "arrayrecord" and any(f"{end}-" in name for end in ends)):
            return kind
    return None


def _hf_files(path: Path) -> tuple[str, list[Path]] | None:
    """Return the Arrow files of a folder that `Dataset.save_to_disk` wrote, in the order of its state.json."""
    if (path / SPLITS).is_file():
        splits = _json(path / SPLITS).get("splits", [])
        raise UserError(
            f"{str(path)!r} holds a dataset of several splits ({', '.join(splits)}); name one, as {path}/train",
            param="path",
        )
    if not (path / STATE).is_file():
        return None
    listed = [path / str(entry["filename"]) for entry in _json(path / STATE).get("_data_files", [])]
    for file in listed:
        if not file.is_file():
            raise MissingFileError(f"{path / STATE} lists {file.name}, which is missing; copy the whole dataset folder")
    if not listed:
        raise FileError(f"{path / STATE} lists no data files; save the dataset again with save_to_disk")
    return "hf", listed


def _json(path: Path) -> dict:
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise FileError(f"{path} is not JSON ({error}); save the dataset again with save_to_disk") from None
    return found if isinstance(found, dict) else {}


# --- datasets of the hub ----------------------------------------------------------------------------------------------


def dataset_folder(path: str) -> tuple[Path, str, str]:
    """Return the local folder of a hub dataset with its data files, its hub id, and the FILES part of the path."""
    org, _, rest = path.removeprefix(PREFIX).partition("/")
    name, _, wanted = rest.partition("/")
    hub_id = f"{org}/{name}"
    if not HUB_ID.fullmatch(hub_id):
        raise UserError(
            f"expected a dataset as org/name, {PREFIX}org/name or {PREFIX}org/name/FILES, got {path!r}", param="path"
        )
    return fetch_dataset(hub_id, [f"*{ending}" for ending in ALL_ENDINGS if ending != CARD]), hub_id, wanted


def _is_hub_dataset(path: str) -> bool:
    """Return whether a path is a dataset on the hub: `org/name`, unless it is a local path or ends as a data file."""
    if path.startswith(PREFIX):
        return True
    return bool(HUB_ID.fullmatch(path)) and not path.lower().endswith(tuple(ALL_ENDINGS)) and not Path(path).exists()


def _fetch(path: str) -> list[Path]:
    """Return the files of a dataset, fetched or from the hub's cache: those of FILES, or of the train split."""
    folder, hub_id, wanted = dataset_folder(path)
    below = sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())
    files = [file for file in below if file.lower().endswith(tuple(ALL_ENDINGS)) and not file.endswith(CARD)]
    chosen = _matching(files, wanted) if wanted else _train_split(files)
    if not chosen:
        raise MissingFileError(
            f"expected files ending in {' '.join(ALL_ENDINGS)} in the dataset {path!r}, found none; it holds "
            f"{', '.join(files[:8]) or 'no data file'}",
            param="path",
        )
    folders = sorted({str(Path(file).parent) for file in chosen})
    if len(folders) > 1 and not wanted:
        raise UserError(
            f"the dataset {hub_id} has data in several folders ({', '.join(folders)}): name one, such as "
            f"{PREFIX}{hub_id}/{folders[0]}",
            param="path",
        )
    return [folder / file for file in chosen]


def _matching(files: list[str], wanted: str) -> list[str]:
    """Return the files of the train split below a folder, or those that a pattern matches."""
    wanted = wanted.rstrip("/")
    inside = [file for file in files if file.startswith(f"{wanted}/")]
    return _train_split(inside) if inside else [file for file in files if fnmatch.fnmatch(file, wanted)]


def _train_split(files: list[str]) -> list[str]:
    """Return the files named after the train split, or those that are named after no split."""
    splits = {file: found[-1] if (found := SPLIT.findall(file.lower())) else "" for file in files}
    return [file for file in files if splits[file] == "train"] or [file for file in files if not splits[file]]


# --- spans ------------------------------------------------------------------------------------------------------------


def _split_file(kind: str, path: Path, largest: int) -> list[FileSpan]:
    size = path.stat().st_size
    if kind == "jsonl" and path.suffix != ".gz":
        return _even(kind, str(path), size, size, largest)
    if kind == "parquet":
        return _even(kind, str(path), parquet_groups(path), size, largest)
    if kind == "arrayrecord":
        return _even(kind, str(path), array_records(path), size, largest)
    return [FileSpan(kind, str(path), 0, 0, size)]


def _even(kind: str, path: str, units: int, size: int, largest: int) -> list[FileSpan]:
    """Divide `units` into equal spans of about `largest` bytes each."""
    count = max(1, min(units, round(size / largest)))
    marks = [units * i // count for i in range(count + 1)]
    return [FileSpan(kind, path, a, b, size // count) for a, b in itertools.pairwise(marks)]
