"""A bar for whatever reports (what, done, total), in bytes or in pieces; a remark for total = 0."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

WIDTH = 32  # of the words before the bar
PIECES = 10_000  # a total below is of pieces, such as programs to compile: nobody waits for so few bytes


@contextmanager
def bar() -> Iterator[Callable[[str, int, int], None]]:
    """A `progress` callable drawing rich bars on stderr.

    What counts to the same total is one piece of work and one bar: a loader names each of its hundreds of tensors.
    The display starts with the first byte counted, so that bars drawn by others (huggingface_hub has its own) and
    remarks made before it are not painted over.
    """
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
    from rich.text import Text

    class Amount(DownloadColumn):
        def render(self, task) -> Text:
            return (
                super().render(task) if (task.total or 0) >= PIECES else Text(f"{task.completed:.0f}/{task.total:.0f}")
            )

    class Speed(TransferSpeedColumn):
        def render(self, task) -> Text:
            return super().render(task) if (task.total or 0) >= PIECES else Text()

    console = Console(stderr=True, highlight=False)
    words = TextColumn("  {task.description}", markup=False)
    display = Progress(words, BarColumn(24), Amount(), Speed(), console=console)
    tasks, ended = {}, set()  # by their totals

    def report(what: str, done: int, total: int) -> None:
        if total <= 0:
            console.print(f"  {what}", style="dim", markup=False, soft_wrap=True)
            return
        if total not in tasks:
            if done >= total and total in ended:
                return
            display.start()
            tasks[total] = display.add_task("", total=total)
        display.update(tasks[total], completed=min(done, total), description=_fit(what))
        if display.finished:
            end()

    def end() -> None:
        """Leave the finished bars as they are: a server goes on for days, and writes other lines below them."""
        if tasks:  # stopping a display that never started prints an empty line
            display.stop()
        for total, task in tasks.items():
            display.remove_task(task)
            ended.add(total)
        tasks.clear()

    try:
        yield report
    finally:
        end()


def _fit(what: str) -> str:
    """`what` in exactly WIDTH characters, so that the bar does not move; the end says more than the beginning."""
    return what.ljust(WIDTH) if len(what) <= WIDTH else "…" + what[1 - WIDTH :]
