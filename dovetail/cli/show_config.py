"""`--show-config` of the trainings: every key with its value, its default and its meaning."""

from typing import Any

import typer

OPTION = typer.Option(False, "--show-config", help="Print every key with value, default and meaning; train nothing.")
WIDEST = 32  # of a column: a longer value moves only its own line
HEAD = ("key", "value", "default", "meaning")


def show_config(cls: type, settings: Any) -> None:
    """Print the keys of a training's class on stdout, with the values of `settings` (None: the defaults); those that
    are not defaults stand out."""
    from rich.console import Console
    from rich.text import Text

    from dovetail.core.explain import explained

    keys = explained(cls, settings)
    rows: list[tuple[Any, ...]] = [HEAD, *((key.name, key.value, key.default, key.meaning) for key in keys)]
    wide = [max(min(len(row[column]), WIDEST) for row in rows) for column in range(3)]
    styles = ["bold", *("bold cyan" if key.is_set else "" for key in keys)]
    console = Console(highlight=False)
    for (*cells, meaning), style in zip(rows, styles, strict=True):
        padded = "  ".join(cell.ljust(width) for cell, width in zip(cells, wide, strict=True))
        console.print(Text(f"{padded}  {meaning}".rstrip(), style), soft_wrap=True)
