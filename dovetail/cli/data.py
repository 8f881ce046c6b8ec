"""`dovetail data`: tokenise a corpus once, and look at the rows that training will read, or at an example of tuning."""

from __future__ import annotations

from itertools import groupby, islice
from typing import TYPE_CHECKING, Any

import typer

from dovetail.core.errors import UserError

if TYPE_CHECKING:
    from dovetail.data.settings import Data
if TYPE_CHECKING:
    from rich.text import Text

    from dovetail.data.example_encoder import ExampleEncoder, MaskedTokens
    from dovetail.data.records import Record
    from dovetail.data.settings import Keys, TuningData
    from dovetail.io.tokenizer import Tokenizer
    from dovetail.tune.settings import Tuning


app = typer.Typer(help="Tokenise a corpus once; look at the rows that training reads.", no_args_is_help=True)

WHAT = typer.Argument(help="A recipe and key=value, or files, folders, patterns and built-in corpora (fables).")
TOKENIZER = typer.Option(
    "", help="bytes, a folder with a tokenizer.json, or a model's name; a recipe's own if not given."
)
OUT = typer.Option("", help="The folder of the cache; the recipe's, or the package's own, if not given.")
FORMAT = typer.Option("auto", "--format", help="text, jsonl, parquet, arrayrecord, hf or corpus; else by the files.")
TEXT_KEY = typer.Option("text", help="The field that holds the text, where a record has fields.")
LENGTH = 256  # tokens of a row that `show` shows when no recipe says
COLOURS = ("cyan", "yellow", "green", "magenta", "blue", "bright_red")


@app.command()
def prepare(
    what: list[str] = WHAT,
    tokenizer: str = TOKENIZER,
    out: str = OUT,
    kind: str = FORMAT,
    text_key: str = TEXT_KEY,
    processes: int = typer.Option(0, min=0, help="How many processes tokenise; one per core if not given."),
) -> None:
    """Tokenise a recipe's data, or files, into a cache."""
    from rich.console import Console

    from dovetail.core.reporter import bar
    from dovetail.data.tokenise import prepare as make

    data, model, _ = _read(what, tokenizer, kind, text_key)
    with bar() as progress:
        stores = make(data, model, out, progress, processes)
    console = Console(highlight=False)
    console.print(_table(stores))
    for store in stores:
        console.print(str(store.folder), soft_wrap=True)


@app.command()
def show(
    what: list[str] = WHAT,
    rows: int = typer.Option(2, min=1, help="How many rows."),
    first: int = typer.Option(0, min=0, help="The number of the first row of the run to show."),
    length: int = typer.Option(0, min=0, help=f"Tokens of a row; the recipe's, or {LENGTH}, if not given."),
    packing: str = typer.Option("", help="concat or best_fit; the recipe's, or concat, if not given."),
    held_out: bool = typer.Option(False, help="Rows of the held-out documents, not those of training."),
    tokenizer: str = TOKENIZER,
    out: str = OUT,
    kind: str = FORMAT,
    text_key: str = TEXT_KEY,
    model: str = typer.Option("", help="Show an example for fine-tuning this model; model=NAME does the same."),
    index: int = typer.Option(0, min=0, help="Of an example: the number of its record."),
    use: str = typer.Option("", "--kind", help="Of an example: sft, preference, unpaired, prompts; else by its keys."),
) -> None:
    """Show rows as training reads them, a colour per document; or, of a recipe for fine-tuning or with a model, one
    example and what it trains. Keys are those of `dovetail sft`: model=NAME data.path=chats.jsonl data.template=FILE"""

    if recipe := tuning_recipe(what, model):
        _refuse_with_model(tokenizer=tokenizer, packing=packing, first=first, held_out=held_out, out=out)
        show_example(recipe, model, index, use, length)
        return
    if index or use:
        raise UserError("expected --model with --index and --kind: whose tokenizer and chat template to use")
    _show_rows(what, rows, first, length, packing, held_out, tokenizer, out, kind, text_key)


def _refuse_with_model(**given: object) -> None:
    for name, value in given.items():
        if value:
            option = "--" + name.replace("_", "-")
            raise UserError(
                f"{option} is about rows of text, and an example for fine-tuning is shown: leave it out, or --model"
            )


def _show_rows(
    what: list[str],
    rows: int,
    first: int,
    length: int,
    packing: str,
    held_out: bool,
    tokenizer: str,
    out: str,
    kind: str,
    text_key: str,
) -> None:
    import dataclasses

    from rich.console import Console

    from dovetail.core.reporter import bar
    from dovetail.data.encoder import make
    from dovetail.data.loader import open_data

    data, model, recipe_length = _read(what, tokenizer, kind, text_key)
    data = dataclasses.replace(data, packing=packing or data.packing)
    with bar() as progress:
        found = open_data(data, length or recipe_length or LENGTH, 1, model, directory=out, progress=progress)
    loader = found[1] if held_out else found[0]
    if loader is None:
        raise UserError("expected held-out documents to show, and data.held_out is 0; set it, such as 0.01")
    encoder, console = make(data.tokenizer, model), Console(highlight=False)
    for i in range(first, first + rows):
        source, _ = loader.rows.locate(i)
        console.print(*_row(loader.rows.row(i), encoder, f"row {i} from {data.sources[source].path}"), sep="\n")
    shares = ", ".join(f"{s.path} {p:.2%}" for s, p in zip(data.sources, loader.padding, strict=True))
    console.print(f"{loader.rows_per_epoch:,} rows per epoch; padding: {shares}", style="dim", markup=False)


def _read(what: list[str], tokenizer: str, kind: str, text_key: str):
    """(data, the model's own tokenizer or None, tokens of a row or 0) of a recipe, or of paths."""
    import dataclasses

    from dovetail.core.recipe import load, shipped
    from dovetail.data.encoder import beside_model

    if what[0] in shipped() or what[0].endswith((".yaml", ".yml")):
        from dovetail.train.settings import Pretrain

        if kind != "auto" or text_key != "text":
            raise UserError("expected --format and --text-key with paths; a recipe says them for each of its sources")
        recipe = load(what[0], what[1:], Pretrain)
        data = dataclasses.replace(recipe.data, tokenizer=tokenizer or recipe.data.tokenizer)
        return data, beside_model(recipe.model, recipe.init), recipe.length
    return _from_paths(what, tokenizer, kind, text_key), None, 0


def _from_paths(paths: list[str], tokenizer: str, kind: str, text_key: str) -> Data:
    from dovetail.data.settings import Data, Source

    if not tokenizer:
        raise UserError("expected --tokenizer with paths: bytes, a folder with a tokenizer.json, or a model's name")
    return Data(tuple(Source(path, format=kind, text_key=text_key) for path in paths), tokenizer)


def _table(stores):
    import numpy as np
    from rich import box
    from rich.table import Table

    out = Table(title="tokens", title_justify="left", title_style="bold", box=box.ROUNDED)
    out.add_column("source")
    for column in ("documents", "empty", "tokens", "text", "tokens per document, p50", "p99"):
        out.add_column(column, justify="right")
    for store in stores:
        meta, (p50, p99) = store.meta, np.percentile(store.lengths, [50, 99])
        text = f"{meta.text_bytes / 1e6:,.1f} MB"
        out.add_row(
            meta.name, f"{meta.documents:,}", f"{meta.empty:,}", f"{meta.tokens:,}", text, f"{p50:,.0f}", f"{p99:,.0f}"
        )
    return out


def _row(row, encoder, title: str):
    """A heading and the row's text; each document in the next colour, its end as a mark."""
    from rich.text import Text

    segments = int(row.segment_ids.max())
    used = int((row.segment_ids > 0).sum())
    text = Text()
    for segment in range(1, segments + 1):
        ids = row.tokens[row.segment_ids == segment].tolist()
        ended = ids[-1] == encoder.eos_id
        text.append(encoder.decode(ids[:-1] if ended else ids), style=COLOURS[(segment - 1) % len(COLOURS)])
        text.append("⏹" if ended else "…", style="bold reverse")
    heading = f"{title}: {segments} documents or parts of them, {used} tokens, {len(row.tokens) - used} padding, "
    yield Text(f"{heading}{int(row.loss_mask.sum())} targets", style="bold")
    yield text


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
        return _read_tuning(mapping, f"recipe {what[0]}: ")
    if not model and not any(path[0] in ("model", "init") for path, _ in pairs):
        return None
    mapping = place({"data": {"path": what[0]} if named else {}}, [(_of_recipe(path), value) for path, value in pairs])
    return _read_tuning({"model": model, **mapping} if model else mapping)


def _of_recipe(path: list[str]) -> list[str]:
    """Return a key as a recipe has it: those of the data may be given without `data`."""
    from dataclasses import fields

    from dovetail.data.settings import TuningData
    from dovetail.tune.settings import Sft

    own = {field.name for field in fields(TuningData)} - {field.name for field in fields(Sft)}
    return ["data", *path] if path[0] in own else path


def _read_tuning(mapping: dict[str, Any], where: str = "") -> Tuning:
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
