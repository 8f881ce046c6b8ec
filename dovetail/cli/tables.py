"""The tables of the commands: names with values, framed columns, and wide columns without a frame."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table


def pairs(title: str, rows: Iterable[tuple[str, str]]) -> Table:
    """Return a table of names and their values."""
    from rich.text import Text

    out = framed(title)
    out.show_header = False
    out.add_column(style="cyan", no_wrap=True)
    out.add_column()
    for name, value in rows:
        out.add_row(Text(name), Text(str(value)))
    return out


def framed(title: str, *columns: str, right: Iterable[str] = ()) -> Table:
    """Return an empty table with a frame; `right` are further columns, aligned to the right."""
    from rich import box
    from rich.table import Table

    out = Table(title=title, title_justify="left", title_style="bold", box=box.ROUNDED)
    for name in columns:
        out.add_column(name)
    for name in right:
        out.add_column(name, justify="right")
    return out


def frameless(title: str) -> Table:
    """Return an empty table without a frame, for many columns."""
    from rich import box
    from rich.table import Table

    return Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False,
        collapse_padding=True,
    )  # fmt: skip
