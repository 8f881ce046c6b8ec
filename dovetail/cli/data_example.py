"""One example of a fine-tuning set as the model will see it, with what it is taught to write."""

from __future__ import annotations

from itertools import groupby, islice
from typing import TYPE_CHECKING, Any

from dovetail.core.errors import UserError

if TYPE_CHECKING:
    from rich.text import Text

    from dovetail.data.example_encoder import ExampleEncoder, MaskedTokens
    from dovetail.data.records import Record
    from dovetail.data.settings import Keys, TuningData
    from dovetail.io.tokenizer import Tokenizer
    from dovetail.tune.settings import Tuning

TUNING = ("lora", "samples", "epochs", "preference", "teacher", "reward", "algo")  # keys of fine-tuning's recipes alone
READ_KEYS = ("model", "init", "length", "data", "assistant_only_loss", "completion_only_loss")
TRAINED, READ = "bold green", "dim"
OPEN, CLOSE = "⟦", "⟧"  # around what is trained, where there are no colours


def tuning_recipe(what: list[str], model: str = "") -> Tuning | None:
    """Return what says how examples are made: a recipe for fine-tuning with key=value, or a path with the keys of such
    a recipe or of its data; None: it is about the rows of a corpus."""
    from dovetail.core.overrides import place, split
    from dovetail.core.recipe import raw, training_of
    from dovetail.tune.settings import Sft

    named = "=" not in what[0]
    pairs = [split(text) for text in (what[1:] if named else what)]
    if named and (what[0].endswith((".yaml", ".yml")) or training_of(what[0]) not in (None, "pretrain")):
        mapping = place(raw(what[0], Sft), pairs)
        data = mapping.get("data")
        if not (isinstance(data, dict) and "path" in data) and not any(key in mapping for key in TUNING):
            return None
        return _read(mapping, f"recipe {what[0]}: ")
    if not model and not any(path[0] in ("model", "init") for path, _ in pairs):
        return None
    mapping = place({"data": {"path": what[0]} if named else {}}, [(_of_recipe(path), value) for path, value in pairs])
    return _read({"model": model, **mapping} if model else mapping)


def _of_recipe(path: list[str]) -> list[str]:
    """Return a key as a recipe has it: those of the data may be given without `data`."""
    from dataclasses import fields

    from dovetail.data.settings import TuningData
    from dovetail.tune.settings import Sft

    own = {field.name for field in fields(TuningData)} - {field.name for field in fields(Sft)}
    return ["data", *path] if path[0] in own else path


def _read(mapping: dict[str, Any], where: str = "") -> Tuning:
    from dataclasses import fields

    from dovetail.core.choice import did_you_mean
    from dovetail.core.recipe import read
    from dovetail.tune.rl.settings import Rl
    from dovetail.tune.settings import Distill, Dpo, Reward, Sft

    known = {field.name for cls in (Sft, Dpo, Reward, Distill, Rl) for field in fields(cls)}
    for key in mapping:
        if key not in known:
            raise UserError(f"{where}{key} is not a key.{did_you_mean(key, sorted(known | {'keys', 'template'}))}")
    wanted = {name: mapping[name] for name in READ_KEYS if name in mapping}
    try:  # whatever kind of fine-tuning it is for: all are alike in these
        return read(Sft, wanted | {"steps": 1})
    except ValueError as error:
        raise UserError(f"{where}{error}") from error


def show_example(recipe: Tuning, model: str, index: int, kind: str, length: int) -> None:
    """Print an example, shortened to `length` tokens or, where that is 0, to the recipe's."""
    from rich.console import Console

    from dovetail.data.encoder import find_tokenizer
    from dovetail.data.example_encoder import example_encoder

    model = model or recipe.weights
    tokenizer = find_tokenizer(model)
    if tokenizer is None:
        raise UserError(f"{model!r} has no tokenizer: name a model, or a folder with a tokenizer.json, by --model")
    settings, length = recipe.data, length or recipe.length
    record, keys = _record(settings, index)
    console = Console(highlight=False)
    encoder = example_encoder(settings, tokenizer, recipe.trained_tokens)
    for part in _parts(record, keys, settings, encoder, kind, length, console.color_system is not None):
        console.print(part, soft_wrap=True)


def _record(settings: TuningData, index: int) -> tuple[Record, Keys]:
    from dovetail.data.records import open_records

    count, names = 0, []
    for name, keys, records in open_records(settings):
        names.append(name)
        for record in islice(records, index + 1 - count):
            count += 1
            if count == index + 1:
                return record, keys
    raise UserError(
        f"expected an --index below {count}, for {' and '.join(names)} holds {count:,} records; got {index}"
    )


def _parts(
    record: Record, keys: Keys, settings: TuningData, encoder: ExampleEncoder, kind: str, length: int, colour: bool
):
    from rich.text import Text

    from dovetail.data.example_encoder import fit
    from dovetail.data.examples import example, kind_of

    kind = kind or kind_of(record, keys)
    found = example(record, kind, settings.format, keys)
    if found is None:
        raise UserError(f"{record.where()}: nothing is trained, for the assistant does not speak; try another --index")
    if kind == "prompts":
        yield Text(f"{record.where()} ({kind})", style="bold")
        yield Text(encoder.decode(encoder.prompt(found.sides[0])), style=READ)
        return
    sides, outcome = fit(encoder, found.sides, length or 1 << 40, settings.overlong)
    documents = [document for side in sides for document in side]
    names = ["chosen", "rejected"] if len(found.sides) == 2 else [""] * len(documents)
    yield Text(_heading(record, kind, outcome, documents, found.label), style="bold")
    for number, (name, document) in enumerate(zip(names, documents, strict=True), 1):
        if len(documents) > 1:
            yield Text(_counts(f"segment {number}{name and f', {name}'}", [document]), style="bold")
        yield _coloured(document, encoder.tokenizer, colour)


def _heading(record: Record, kind: str, outcome: str, documents: list[MaskedTokens], label: bool | None) -> str:
    said = "" if label is None else f", label {str(label).lower()}"
    return _counts(f"{record.where()} ({kind}{said}, {outcome})", documents)


def _counts(what: str, documents: list[MaskedTokens]) -> str:
    total = sum(len(document.tokens) for document in documents)
    return f"{what}: {sum(int(d.mask[1:].sum()) for d in documents):,} of {total:,} tokens trained"


def _coloured(document: MaskedTokens, tokenizer: Tokenizer, colour: bool) -> Text:
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
