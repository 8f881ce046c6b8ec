"""The fingerprint of a reward: the same in another process, and changed with what it computes."""

import functools
import re
import subprocess
import sys
from pathlib import Path

import numpy as np

from dovetail.tune.rl.rewards.matches import ExactReward, LengthReward
from dovetail.tune.rl.rewards.model_rewards import ModelReward
from dovetail.tune.rl.rewards.reward import RewardFunction, reward_of

MODULE = """
import math
WORTH = 4.0

def half(x):
    return x / 2

def mine(prompts, completions, **columns):
    # a comment
    return [half(len(c)) + WORTH for c in completions]

def other(prompts, completions):
    return [0.0] * len(completions)

class Counts:
    def __init__(self, least):
        self.least = least
    def __call__(self, prompts, completions):
        return [float(len(c) > self.least) for c in completions]
"""


def rewards_of(source: str, path: Path) -> dict[str, str]:
    """Return the fingerprints of the rewards of a program."""
    path.write_text(source)  # where inspect finds the source
    names: dict = {"__name__": "program"}
    exec(compile(source, str(path), "exec"), names)
    given = {"mine": names["mine"], "object": names["Counts"](2), "partial": functools.partial(names["other"])}
    return {name: reward_of(each).fingerprint for name, each in given.items()}


def test_what_a_programs_function_computes(tmp_path):
    before = rewards_of(MODULE, tmp_path / "a.py")
    assert len(set(before.values())) == 3
    layout = MODULE.replace("# a comment", "# another\n").replace("WORTH for", "WORTH   for") + "\ndef more(): pass\n"
    assert rewards_of(layout, tmp_path / "b.py") == before
    for old, new in (("x / 2", "x / 3"), ("4.0", "5.0"), ("half(len(c))", "half(len(c) + 1)")):
        now = rewards_of(MODULE.replace(old, new), tmp_path / f"{re.sub(r'[^a-z0-9]', '', new)}.py")
        assert now["mine"] != before["mine"] and {**now, "mine": ""} == {**before, "mine": ""}, new
    now = rewards_of(MODULE.replace("> self.least", ">= self.least"), tmp_path / "c.py")
    assert now["object"] != before["object"] and now["mine"] == before["mine"]


def test_settings_weights_and_closures():
    def over(least):
        return lambda prompts, completions: [float(len(c) > least) for c in completions]

    given = [
        ExactReward(), ExactReward(case=False), LengthReward(most=3), RewardFunction("exact", ExactReward(), 0.5),
        over(2), over(3), np.tanh, max,
        {"kind": "model", "model": Scores(), "suffix": "a"}, ModelReward(Scores()), "math:gcd", "math:lcm",
    ]  # fmt: skip
    found = [reward_of(each).fingerprint for each in given]
    assert len(set(found)) == len(found)
    assert reward_of({"kind": "exact"}).fingerprint == found[0] and reward_of(over(2)).fingerprint == found[4]
    assert reward_of({"kind": "exact", "seconds": 9, "name": "mine"}).fingerprint == found[0]


class Scores:
    def score(self, texts):
        return [0.0] * len(texts)


def test_a_file_counts_whole_and_is_the_same_in_another_process(tmp_path):
    path = tmp_path / "rewards_of_a_file.py"
    path.write_text(MODULE)
    given = f"{path}:mine"
    show = f"from dovetail.tune.rl.rewards.reward import reward_of; print(reward_of({given!r}).fingerprint)"
    printed = subprocess.run([sys.executable, "-c", show], capture_output=True, text=True, check=True).stdout.strip()
    assert printed == reward_of(given).fingerprint
    path.write_text(MODULE.replace("[0.0]", "[1.0]"))  # a neighbour, which may be a helper
    assert printed != reward_of(given).fingerprint
