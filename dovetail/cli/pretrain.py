"""`dovetail pretrain`: a recipe, on whatever machine this is; the same command again goes on where it stopped."""

from pathlib import Path

import typer

from dovetail.cli.show_config import OPTION
from dovetail.core.errors import UserError


def pretrain(
    recipe: str = typer.Argument("", help="A shipped recipe's name (`dovetail recipes` lists them), or a YAML file."),
    overrides: list[str] = typer.Argument(None, help="Keys to change, such as optimizer.lr=1e-3 steps=500."),
    run_dir: str = typer.Option("", "--run-dir", help="Where the run is kept; default runs/RECIPE."),
    export_hf: int = typer.Option(
        None, "--export-hf", min=1, help="Steps between exports to a Hugging Face folder (checkpoint.export_hf)."
    ),
    show_config: bool = OPTION,
    quiet: bool = typer.Option(False, help="No live line."),
) -> None:
    """Train a model from a recipe; started again, it goes on where it stopped."""
    from dovetail.core.host import process_age

    if show_config:
        from dovetail.cli.show_config import show_config as show
        from dovetail.core.recipe import load
        from dovetail.train.settings import Pretrain

        show(Pretrain, load(recipe, overrides or [], Pretrain) if recipe else None)
        return
    if not recipe:
        raise UserError("say what to train: dovetail pretrain RECIPE (`dovetail recipes` lists them)")
    code = run(recipe, overrides or [], run_dir, export_hf, show=not quiet, age=process_age())
    if code:
        raise typer.Exit(code)


def run(
    recipe: str,
    overrides: list[str],
    run_dir: str = "",
    export_hf: int | None = None,
    show: bool = True,
    age: float = 0.0,
) -> int:
    """The exit code. `age`: seconds that the process has spent on this run already."""
    import time

    from rich.console import Console

    from dovetail.cli.errors import last_words
    from dovetail.cli.progress import bar
    from dovetail.core.recipe import load
    from dovetail.train.guard.stop import Stop
    from dovetail.train.pretrain import pretrain_settings, run_folder
    from dovetail.train.settings import Pretrain

    since = time.monotonic() - age
    with Stop(ends_process=True) as stop:
        if export_hf:
            overrides = [*overrides, f"checkpoint.export_hf={export_hf}"]
        settings = load(recipe, overrides, Pretrain)
        console = Console(stderr=True, highlight=False)
        ended = pretrain_settings(
            settings, Path(run_dir) if run_dir else run_folder(recipe), stop=stop, since=since, show=show,
            explain=lambda lines: show and console.print("\n".join(lines), style="dim", soft_wrap=True),
            bar=bar if show else None, last_words=last_words,
        )  # fmt: skip
    if show:
        say_end(console, ended)
    return ended.code


def say_end(console, ended) -> None:
    """In the first process: how a training ended."""
    import jax

    if jax.process_index():
        return
    from dovetail.cli.info import table
    from dovetail.train.guard.exits import meaning
    from dovetail.train.report.summary import read, summary

    if ended.code:
        console.print(meaning(ended.code), style="bold")
    elif not ended.trained:
        console.print(
            f"nothing was trained: the run in {ended.folder} has done all its {ended.step:,} steps; raise steps (or "
            "epochs) to train further, or give another --run-dir for a new run",
            style="bold", markup=False, soft_wrap=True,
        )  # fmt: skip
    page = ended.folder / "report.html"
    if page.exists():
        found = read(ended.folder)
        console.print(table(found.name, summary(found)))
        console.print(f"curves, losses of time and recipe: {page}", markup=False, soft_wrap=True)
