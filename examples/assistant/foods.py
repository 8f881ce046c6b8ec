"""The food table: nutrition facts per 100 g, found by name."""

from __future__ import annotations

import csv
import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

BUNDLED = Path(__file__).parent / "foods.csv"
NUTRIENTS = ("kcal", "protein_g", "carbohydrate_g", "fat_g")


@dataclass(frozen=True)
class Food:
    """Hold the facts of one food: nutrients per 100 g, and the weight of a usual portion."""

    name: str
    kcal: float
    protein_g: float
    carbohydrate_g: float
    fat_g: float
    portion_g: float

    def nutrients(self, grams: float) -> dict[str, float]:
        """Return the nutrients of some grams of it."""
        return {each: round(getattr(self, each) * grams / 100, 1) for each in NUTRIENTS}


class FoodTable:
    """Find foods by name."""

    def __init__(self, foods: Iterable[Food]) -> None:
        self.foods = {_words(food.name): food for food in foods}

    @classmethod
    def read(cls, path: Path = BUNDLED) -> FoodTable:
        """Read a table in the form of foods.csv."""
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
        rows = csv.DictReader(lines)
        return cls(Food(row.pop("name"), **{key: float(value) for key, value in row.items()}) for row in rows)

    def get(self, name: str) -> Food | None:
        """Return the food of this name, in the singular or the plural."""
        return self.foods.get(_words(name))

    def search(self, query: str, limit: int = 5) -> list[Food]:
        """Return the foods whose names are most like the query, best first."""
        words = set(_words(query))
        scores = {key: _likeness(words, key) for key in self.foods}
        best = sorted((key for key in scores if scores[key] > 0.6), key=lambda key: (-scores[key], key))
        return [self.foods[key] for key in best[:limit]]


def _words(name: str) -> tuple[str, ...]:
    return tuple(_singular(word) for word in name.casefold().replace(",", " ").split())


def _singular(word: str) -> str:
    for ending, single in (("ies", "y"), ("oes", "o"), ("ches", "ch")):
        if word.endswith(ending) and len(word) > len(ending) + 1:
            return word.removesuffix(ending) + single
    return word[:-1] if word.endswith("s") and not word.endswith("ss") and len(word) > 3 else word


def _likeness(query: set[str], name: tuple[str, ...]) -> float:
    """Return how well the words of the query match a name: 1 for each word in common, less for similar ones."""
    similar = [max((difflib.SequenceMatcher(None, a, b).ratio() for b in name), default=0.0) for a in query]
    return sum(each for each in similar if each > 0.7)
