"""`dovetail report`: what came of a run, as a table here and as a page."""

import typer


def report(
    run_dir: str = typer.Argument(help="The folder of a run, finished or not."),
    out: str = typer.Option("", help="Where to write the page; otherwise RUN_DIR/report.html."),
) -> None:
    """Show a run's figures and write its page, with the curves."""
    from rich.console import Console

    from dovetail.cli.info import table
    from dovetail.train.report.page import write
    from dovetail.train.report.summary import read, summary

    run = read(run_dir)
    page = write(run_dir, out or None)
    console = Console(highlight=False)
    console.print(table(run.name, summary(run)))
    console.print(f"curves, losses of time and recipe: {page}", markup=False, soft_wrap=True)
