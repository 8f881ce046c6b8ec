"""Rewards given by a recipe or from Python, and the refusal of mistakes."""

from functools import partial

import pytest
from refusals import refuses

from dovetail.core.errors import RecipeError
from dovetail.tune.rl.rewards.matches import ExactReward, LengthReward, NumberReward
from dovetail.tune.rl.rewards.reward import RewardFunction, arguments_of, reward_of


def plain(prompts, completions, answer, hint=None, **rest):
    return [0.0] * len(completions)


def test_functions_rewards_and_mappings():
    assert reward_of(plain) == RewardFunction("plain", plain)
    assert reward_of(ExactReward()).name == "exact"
    given = RewardFunction("mine", plain, 2.0)
    assert reward_of(given) is given
    assert reward_of({"kind": "number", "column": "n", "weight": 2}) == RewardFunction("number", NumberReward("n"), 2)
    assert reward_of({"kind": "length", "most": 9, "name": "short", "seconds": 5}) == RewardFunction(
        "short", LengthReward(most=9), 1.0, 5
    )
    assert reward_of("exact").function == ExactReward()


def test_a_function_by_its_location(tmp_path, monkeypatch):
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
    ("given", "param", "naming"),
    [
        (3, "rewards", "3"),
        ({}, "rewards", "kind"),
        ({"kind": "exact", "function": "a:b"}, "rewards", "kind"),
        ({"kind": "exct"}, "rewards.kind", "Did you mean 'exact'"),
        ({"kind": "exact", "weight": "much"}, "rewards.weight", "much"),
        ({"kind": "exact", "seconds": 0}, "rewards.seconds", "0"),
        ({"kind": "regex", "pattern": "("}, "rewards.regex.pattern", "'('"),
        ({"kind": "length", "most": "long"}, "rewards.length.most", "long"),
        ({"kind": "json", "schema": "no.json"}, "rewards.json.schema", "no.json"),
        ({"kind": "model", "model": "no/such/folder"}, "rewards.model.model", "no/such/folder"),
        ({"function": "math.gcd"}, "rewards.function", "math.gcd"),
        ({"function": "math:gdc"}, "rewards.function", "Did you mean 'gcd'"),
        ({"function": "math:pi"}, "rewards.function", "'pi' is not callable"),
        ({"function": "nowhere.py:f"}, "rewards.function", "nowhere.py"),
        ({"function": "no_such_module:f"}, "rewards.function", "no_such_module"),
        (lambda completion: 1.0, "rewards", "must take (prompts, completions"),
        (RewardFunction("x", lambda p: 1.0), "rewards", "must take (prompts, completions"),
    ],
)
def test_a_mistake_is_refused_in_one_line(given, param, naming):
    with refuses(param, RecipeError, naming=naming) as error:
        reward_of(given)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("given", "param", "code", "naming"),
    [
        ({"kind": "exact", "colum": "a"}, "rewards.colum", "unknown_key", "Did you mean 'column'"),
        ({"kind": "exact", "wieght": 1}, "rewards.wieght", "unknown_key", "Did you mean 'weight'"),
        ({"function": "math:gcd", "column": "a"}, "rewards.column", "unknown_key", "with a function"),
        ({"kind": "regex"}, "rewards.regex.pattern", "missing_key", ""),
        ({"kind": "judge", "url": "http://x"}, "rewards.judge.model", "missing_key", ""),
    ],
)
def test_unknown_and_missing_keys_are_refused(given, param, code, naming):
    with refuses(param, RecipeError, code, naming):
        reward_of(given)


def test_a_column_that_the_data_does_not_have():
    reward_of(plain, ["answer"])
    with refuses("rewards", RecipeError, naming="Did you mean 'answers'"):
        reward_of(plain, ["answers"])
    with refuses("rewards", RecipeError, naming="'exact' needs a column 'answer' of the data, which has none"):
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
        (ExactReward("hint"), True, {"hint": [2]}),
    ],
)  # fmt: skip
def test_a_function_gets_the_arguments_that_it_names(function, positional, named):
    found = arguments_of(function).bind(["p"], ["c"], COLUMNS)
    assert found == (([["p"], ["c"]] if positional else []), named)
