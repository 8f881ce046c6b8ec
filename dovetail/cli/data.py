"""`dovetail data`: tokenise a corpus once, and look at the rows that training will read, or at an example of tuning."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from dovetail.core.errors import UserError

if TYPE_CHECKING:
    from dovetail.data.settings import Data

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

    from dovetail.cli.progress import bar
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
    from dovetail.cli.data_example import show_example, tuning_recipe

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

    from dovetail.cli.progress import bar
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
