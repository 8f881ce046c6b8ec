"""Records that cannot be used: all of them are named at once, or left out and listed where a recipe says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from dovetail.core.errors import UserError

T = TypeVar("T")
MOST = 20  # that an error lists; reading stops there


class BadRecords:
    """Collects the errors of one source. `skip`: data.skip_bad_records."""

    def __init__(self, skip: bool, name: str):
        self.skip, self.name, self.errors = skip, name, []

    def read(self, work: Callable[[], T]) -> T | None:
        """Return what `work` makes of a record; None where the record is bad, which is kept as an error."""
        try:
            return work()
        except ValueError as error:
            self.errors.append(str(error))
        if not self.skip and len(self.errors) == MOST:
            self.check()
        return None

    def check(self) -> None:
        """Raise a ValueError that names every bad record, unless they are to be left out."""
        if self.skip or not self.errors:
            return
        hint = "mend them, or set data.skip_bad_records=true to leave them out"
        if len(self.errors) == 1:
            raise UserError(f"{self.errors[0]} (or set data.skip_bad_records=true to leave the record out)")
        least = "at least " if len(self.errors) == MOST else ""
        listed = "\n".join(f"  {error}" for error in self.errors)
        raise UserError(f"{least}{len(self.errors)} records of {self.name} cannot be used: {hint}\n{listed}")
