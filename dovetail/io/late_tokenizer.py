"""A tokenizer that is read when it is first used: an engine behind a server may never need it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

from dovetail.io.tokenizer import Tokenizer


class LateTokenizer(Tokenizer):
    """Take no memory until an attribute besides `eos_ids` is used.

    Args:
        read: Returns the tokenizer.
        eos_ids: Its `eos_ids`.
    """

    def __init__(self, read: Callable[[], Tokenizer], eos_ids: Iterable[int]):
        self._read, self._lock, self.eos_ids = read, threading.Lock(), tuple(eos_ids)

    def __getattr__(self, name: str) -> Any:
        """Read the tokenizer for an attribute that is not here yet."""
        if name.startswith("__") or "_lock" not in self.__dict__:  # as copies are made
            raise AttributeError(name)
        with self._lock:
            if "backend" not in self.__dict__:
                self.__dict__ |= {**vars(self._read()), **self.__dict__}
        return object.__getattribute__(self, name)
