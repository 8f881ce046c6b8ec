"""Print safely at a terminal: strip control characters from foreign text, and define the log level NOTE."""

from __future__ import annotations

import logging
import re

NOTE = logging.WARNING + 1  # shown like a warning, for news that is not a problem
logging.addLevelName(NOTE, "NOTE")

# CSI (colours, cursor moves), then OSC, DCS, SOS, PM and APC with all that they carry, then two-character sequences.
ESCAPE = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
    r"|(?:\x1b[\]PX^_]|[\x9d\x90\x98\x9e\x9f])[^\x07\x1b\x9c\n]*(?:\x07|\x1b\\|\x9c)?"
    r"|\x1b[ -/]*[0-~]"
)
OVERWRITTEN = re.compile(r"[^\n]*\r(?=[^\n])")  # a progress bar's earlier states
# C0 and C1 without tab and newline, and the characters that reorder a line
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """Return `text` without escape sequences and control characters; tabs and newlines stay.

    Of a line that a carriage return overwrites, the last state is kept.
    """
    return CONTROL.sub("", OVERWRITTEN.sub("", ESCAPE.sub("", text).replace("\r\n", "\n")))
