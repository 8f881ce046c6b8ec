"""What a person at a terminal sees when something goes wrong: one line and an exit code, not a traceback."""

import os
import sys
import warnings
from collections.abc import Callable
from typing import NoReturn

# ValueError, OSError and ImportError are how the package tells a user that the input, the machine or the installation
# is at fault. Everything else is a fault of ours.
USER_ERRORS = (ValueError, OSError, ImportError)


def run(command: Callable[[], object]) -> None:
    """Call `command`, turning exceptions into messages: exit 2 for a user's error, 1 for ours, 130 for ctrl-C."""
    try:
        command()
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        if os.environ.get("DOVETAIL_TRACEBACK") == "1":
            raise
        _explain(error)


def outcome(error: BaseException) -> tuple[int, str]:
    """(exit code, one line) for what went wrong."""
    if isinstance(error, KeyboardInterrupt):
        return 130, "stopped"
    if isinstance(error, SystemExit):  # train.guard.stop.Stopped
        return error.code if isinstance(error.code, int) else 1, str(error)
    if isinstance(error, USER_ERRORS):
        return 2, f"error: {str(error) or type(error).__name__}"
    why = "run again with DOVETAIL_TRACEBACK=1 to see where, and report it"
    return 1, f"internal error: {type(error).__name__}: {error}; {why}"


def last_words(error: BaseException) -> tuple[int, str]:
    """The outcome for a process that others wait for; the traceback is shown here, where it was asked for."""
    if os.environ.get("DOVETAIL_TRACEBACK") == "1":
        import traceback

        traceback.print_exception(error)
    return outcome(error)


def _explain(error: Exception) -> NoReturn:
    code, line = outcome(error)
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
