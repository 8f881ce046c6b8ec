"""Errors on the command line: one line and exit code 2 for a UserError, a traceback and 1 for anything else."""

import sys
import warnings
from collections.abc import Callable
from typing import NoReturn

from dovetail.core.errors import report_failure


def run(command: Callable[[], object]) -> None:
    """Call `command` and exit with 2 for a user's error, 1 for a fault of Dovetail, 130 for ctrl-C."""
    try:
        command()
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        _explain(error)


def _explain(error: Exception) -> NoReturn:
    code, line = report_failure(error)
    label, _, message = line.partition(": ")
    _say(f"{label}:", message)
    # a library's unfinished write would otherwise print a warning after the error
    warnings.filterwarnings("ignore", message="coroutine .* was never awaited", category=RuntimeWarning)
    sys.exit(code)


def _say(label: str, message: str) -> None:
    from rich.console import Console
    from rich.text import Text

    from dovetail.core.printable import printable

    # Text, not markup: a message may hold [brackets]. soft_wrap: a piped or copied error stays on one line.
    line = Text(label, style="bold red").append(" " if label else "")
    line.append(printable(message), style="default not bold")
    Console(stderr=True, highlight=False).print(line, soft_wrap=True)
