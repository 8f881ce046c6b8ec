"""What a recipe and a Python caller may give as a reward, and what they are told of a mistake."""

from functools import partial

import pytest

from dovetail.tune.rl.rewards.arguments import arguments_of
from dovetail.tune.rl.rewards.matches import Exact, Length
from dovetail.tune.rl.rewards.number import Number
from dovetail.tune.rl.rewards.reward import Reward, reward_of


def plain(prompts, completions, answer, hint=None, **rest):
    return [0.0] * len(completions)


def test_functions_rewards_and_mappings():
    assert reward_of(plain) == Reward("plain", plain)
    assert reward_of(Exact()).name == "exact"
    given = Reward("mine", plain, 2.0)
    assert reward_of(given) is given
    assert reward_of({"kind": "number", "column": "n", "weight": 2}) == Reward("number", Number("n"), 2)
    assert reward_of({"kind": "length", "most": 9, "name": "short", "seconds": 5}) == Reward(
        "short", Length(most=9), 1.0, 5
    )
    assert reward_of("exact").function == Exact()


def test_a_function_by_where_it_lies(tmp_path, monkeypatch):
    (tmp_path / "neighbour.py").write_text("WORTH = 3.0\n")
    (tmp_path / "rewards.py").write_text(
        "from neighbour import WORTH\ndef mine(prompts, completions, answer):\n    return [WORTH] * len(completions)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(__import__("sys").path))
    found = reward_of({"function": "rewards.py:mine", "weight": 0.5})
    assert (found.name, found.weight, found.arguments.required) == ("mine", 0.5, ("answer",))
    assert found.function([], ["a", "b"], answer=[1, 2]) == [3.0, 3.0]
    assert reward_of("math:gcd").name == "gcd"


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (3, "must be a function, a Reward, or a mapping"),
        ({}, "either a kind"),
        ({"kind": "exact", "function": "a:b"}, "either a kind"),
        ({"kind": "exct"}, "Did you mean 'exact'"),
        ({"kind": "exact", "colum": "a"}, "Did you mean 'column'"),
        ({"kind": "exact", "wieght": 1}, "Did you mean 'weight'"),
        ({"kind": "exact", "weight": "much"}, "weight must be a number"),
        ({"kind": "exact", "seconds": 0}, "seconds must be a number above 0"),
        ({"kind": "regex"}, "of kind regex needs pattern"),
        ({"kind": "judge", "url": "http://x"}, "of kind judge needs model"),
        ({"kind": "regex", "pattern": "("}, "of kind regex: pattern must be a regular expression"),
        ({"function": "math.gcd"}, "the name after a colon"),
        ({"function": "math:gdc"}, "Did you mean 'gcd'"),
        ({"function": "math:pi"}, "'pi' is no function"),
        ({"function": "nowhere.py:f"}, "does not exist"),
        ({"function": "no_such_module:f"}, "no_such_module was not found"),
        ({"function": "math:gcd", "column": "a"}, "with a function has no 'column'"),
        (lambda completion: 1.0, "must take .prompts, completions"),
        (Reward("x", lambda p: 1.0), "must take .prompts, completions"),
    ],
)
def test_a_mistake_is_told_in_a_sentence(given, sentence):
    with pytest.raises(ValueError, match=sentence) as error:
        reward_of(given)
    assert "\n" not in str(error.value)


def test_a_column_that_the_data_has_not():
    reward_of(plain, ["answer"])
    with pytest.raises(ValueError, match=r"'plain' needs a column 'answer' .* has answers.* Did you mean 'answers'"):
        reward_of(plain, ["answers"])
    with pytest.raises(ValueError, match=r"'exact' needs a column 'answer' of the data, which has none"):
        reward_of({"kind": "exact"}, [])
    reward_of({"kind": "length"}, [])  # the completion's ids are always there


COLUMNS = {"answer": [1], "hint": [2], "other": [3], "completion_ids": [[4]]}


@pytest.mark.parametrize(
    ("function", "positional", "named"),
    [
        (lambda p, c: 0, True, {}),
        (lambda p, c, **rest: 0, True, {"answer": [1], "hint": [2], "other": [3]}),
        (lambda p, c, hint, completion_ids: 0, True, {"hint": [2], "completion_ids": [[4]]}),
        (lambda p, c, hint=(), none=(): 0, True, {"hint": [2]}),
        (lambda p, c, *, hint: 0, True, {"hint": [2]}),
        (lambda *rows: 0, True, {}),
        (lambda completions, **rest: 0, False, {"prompts": ["p"], "completions": ["c"], "answer": [1], "hint": [2],
                                                "other": [3]}),
        (lambda completions, answer: 0, False, {"completions": ["c"], "answer": [1]}),
        (lambda answer, prompts, completions: 0, False, {"prompts": ["p"], "completions": ["c"], "answer": [1]}),
        (partial(plain, hint=5), False, {"prompts": ["p"], "completions": ["c"], "answer": [1], "hint": [2],
                                         "other": [3]}),
        (Exact("hint"), True, {"hint": [2]}),
    ],
)  # fmt: skip
def test_a_function_gets_what_it_asks_for(function, positional, named):
    found = arguments_of(function).bind(["p"], ["c"], COLUMNS)
    assert found == (([["p"], ["c"]] if positional else []), named)
