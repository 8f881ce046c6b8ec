"""Fewest: find that a text has more than a given number of tokens by counting bytes, much faster than tokenizing it.

No token of a vocabulary spells more letters than its longest does, so a text of many letters needs many tokens. Bytes
are counted in three classes, for each of which this holds separately, because a vocabulary often has a token of eighty
spaces or dashes and hardly one of thirty letters:
- letters and digits of ASCII, which nearly every tokenizer keeps unchanged;
- the bytes of other characters, and all bytes: only if nothing is normalised, stripped or dropped.
If a tokenizer might drop or join what is counted, nothing is claimed, and the text has to be tokenized.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from dovetail.io.detokenize import byte_characters

_CHUNK = 1 << 18  # characters that are counted at a time
_LETTERS = bytes(range(0x30, 0x3A)) + bytes(range(0x41, 0x5B)) + bytes(range(0x61, 0x7B))
_ASCII, _HIGH = bytes(range(128)), bytes(range(128, 256))

# What leaves every letter and digit of ASCII a character of its own: its case may change, and its accents go.
_NORMALIZERS = {"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Strip", "StripAccents", "BertNormalizer", "ByteLevel"}
_COMPOSING = {"NFC", "NFKC"}  # e and a combining accent become one character
_PRE_TOKENIZERS = {"ByteLevel", "Metaspace", "Digits", "Split", "Punctuation", "UnicodeScripts"}
_DROP_SPACES = {"Whitespace", "WhitespaceSplit", "BertPreTokenizer"}


class _Kind(NamedTuple):
    others: bytes  # the bytes that are not of this kind
    longest: int  # how many of this kind one token spells at most

    def count(self, data: bytes) -> int:
        return len(data.translate(None, self.others))


class Fewest:
    """Bound the number of tokens of a text from below."""

    def __init__(self, backend: Backend):
        pipeline = _Pipeline(backend)
        self._composes = any(part["type"] in _COMPOSING for part in pipeline.normalizers)
        self._kinds = [_kind(spelled, pipeline) for spelled in _spelled(pipeline)]

    def exceeds(self, text: str, most: int) -> bool:
        """Return whether `text` certainly has more than `most` tokens; it stops reading as early as it can."""
        if 4 * len(text) <= most:  # a character has at most 4 bytes, and a token stands for at least one
            return False
        counts = [0] * len(self._kinds)
        for start in range(0, len(text), _CHUNK):
            data = text[start : start + _CHUNK].encode()
            lost = len(data.translate(None, _ASCII)) // 2 if self._composes else 0  # one letter per mark, of 2 bytes
            for i, kind in enumerate(self._kinds):
                counts[i] += kind.count(data) - lost
                # The last letter may yet be lost to a mark at the start of the next chunk.
                if counts[i] - self._composes > most * kind.longest:
                    return True
        return False


class _Pipeline:
    """Hold the steps of a backend, as in tokenizer.json."""

    def __init__(self, backend: Backend):
        self.model = backend.model
        self.vocab = backend.get_vocab(with_added_tokens=False)
        self.added = list(backend.get_added_tokens_decoder().values())
        self.normalizers = list(_parts(backend.normalizer))
        self.pre_tokenizers = list(_parts(backend.pre_tokenizer))
        self.byte_level = any(part["type"] == "ByteLevel" for part in self.normalizers + self.pre_tokenizers)


def _parts(component: Any) -> Iterator[dict[str, Any]]:
    def flat(part: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if part["type"] != "Sequence":
            yield part
            return
        for each in part.get("normalizers") or part.get("pretokenizers") or ():
            yield from flat(each)

    if component is not None:
        yield from flat(json.loads(component.__getstate__()))


def _spelled(pipeline: _Pipeline) -> list[bytes]:
    """Return the classes of bytes that tokens spell one to one."""
    if not _keeps_letters(pipeline):
        return []
    lowers = any(part["type"] in ("Lowercase", "BertNormalizer") for part in pipeline.normalizers)
    vocab = pipeline.vocab
    letters = bytes(byte for byte in _LETTERS if chr(byte) in vocab or (lowers and chr(byte).lower() in vocab))
    if not _keeps_all(pipeline):
        return [letters] if letters else []
    known = bytes(range(256))
    if pipeline.byte_level:  # a vocabulary may lack bytes that were not in what it was made from; those are dropped
        known = bytes(byte for byte, c in enumerate(byte_characters()) if c in vocab)
    return [kind for kind in (letters, bytes(set(known) & set(_HIGH)), known) if kind]


def _keeps_letters(pipeline: _Pipeline) -> bool:
    model = pipeline.model
    if not isinstance(model, BPE) or model.dropout or model.continuing_subword_prefix or model.end_of_word_suffix:
        return False  # other models make one unknown token of a long word
    return all(map(_spares_letters, pipeline.normalizers)) and all(map(_keeps_matches, pipeline.pre_tokenizers))


def _spares_letters(part: dict[str, Any]) -> bool:
    if part["type"] == "Prepend":
        return _has_no_mark(part["prepend"])
    if part["type"] == "Replace":
        old = part["pattern"].get("String", "")
        return bool(old) and not any(c.isascii() and c.isalnum() for c in old) and _has_no_mark(part["content"])
    return part["type"] in _NORMALIZERS


def _has_no_mark(text: str) -> bool:
    """Return whether the text has no combining mark, which could be composed with the letter before it."""
    return not any(unicodedata.combining(c) for c in text)


def _keeps_matches(part: dict[str, Any]) -> bool:
    if part["type"] == "Split":
        return part["behavior"] != "Removed"
    return part["type"] in _PRE_TOKENIZERS | _DROP_SPACES


def _keeps_all(pipeline: _Pipeline) -> bool:
    """Return whether no step changes a byte and every character is in the vocabulary, if need be by its bytes."""
    for part in pipeline.normalizers:
        marks_spaces = part["type"] == "Replace" and (part["pattern"], part["content"]) == ({"String": " "}, "▁")
        if not marks_spaces and part["type"] not in ("ByteLevel", "Prepend"):
            return False
    if any(part["type"] in _DROP_SPACES or part.get("behavior") == "Removed" for part in pipeline.pre_tokenizers):
        return False
    if any(token.lstrip or token.rstrip for token in pipeline.added):
        return False  # such a token takes all the spaces beside it
    by_bytes = pipeline.model.byte_fallback and all(f"<0x{byte:02X}>" in pipeline.vocab for byte in range(256))
    return pipeline.byte_level or by_bytes


def _kind(spelled: bytes, pipeline: _Pipeline) -> _Kind:
    kind = _Kind(bytes(set(range(256)) - set(spelled)), 1)
    bytes_of = _reader(pipeline)
    counts = [kind.count(bytes_of(token)) for token in pipeline.vocab]
    counts += [kind.count(token.content.encode()) for token in pipeline.added]
    return kind._replace(longest=max(1, *counts))


def _reader(pipeline: _Pipeline) -> Callable[[str], bytes]:
    """Return a function from a token to the bytes that it stands for, or to more of them."""
    if not pipeline.byte_level:
        return str.encode
    table = {ord(c): byte for byte, c in enumerate(byte_characters())}
    return lambda token: token.translate(table).encode("latin-1", "replace")
