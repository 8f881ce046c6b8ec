"""Tokens on disk: a folder a source, memory-mapped, whole or not there at all.

<name>-<fingerprint>/  meta.json   what it is, and how many documents each part has
                       offsets.npy [documents + 1] int64: where each document starts among all tokens
                       00000.bin, 00001.bin, ..  the tokens, uint16 or uint32, documents end to end
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from dovetail.core.fingerprint import fingerprint as digest
from dovetail.data import corpus
from dovetail.data.encoder import Encoder, identity
from dovetail.data.settings import Source
from dovetail.data.sources import Files

WHOLE = 64 << 20  # bytes of tokens that are fingerprinted whole; of more, a few blocks
VERSION = 1  # raise it when what is written changes
META, OFFSETS = "meta.json", "offsets.npy"


@dataclass(frozen=True)
class Meta:
    name: str
    fingerprint: str
    dtype: str
    eos_id: int
    vocab_size: int
    parts: list[int]  # documents of each
    documents: int
    tokens: int
    text_bytes: int  # of the documents, as UTF-8
    empty: int  # documents without text, left out
    version: int = VERSION


class TokenStore:
    """The documents of one source as tokens. Reading is by memory map: opening costs nothing, and hosts share pages."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.meta = Meta(**json.loads((folder / META).read_text()))
        self.offsets = np.load(folder / OFFSETS, mmap_mode="r")
        self._first = np.concatenate([[0], np.cumsum(self.meta.parts)])  # document that each part starts with
        self._parts = [
            np.memmap(part_path(folder, i), self.meta.dtype, "r") if count else np.zeros(0, self.meta.dtype)
            for i, count in enumerate(self.meta.parts)
        ]

    def __len__(self) -> int:
        return self.meta.documents

    @property
    def lengths(self) -> np.ndarray:
        """[documents] tokens of each."""
        return np.diff(self.offsets)

    @property
    def fingerprint(self) -> str:
        """Return a fingerprint of the tokens. Of a large corpus the totals and a few blocks count: reading all of it at
        every start would cost more than the edits of equal length that are missed."""
        meta, whole = self.meta, sum(part.nbytes for part in self._parts) <= WHOLE
        totals = [meta.documents, meta.tokens, meta.text_bytes, meta.eos_id, meta.vocab_size]
        return digest(totals, self.offsets, *self._parts, whole=whole)

    def read(self, document: int, start: int, stop: int) -> np.ndarray:
        """Tokens start..stop-1 of a document, or those of them that it has."""
        part = int(np.searchsorted(self._first, document, "right")) - 1
        base = int(self.offsets[self._first[part]])
        begin, end = int(self.offsets[document]) - base, int(self.offsets[document + 1]) - base
        return self._parts[part][begin + start : min(begin + stop, end)]


def part_path(folder: Path, index: int) -> Path:
    return folder / f"{index:05d}.bin"


def fingerprint(files: Files, source: Source, encoder: Encoder) -> str:
    """Changes when the tokens would: other files, sizes or times of change; another tokenizer, format or key.

    Where the files lie is not part of it: a folder that was moved is the same folder.
    """
    top = Path(source.path).expanduser()
    seen: list[object] = [VERSION, files.kind, source.text_key, identity(encoder)]
    if files.kind == "corpus":
        seen += [source.path, corpus.VERSION]
    for path in files.paths:
        stat = path.stat()
        name = path.relative_to(top).as_posix() if path.is_relative_to(top) and path != top else path.name
        seen.append([name, stat.st_size, stat.st_mtime_ns])
    return hashlib.sha256(json.dumps(seen).encode()).hexdigest()


def entry(directory: Path, name: str, fingerprint: str) -> Path:
    return directory / f"{name}-{fingerprint[:16]}"


def write_meta(folder: Path, meta: Meta) -> None:
    (folder / META).write_text(json.dumps(asdict(meta), indent=1) + "\n")
