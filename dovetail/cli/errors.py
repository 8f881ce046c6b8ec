"""What a person at a terminal sees when something goes wrong: one line and an exit code, not a traceback."""

import os
import sys
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


def _explain(error: Exception) -> NoReturn:
    if isinstance(error, USER_ERRORS):
        _say("error:", str(error) or type(error).__name__)
        sys.exit(2)
    _say("internal error:", f"{type(error).__name__}: {error}")
    _say("", "run again with DOVETAIL_TRACEBACK=1 to see where, and report it")
    sys.exit(1)


def _say(label: str, message: str) -> None:
    from rich.console import Console
    from rich.text import Text

    # Text, not markup: a message may hold [brackets]. soft_wrap: a piped or copied error stays on one line.
    line = Text(label, style="bold red").append(" " if label else "").append(message, style="default not bold")
    Console(stderr=True, highlight=False).print(line, soft_wrap=True)
