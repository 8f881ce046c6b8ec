"""Fine-tuning's data, opened: from settings, or a program's records, to rows by number and what became of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dovetail.core.choice import one_of
from dovetail.core.errors import UserError
from dovetail.data import records as reading
from dovetail.data.bad_records import BadRecords
from dovetail.data.example_rows import COLUMNS, ExamplePacking, ExampleRows, own_column
from dovetail.data.example_store import Examples, Made, Stats, make
from dovetail.data.examples import example
from dovetail.data.loader import held_out, held_out_each
from dovetail.data.mixture import Mixture
from dovetail.data.shuffle import key
from dovetail.data.trained_tokens import ExampleEncoder
from dovetail.data.tuning import Keys, TrainedTokens, TuningData
from dovetail.io.hub import Progress
from dovetail.io.tokenizer import Tokenizer

KINDS = ("sft", "preference", "unpaired")
BLOCK = 128  # tokens of a block of the TPU's attention kernels


def open_examples(
    settings: TuningData,
    length: int,
    batch: int,
    tokenizer: Tokenizer,
    kind: str,
    host_index: int = 0,
    host_count: int = 1,
    columns: Sequence[str] = (),
    records: Iterable[Any] | None = None,
    progress: Progress | None = None,
    packing: bool = True,
    trained: TrainedTokens = TrainedTokens(),
) -> tuple[ExampleRows, ExampleRows | None, Stats]:
    """The training rows, those held out where settings.held_out sets some apart, and what became of the records.

    kind: sft, preference or unpaired (which has the column `label` at each of a document's tokens: +1, -1, or 0 of the
    mismatched document that follows each: see data.mismatched).
    columns: `document`, the number of a token's document plus 1; `margin`, that of a preference. records: dicts, in
    place of files. packing: several examples share a row; without it each has a row of its own, and rows are no longer
    than the longest example needs.
    """
    one_of("kind", kind, KINDS)
    for name in columns:
        one_of("a column", name, COLUMNS)
    if length < 2:
        raise UserError(f"expected rows of 2 tokens or more, got length {length}")
    made, weights = _read(settings, example_encoder(settings, tokenizer, trained), kind, length, records, progress)
    examples = Examples(made, per_unit=1 if kind == "sft" else 2)
    wanted = {*columns, "label"} if kind == "unpaired" else set(columns)
    brought = {name: own_column(name, examples) for name in sorted(wanted)}
    apart = _apart(settings, made, weights, length, packing)
    length = length if packing else min(length, _rounded(int(examples.lengths.max())))

    def rows(held: bool) -> ExampleRows:
        packed = [
            ExamplePacking(
                examples, np.flatnonzero(mask == held) + first, length, key(settings.seed, i), brought, packing
            )
            for i, (first, mask) in enumerate(apart)
        ]
        mixture = Mixture(packed, weights, settings.seed)
        return ExampleRows(mixture, examples, batch, host_index, host_count, tokenizer.vocab_size)

    stats = sum((each.stats for each in made), Stats())
    return rows(False), rows(True) if settings.held_out else None, stats


def open_prompts(
    settings: TuningData, tokenizer: Tokenizer, records: Iterable[Any] | None = None, progress: Progress | None = None
) -> list[np.ndarray]:
    """The prompts of records, as the tokens that a model is given to go on with: for what it writes itself."""
    encoder, found = example_encoder(settings, tokenizer), []
    for name, keys, each in open_records(settings, records, progress):
        bad = BadRecords(settings.skip_bad_records, name)
        for record in each:
            read = bad.read(lambda record=record, keys=keys: example(record, "prompts", settings.format, keys))
            found += [encoder.prompt(read.sides[0])] if read else []
        bad.check()
    if not found:
        raise UserError("expected at least one prompt, and the data holds no record; name another path")
    return found


def example_encoder(
    settings: TuningData, tokenizer: Tokenizer, trained: TrainedTokens = TrainedTokens()
) -> ExampleEncoder:
    """With the template that the settings name, or the tokenizer's own."""
    template = template_source(settings)
    if template is None:
        return ExampleEncoder(tokenizer, trained=trained)
    name = f"the chat template {Path(settings.template).expanduser()}"
    return ExampleEncoder(tokenizer, template, name, trained)


def template_source(settings: TuningData) -> str | None:
    """Return the Jinja source of `data.template`; None: the tokenizer's own template is used."""
    if not settings.template:
        return None
    path = Path(settings.template).expanduser()
    if not path.is_file():
        raise UserError(f"template must be a file with a chat template's Jinja source; there is no {str(path)!r}")
    return path.read_text(encoding="utf-8")


def open_records(
    settings: TuningData, records: Iterable[Any] | None = None, progress: Progress | None = None
) -> list[tuple[str, Keys, Iterator[reading.Record]]]:
    """(name, keys, records) of each source."""
    if records is not None:
        return [("the list of records", settings.keys, reading.from_list(records))]
    if not settings.all_sources:
        raise UserError("path must name a file or a folder of records, or sources list some; both are empty")
    return [(s.path, s.keys, reading.from_path(s.path, progress)) for s in settings.all_sources]


def _read(
    settings: TuningData, encoder: ExampleEncoder, kind: str, length: int, records: Any, progress: Progress | None
) -> tuple[list[Made], list[float]]:
    """The documents of each source, and its weight."""
    made = []
    for name, keys, found in open_records(settings, records, progress):
        made.append(make(found, encoder, settings, keys, kind, length, name))
        _check_some(made[-1], length)
    return made, [source.weight for source in settings.all_sources] if records is None else [1.0]


def _check_some(made: Made, length: int) -> None:
    name, stats = made.name, made.stats
    if stats.documents:
        return
    if not stats.records:
        raise UserError(f"expected at least one record to train on, and {name} holds none; name another path")
    if len(stats.bad) == stats.records:
        raise UserError(f"none of the {stats.records:,} records of {name} can be used; the first: {stats.bad[0]}")
    if stats.unanswered == stats.records:
        raise UserError(
            f"expected records in which the assistant speaks, and none of the {stats.records:,} of {name} has an "
            "assistant's turn; check the roles, or name the right keys"
        )
    raise UserError(
        f"expected examples that fit rows of {length:,} tokens, and all of {name} were left out ({stats}); "
        "raise length, or set data.overlong to turns"
    )


def _rounded(tokens: int) -> int:
    """Return a row length that holds so many tokens: a whole number of blocks, where there are several."""
    size = BLOCK if tokens > BLOCK else 32
    return -(-tokens // size) * size


def _apart(
    settings: TuningData, made: list[Made], weights: list[float], length: int, packing: bool
) -> list[tuple[int, np.ndarray]]:
    """Of each source: the number of its first unit among all, and [units] whether each is held out. It is chosen by
    records, so that the turns of one conversation stay together."""
    found, first = [], 0
    for one, wanted in zip(made, held_out_each(settings.held_out, weights), strict=True):
        of_unit = np.asarray(one.records)
        # a number of rows: without packing each unit fills one
        sizes = one.lengths if packing else np.full(len(of_unit), length)
        lengths = np.bincount(of_unit, weights=sizes).astype(np.int64)
        found.append((first, held_out(lengths, wanted, length, one.name)[of_unit]))
        first += len(of_unit)
    return found
