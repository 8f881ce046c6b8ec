"""Text that ships with the package: small English stories written by a grammar, the same on every machine.

For tests, the tour and a first run. Names, pronouns, numbers and causes hold within a story, so there is something to
learn beyond spelling; being generated, it carries nobody's rights.
"""

from __future__ import annotations

import difflib
import random
from collections.abc import Callable, Iterator, Sequence

from dovetail.core.errors import UserError

VERSION = 1  # part of a cache's fingerprint: raise it when a story changes
DOCUMENTS = 6000  # of a corpus named without a number; about 3 MB
BYTES = 485  # of a document, on average: for the progress bar

ANIMALS = {
    "fox": "clever", "hare": "quick", "bear": "strong", "owl": "wise", "mouse": "small", "crow": "proud",
    "tortoise": "slow", "wolf": "hungry", "goat": "stubborn", "frog": "cheerful", "hen": "careful", "badger": "grumpy",
    "otter": "playful", "sheep": "gentle", "donkey": "patient", "cat": "curious",
}  # fmt: skip
NAMES = {
    "Ada": "she", "Bruno": "he", "Clara": "she", "Dimitri": "he", "Elsa": "she", "Felix": "he", "Greta": "she",
    "Hugo": "he", "Ines": "she", "Jonas": "he", "Kaya": "she", "Luca": "he", "Mira": "she", "Nils": "he", "Olga": "she",
    "Pavel": "he", "Rosa": "she", "Sami": "he", "Tilda": "she", "Viktor": "he",
}  # fmt: skip
HIS, HIM = {"she": "her", "he": "his"}, {"she": "her", "he": "him"}
PLACES = {
    "forest": "under an old oak", "village": "behind the baker's shop", "valley": "beside a narrow stream",
    "castle": "in a tower of stone", "harbour": "above the fishing boats", "meadow": "among the tall flowers",
    "mountain": "near the frozen lake", "desert": "by the only well",
}  # fmt: skip
FOODS = {
    "apple": "apples", "pear": "pears", "berry": "berries", "nut": "nuts", "loaf": "loaves", "fish": "fish",
    "egg": "eggs", "plum": "plums", "cherry": "cherries", "carrot": "carrots",
}  # fmt: skip
THINGS = ["lantern", "silver key", "wooden flute", "red kite", "broken clock", "copper bell", "map", "blue cup"]
WEATHER = {"rain": "wet", "snow": "cold", "wind": "loud", "sun": "warm", "fog": "grey", "frost": "white"}
TIMES = ["One morning", "One evening", "Long ago", "Last winter", "On the first day of spring", "Late one night"]
NUMBERS = "no one two three four five six seven eight nine ten eleven twelve".split()
TRADES = {
    "baker": ("flour", "bread"), "weaver": ("wool", "cloth"), "smith": ("iron", "a plough"),
    "potter": ("clay", "a jug"), "carpenter": ("wood", "a chair"), "brewer": ("barley", "beer"),
    "tailor": ("cloth", "a coat"),
}  # fmt: skip
SOUNDS = {
    "sheep": ("wool", "baa"), "cow": ("horns", "moo"), "duck": ("a flat bill", "quack"), "dog": ("a wet nose", "woof"),
    "cat": ("soft paws", "meow"), "rooster": ("a red comb", "cock-a-doodle-doo"), "bee": ("thin wings", "buzz"),
    "snake": ("no legs", "hiss"), "frog": ("long legs", "croak"), "crow": ("black feathers", "caw"),
}  # fmt: skip
ROADS = ["bridge", "mill", "chapel", "orchard", "crossroads", "inn", "quarry", "ferry", "gate", "tower"]


class Dice:
    """Choices from `random()` alone: the one method whose numbers Python promises never to change."""

    def __init__(self, name: str):
        self._random = random.Random(name).random

    def below(self, count: int) -> int:
        return int(self._random() * count)

    def pick(self, items: Sequence[str]) -> str:
        return items[self.below(len(items))]

    def some(self, items: Sequence[str], count: int) -> list[str]:
        left = list(items)
        return [left.pop(self.below(len(left))) for _ in range(count)]


def help_story(dice: Dice) -> str:
    first, second = dice.some(list(ANIMALS), 2)
    (one, other), place, thing = dice.some(list(NAMES), 2), dice.pick(list(PLACES)), dice.pick(THINGS)
    he, she = NAMES[one], NAMES[other]
    weather = dice.pick(list(WEATHER))
    kind = dice.below(2) == 0
    lines = [
        f"{dice.pick(TIMES)} a {ANIMALS[first]} {first} named {one} walked home to the {place}, where {he} lived "
        f"{PLACES[place]}.",
        f"The {weather} made the road {WEATHER[weather]}, and {one} lost {HIS[he]} {thing}.",
        f'"Have you seen my {thing}?" {he} asked {other}, the {second}.',
    ]
    if kind:
        lines += [
            f'"No," said {other}, "but I will help you look." They looked until it was dark, and {she} found the '
            f"{thing} {PLACES[place]}.",
            f"{one} thanked {HIM[she]}. Since that day the {first} and the {second} have been friends.",
            "Moral: help that is given freely comes back.",
        ]
    else:
        lines += [
            f'"That is your trouble and not mine," said {other}, and {she} went to sleep.',
            f"The next day {other} lost {HIS[she]} way in the {weather}. {one} heard {HIM[she]} call, but {he} was "
            f"busy looking for the {thing}.",
            "Moral: who helps nobody waits alone.",
        ]
    return " ".join(lines)


def count_story(dice: Dice) -> str:
    name, other = dice.some(list(NAMES), 2)
    he, food = NAMES[name], dice.pick(list(FOODS))
    have, more = 2 + dice.below(5), 1 + dice.below(5)
    gone = 1 + dice.below(have + more - 1)

    def some(count: int) -> str:
        return f"{NUMBERS[count]} {food if count == 1 else FOODS[food]}"

    return (
        f"{name} had {some(have)} in {HIS[he]} basket. On the way to market {he} found {NUMBERS[more]} more, so now "
        f"{he} had {some(have + more)}. {other} was hungry, and {name} gave {HIM[NAMES[other]]} {NUMBERS[gone]}. "
        f"How many were left? {have + more} - {gone} = {have + more - gone}, so {he} came to market with "
        f"{some(have + more - gone)}."
    )


def road_story(dice: Dice) -> str:
    name, stops = dice.pick(list(NAMES)), dice.some(ROADS, 3 + dice.below(3))
    he, thing, weather = NAMES[name], dice.pick(THINGS), dice.pick(list(WEATHER))
    there = ", then the ".join(stops)
    back = ", then the ".join(reversed(stops))
    return (
        f"{name} carried a {thing} to the town. {he.capitalize()} passed the {there}. In the town {he} sold the "
        f"{thing} for {NUMBERS[2 + dice.below(10)]} coins. Then the {weather} came, and the way back was "
        f"{WEATHER[weather]}. {he.capitalize()} went home by the same road: {he} passed the {back}, and was home "
        "before night."
    )


def trade_story(dice: Dice) -> str:
    first, second = dice.some(list(TRADES), 2)
    name, other = dice.some(list(NAMES), 2)
    (material, made), (needs, gives) = TRADES[first], TRADES[second]
    return (
        f"{name} the {first} makes {made} from {material}. {other} the {second} makes {gives} from {needs}. "
        f'"I have {made}," said {name}, "but I need {gives}." "And I have {gives}," said {other}, "but I need {made}." '
        f"So the {first} gave {made} to {other}, the {second} gave {gives} to {name}, and both went home content. "
        f"The next week {name} bought more {material}, and {other} bought more {needs}."
    )


def riddles(dice: Dice) -> str:
    asker, other = dice.some(list(NAMES), 2)
    lines = [f"{asker} asked riddles and {other} answered them."]
    for animal in dice.some(list(SOUNDS), 2 + dice.below(2)):
        has, says = SOUNDS[animal]
        lines.append(f'"I have {has} and I say {says}. What am I?" "You are a {animal}," said {other}.')
    lines.append(f'"You know them all," said {asker}.')
    return "\n".join(lines)


def letter(dice: Dice) -> str:
    writer, reader = dice.some(list(NAMES), 2)
    place, weather, food = dice.pick(list(PLACES)), dice.pick(list(WEATHER)), dice.pick(list(FOODS))
    days, animal = 2 + dice.below(9), dice.pick(list(ANIMALS))
    return (
        f"Dear {reader},\nI have been in the {place} for {NUMBERS[days]} days, and my room is {PLACES[place]}. There "
        f"is much {weather} here, so everything is {WEATHER[weather]}. Yesterday a {ANIMALS[animal]} {animal} came to "
        f"my door and I gave it some {FOODS[food]}. Today the {animal} came again, for it likes {FOODS[food]}. "
        f"Come and see the {place} before the {weather} ends.\nYour friend, {writer}"
    )


STORIES: tuple[Callable[[Dice], str], ...] = (help_story, count_story, road_story, trade_story, riddles, letter)
CORPORA = {"fables": STORIES}


def size(name: str) -> int:
    """How many documents a corpus has: 'fables', or 'fables:500' for its first 500."""
    corpus, _, count = name.partition(":")
    if corpus not in CORPORA:
        near = difflib.get_close_matches(corpus, CORPORA, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "for files, set format to what they are, or leave it out"
        raise UserError(f"expected a built-in corpus ({', '.join(CORPORA)}), got {name!r}; {hint}")
    if count and not (count.isdecimal() and int(count) > 0):
        raise UserError(f"expected a number of documents after the colon, as fables:500; got {name!r}")
    return int(count) if count else DOCUMENTS


def documents(name: str, start: int, stop: int) -> Iterator[str]:
    """Documents start..stop-1. Each depends on its own number alone: one or two small stories on a page."""
    corpus = name.partition(":")[0]
    for index in range(start, stop):
        dice = Dice(f"{corpus} {index}")
        stories = [dice_story(dice, CORPORA[corpus]) for _ in range(1 + dice.below(2))]
        yield "\n\n".join(stories) + "\n"


def dice_story(dice: Dice, stories: Sequence[Callable[[Dice], str]]) -> str:
    return stories[dice.below(len(stories))](dice)
