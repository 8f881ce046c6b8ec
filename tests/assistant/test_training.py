"""Test the parts of the assistant's training: synthetic meals and their pictures, rewards and the success rate."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from dovetail.io.chat import has_images
from dovetail.io.images.processor import read_processor
from dovetail.io.images.prompt import encode_images
from dovetail.io.load import load
from examples.assistant.episode import MealEnvironment, new_tools, play, record, success_rate
from examples.assistant.evaluate import evaluate
from examples.assistant.foods import FoodTable
from examples.assistant.lessons import lesson, meal_exchange
from examples.assistant.plates import SHAPES, describe, draw, random_meal
from examples.assistant.rewards import right_amount, right_food, success, well_formed
from examples.assistant.tiny_vlm import tiny_vlm
from examples.assistant.train import train
from examples.assistant.turn import SYSTEM

pytestmark = pytest.mark.slow


def caller(*made: dict):
    """Return a model that makes these log_meal calls, and then answers."""

    def ask(episodes: list[list[dict]], tools: list[dict]) -> list[dict]:
        assert tools[0]["function"]["name"] == "log_meal"
        if episodes[0][-1]["role"] == "tool":
            return [{"role": "assistant", "content": "Done."}] * len(episodes)
        calls = [{"id": f"c{i}", "function": {"name": "log_meal", "arguments": each}} for i, each in enumerate(made)]
        return [{"role": "assistant", "content": "", "tool_calls": calls}] * len(episodes)

    return ask


def test_meals_depend_on_the_seed_alone():
    meals = [random_meal(seed) for seed in range(200)]
    assert meals == [random_meal(seed) for seed in range(200)] and len({str(meal) for meal in meals}) > 100
    assert {food for meal in meals for food in meal} == set(SHAPES)
    assert {count for meal in meals for count in meal.values()} == {1, 2, 3}
    assert all(FoodTable.read().get(food) for food in SHAPES)
    assert draw(meals[0], 3).tobytes() == draw(meals[0], 3).tobytes() != draw(meals[0], 4).tobytes()
    assert draw({"egg": 1}, 0, side=96).size == (96, 96)
    sentences = {describe({"egg": 2, "bread": 1}, seed) for seed in range(200)}
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
    (episode,) = play(caller(*made), [[{"role": "user", "content": "two eggs and a banana"}]])
    given = [reward([episode], meal=[meal])[0] for reward in (well_formed, right_food, right_amount, success)]
    assert given == pytest.approx(rewards)


def test_the_success_rate_is_of_whole_meals():
    records = [record(seed, picture=seed % 2 == 0) for seed in range(40)]
    assert records[0]["images"][0][:2] == b"\xff\xd8" and "images" not in records[1]
    first = records[1]["meal"]
    rate = success_rate(caller(*({"food": food, "amount": count} for food, count in first.items())), records)
    assert rate == sum(each["meal"] == first for each in records) / 40 > 0
    assert MealEnvironment({}, None).tools[0]("egg", 2)["grams"] == 100  # type: ignore[arg-type]


def test_half_of_the_meals_in_lessons_have_a_mistake():
    chance = random.Random(0)
    tools = {tool.name: tool for tool in new_tools().tools}
    meals = [random_meal(seed) for seed in range(400)]
    right = success([named(meal_exchange(meal, chance, tools)) for meal in meals], meals)
    assert 0.44 < sum(right) / 400 < 0.58
    chats = [lesson(seed) for seed in range(60)]
    called = {call["function"]["name"] for chat in chats for m in chat["messages"] for call in m.get("tool_calls", ())}
    assert called == {"log_meal", "search_food", "day_summary"}
    assert all(has_images(chat["messages"]) == ("images" in chat) for chat in chats)


def named(messages: list[dict]) -> list[dict]:
    """Give calls and results the ids that rewards join them by."""
    calls = [call | {"id": f"c{i}"} for i, call in enumerate(messages[0]["tool_calls"])]
    results = [message | {"tool_call_id": f"c{i}"} for i, message in enumerate(messages[1:-1])]
    return [messages[0] | {"tool_calls": calls}, *results, messages[-1]]


def test_the_tiny_model_is_of_smolvlms_shape_and_its_template_skips_system_messages(tmp_path):
    folder = tiny_vlm(tmp_path / "model", [lesson(seed) for seed in range(30)])
    model, meal = load(folder), record(0, picture=True)
    assert model.config.vision and model.tokenizer
    processor = read_processor(folder, model.config.vision, model.tokenizer)
    system = {"role": "system", "content": SYSTEM}
    prompts = [
        encode_images(model.tokenizer, processor, messages, meal["images"], [tool.schema for tool in new_tools().tools])
        for messages in (meal["messages"], [system, *meal["messages"]])
    ]
    assert prompts[0].tokens == prompts[1].tokens and 20 < len(prompts[0].tokens) < 60
    assert (np.asarray(prompts[0].tokens) == processor.image_id).sum() == 9


@pytest.mark.thorough
def test_training_raises_the_success_rate(tmp_path):
    """The training as `make demo` runs it: minutes."""
    train(tmp_path)
    before, after = (evaluate(tmp_path / name, meals=100) for name in ("before", "after"))
    assert after["words"] > before["words"] + 0.1
    assert after["pictures"] > before["pictures"] - 0.1  # 40 steps teach it little about counting in pictures
