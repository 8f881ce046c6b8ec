"""A bar for whatever reports (what, done, total), in bytes; a remark for total = 0."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

WIDTH = 32  # of the words before the bar


@contextmanager
def bar() -> Iterator[Callable[[str, int, int], None]]:
    """A `progress` callable drawing rich bars on stderr.

    What counts to the same total is one piece of work and one bar: a loader names each of its hundreds of tensors.
    The display starts with the first byte counted, so that bars drawn by others (huggingface_hub has its own) and
    remarks made before it are not painted over.
    """
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    console = Console(stderr=True, highlight=False)
    words = TextColumn("  {task.description}", markup=False)
    display = Progress(words, BarColumn(24), DownloadColumn(), TransferSpeedColumn(), console=console)
    tasks = {}

    def report(what: str, done: int, total: int) -> None:
        if total <= 0:
            console.print(f"  {what}", style="dim", markup=False, soft_wrap=True)
            return
        if total not in tasks:
            display.start()
            tasks[total] = display.add_task("", total=total)
        display.update(tasks[total], completed=min(done, total), description=_fit(what))

    try:
        yield report
    finally:
        if tasks:  # stopping a display that never started prints an empty line
            display.stop()


def _fit(what: str) -> str:
    """`what` in exactly WIDTH characters, so that the bar does not move; the end says more than the beginning."""
    return what.ljust(WIDTH) if len(what) <= WIDTH else "…" + what[1 - WIDTH :]
