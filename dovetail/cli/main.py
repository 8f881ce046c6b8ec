"""`dovetail`: the app, and the list of its commands."""

import logging

import typer

from dovetail.cli import (
    bench,
    chat,
    compile,
    data,
    doctor,
    errors,
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

app = typer.Typer(
    name="dovetail",
    help="The whole life of a language model in JAX: pretrain, post-train, serve, run on machines.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # errors.py says what went wrong in one line
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


app.command("tour")(tour.tour)
app.command("pull")(models.pull)
app.command("convert")(models.convert)
app.command("info")(info.info)
app.command("doctor")(doctor.doctor)
app.command("serve", cls=OptionCommand)(serve.serve)
app.command("chat", cls=OptionCommand)(chat.chat)
app.command("pretrain")(train.pretrain)
app.command("sft")(train.sft)
app.command("dpo")(train.dpo)
app.command("distill")(train.distill)
app.command("reward")(train.reward)
app.command("rl")(train.rl)
app.command("merge")(models.merge)
app.command("recipes")(recipes.recipes)
app.command("report")(info.report)
app.command("eval", cls=OptionCommand)(evaluate.evaluate)
app.add_typer(plan.app, name="plan")
app.add_typer(compile.app, name="compile")
app.add_typer(data.app, name="data")
app.add_typer(bench.app, name="bench")
app.add_typer(job.app, name="job")


def main() -> None:
    from dovetail.core.libtpu import quiet_libtpu

    quiet_libtpu()
    logging.basicConfig(format="%(message)s")  # before a library sets its own, with names of modules
    errors.run(app)
