"""Recipes: parsing, refusals, layering, overrides, and writing them back."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
from refusals import refuses

from dovetail.core import recipe, yaml_text
from dovetail.core.choice import require
from dovetail.core.errors import RecipeError
from dovetail.core.recipe import Count


@dataclass(frozen=True)
class Oven:
    degrees: int = 200
    fan: bool | None = None

    def __post_init__(self):
        require(self.degrees < 300, f"degrees must be below 300; got {self.degrees}", param="degrees")


@dataclass(frozen=True)
class Part:
    name: str
    weight: float = 1.0


@dataclass(frozen=True)
class Cake:
    ALTERNATIVES: ClassVar = (("crumbs", "slices"),)

    parts: tuple[Part, ...]
    oven: Oven = Oven(degrees=180)
    crumbs: Count = 0
    slices: int = 0
    note: str = ""
    corner: tuple[int, int] = (0, 0)
    glaze: int | str | None = None
    guests: tuple[Mapping[str, Any], ...] = ()


PARTS = {"parts": [{"name": "flour"}]}


@pytest.fixture
def shelf(tmp_path, monkeypatch):
    """A folder in place of the shipped recipes."""
    monkeypatch.setattr(recipe, "SHIPPED", tmp_path / "shipped")
    (tmp_path / "shipped").mkdir()
    (tmp_path / "shipped" / "plain.yaml").write_text(
        "parts:\n  - {name: flour, weight: 2}\n  - {name: sugar}\noven: {degrees: 170, fan: true}\ncrumbs: 10B\n"
    )
    return tmp_path


def test_nested_values_lists_and_defaults():
    cake = recipe.read(Cake, {**PARTS, "oven": {"fan": False}, "corner": [1, 2], "glaze": "sugar"})
    assert cake == Cake((Part("flour"),), Oven(180, False), corner=(1, 2), glaze="sugar")
    assert recipe.read(Cake, {**PARTS, "glaze": None}).glaze is None


@pytest.mark.parametrize(
    ("written", "meant"),
    [("10B", 10**10), ("300M", 3 * 10**8), ("4k", 4000), ("1e9", 10**9), ("14.8T", 14_800_000_000_000), (7, 7),
     ("1_000", 1000), (1e9, 10**9), ("1.5k", 1500)],
)  # fmt: skip
def test_counts_are_written_as_people_do(written, meant):
    assert recipe.read(Cake, {**PARTS, "crumbs": written}).crumbs == meant


def test_a_whole_float_is_an_int_and_an_int_a_float():
    cake = recipe.read(Cake, {"parts": [{"name": "a", "weight": 2}], "slices": 1e3})
    assert (cake.slices, type(cake.slices)) == (1000, int)
    assert (cake.parts[0].weight, type(cake.parts[0].weight)) == (2.0, float)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"ovn": {}}, "ovn is not a key. Did you mean oven?"),
        ({"oven": {"degree": 1}}, "oven.degree is not a key. Did you mean oven.degrees?"),
        ({"oven": {"qqq": 1}}, "oven.qqq is not a key. The keys of oven are degrees, fan."),
        ({"oven": {"degrees": "hot"}}, r"oven.degrees must be a whole number; got 'hot' \(text\)"),
        ({"oven": {"degrees": 1.5}}, r"oven.degrees must be a whole number; got 1.5"),
        ({"oven": {"degrees": True}}, r"oven.degrees must be a whole number; got True"),
        ({"oven": {"degrees": 400}}, "oven.degrees must be below 300; got 400"),
        ({"oven": {"fan": 1}}, "oven.fan must be true or false; got 1"),
        ({"oven": 3}, "oven must be a mapping of keys to values; got 3"),
        ({"parts": {"name": "a"}}, r"parts must be a list; got a mapping \(name\)"),
        ({"parts": [{"weight": 1}]}, "parts.0.name is required"),
        ({"parts": [{"name": "a"}, {"name": "b", "weight": "x"}]}, "parts.1.weight must be a number"),
        ({"crumbs": "10 billion"}, "crumbs must be a whole number such as 4096, 300M, 10B"),
        ({"crumbs": "1.2345k"}, "crumbs must be a whole number"),
        ({"crumbs": -3}, "crumbs must be a whole number"),
        ({"slices": "4k"}, "slices must be a whole number; got '4k'"),
        ({"note": 3}, "note must be text; got 3"),
        ({"corner": [1]}, "corner must be a list of 2; got a list of 1"),
        ({"glaze": 1.5}, "glaze must be a whole number or text or null; got 1.5"),
        ({3: 4}, "3 is not a key"),
    ],
)
def test_a_wrong_value_is_refused_with_its_path(given, message):
    with pytest.raises(RecipeError, match=message) as error:
        recipe.read(Cake, {**PARTS, **given})
    assert error.value.param == message.split()[0]


def test_a_shipped_recipe_by_name_with_overrides(shelf):
    cake = recipe.load(
        "plain", ["oven.degrees=190", "parts.0.name=007", "parts.2.name=salt", "note=", "glaze=null"], Cake
    )
    assert cake.oven == Oven(190, True)
    assert [part.name for part in cake.parts] == ["007", "sugar", "salt"]
    assert cake.parts[0].weight == 2.0 and cake.crumbs == 10**10


def test_a_section_or_a_list_can_be_given_whole(shelf):
    cake = recipe.load("plain", ["oven={degrees: 90}", "oven.fan=false", "parts=[{name: egg}]"], Cake)
    assert cake.oven == Oven(90, False) and cake.parts == (Part("egg"),)


def test_mappings_of_any_keys_are_read_changed_and_written(shelf):
    """`rewards` holds such mappings; the class of the reward checks their keys."""
    (shelf / "party.yaml").write_text("base: plain\nguests:\n  - {kind: aunt, seats: 1}\n  - {kind: cat, of: [1]}\n")
    given = ["guests.0.seats=2", "guests.1.of=[b]", "guests.2.kind=dog", "guests.2.at.home=true"]
    cake = recipe.load(str(shelf / "party.yaml"), given, Cake)
    assert cake.guests == (
        {"kind": "aunt", "seats": 2}, {"kind": "cat", "of": ["b"]}, {"kind": "dog", "at": {"home": True}},
    )  # fmt: skip
    assert recipe.read(Cake, yaml_text.parse(recipe.to_yaml(cake))) == cake
    assert recipe.change(cake, {"slices": 3}).guests == cake.guests
    assert recipe.load("plain", ["guests=[{kind: x}]"], Cake).guests == ({"kind": "x"},)
    for wrong in (["aunt"], [{1: 2}]):
        with refuses("guests.0", RecipeError):
            recipe.read(Cake, {**PARTS, "guests": wrong})


def test_a_later_alternative_replaces_the_earlier_one(shelf):
    assert recipe.load("plain", ["slices=8"], Cake).crumbs == 0
    (shelf / "mine.yaml").write_text("base: plain\nslices: 4\n")
    cake = recipe.load(str(shelf / "mine.yaml"), [], Cake)
    assert (cake.slices, cake.crumbs, cake.oven.degrees) == (4, 0, 170)


def test_a_base_is_merged_and_may_be_a_file_beside(shelf):
    (shelf / "a.yaml").write_text("base: plain\noven: {degrees: 100}\n")
    (shelf / "b.yaml").write_text("base: a.yaml\nnote: 10:13\n")
    cake = recipe.load(str(shelf / "b.yaml"), [], Cake)
    assert cake.oven == Oven(100, True) and cake.note == "10:13"


def test_a_quantization_under_base_is_refused_with_the_new_key(shelf):
    (shelf / "a.yaml").write_text("base: nf4\nparts: []\n")
    with refuses("base", RecipeError, naming="quantization: nf4"):
        recipe.load(str(shelf / "a.yaml"), [], Cake)


def test_a_cycle_of_bases_is_refused(shelf):
    (shelf / "a.yaml").write_text("base: b.yaml\n")
    (shelf / "b.yaml").write_text("base: a.yaml\n")
    with refuses("base", RecipeError, naming="a.yaml -> b.yaml -> a.yaml"):
        recipe.load(str(shelf / "a.yaml"), [], Cake)


@pytest.mark.parametrize(
    ("overrides", "param", "code", "naming"),
    [
        (["oven"], None, None, "key=value"),
        (["=3"], None, None, "key=value"),
        (["oven..fan=true"], None, None, "key=value"),
        (["parts.name=x"], "parts", None, "parts.0"),
        (["parts.7.name=x"], "parts", None, "parts.2"),
        (["oven.degrees.x=1"], "oven.degrees.x", None, "170"),
        (["oven.degres=1"], "oven.degres", "unknown_key", "oven.degrees"),
        (["oven.degrees=[1"], None, None, "YAML"),
    ],
)
def test_bad_overrides(shelf, overrides, param, code, naming):
    with refuses(param, RecipeError, code=code, naming=naming):
        recipe.load("plain", overrides, Cake)


def test_a_name_that_is_not_there_gets_a_suggestion(shelf):
    with refuses("recipe", RecipeError, naming="'plain'"):
        recipe.load("plian", [], Cake)
    with refuses("recipe", RecipeError, naming="nowhere/x.yaml"):
        recipe.load("nowhere/x.yaml", [], Cake)


@pytest.mark.parametrize(
    ("text", "param"), [("- 1\n", None), ("a: [1\n", None), ("", None), ("oven: {}\noven: {}\n", "oven")]
)
def test_a_file_that_is_not_a_recipe(shelf, text, param):
    (shelf / "bad.yaml").write_text(text)
    with refuses(param, RecipeError, naming="bad.yaml"):
        recipe.load(str(shelf / "bad.yaml"), [], Cake)


def test_dump_says_what_differs_and_reads_back():
    cake = Cake((Part("a", 2.0), Part("b")), Oven(180, True), crumbs=10**10, note="1e-3")
    mapping = recipe.dump(cake)
    assert mapping == {
        "parts": [{"name": "a", "weight": 2.0}, {"name": "b"}],
        "oven": {"fan": True},
        "crumbs": 10**10,
        "note": "1e-3",
    }
    assert recipe.read(Cake, mapping) == cake
    assert recipe.read(Cake, yaml_text.parse(recipe.to_yaml(cake))) == cake
    assert recipe.dump(Cake((Part("a"),))) == {"parts": [{"name": "a"}]}


def test_yaml_values_are_read_by_their_usual_types():
    text = "a: 1e-3\nb: 10:13\nc: no\nd: 1_000\ne: 010\nf: ~\ng: true\nh: 2024-01-01\ni: -1.5\nj:\nk: .inf"
    assert yaml_text.parse(text) == {
        "a": 1e-3, "b": "10:13", "c": "no", "d": 1000, "e": 10, "f": None, "g": True, "h": "2024-01-01", "i": -1.5,
        "j": None, "k": float("inf"),
    }  # fmt: skip
