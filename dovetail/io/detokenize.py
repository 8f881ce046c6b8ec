"""Decode token ids one at a time, with the same text as decoding them all at once.

The `tokenizers` decoder is a chain of small rules over a list of tokens (replace "▁", join byte tokens, drop the first
space). Here each rule is a stage that takes one token and returns the text that is now certain, so that a token costs
the same at any position, and no text is sent that a later token could change.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterable
from typing import Protocol

from tokenizers import Tokenizer as Backend

from dovetail.core.errors import UserError

# The library reads <0xNN> with a parser that also takes a plus sign; to decode alike we take it too.
_BYTE_TOKEN = re.compile(r"<0x([0-9a-fA-F]{2}|\+[0-9a-fA-F])>")


class Detokenizer:
    """Stream text: `push` each id, then `flush`; the pieces joined equal `Tokenizer.decode` of all ids.

    `context` has ids that came before (the end of a prompt): they set the state and their text is not returned, so that
    a completion keeps the space that separates it from its prompt. Where the result of a rule depends on later tokens
    (WordPiece, a replacement in the joined text, or `clean`, which applies to the whole text), everything is held back
    until `flush`.
    """

    def __init__(
        self,
        backend: Backend,
        special_ids: Iterable[int] = (),
        *,
        skip_special: bool = True,
        context: Iterable[int] = (),
        clean: Callable[[str], str] | None = None,
    ):
        self._backend = backend
        self._skip = frozenset(special_ids) if skip_special else frozenset()
        self._clean = clean
        self._reset()
        for token_id in context:
            self.push(token_id)

    def _reset(self) -> None:
        stages = None if self._clean else _stages(self._backend)
        self._stages: list[_Stage] = [_Whole(self._backend, self._clean)] if stages is None else stages

    def push(self, token_id: int) -> str:
        """Return the text that `token_id` makes certain; '' while a character is incomplete.

        An id beyond the tokenizer's own has no text: a padded vocabulary has such ids.
        """
        if token_id < 0:
            raise UserError(f"a token id is 0 or more; got {token_id}")
        token = self._backend.id_to_token(token_id)
        return "" if token is None or token_id in self._skip else "".join(_through(self._stages, [token]))

    def flush(self) -> str:
        """Return the text held back (half characters become U+FFFD), and reset the detokenizer, without context."""
        pieces: list[str] = []
        for stage in self._stages:
            pieces = _through([stage], pieces) + stage.flush()
        self._reset()
        return "".join(pieces)


def _through(stages: list[_Stage], pieces: list[str]) -> list[str]:
    for stage in stages:
        pieces = [out for piece in pieces for out in stage.push(piece)]
    return pieces


class _Stage(Protocol):
    def push(self, piece: str) -> list[str]: ...

    def flush(self) -> list[str]: ...


class _Stateless:
    def flush(self) -> list[str]:
        return []


class _Replace(_Stateless):
    def __init__(self, old: str, new: str):
        self.old, self.new = old, new

    def push(self, piece: str) -> list[str]:
        return [piece.replace(self.old, self.new)]


class _StripEach(_Stateless):
    """Strip up to `count` leading characters of every token (Strip before Fuse)."""

    def __init__(self, content: str, count: int):
        self.content, self.count = content, count

    def push(self, piece: str) -> list[str]:
        return [_strip(piece, self.content, self.count)]


class _StripFirst(_Stateless):
    """Strip up to `count` leading characters of the whole text, over several pieces (Strip after Fuse)."""

    def __init__(self, content: str, count: int):
        self.content, self.left = content, count

    def push(self, piece: str) -> list[str]:
        rest = _strip(piece, self.content, self.left)
        self.left = 0 if rest else self.left - len(piece)
        return [rest]


def _strip(text: str, content: str, count: int) -> str:
    cut = 0
    while cut < min(count, len(text)) and text[cut] == content:
        cut += 1
    return text[cut:]


class _Metaspace(_Stateless):
    """Replace the mark by a space, except in the first token, where SentencePiece's dummy prefix vanishes."""

    def __init__(self, replacement: str, prefixed: bool):
        self.replacement, self.blank = replacement, "" if prefixed else " "

    def push(self, piece: str) -> list[str]:
        text = piece.replace(self.replacement, self.blank)
        self.blank = " "
        return [text]


class _JoinWithSpaces(_Stateless):
    """Join tokens with spaces, as the library does for a tokenizer without a decoder."""

    between = ""

    def push(self, piece: str) -> list[str]:
        text, self.between = self.between + piece, " "
        return [text]


class _ByteFallback:
    """Hold a run of <0xNN> tokens: it is text if the *whole run* is valid UTF-8, else one U+FFFD per byte."""

    def __init__(self):
        self.run = bytearray()

    def push(self, piece: str) -> list[str]:
        if match := _BYTE_TOKEN.fullmatch(piece):
            self.run.append(int(match[1], 16))
            return []
        return [*self.flush(), piece]

    def flush(self) -> list[str]:
        if not self.run:
            return []
        run, self.run = self.run, bytearray()
        try:
            return [run.decode()]
        except UnicodeDecodeError:
            return ["\ufffd"] * len(run)


class _ByteLevel:
    """Map each character of a token to a byte; a token with any other character is text."""

    def __init__(self):
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, piece: str) -> list[str]:
        try:
            data = bytes([_BYTE_OF[c] for c in piece])
        except KeyError:
            data = piece.encode()
        return [self.decoder.decode(data)]

    def flush(self) -> list[str]:
        return [self.decoder.decode(b"", final=True)]


def byte_characters() -> list[str]:
    """Return GPT-2's character for each byte: printable Latin-1 bytes are themselves, others are from 256 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


_BYTE_OF = {character: byte for byte, character in enumerate(byte_characters())}


class _Whole:
    """Keep the tokens and let the library decode them at the end, for rules that cannot be streamed."""

    def __init__(self, backend: Backend, clean: Callable[[str], str] | None):
        self.backend, self.clean, self.tokens = backend, clean, []

    def push(self, piece: str) -> list[str]:
        self.tokens.append(piece)
        return []

    def flush(self) -> list[str]:
        decoder = self.backend.decoder
        text = decoder.decode(self.tokens) if decoder else " ".join(self.tokens)
        return [self.clean(text) if self.clean else text]


def token_bytes(backend: Backend, token: str, special: bool) -> bytes:
    """Return the bytes of a token within a text; a token may be a part of a character."""
    outer: dict = json.loads(backend.decoder.__getstate__()) if backend.decoder else {"type": "none"}
    rules = {rule["type"]: rule for rule in outer.get("decoders", [outer])}
    if special:
        return token.encode()
    if "ByteLevel" in rules and all(c in _BYTE_OF for c in token):
        return bytes([_BYTE_OF[c] for c in token])
    if "ByteFallback" in rules and (match := _BYTE_TOKEN.fullmatch(token)):
        return bytes([int(match[1], 16)])
    if "WordPiece" in rules:
        prefix = rules["WordPiece"]["prefix"]
        return (token.removeprefix(prefix) if token.startswith(prefix) else f" {token}").encode()
    return token.replace("▁", " ").encode() if {"Metaspace", "Replace"} & rules.keys() else token.encode()


def _stages(backend: Backend) -> list[_Stage] | None:
    """Return the stages of this tokenizer's decoder; None if one of its rules cannot be streamed."""
    if backend.decoder is None:
        return [_JoinWithSpaces()]
    outer = json.loads(backend.decoder.__getstate__())
    stages: list[_Stage] = []
    fused = False
    for rule in outer["decoders"] if outer["type"] == "Sequence" else [outer]:
        stage = _stage(rule, fused)
        if stage is None and rule["type"] != "Fuse":
            return None
        if stage is not None:
            stages.append(stage)
        # From Fuse (or ByteLevel, which joins too) on, the library sees one token that holds the whole text.
        fused = fused or rule["type"] in ("Fuse", "ByteLevel")
    return stages


def _stage(rule: dict, fused: bool) -> _Stage | None:
    kind = rule["type"]
    if kind == "Strip" and rule["stop"] == 0:
        return (_StripFirst if fused else _StripEach)(rule["content"], rule["start"])
    if fused:
        return None
    if kind == "ByteLevel":
        return _ByteLevel()
    if kind == "ByteFallback":
        return _ByteFallback()
    if kind == "Metaspace":
        return _Metaspace(rule["replacement"], rule["prepend_scheme"] != "never")
    if kind == "Replace" and rule["pattern"].get("String"):
        return _Replace(rule["pattern"]["String"], rule["content"])
    return None
