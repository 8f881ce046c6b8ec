"""The diary: the meals of each day and their totals."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from datetime import datetime
from typing import Any

from examples.assistant.foods import NUTRIENTS, Food

FIELDS = ("id", "day", "time", "food", "grams", *NUTRIENTS)


class Diary:
    """Keep meals in a database.

    Args:
        database: The connection of database.connect.
        now: Returns the present time; tests replace it.
        changed: Called with the day of each change.
    """

    def __init__(
        self,
        database: sqlite3.Connection,
        now: Callable[[], datetime] = datetime.now,
        changed: Callable[[str], None] = lambda day: None,
    ) -> None:
        self._database, self._now, self.changed = database, now, changed

    @property
    def today(self) -> str:
        """Return the date of today, such as 2026-11-18."""
        return self._now().date().isoformat()

    def add(self, food: Food, grams: float) -> dict[str, Any]:
        """Log a food as eaten now, and return its entry."""
        now = self._now()
        values = {"day": now.date().isoformat(), "time": now.strftime("%H:%M"), "food": food.name, "grams": grams}
        values |= food.nutrients(grams)
        names, marks = ", ".join(values), ", ".join("?" * len(values))
        made = self._database.execute(f"INSERT INTO meals ({names}) VALUES ({marks})", tuple(values.values()))
        self.changed(values["day"])
        return {"id": made.lastrowid, **values}

    def delete(self, id: int) -> dict[str, Any] | None:
        """Delete an entry and return it, or None if there is none with this id."""
        row = self._database.execute(f"SELECT {', '.join(FIELDS)} FROM meals WHERE id = ?", (id,)).fetchone()
        if row is None:
            return None
        self._database.execute("DELETE FROM meals WHERE id = ?", (id,))
        self.changed(row["day"])
        return dict(row)

    def day(self, day: str = "") -> dict[str, Any]:
        """Return the entries of a day, by default today's, and their totals."""
        day = day or self.today
        query = f"SELECT {', '.join(FIELDS)} FROM meals WHERE day = ? ORDER BY id"
        entries = [dict(row) for row in self._database.execute(query, (day,))]
        totals = {each: round(sum(entry[each] for entry in entries), 1) for each in NUTRIENTS}
        return {"day": day, "today": self.today, "entries": entries, "totals": totals}
