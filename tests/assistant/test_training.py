"""Test the parts of the assistant's training: synthetic meals and their pictures, rewards and the success rate."""

from __future__ import annotations

import itertools
import json

import pytest

from examples.assistant.episode import MealEnvironment, play, record, success_rate
from examples.assistant.foods import FoodTable
from examples.assistant.plates import SHAPES, describe, draw, random_meal
from examples.assistant.rewards import right_amount, right_food, success, well_formed


def caller(*made: dict):
    """Return a model that makes these log_meal calls, and then answers."""

    def ask(messages: list[dict], tools: list[dict]) -> dict:
        assert tools[0]["function"]["name"] == "log_meal"
        if messages[-1]["role"] == "tool":
            return {"role": "assistant", "content": "Done."}
        calls = [
            {"id": f"c{i}", "function": {"name": "log_meal", "arguments": json.dumps(a)}} for i, a in enumerate(made)
        ]
        return {"role": "assistant", "content": "", "tool_calls": calls}

    return ask


def test_meals_depend_on_the_seed_alone():
    meals = [random_meal(seed) for seed in range(200)]
    assert meals == [random_meal(seed) for seed in range(200)] and len({str(meal) for meal in meals}) > 100
    assert {food for meal in meals for food in meal} == set(SHAPES)
    assert {count for meal in meals for count in meal.values()} == {1, 2, 3}
    assert all(FoodTable.read().get(food) for food in SHAPES)
    assert draw(meals[0], 3).tobytes() == draw(meals[0], 3).tobytes() != draw(meals[0], 4).tobytes()
    assert draw({"egg": 1}, 0, side=96).size == (96, 96)
    sentences = {describe({"egg": 2, "bread": 1}, seed) for seed in range(50)}
    assert "I had two eggs and a slice of bread" in sentences


def test_pictures_show_foods_and_counts():
    pictures = {food: draw({food: 1}, 5) for food in SHAPES}
    for one, other in itertools.combinations(pictures, 2):
        assert pictures[one].tobytes() != pictures[other].tobytes(), (one, other)
    red = [sum(pixel == (0xD7, 0x35, 0x2B) for pixel in pixels(draw({"tomato": n}, 9))) for n in (1, 2, 3)]
    assert 1.6 < red[1] / red[0] < 2.5 and 2.4 < red[2] / red[0] < 3.7  # portions do not overlap


def pixels(image) -> list[tuple[int, ...]]:
    data = image.tobytes()
    return [tuple(data[i : i + 3]) for i in range(0, len(data), 3)]


@pytest.mark.parametrize(
    ("made", "rewards"),
    [
        ([{"food": "egg", "amount": 2}, {"food": "bananas", "amount": 120, "unit": "g"}], [1, 1, 1, 1]),
        ([{"food": "egg", "amount": 3}, {"food": "banana", "amount": 1}], [1, 1, 0.5, 0]),
        ([{"food": "egg", "amount": 2}], [1, 2 / 3, 2 / 3, 0]),
        ([{"food": "egg", "amount": 2}, {"food": "unicorn", "amount": 1}], [0.5, 2 / 3, 2 / 3, 0]),
        ([{"food": "egg", "amount": 2}] * 2 + [{"food": "banana", "amount": 1}], [1, 0.8, 0.8, 0]),  # logged twice
        ([{"food": "egg"}], [0, 0, 0, 0]),
        ([], [0, 0, 0, 0]),
    ],
)
def test_rewards_grade_the_calls(made, rewards):
    meal = {"egg": 2, "banana": 1}
    episode = play(caller(*made), [{"role": "user", "content": "two eggs and a banana"}])
    given = [reward([episode], meal=[meal])[0] for reward in (well_formed, right_food, right_amount, success)]
    assert given == pytest.approx(rewards)


def test_the_success_rate_is_of_whole_meals():
    records = [record(seed) for seed in range(40)]
    assert [message["role"] for message in records[0]["messages"]] == ["system", "user"]
    first = records[0]["meal"]
    rate = success_rate(caller(*({"food": food, "amount": count} for food, count in first.items())), records)
    assert rate == sum(each["meal"] == first for each in records) / 40 > 0
    assert MealEnvironment({}, None).tools[0]("egg", 2)["grams"] == 100  # type: ignore[arg-type]
