"""The process's umask: what files written through a temporary one (mode 0600) must be given back."""

from __future__ import annotations

import os


def umask() -> int:
    """It can only be read by setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
