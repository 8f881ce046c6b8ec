"""The tools: typed functions by which a model reads and writes the diary, in the app and in training alike.

Arguments that do not fit a function's types, and names that do not exist, come back to the model as an error text.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

from dovetail.tune.rl.tools import Tool
from examples.assistant.diary import Diary
from examples.assistant.foods import FoodTable

MAX_GRAMS = 5000  # of one entry


class ToolError(ValueError):
    """Say which argument is wrong, for the model."""


class FoodTools:
    """The four tools over one diary and one food table."""

    def __init__(self, diary: Diary, foods: FoodTable) -> None:
        self._diary, self._foods = diary, foods

    @property
    def functions(self) -> tuple[Callable[..., Any], ...]:
        """Return the tools as functions."""
        return self.log_meal, self.search_food, self.day_summary, self.delete_entry

    def log_meal(self, food: str, amount: float, unit: Literal["portion", "g"] = "portion") -> dict[str, Any]:
        """Write a food that the user ate into the diary.

        food: one food, in English, such as egg
        amount: how many portions, or how many grams
        unit: portion (one egg, one slice, one cup) or g
        """
        found = self._foods.get(food)
        if found is None:
            names = ", ".join(each.name for each in self._foods.search(food))
            raise ToolError(f"no food is called {food!r}" + (f"; similar: {names}" if names else "; use search_food"))
        grams = amount * found.portion_g if unit == "portion" else amount
        if not (math.isfinite(grams) and 0 < grams <= MAX_GRAMS):
            raise ToolError(f"the amount must be over 0 and at most {MAX_GRAMS} g, got {grams:g} g")
        entry = self._diary.add(found, round(grams, 1))
        return {key: entry[key] for key in ("id", "food", "grams", "kcal")}

    def search_food(self, query: str) -> list[dict[str, Any]]:
        """Find foods in the table, with nutrients per 100 g and the weight of a portion.

        query: a part of the food's name
        """
        return [vars(food) for food in self._foods.search(query)]

    def day_summary(self) -> dict[str, Any]:
        """Return the meals of today and their totals."""
        return self._diary.day()

    def delete_entry(self, id: int) -> dict[str, Any]:
        """Delete an entry of the diary.

        id: the entry's id, from log_meal or day_summary
        """
        entry = self._diary.delete(id)
        if entry is None:
            ids = ", ".join(str(each["id"]) for each in self._diary.day()["entries"])
            raise ToolError(f"no entry has the id {id}" + (f"; today's are {ids}" if ids else "; today has none"))
        return {"deleted": entry}

    @property
    def tools(self) -> list[Tool]:
        """Return the tools with their descriptions."""
        return [Tool.of(function) for function in self.functions]
