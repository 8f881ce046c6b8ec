"""`dovetail pretrain`: a recipe, on whatever machine this is; the same command again goes on where it stopped."""

from pathlib import Path

import typer


def pretrain(
    recipe: str = typer.Argument(..., help="A shipped recipe's name (`dovetail recipes` lists them), or a YAML file."),
    overrides: list[str] = typer.Argument(None, help="Keys to change, such as optimizer.lr=1e-3 steps=500."),
    run_dir: str = typer.Option("", "--run-dir", help="Where the run is kept; default runs/RECIPE."),
    export_hf: int = typer.Option(
        None, "--export-hf", min=1, help="Steps between exports to a Hugging Face folder (checkpoint.export_hf)."
    ),
    quiet: bool = typer.Option(False, help="No live line."),
) -> None:
    """Train a model from a recipe; started again, it goes on where it stopped."""
    code = run(recipe, overrides or [], run_dir, export_hf, show=not quiet)
    if code:
        raise typer.Exit(code)


def run(recipe: str, overrides: list[str], run_dir: str = "", export_hf: int | None = None, show: bool = True) -> int:
    from rich.console import Console

    from dovetail.core.recipe import load
    from dovetail.train.distributed import start
    from dovetail.train.goodput import Goodput
    from dovetail.train.settings import Pretrain

    if export_hf:
        overrides = [*overrides, f"checkpoint.export_hf={export_hf}"]
    settings = load(recipe, overrides, Pretrain)
    start()
    import jax

    from dovetail.io.compiled import keep_compiled

    keep_compiled()
    folder = Path(run_dir or Path("runs") / Path(recipe).stem)
    first = jax.process_index() == 0
    console = Console(stderr=True, highlight=False)
    goodput = Goodput(folder / "goodput.json" if first else None)
    with goodput.span("init"):
        ready, train, held_out, tokenizer = _ready(settings, console if first and show else None)
    from dovetail.train.exits import meaning
    from dovetail.train.loop import Run

    code = Run(ready, folder, train, held_out, tokenizer, goodput, show).go()
    if first and show:
        _say_end(console, folder, code, meaning(code))
    return code


def _ready(settings, console):
    from dovetail.cli.progress import bar
    from dovetail.data.encoder import beside_model
    from dovetail.data.loader import open_data
    from dovetail.train.prepare import prepare

    ready = prepare(settings)
    if console:
        console.print("\n".join(ready.derived.explain()), style="dim", soft_wrap=True)
    tokenizer = beside_model(settings.model, settings.init)
    index, count = ready.rows_here()
    with bar() as progress:
        train, held_out = open_data(
            settings.data, settings.length, settings.batch, tokenizer, host_index=index, host_count=count,
            progress=progress if console else None,
        )  # fmt: skip
    if train.vocab_size > ready.cfg.vocab:
        raise ValueError(
            f"the tokenizer has {train.vocab_size:,} ids and the model's vocabulary {ready.cfg.vocab:,}: set "
            "data.tokenizer to the model's own, or vocab_size in the model's config.json"
        )
    return ready, train, held_out, _tokenizer(settings, tokenizer)


def _tokenizer(settings, beside):
    """What an export carries, so that the folder can be served."""
    if settings.data.tokenizer == "bytes":
        from dovetail.io.bytes_tokenizer import byte_tokenizer

        return byte_tokenizer()
    if not settings.data.tokenizer:
        return beside
    from dovetail.data.encoder import find_tokenizer

    return find_tokenizer(settings.data.tokenizer)


def _say_end(console, folder: Path, code: int, meaning: str) -> None:
    from dovetail.cli.info import table
    from dovetail.train.report import read, summary

    if code:
        console.print(meaning, style="bold")
    if (folder / "report.html").exists():
        found = read(folder)
        console.print(table(found.name, summary(found)))
        console.print(f"curves, losses of time and recipe: {folder / 'report.html'}", markup=False, soft_wrap=True)
