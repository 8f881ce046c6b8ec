"""Prompts with completions of other prompts, from which KTO estimates how far the policy is from its reference.

Tokenised examples in memory: their documents end to end, which tokens are trained, and what was left out.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np

from dovetail.core.errors import UserError
from dovetail.core.fingerprint import fingerprint, of_sources
from dovetail.data.example_encoder import LEFT_OUT, WHOLE, ExampleEncoder, MaskedTokens, begins_with_assistant, fit
from dovetail.data.examples import Example, example
from dovetail.data.records import BadRecords, Record
from dovetail.data.settings import Keys, TuningData

OWN_SHARE = 3, 4  # of a row, that an example may fill: the rest is left to the mismatched document beside it


def room_of(length: int) -> int:
    """Return the tokens that an example may have in rows of `length`."""
    over, under = OWN_SHARE
    return length * over // under


def mismatched(documents: Sequence[MaskedTokens], length: int) -> list[MaskedTokens]:
    """Return for each document its prompt with the completion of the nearest document before it (the last ones come
    before the first) that has another prompt. Where both together are longer than `length`, the mismatched one loses
    the end of its completion, then the start of its prompt."""
    starts = [int(np.argmax(document.mask)) for document in documents]
    prompts = [document.tokens[:start] for document, start in zip(documents, starts, strict=True)]
    found = []
    for i, document in enumerate(documents):
        other = _other(prompts, i)
        room = length - len(document.tokens)
        found.append(_joined(prompts[i], documents[other], starts[other], room))
    return found


def _other(prompts: Sequence[np.ndarray], i: int) -> int:
    count = len(prompts)
    for back in range(1, count):
        if not np.array_equal(prompts[i - back], prompts[i]):
            return (i - back) % count
    return (i - 1) % count  # all prompts are the same


def _joined(prompt: np.ndarray, other: MaskedTokens, start: int, room: int) -> MaskedTokens:
    answer, mask = other.tokens[start:], other.mask[start:]
    answered = min(len(answer), max(room - len(prompt), room // 2))
    kept = prompt[max(0, len(prompt) - (room - answered)) :]
    tokens = np.concatenate([kept, answer[:answered]])
    return MaskedTokens(tokens, np.concatenate([np.zeros(len(kept), bool), mask[:answered]]))


COUNTED = ("records", "unanswered", "shortened", "cut", "left_out", "split", "opening")


@dataclass(frozen=True)
class ExampleStats:
    """What became of the records; `str` tells it in a line."""

    records: int = 0
    documents: int = 0
    tokens: int = 0
    trained: int = 0  # of the tokens
    unanswered: int = 0  # records without an assistant's turn, left out
    shortened: int = 0  # that lost their oldest turns
    cut: int = 0
    left_out: int = 0  # as too long
    split: int = 0  # conversations with turns that are documents of their own
    opening: int = 0  # conversations that the assistant begins, whose first turn is not trained
    bad: tuple[str, ...] = ()  # records that were left out, and why

    def __str__(self) -> str:
        told = {
            "without an assistant's turn, left out": self.unanswered, "shortened by turns": self.shortened,
            "cut at the end": self.cut, "left out as too long": self.left_out,
            "split, for turns to stand as the model will see them": self.split,
            "begin with the assistant: that turn is read and not trained": self.opening,
            "bad records left out": len(self.bad),
        }  # fmt: skip
        rest = "".join(f"; {count:,} {what}" for what, count in told.items() if count)
        share = self.trained / max(self.tokens, 1)
        kept = f"{self.documents:,} documents, {self.tokens:,} tokens, {self.trained:,} of them trained ({share:.0%})"
        return f"{self.records:,} records: {kept}{rest}"

    def __add__(self, other: ExampleStats) -> ExampleStats:
        return ExampleStats(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


class Made(NamedTuple):
    """The documents of one source. A unit is what a row holds whole: a document, the two of a preference, or an
    unpaired one and its mismatched one (mismatched)."""

    name: str
    documents: list[MaskedTokens]
    records: list[int]  # of each unit: the number of its record among those kept
    labels: list[float]  # of each document: +1, -1 to avoid, 0 of a mismatched one
    margins: list[float]  # of each document: its pair's, NaN where its record has none
    stats: ExampleStats

    @property
    def lengths(self) -> np.ndarray:
        """[units] tokens of each."""
        sizes = np.asarray([len(document.tokens) for document in self.documents])
        return sizes.reshape(len(self.records), -1).sum(1)


class Examples:
    """The documents of all sources, by number; those of pair k are 2k (chosen) and 2k + 1 (rejected)."""

    def __init__(self, made: list[Made], per_unit: int):
        documents = [document for one in made for document in one.documents]
        self.per_unit = per_unit
        self.tokens = np.concatenate([document.tokens for document in documents])
        self.mask = np.concatenate([document.mask for document in documents])
        self.offsets = np.concatenate([[0], np.cumsum([len(document.tokens) for document in documents])])
        self.labels = np.asarray([label for one in made for label in one.labels], np.float32)
        self.margins = np.asarray([margin for one in made for margin in one.margins], np.float32)
        self._sources = [(one.name, len(one.documents)) for one in made]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @functools.cached_property
    def fingerprints(self) -> dict[str, str]:
        """Return a fingerprint of each source, by its name. It is that of the tokens and not of the files: a file that
        was only touched or written another way is the same, and another chat template or tokenizer is not."""
        found, first = [], 0
        for name, count in self._sources:
            last = first + count
            span = slice(int(self.offsets[first]), int(self.offsets[last]))
            arrays = self.tokens[span], self.mask[span], np.diff(self.offsets[first : last + 1])
            found.append((name, fingerprint(*arrays, self.labels[first:last], self.margins[first:last])))
            first = last
        return of_sources(found)

    @property
    def lengths(self) -> np.ndarray:
        """[units] tokens of each."""
        return np.diff(self.offsets).reshape(-1, self.per_unit).sum(1)

    def span(self, document: int) -> slice:
        """Where its tokens are among all."""
        return slice(int(self.offsets[document]), int(self.offsets[document + 1]))

    def read(self, document: int, start: int, stop: int) -> np.ndarray:
        """Tokens start..stop-1 of a document, or those of them that it has."""
        return self.tokens[self.span(document)][start:stop]


def make(
    records: Iterable[Record],
    encoder: ExampleEncoder,
    settings: TuningData,
    keys: Keys,
    kind: str,
    length: int,
    name: str,
) -> Made:
    """Return the examples of `kind` of these records; an error names the record. Beside an unpaired one is a mismatched
    document, with label 0."""
    made, counts, bad = (
        Made(name, [], [], [], [], ExampleStats()),
        Counter[str](),
        BadRecords(settings.skip_bad_records, name),
    )
    room = room_of(length) if kind == "unpaired" else length

    def read(record: Record) -> tuple[Example | None, list[MaskedTokens]]:
        found = example(record, kind, settings.format, keys)
        if found is None:
            return None, []
        return found, _located(record, lambda: _documents(found, encoder, settings.overlong, room, counts))

    for record in records:
        counts["records"] += 1
        result = bad.read(lambda record=record: read(record))
        if result is None:
            continue
        found, documents = result
        if found is None:
            counts["unanswered"] += 1
            continue
        units = len(documents) // len(found.sides)
        counts["opening"] += units > 0 and any(begins_with_assistant(side) for side in found.sides)
        counts["split"] += units > 1
        made.records.extend([counts["kept"]] * units)
        made.documents.extend(documents)
        made.labels.extend([-1.0 if found.label is False else 1.0] * len(documents))
        made.margins.extend([found.margin] * len(documents))
        counts["kept"] += units > 0
    bad.check()
    tokens, trained = (sum(int(size(d)) for d in made.documents) for size in (lambda d: len(d.tokens), _trained))
    known = {what: counts[what] for what in COUNTED}
    stats = ExampleStats(documents=len(made.documents), tokens=tokens, trained=trained, bad=tuple(bad.errors), **known)
    made = made._replace(stats=stats)
    return _beside_mismatched(made, length) if kind == "unpaired" else made


def _beside_mismatched(made: Made, length: int) -> Made:
    documents = [each for both in zip(made.documents, mismatched(made.documents, length), strict=True) for each in both]
    labels = [number for label in made.labels for number in (label, 0.0)]
    return made._replace(documents=documents, labels=labels, margins=np.repeat(made.margins, 2).tolist())


def _trained(document: MaskedTokens) -> int:
    return int(document.mask[1:].sum())


def _documents(
    found: Example, encoder: ExampleEncoder, overlong: str, length: int, counts: Counter[str]
) -> list[MaskedTokens]:
    """Those of a preference: chosen, rejected."""
    sides, outcome = fit(encoder, found.sides, length, overlong)
    if outcome != WHOLE:
        counts[outcome.replace(" ", "_")] += 1
    if outcome == LEFT_OUT:
        return []
    if not all(sides):  # the template marks none of the assistant's text
        counts["unanswered"] += 1
        return []
    if len(sides) > 1 and any(len(side) > 1 for side in sides):
        raise UserError(
            f"{encoder.name} writes the turns of one completion otherwise once it has gone on: give chosen and "
            "rejected one assistant's turn each, or set data.template to one with {% generation %} marks"
        )
    return [document for side in sides for document in side]


def _located(record: Record, work: Callable[[], list[MaskedTokens]]) -> list[MaskedTokens]:
    try:
        return work()
    except ValueError as error:
        raise UserError(f"{record.where()}: {error}") from error
