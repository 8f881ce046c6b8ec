"""Encode text to token ids: with a model's tokenizer, as UTF-8 bytes, or with the characters of each token.

An encoder can be sent to a worker process (`spec`), and has an identity: a cache that was made with another encoder is
not used.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dovetail.core.errors import UserError

if TYPE_CHECKING:
    from dovetail.io.tokenizer import Tokenizer

LONGEST_TEXT = 1 << 20  # characters given to a tokenizer at once: it needs some thirty times that in memory


class ByteEncoder:
    """Encode a text as its UTF-8 bytes; 256 ends a document."""

    eos_id = 256
    vocab_size = 257

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return [n] uint32 of each text."""
        return [np.append(np.frombuffer(text.encode(), np.uint8).astype(np.uint32), np.uint32(256)) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids."""
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    def spec(self) -> dict[str, Any]:
        """Return what `from_spec` makes this encoder from."""
        return {"kind": "bytes"}


class TokenEncoder:
    """Encode with a `tokenizers` backend, with BOS where it adds one and always one EOS at the end.

    Special tokens that are spelled out in a document become their ids, as in Tokenizer.encode.
    """

    def __init__(self, backend: Any, eos_id: int, vocab_size: int, split_special: bool):
        backend.encode_special_tokens = split_special
        self._backend, self._split_special = backend, split_special
        self.eos_id, self.vocab_size = eos_id, vocab_size
        self._prefix = before_text(backend)

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> TokenEncoder:
        """Return the encoder of a model's tokenizer."""
        if tokenizer.eos_id is None:
            raise UserError(
                "the tokenizer must have an end-of-text token, and this one has none: name eos_token in its "
                "tokenizer_config.json, or set data.tokenizer to another",
                param="data.tokenizer",
            )
        backend = tokenizer.backend
        return cls(backend, tokenizer.eos_id, tokenizer.vocab_size, bool(backend.encode_special_tokens))

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return [n] uint32 of each text."""
        parts = [_cut(text) for text in texts]
        flat = self._backend.encode_batch_fast([part for cut in parts for part in cut], add_special_tokens=False)
        ids = iter(encoding.ids for encoding in flat)
        return [self._document([next(ids) for _ in cut]) for cut in parts]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens included."""
        return self._backend.decode([int(i) for i in ids], skip_special_tokens=False)

    def spec(self) -> dict[str, Any]:
        """Return what `from_spec` makes this encoder from."""
        return {
            "kind": "tokenizer", "backend": self._backend.to_str(), "eos_id": self.eos_id,
            "vocab_size": self.vocab_size, "split_special": self._split_special,
        }  # fmt: skip

    def _document(self, parts: list[list[int]]) -> np.ndarray:
        ended = bool(parts[-1]) and parts[-1][-1] == self.eos_id  # the text itself ends with the token, spelled out
        frame = [self._prefix, *parts, [] if ended else [self.eos_id]]
        return np.concatenate([np.asarray(ids, np.uint32) for ids in frame])


Encoder = ByteEncoder | TokenEncoder


def make(name: str, tokenizer: Tokenizer | None = None) -> Encoder:
    """Return the encoder of `data.tokenizer`: "" is the model's own `tokenizer`; "bytes"; or a model's name or path."""
    if name == "bytes":
        return ByteEncoder()
    if name:
        tokenizer = find_tokenizer(name)
    if tokenizer is None:
        where = f"{name!r} has no tokenizer" if name else "the model has no tokenizer"
        raise UserError(
            f"{where}: set data.tokenizer to 'bytes', a folder with a tokenizer.json, or a model's name",
            param="data.tokenizer",
        )
    return TokenEncoder.of(tokenizer)


def from_spec(spec: dict[str, Any]) -> Encoder:
    """Return the encoder whose `spec()` was saved."""
    if spec["kind"] == "bytes":
        return ByteEncoder()
    from tokenizers import Tokenizer as Backend

    return TokenEncoder(Backend.from_str(spec["backend"]), spec["eos_id"], spec["vocab_size"], spec["split_special"])


def identity(encoder: Encoder) -> str:
    """Return a hash of everything that decides an encoder's ids."""
    return hashlib.sha256(json.dumps(encoder.spec(), sort_keys=True).encode()).hexdigest()


def before_text(backend: Any) -> list[int]:
    """Return the ids that the post-processor puts first, such as BOS.

    They are found by encoding a text, because BOS and EOS may be the same token.
    """
    bare = backend.encode("a", add_special_tokens=False).ids
    framed = backend.encode("a", add_special_tokens=True).ids
    for start in range(len(framed) - len(bare) + 1):
        if framed[start : start + len(bare)] == bare:
            return framed[:start]
    return []


def beside_model(*places: str) -> Tokenizer | None:
    """Return the tokenizer of the first place that has one: a recipe's model and init are folders, names or hub ids."""
    from dovetail.io.hub import HUB_ID, fetch_tokenizer
    from dovetail.io.tokenizer import Tokenizer

    for place in filter(None, places):
        folder = Path(place).expanduser()
        if folder.exists():
            folder = folder if folder.is_dir() else folder.parent
        elif HUB_ID.fullmatch(place):
            folder = fetch_tokenizer(place)
        if (folder / "tokenizer.json").is_file():
            return Tokenizer.from_folder(folder)
    return None


def find_tokenizer(name: str) -> Tokenizer | None:
    """Return the tokenizer of a folder, a .gguf file, a hub id or a catalogue name; None where it has none."""
    from dovetail.io.hub import resolve
    from dovetail.io.tokenizer import Tokenizer

    path = resolve(name)
    if path.suffix == ".gguf":
        from dovetail.io.gguf import GgufCheckpoint

        return GgufCheckpoint(path).tokenizer()
    return Tokenizer.from_folder(path) if (path / "tokenizer.json").exists() else None


def _cut(text: str) -> list[str]:
    """Split a very long text into parts that end with a line or a word, so that the ids hardly differ."""
    parts, start = [], 0
    while len(text) - start > LONGEST_TEXT:
        limit = start + LONGEST_TEXT
        end = text.rfind("\n", start + LONGEST_TEXT // 2, limit) + 1 or text.rfind(" ", start + 1, limit)
        end = end if end > start else limit
        parts.append(text[start:end])
        start = end
    return [*parts, text[start:]]


# --- tokens with their characters -------------------------------------------------------------------------------------


class OffsetTokens(NamedTuple):
    """Hold the tokens of a text, each with the characters it stands for."""

    ids: np.ndarray  # [n] int32
    starts: np.ndarray  # [n] the first character of each
    ends: np.ndarray  # [n] one past the last; the tokens of one character's bytes share it

    def within(self, start: int, end: int) -> slice:
        """Return the tokens that hold any of the characters start..end-1."""
        found = np.flatnonzero((self.starts < end) & (self.ends > start))
        return slice(int(found[0]), int(found[-1]) + 1) if len(found) else slice(0, 0)

    def cut_at(self, character: int) -> bool:
        """Return whether no token spans the boundary before this character."""
        return not ((self.starts < character) & (self.ends > character)).any()


class OffsetTokenizer:
    """Encode text to `OffsetTokens`, without BOS and EOS: see `before`."""

    def __init__(self, tokenizer: Tokenizer):
        from tokenizers import Tokenizer as Backend

        self.before = before_text(tokenizer.backend)  # what a plain text begins with, such as BOS
        self.backend = Backend.from_str(tokenizer.backend.to_str())
        self.backend.encode_special_tokens = tokenizer.backend.encode_special_tokens
        # Byte-level post-processors move the offsets, to leave out the space before a word; it is part of its token.
        self.backend.post_processor = None  # type: ignore[assignment]

    def encode(self, text: str) -> OffsetTokens:
        """Return the tokens of a text."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UserError(
                f"expected valid Unicode, got half a surrogate pair at character {error.start}; write the text again "
                "with errors='replace'"
            ) from None
        found = self.backend.encode(text, add_special_tokens=False)
        offsets = np.asarray(found.offsets, np.int64).reshape(-1, 2)
        return OffsetTokens(np.asarray(found.ids, np.int32), offsets[:, 0], offsets[:, 1])

    def split(self, before: str, after: str) -> tuple[np.ndarray, np.ndarray] | None:
        """Return the tokens of `before + after` on each side of the boundary.

        Where a token would span it, each side is tokenised alone, as when a model reads one and writes the other. None
        if that gives another text: some tokenizers put a space before every text.
        """
        whole = self.encode(before + after)
        if whole.cut_at(len(before)):
            first = int((whole.ends <= len(before)).sum())
            return whole.ids[:first], whole.ids[first:]
        parts = self.encode(before).ids, self.encode(after).ids
        return parts if self._text(np.concatenate(parts)) == self._text(whole.ids) else None

    def _text(self, ids: np.ndarray) -> str:
        return self.backend.decode(ids.tolist(), skip_special_tokens=False)
