"""`dovetail plan`: the memory, the time and the cost of training and serving, before a chip is paid for."""

import typer

from dovetail.cli import plan_rl, plan_serve, plan_storage, plan_train

app = typer.Typer(
    help="Know the memory, the time and the cost before paying for a chip.",
    invoke_without_command=True,
    no_args_is_help=True,
)


@app.callback()
def _root(
    calibrate: str = typer.Option("", metavar="RUN_DIR", help="Learn from a run what its chips reach of their peaks."),
) -> None:
    if calibrate:
        from dovetail.cli.plan_calibrate import calibrate as learn

        learn(calibrate)
        raise typer.Exit()


app.command("train")(plan_train.train)
app.command("serve")(plan_serve.serve)
app.command("rl")(plan_rl.rl)
app.command("storage")(plan_storage.storage)
