"""What a person at a terminal sees when something goes wrong: one line and an exit code, not a traceback."""

import sys
import warnings
from collections.abc import Callable
from typing import NoReturn

from dovetail.core.errors import report_failure


def run(command: Callable[[], object]) -> None:
    """Call `command`, turning exceptions into messages: exit 2 for a user's error, 1 for ours, 130 for ctrl-C."""
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
    # what the error broke off (a library's write under way) is collected at the exit, and would have the last word
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
