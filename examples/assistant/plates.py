"""Synthetic meals for training: a random meal, its picture drawn by Pillow, and its description in words.

Everything depends on the seed alone.
"""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Iterable

from PIL import Image, ImageDraw

Meal = dict[str, int]  # food -> portions

SIDE = 128  # pixels of a picture
CELLS = [(x, y) for y in (-1, 0, 1) for x in (-1, 0, 1)]  # places for a food on the plate, row by row
MAX_FOODS, MAX_PORTIONS = 2, 3
NUMBERS = {1: "one", 2: "two", 3: "three"}
PHRASES = ("I had {}", "I ate {}", "I just ate {}", "For lunch I had {}", "My breakfast was {}", "Please log {}")

Draw = ImageDraw.ImageDraw


def random_meal(seed: int, foods: Iterable[str] = ()) -> Meal:
    """Return one or two of the foods, by default of those that can be drawn, with one to three portions of each."""
    chance = random.Random(f"meal {seed}")
    eaten = chance.sample(sorted(foods or SHAPES), chance.randint(1, MAX_FOODS))
    return {food: chance.randint(1, MAX_PORTIONS) for food in eaten}


def describe(meal: Meal, seed: int) -> str:
    """Return what a user would write, such as "I had two eggs and a banana"."""
    chance = random.Random(f"words {seed}")
    parts = [_words(food, count, chance) for food, count in meal.items()]
    return chance.choice(PHRASES).format(" and ".join(parts))


def draw(meal: Meal, seed: int, side: int = SIDE) -> Image.Image:
    """Return the picture of a plate with each portion on it, at a random place and size."""
    chance, places = _arrange(meal, seed)
    image = Image.new("RGB", (side, side), chance.choice(["#b98d5f", "#8fa3ad", "#d8cfc0", "#6f5a4a"]))
    pen = ImageDraw.Draw(image)
    middle, plate = side / 2, side * 0.66  # a photo from close by: the rim is seen in the corners
    pen.ellipse(_box(middle, middle, plate), fill="#f4f4f0", outline="#c9c9c2", width=max(1, side // 100))
    for (x, y), food in places.items():
        radius = side * chance.uniform(0.11, 0.13)
        shift = side * 0.02
        across, down = (middle + each * side / 3 + chance.uniform(-shift, shift) for each in (x, y))
        SHAPES[food](pen, across, down, radius)
    return image


def caption(meal: Meal, seed: int) -> str:
    """Return what lies at each place of the picture, row by row, such as "egg - - egg - - - banana -"."""
    _, places = _arrange(meal, seed)
    return " ".join(places.get(cell, "-") for cell in CELLS)


def _arrange(meal: Meal, seed: int) -> tuple[random.Random, dict[tuple[int, int], str]]:
    """Return the picture's generator, and the food at each place that is not empty."""
    chance = random.Random(f"picture {seed}")
    portions = [food for food, count in meal.items() for _ in range(count)]
    return chance, dict(zip(chance.sample(CELLS, len(portions)), portions, strict=True))


def photo(meal: Meal, seed: int, side: int = SIDE) -> bytes:
    """Return the picture of a plate as a JPEG file."""
    file = io.BytesIO()
    draw(meal, seed, side).save(file, "JPEG", quality=88)
    return file.getvalue()


def _words(food: str, count: int, chance: random.Random) -> str:
    one, many = NAMES.get(food) or (food, food + "s")
    if food not in NAMES and food not in COUNTED:
        one, many = f"portion of {food}", f"portions of {food}"
    if count > 1:
        return f"{chance.choice([NUMBERS[count], str(count)])} {many}"
    return f"{chance.choice(['an' if one[0] in 'aeiou' else 'a', 'one', '1'])} {one}"


# --- shapes -----------------------------------------------------------------------------------------------------------


def _box(x: float, y: float, radius: float, height: float | None = None) -> tuple[float, float, float, float]:
    height = radius if height is None else height
    return x - radius, y - height, x + radius, y + height


def _disc(colour: str, spot: str = "", spot_size: float = 0.5) -> Callable[[Draw, float, float, float], None]:
    def draw_disc(pen: Draw, x: float, y: float, radius: float) -> None:
        pen.ellipse(_box(x, y, radius), fill=colour, outline="#8a8a80", width=max(1, round(radius * 0.06)))
        if spot:
            pen.ellipse(_box(x, y, radius * spot_size), fill=spot)

    return draw_disc


def _banana(pen: Draw, x: float, y: float, radius: float) -> None:
    pen.arc(_box(x, y - radius * 0.5, radius), 10, 170, fill="#f2d13c", width=max(2, round(radius * 0.5)))


def _bread(pen: Draw, x: float, y: float, radius: float) -> None:
    crust = max(1, round(radius * 0.14))
    pen.rounded_rectangle(_box(x, y, radius * 0.9), radius * 0.3, fill="#e0b878", outline="#9a6a34", width=crust)


def _carrot(pen: Draw, x: float, y: float, radius: float) -> None:
    corners = [(x - radius * 0.45, y - radius * 0.6), (x + radius * 0.45, y - radius * 0.6), (x, y + radius)]
    pen.polygon(corners, fill="#ee7f2d")
    pen.line((x, y - radius * 0.6, x, y - radius), fill="#4f9a3c", width=max(1, round(radius * 0.2)))


def _broccoli(pen: Draw, x: float, y: float, radius: float) -> None:
    pen.rectangle(_box(x, y + radius * 0.5, radius * 0.2, radius * 0.5), fill="#a6c77d")
    for dx, dy in ((-0.45, -0.1), (0.45, -0.1), (0, -0.45)):
        pen.ellipse(_box(x + dx * radius, y + dy * radius, radius * 0.5), fill="#3d8b40")


def _cookie(pen: Draw, x: float, y: float, radius: float) -> None:
    pen.ellipse(_box(x, y, radius), fill="#b97a3d")
    for dx, dy in ((-0.4, -0.3), (0.35, -0.35), (0.0, 0.15), (-0.35, 0.45), (0.45, 0.4)):
        pen.ellipse(_box(x + dx * radius, y + dy * radius, radius * 0.14), fill="#4a2a14")


NAMES = {  # of one portion and of several
    "tomato": ("tomato", "tomatoes"), "potato": ("potato", "potatoes"), "bread": ("slice of bread", "slices of bread"),
    "peach": ("peach", "peaches"), "mango": ("mango", "mangoes"), "sweet potato": ("sweet potato", "sweet potatoes"),
    "cheese pizza": ("slice of cheese pizza", "slices of cheese pizza"), "coffee": ("cup of coffee", "cups of coffee"),
    "milk": ("glass of milk", "glasses of milk"), "orange juice": ("glass of orange juice", "glasses of orange juice"),
}  # fmt: skip
COUNTED = {  # their plural ends in s; foods that are not listed here are counted in portions
    "apple", "apricot", "avocado", "bagel", "banana", "burger", "carrot", "cookie", "croissant", "cucumber", "egg",
    "kiwi", "orange", "pancake", "pear", "pork chop", "steak", "zucchini",
}  # fmt: skip
SHAPES: dict[str, Callable[[Draw, float, float, float], None]] = {
    "egg": _disc("#fffdf5", "#f6b73c"), "tomato": _disc("#d7352b", "#3d8b40", 0.22), "orange": _disc("#f59a23"),
    "cucumber": _disc("#5fa344", "#d5ecc2", 0.8), "banana": _banana, "bread": _bread, "carrot": _carrot,
    "broccoli": _broccoli, "cookie": _cookie,
}  # fmt: skip
