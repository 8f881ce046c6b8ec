"""Fingerprints of what a run reads (data, rewards), by which a resumed run detects changes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any

import numpy as np

BLOCKS, BLOCK = 16, 32 << 10  # samples of one large array, and the bytes of each


def fingerprint(*parts: Any, whole: bool = True) -> str:
    """Return a digest of arrays, bytes and JSON values (others count by `content_of`), in this order.

    Args:
        parts: The values.
        whole: False hashes only some blocks of each array, for arrays too large to read at every start.
    """
    found = hashlib.sha256()
    for part in parts:
        kind, blocks = _blocks(part, whole)
        found.update(f"{kind}\n".encode())
        for block in blocks:
            found.update(block)
    return found.hexdigest()[:32]


def content_of(value: Any) -> str:
    """Return what stands for a value in a digest: that of an image or an array is its content, not its address."""
    if not hasattr(value, "tobytes"):
        return repr(value)
    size = getattr(value, "size", None)
    return f"{type(value).__name__} {size} {hashlib.sha256(value.tobytes()).hexdigest()}"


def of_sources(found: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return the fingerprints of data sources by name, from (path, fingerprint) of each in order."""
    named: dict[str, str] = {}
    for number, (path, digest) in enumerate(found, 1):
        name = f"data {path}"
        named[name if name not in named else f"{name} (source {number})"] = digest
    return named


def _blocks(part: Any, whole: bool) -> tuple[str, list[Any]]:
    """Return the part's kind and size, which keep different lists of parts apart, and the bytes to hash."""
    if isinstance(part, np.ndarray):
        kind = f"{part.dtype.str} {part.shape}"
        flat = part.reshape(-1)
        size = BLOCK // part.itemsize
        if whole or flat.size <= BLOCKS * size:
            return kind, [np.ascontiguousarray(flat).view(np.uint8)]
        starts = np.linspace(0, flat.size - size, BLOCKS).astype(np.int64)
        return kind, [np.ascontiguousarray(flat[start : start + size]).view(np.uint8) for start in starts]
    content = part if isinstance(part, bytes) else json.dumps(part, sort_keys=True, default=content_of).encode()
    return f"{type(part).__name__} {len(content)}", [content]
