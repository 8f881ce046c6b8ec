"""One example of a fine-tuning set as the model will see it, with what it is taught to write."""

from __future__ import annotations

from itertools import groupby, islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.text import Text

    from dovetail.data.records import Record
    from dovetail.data.trained_tokens import Trained
    from dovetail.data.tuning import Keys, TuningData
    from dovetail.io.tokenizer import Tokenizer

TRAINED, READ = "bold green", "dim"
OPEN, CLOSE = "⟦", "⟧"  # around what is trained, where there are no colours


def show_example(what: list[str], model: str, index: int, kind: str, length: int) -> None:
    """what: a path, and key=value of the data's settings. length: 0 shows the example whole."""
    from rich.console import Console

    from dovetail.data.encoder import find_tokenizer

    tokenizer = find_tokenizer(model)
    if tokenizer is None:
        raise ValueError(f"{model!r} has no tokenizer: name a model, or a folder with a tokenizer.json, by --model")
    settings = _settings(what)
    record, keys = _record(settings, index)
    console = Console(highlight=False)
    for part in _parts(record, keys, settings, tokenizer, kind, length, console.color_system is not None):
        console.print(part, soft_wrap=True)


def _settings(what: list[str]) -> TuningData:
    from dovetail.core.overrides import place, split
    from dovetail.core.recipe import read
    from dovetail.data.tuning import TuningData

    return read(TuningData, place({"path": what[0]}, [split(text) for text in what[1:]]))


def _record(settings: TuningData, index: int) -> tuple[Record, Keys]:
    from dovetail.data.open_examples import open_records

    ((name, keys, records),) = open_records(settings)
    count = 0
    for count, record in enumerate(islice(records, index + 1), 1):
        if count == index + 1:
            return record, keys
    raise ValueError(f"expected an --index below {count}, for {name} holds {count:,} records; got {index}")


def _parts(
    record: Record, keys: Keys, settings: TuningData, tokenizer: Tokenizer, kind: str, length: int, colour: bool
):
    from rich.text import Text

    from dovetail.data import shorten
    from dovetail.data.examples import example, kind_of
    from dovetail.data.open_examples import example_encoder

    kind = kind or kind_of(record, keys)
    found = example(record, kind, settings.format, keys)
    if found is None:
        raise ValueError(f"{record.where()}: nothing is trained, for the assistant does not speak; try another --index")
    encoder = example_encoder(settings, tokenizer)
    if kind == "prompts":
        yield Text(f"{record.where()} ({kind})", style="bold")
        yield Text(encoder.decode(encoder.prompt(found.sides[0])), style=READ)
        return
    sides, outcome = shorten.fit(encoder, found.sides, length or 1 << 40, settings.overlong)
    documents = [document for side in sides for document in side]
    names = ["chosen", "rejected"] if len(found.sides) == 2 else [""] * len(documents)
    yield Text(_heading(record, kind, outcome, documents, found.label), style="bold")
    for number, (name, document) in enumerate(zip(names, documents, strict=True), 1):
        if len(documents) > 1:
            yield Text(_counts(f"segment {number}{name and f', {name}'}", [document]), style="bold")
        yield _coloured(document, tokenizer, colour)


def _heading(record: Record, kind: str, outcome: str, documents: list[Trained], label: bool | None) -> str:
    said = "" if label is None else f", label {str(label).lower()}"
    return _counts(f"{record.where()} ({kind}{said}, {outcome})", documents)


def _counts(what: str, documents: list[Trained]) -> str:
    total = sum(len(document.tokens) for document in documents)
    return f"{what}: {sum(int(d.mask[1:].sum()) for d in documents):,} of {total:,} tokens trained"


def _coloured(document: Trained, tokenizer: Tokenizer, colour: bool) -> Text:
    """The text in runs of tokens that are trained or not; without colours, marks are around those that are."""
    from rich.text import Text

    stream, text = tokenizer.stream(skip_special=False), Text()
    pushed = [(bool(trained), stream.push(int(token))) for token, trained in zip(*document, strict=True)]
    pushed.append((pushed[-1][0], stream.flush()))
    for trained, run in groupby(pushed, key=lambda each: each[0]):
        written = "".join(piece for _, piece in run)
        text.append(
            f"{OPEN}{written}{CLOSE}" if trained and not colour else written, style=TRAINED if trained else READ
        )
    return text
