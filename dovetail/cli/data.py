"""`dovetail data`: tokenize a corpus, show the rows that training reads, or show an example of fine-tuning."""

from __future__ import annotations

from itertools import groupby, islice
from typing import TYPE_CHECKING, Any

import typer

from dovetail.core.errors import RecipeError, UserError

if TYPE_CHECKING:
    from rich.text import Text

    from dovetail.data.example_encoder import ExampleEncoder, MaskedTokens
    from dovetail.data.records import Record
    from dovetail.data.settings import Data, Keys, TuningData
    from dovetail.io.tokenizer import Tokenizer
    from dovetail.tune.settings import Tuning


app = typer.Typer(help="Tokenize a corpus; show the rows or examples that training reads.", no_args_is_help=True)

WHAT = typer.Argument(help="Recipe and overrides; or files, folders, patterns and built-in corpora (fables).")
TOKENIZER = typer.Option("", help="bytes, folder with a tokenizer.json, or model name. Default: the recipe's.")
OUT = typer.Option("", help="Folder of the cache. Default: the recipe's, or the package's cache.")
FORMAT = typer.Option("auto", "--format", help="text, jsonl, parquet, arrayrecord, hf or corpus; auto: by file name.")
TEXT_KEY = typer.Option("text", help="Field of a record that has the text.")
LENGTH = 256  # tokens per row without a recipe
COLOURS = ("cyan", "yellow", "green", "magenta", "blue", "bright_red")


@app.command()
def prepare(
    what: list[str] = WHAT,
    tokenizer: str = TOKENIZER,
    out: str = OUT,
    kind: str = FORMAT,
    text_key: str = TEXT_KEY,
    processes: int = typer.Option(0, min=0, show_default=False, help="Number of processes. Default: one per core."),
) -> None:
    """Tokenize the data of a recipe, or files, into the cache."""
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
    rows: int = typer.Option(2, min=1, help="Number of rows."),
    first: int = typer.Option(0, min=0, help="Index of the first row."),
    length: int = typer.Option(
        0, min=0, show_default=False, help=f"Tokens per row. Default: the recipe's, or {LENGTH}."
    ),
    packing: str = typer.Option("", help="concat or best_fit. Default: the recipe's, or concat."),
    held_out: bool = typer.Option(False, "--held-out", help="Show rows of the held-out documents."),
    tokenizer: str = TOKENIZER,
    out: str = OUT,
    kind: str = FORMAT,
    text_key: str = TEXT_KEY,
    model: str = typer.Option("", help="Show a fine-tuning example for this model; short for model=NAME."),
    index: int = typer.Option(0, min=0, help="Index of the example's record."),
    use: str = typer.Option(
        "", "--kind", help="Kind of example: sft, preference, unpaired or prompts. Default: by its keys."
    ),
) -> None:
    """Show rows of pretraining, a colour per document, or an example of fine-tuning with its trained tokens.

    An example is shown for a fine-tuning recipe or with a model: model=NAME data.path=chats.jsonl data.template=FILE.
    """
    if recipe := tuning_recipe(what, model):
        _refuse_with_model(tokenizer=tokenizer, packing=packing, first=first, held_out=held_out, out=out)
        show_example(recipe, model, index, use, length)
        return
    if index or use:
        raise UserError("--index and --kind need --model, whose tokenizer and chat template are used", param="--model")
    _show_rows(what, rows, first, length, packing, held_out, tokenizer, out, kind, text_key)


def _refuse_with_model(**given: object) -> None:
    for name, value in given.items():
        if value:
            option = "--" + name.replace("_", "-")
            raise UserError(
                f"{option} applies to rows of text, not to a fine-tuning example: leave it or --model out", param=option
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
        raise UserError(
            "--held-out needs held-out documents, but data.held_out is 0: set it, such as 0.01", param="--held-out"
        )
    encoder, console = make(data.tokenizer, model), Console(highlight=False)
    for i in range(first, first + rows):
        source, _ = loader.rows.locate(i)
        console.print(*_row(loader.rows.row(i), encoder, f"row {i} from {data.sources[source].path}"), sep="\n")
    shares = ", ".join(f"{s.path} {p:.2%}" for s, p in zip(data.sources, loader.padding, strict=True))
    console.print(f"{loader.rows_per_epoch:,} rows per epoch; padding: {shares}", style="dim", markup=False)


def _read(what: list[str], tokenizer: str, kind: str, text_key: str):
    """Return (data, the model's tokenizer or None, tokens per row or 0) of a recipe or of paths."""
    import dataclasses

    from dovetail.core.recipe import load, shipped
    from dovetail.data.encoder import beside_model

    if what[0] in shipped() or what[0].endswith((".yaml", ".yml")):
        from dovetail.train.settings import Pretrain

        if kind != "auto" or text_key != "text":
            option = "--format" if kind != "auto" else "--text-key"
            raise UserError("--format and --text-key apply to paths: a recipe sets them for each source", param=option)
        recipe = load(what[0], what[1:], Pretrain)
        data = dataclasses.replace(recipe.data, tokenizer=tokenizer or recipe.data.tokenizer)
        return data, beside_model(recipe.tokenizer_place, recipe.init), recipe.length
    return _from_paths(what, tokenizer, kind, text_key), None, 0


def _from_paths(paths: list[str], tokenizer: str, kind: str, text_key: str) -> Data:
    from dovetail.data.settings import Data, Source

    if not tokenizer:
        raise UserError(
            "paths need --tokenizer: bytes, a folder with a tokenizer.json, or a model name", param="--tokenizer"
        )
    return Data(tuple(Source(path, format=kind, text_key=text_key) for path in paths), tokenizer)


def _table(stores):
    import numpy as np

    from dovetail.cli.tables import framed

    right = ("documents", "empty", "tokens", "text", "tokens per document, p50", "p99")
    out = framed("tokens", "source", right=right)
    for store in stores:
        meta, (p50, p99) = store.meta, np.percentile(store.lengths, [50, 99])
        text = f"{meta.text_bytes / 1e6:,.1f} MB"
        out.add_row(
            meta.name, f"{meta.documents:,}", f"{meta.empty:,}", f"{meta.tokens:,}", text, f"{p50:,.0f}", f"{p99:,.0f}"
        )
    return out


def _row(row, encoder, title: str):
    """Yield a heading and the text of a row, with a colour per document and a mark at its end."""
    from rich.text import Text

    segments = int(row.segment_ids.max())
    used = int((row.segment_ids > 0).sum())
    text = Text()
    for segment in range(1, segments + 1):
        ids = row.tokens[row.segment_ids == segment].tolist()
        ended = ids[-1] == encoder.eos_id
        text.append(encoder.decode(ids[:-1] if ended else ids), style=COLOURS[(segment - 1) % len(COLOURS)])
        text.append("⏹" if ended else "…", style="bold reverse")
    heading = f"{title}: {segments} documents or parts, {used} tokens, {len(row.tokens) - used} padding, "
    yield Text(f"{heading}{int(row.loss_mask.sum())} targets", style="bold")
    yield text


TUNING = ("lora", "samples", "epochs", "preference", "teacher", "reward", "algo")  # keys that only fine-tuning has
READ_KEYS = ("model", "init", "length", "data", "assistant_only_loss", "completion_only_loss")
TRAINED, READ = "bold green", "dim"
OPEN, CLOSE = "⟦", "⟧"  # around trained text on a terminal without colours


def tuning_recipe(what: list[str], model: str = "") -> Tuning | None:
    """Return the fine-tuning settings of a recipe, or of a path with keys; None if `what` is a corpus."""
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
    """Return the key's path in a recipe; keys of the data may be given without `data`."""
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
    from dovetail.tune.settings import Distill, Dpo, Draft, Reward, Sft

    known = {field.name for cls in (Sft, Dpo, Reward, Distill, Rl, Draft) for field in fields(cls)}
    for key in mapping:
        if key not in known:
            hint = did_you_mean(key, sorted(known | {"keys", "template"}))
            raise RecipeError(f"{where}{key} is not a key.{hint}", param=key, code="unknown_key")
    wanted = {name: mapping[name] for name in READ_KEYS if name in mapping}
    try:  # these keys are the same in every kind of fine-tuning
        return read(Sft, wanted | {"steps": 1})
    except UserError as error:
        raise RecipeError(f"{where}{error}", param=error.param, code=error.code) from error


def show_example(recipe: Tuning, model: str, index: int, kind: str, length: int) -> None:
    """Print an example, truncated to `length` tokens, or to the recipe's length if that is 0."""
    from rich.console import Console

    from dovetail.data.encoder import find_tokenizer
    from dovetail.data.example_encoder import example_encoder
    from dovetail.io.load import find_processor

    model = model or recipe.weights
    tokenizer = find_tokenizer(model)
    if tokenizer is None:
        raise UserError(
            f"{model!r} has no tokenizer: set --model to a model or a folder with a tokenizer.json", param="--model"
        )
    settings, length = recipe.data, length or recipe.length
    name, record, keys = _record(settings, index)
    console = Console(highlight=False)
    processor = find_processor(model, tokenizer) if recipe.takes_images else None
    encoder = example_encoder(settings, tokenizer, recipe.trained_tokens, processor)
    for part in _parts(record, keys, name, settings, encoder, kind, length, console.color_system is not None):
        console.print(part, soft_wrap=True)


def _record(settings: TuningData, index: int) -> tuple[str, Record, Keys]:
    from dovetail.data.records import open_records

    count, names = 0, []
    for name, keys, records in open_records(settings):
        names.append(name)
        for record in islice(records, index + 1 - count):
            count += 1
            if count == index + 1:
                return name, record, keys
    raise UserError(
        f"--index must be below {count:,}, the number of records in {' and '.join(names)}, got {index}", param="--index"
    )


def _parts(
    record: Record, keys: Keys, name: str, settings: TuningData, encoder: ExampleEncoder, kind: str, length: int,
    colour: bool,
):  # fmt: skip
    from rich.text import Text

    from dovetail.data.example_encoder import fit
    from dovetail.data.example_store import folder_of
    from dovetail.data.examples import example, kind_of

    kind = kind or kind_of(record, keys)
    found = example(record, kind, settings.format, keys)
    if found is None:
        raise UserError(
            f"{record.where()}: no token is trained, because there is no assistant message: try another --index",
            param="--index",
        )
    if kind == "prompts":
        yield Text(f"{record.where()} ({kind})", style="bold")
        yield Text(encoder.decode(encoder.prompt(found.sides[0])), style=READ)
        return
    found = encoder.with_pictures(found, folder_of(name))
    sides, outcome = fit(encoder, found.sides, length or 1 << 40, settings.overlong)
    documents = [document for side in sides for document in side]
    names = ["chosen", "rejected"] if len(found.sides) == 2 else [""] * len(documents)
    yield Text(_heading(record, kind, outcome, documents, found.label), style="bold")
    for number, (name, document) in enumerate(zip(names, documents, strict=True), 1):
        if len(documents) > 1:
            yield Text(_counts(f"segment {number}{name and f', {name}'}", [document]), style="bold")
        yield _coloured(document, encoder.tokenizer, colour)


def _heading(record: Record, kind: str, outcome: str, documents: list[MaskedTokens], label: bool | None) -> str:
    label_text = "" if label is None else f", label {str(label).lower()}"
    return _counts(f"{record.where()} ({kind}{label_text}, {outcome})", documents)


def _counts(what: str, documents: list[MaskedTokens]) -> str:
    total = sum(len(document.tokens) for document in documents)
    return f"{what}: {sum(int(d.mask[1:].sum()) for d in documents):,} of {total:,} tokens trained"


def _coloured(document: MaskedTokens, tokenizer: Tokenizer, colour: bool) -> Text:
    """Return the text with trained tokens coloured or, without colours, between marks."""
    from rich.text import Text

    stream, text = tokenizer.stream(skip_special=False), Text()
    pushed = [(bool(trained), stream.push(int(token))) for token, trained in zip(*document[:2], strict=True)]
    pushed.append((pushed[-1][0], stream.flush()))
    for trained, run in groupby(pushed, key=lambda each: each[0]):
        written = "".join(piece for _, piece in run)
        text.append(
            f"{OPEN}{written}{CLOSE}" if trained and not colour else written, style=TRAINED if trained else READ
        )
    return text
