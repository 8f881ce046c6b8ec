"""Token caches on disk: one folder per source, memory-mapped, complete or absent.

<name>-<fingerprint>/  meta.json   the counts of documents and tokens, and how they were made
                       offsets.npy [documents + 1] int64: where each document starts among all tokens
                       00000.bin, 00001.bin, ..  the tokens, uint16 or uint32, documents end to end

A cache of examples (`data.example_store`) has further files. A fingerprint of the files, the tokenizer and the settings
names the folder: a cache that was made from anything else is not found.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from dovetail.core.errors import UserError
from dovetail.core.files import locked
from dovetail.core.fingerprint import fingerprint as digest
from dovetail.core.reporter import Progress
from dovetail.data import corpus
from dovetail.data.settings import Source
from dovetail.data.sources import Files, find
from dovetail.io.hub import home

WHOLE = 64 << 20  # bytes of files, or of tokens, that are fingerprinted whole
VERSION = 2  # increase it when the written files change
META, OFFSETS = "meta.json", "offsets.npy"


@dataclass(frozen=True)
class CacheMeta:
    """Hold the contents of meta.json."""

    name: str
    fingerprint: str
    dtype: str
    eos_id: int
    vocab_size: int
    parts: list[int]  # documents of each part
    documents: int
    tokens: int
    text_bytes: int = 0  # of the documents, as UTF-8
    empty: int = 0  # documents without text, left out
    version: int = VERSION

    def write(self, folder: Path, offsets: np.ndarray) -> None:
        """Write meta.json and the offsets of the documents."""
        np.save(folder / OFFSETS, offsets)
        (folder / META).write_text(json.dumps(asdict(self), indent=1) + "\n")


class TokenStore:
    """Read the tokenised documents of one source. Opening reads almost nothing, and processes share the pages."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.meta = CacheMeta(**json.loads((folder / META).read_text()))
        self.offsets = np.load(folder / OFFSETS, mmap_mode="r")
        self._first = np.concatenate([[0], np.cumsum(self.meta.parts)])  # the first document of each part
        self._parts = [
            np.memmap(part_path(folder, i), self.meta.dtype, "r") if count else np.zeros(0, self.meta.dtype)
            for i, count in enumerate(self.meta.parts)
        ]

    def __len__(self) -> int:
        return self.meta.documents

    @property
    def lengths(self) -> np.ndarray:
        """Return [documents] the tokens of each."""
        return np.diff(self.offsets)

    @property
    def fingerprint(self) -> str:
        """Return a fingerprint of the tokens.

        Of a large corpus, the totals and a few blocks are hashed: reading all of it at every start would cost more than
        the edits of equal length that are missed.
        """
        meta = self.meta
        totals = [meta.documents, meta.tokens, meta.text_bytes, meta.eos_id, meta.vocab_size]
        return self._digest(totals, self.offsets, *self._parts)

    def _digest(self, *parts: object) -> str:
        return digest(*parts, whole=sum(part.nbytes for part in self._parts) <= WHOLE)

    def read(self, document: int, start: int, stop: int) -> np.ndarray:
        """Return the tokens start..stop-1 of a document, fewer where it ends before."""
        part = int(np.searchsorted(self._first, document, "right")) - 1
        base = int(self.offsets[self._first[part]])
        begin, end = int(self.offsets[document]) - base, int(self.offsets[document + 1]) - base
        return self._parts[part][begin + start : min(begin + stop, end)]


def part_path(folder: Path, index: int) -> Path:
    """Return the file of the tokens of a part."""
    return folder / f"{index:05d}.bin"


def token_dtype(vocab_size: int) -> str:
    """Return the smallest dtype that holds every token id."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def fingerprint(files: Files, path: str, *settings: object) -> str:
    """Return a hash of a source's files and of the settings that decide its tokens.

    Of files up to `WHOLE` bytes in total the content counts, of larger ones the names, sizes and times of change. The
    folder does not count: a source that was moved is found again.
    """
    top = Path(path).expanduser()
    seen: list[object] = [VERSION, files.kind, *settings]
    if files.kind == "corpus":
        seen += [path, corpus.VERSION]
    whole = sum(file.stat().st_size for file in files.paths) <= WHOLE
    for file in files.paths:
        stat = file.stat()
        name = file.relative_to(top).as_posix() if file.is_relative_to(top) and file != top else file.name
        seen.append([name, stat.st_size, _content(file) if whole else stat.st_mtime_ns])
    return hashlib.sha256(json.dumps(seen).encode()).hexdigest()


def _content(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def cached(
    source: Source,
    settings: list[object],
    directory: str | Path,
    write: Callable[[Path, Files, str], None],
    progress: Progress | None = None,
) -> Path:
    """Return the folder of a source's cache, which is written first where it is missing.

    The parts are written into a hidden folder beside it, which is renamed when it is complete. One process writes, and
    others that need the same cache wait for it.

    Args:
        source: Where the files are.
        settings: What decides the tokens besides the files: see `fingerprint`.
        directory: The folder of the caches; empty: data/ in Dovetail's home.
        write: Called with (folder, files, fingerprint), to write the cache; the folder may hold parts of a killed run.
        progress: Called while another process writes.
    """
    files = find(source)
    mark = fingerprint(files, source.path, *settings)
    place = Path(directory or home() / "data").expanduser() / f"{files.name}-{mark[:16]}"
    if place.is_dir():
        return place
    place.parent.mkdir(parents=True, exist_ok=True)

    def waiting(holder: str) -> None:
        if progress:
            progress(f"another process ({holder}) is tokenising {files.name}; waiting for it", 0, 0)

    lock = place.with_name(f".{place.name}.lock")
    with locked(lock, waiting):
        if not place.is_dir():  # another process may have written it while this one waited
            partial = place.with_name(f".{place.name}.partial")
            partial.mkdir(exist_ok=True)
            write(partial, files, mark)
            if fingerprint(find(source), source.path, *settings) != mark:
                raise UserError(
                    f"{source.path!r} changed while it was being read; start again when nothing writes to it"
                )
            partial.rename(place)
        lock.unlink(missing_ok=True)  # a process that waits for it then finds the cache
    return place
