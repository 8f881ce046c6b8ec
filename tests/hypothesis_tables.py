"""Spare hypothesis the tables that it makes when it runs for the first time in a folder.

Which characters UTF-8 encodes takes it 7 seconds, one by one. The constants of the package's sources, which it would
draw now and then, take 4 more, and make the examples depend on the modules that other tests have imported.
"""

from __future__ import annotations

import functools


@functools.cache
def share() -> None:
    """Let hypothesis know what UTF-8 encodes, and draw no constants of the package's sources."""
    from hypothesis.internal import charmap
    from hypothesis.internal.conjecture import providers
    from hypothesis.internal.intervalsets import IntervalSet

    asked = charmap.intervals_from_codec
    utf8 = IntervalSet([(0, 0xD7FF), (0xE000, 0x10FFFF)]), IntervalSet([])  # all but the surrogates; they all come back
    charmap.intervals_from_codec = lambda codec: utf8 if codec == "utf-8" else asked(codec)
    providers._get_local_constants = lambda: providers._local_constants
