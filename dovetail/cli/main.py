"""The `dovetail` command and the list of its subcommands."""

import logging
import sys
import warnings
from collections.abc import Callable

import typer

from dovetail.cli import (
    bench,
    chat,
    compile,
    data,
    doctor,
    evaluate,
    info,
    job,
    models,
    plan,
    recipes,
    serve,
    tour,
    train,
)
from dovetail.cli.options import OptionCommand
from dovetail.core.errors import report_failure

app = typer.Typer(
    name="dovetail",
    help="Pretrain, fine-tune, serve and operate language models with JAX.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # `run` prints errors
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        from dovetail import __version__

        typer.echo(f"dovetail {__version__}")
        raise typer.Exit()


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    pass


_MODELS, _TRAINING, _SERVING, _TOOLS = "Models", "Training", "Serving and evaluation", "Planning and operation"

for command, panel in (
    (tour.tour, _MODELS),
    (models.pull, _MODELS),
    (models.convert, _MODELS),
    (models.quantize, _MODELS),
    (models.merge, _MODELS),
    (info.info, _MODELS),
    (train.pretrain, _TRAINING),
    (train.sft, _TRAINING),
    (train.dpo, _TRAINING),
    (train.distill, _TRAINING),
    (train.reward, _TRAINING),
    (train.rl, _TRAINING),
    (train.draft, _TRAINING),
    (recipes.recipes, _TRAINING),
    (info.report, _TRAINING),
    (serve.serve, _SERVING),
    (chat.chat, _SERVING),
    (evaluate.evaluate, _SERVING),
    (doctor.doctor, _TOOLS),
):
    app.command({"evaluate": "eval"}.get(command.__name__), cls=OptionCommand, rich_help_panel=panel)(command)

app.add_typer(data.app, name="data", rich_help_panel=_TRAINING)
app.add_typer(bench.app, name="bench", rich_help_panel=_SERVING)
app.add_typer(plan.app, name="plan", rich_help_panel=_TOOLS)
app.add_typer(compile.app, name="compile", rich_help_panel=_TOOLS)
app.add_typer(job.app, name="job", rich_help_panel=_TOOLS)


def main() -> None:
    """Run the command line."""
    from dovetail.core.host import quiet_libtpu

    quiet_libtpu()
    logging.basicConfig(format="%(message)s")  # before a library sets another format
    run(app)


def run(command: Callable[[], object]) -> None:
    """Call `command`; exit with 2 for a user's error, 1 and a traceback for any other, 130 for ctrl-C."""
    try:
        command()
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        code, line = report_failure(error)
        _print_error(line)
        # a library's unfinished write would otherwise print a warning after the error
        warnings.filterwarnings("ignore", message="coroutine .* was never awaited", category=RuntimeWarning)
        sys.exit(code)


def _print_error(line: str) -> None:
    from rich.console import Console
    from rich.text import Text

    from dovetail.core.reporter import printable

    label, _, message = line.partition(": ")
    # Text, because a message may have [brackets]; soft_wrap, so that a piped or copied error stays on one line
    text = Text(f"{label}: ", style="bold red").append(printable(message), style="default not bold")
    Console(stderr=True, highlight=False).print(text, soft_wrap=True)
