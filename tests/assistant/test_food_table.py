"""The bundled food table, and how foods are found in it."""

from __future__ import annotations

import pytest

from examples.assistant.foods import FoodTable

TABLE = FoodTable.read()


def test_the_energy_of_each_food_agrees_with_its_nutrients():
    assert len(TABLE.foods) >= 60
    for food in TABLE.foods.values():
        energy = 4 * food.protein_g + 4 * food.carbohydrate_g + 9 * food.fat_g
        assert abs(energy - food.kcal) <= max(0.2 * food.kcal, 15), food
        assert food.protein_g + food.carbohydrate_g + food.fat_g <= 100 and 5 <= food.portion_g <= 500


@pytest.mark.parametrize(
    ("name", "found"),
    [("Eggs", "egg"), ("potatoes", "potato"), ("strawberry", "strawberries"), ("peaches", "peach"), ("PEAS", "peas"),
     ("french fry", "french fries"), ("hummus", "hummus"), ("couscous", None), ("", None)],
)  # fmt: skip
def test_foods_are_found_in_the_singular_and_the_plural(name, found):
    food = TABLE.get(name)
    assert (food and food.name) == found


def test_search_finds_similar_names():
    assert TABLE.search("chiken")[0].name == "chicken breast"
    assert {"rice", "brown rice"} <= {food.name for food in TABLE.search("rice")}
    assert TABLE.search("xyzzy") == []
