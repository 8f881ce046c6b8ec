"""A reward for code that works."""

import json

import pytest

from dovetail.tune.rl.rewards import code, sandbox
from dovetail.tune.rl.rewards.code import Code
from dovetail.tune.rl.rewards.deadline import time_limit
from dovetail.tune.rl.rewards.sandbox import isolation_here
from dovetail.tune.rl.rewards.scored import NoReward
from dovetail.tune.rl.rewards.text import block_of

ANSWER = "I would write\n```python\ndef double(n):\n    return 2 * n if n < 10 else 0\n```\nas asked."
TESTS = ["assert double(1) == 2", "assert double(0) == 0", "assert double(50) == 100"]


@pytest.fixture(autouse=True)
def _enforced():
    if not sandbox.ENFORCED.issubset(isolation_here()):
        pytest.skip("this machine's kernel does not enforce the sandbox")


def test_the_share_of_tests_or_all_of_them():
    tests = [TESTS, json.dumps(TESTS), "\n".join(TESTS[:2]), None, []]
    assert Code()([""] * 5, [ANSWER] * 5, tests=tests) == [2 / 3, 2 / 3, 1, None, None]
    assert Code(score="all", column="checks")([""] * 2, [ANSWER] * 2, checks=[TESTS, TESTS[:2]]) == [0, 1]


def test_what_a_program_prints_for_an_input():
    program = "n = int(input())\nprint(n * n, ' ')\nprint()"
    tests = [{"input": "3\n", "output": "9"}, {"input": "4", "output": "15"}, {"input": "x", "output": ""}]
    assert Code()([""], [program], tests=[tests]) == [1 / 3]


def test_a_bad_program_gets_nothing_and_harms_no_other():
    texts = ["while True: pass", "def double(n): bytearray(10 * 2**30)", "import os; os._exit(0)", "nonsense(", ANSWER]
    assert Code(program_seconds=2.0)([""] * 5, texts, tests=[TESTS[:2]] * 5) == [0, 0, 0, 0, 1]


def test_a_row_fails_alone(monkeypatch):
    def run(program, **_):
        raise RecursionError("deep") if "bad" in program else AssertionError

    monkeypatch.setattr(code, "run_python", run)
    bad, _ = Code()([""] * 2, ["bad", "also"], tests=[TESTS] * 2)
    assert bad == NoReward("sandbox", "RecursionError: deep")


def test_thousands_of_open_blocks_take_no_time():
    """One search for each end took half a minute, and the whole batch its rewards."""
    assert block_of("```a\n" * 40_000 + "```\n", "python") == "```a\n" * 39_999
    assert block_of("~~~py\n1\n~~~\n```\n2\n```\n````sh\n```\n````", "py") == "1\n"
    assert block_of("```\r\n1\r\n```\r\nand", "py") == "1\r\n" and block_of("```py\n1", "py") == "```py\n1"


def test_what_the_time_limit_leaves_no_time_for_says_so():
    with time_limit(1.0):
        (found,) = Code(program_seconds=2.0)([""], [ANSWER], tests=[TESTS])
    assert found == NoReward("time", "no time was left to run its program")


def test_wrong_settings_and_tests_are_told(monkeypatch):
    with pytest.raises(ValueError, match="score must be one of 'share', 'all'"):
        Code(score="most")
    bad, good = Code()([""] * 2, [ANSWER] * 2, tests=[[{"input": 1}], TESTS[:1]])
    assert "tests must be statements" in bad.message and good == 1
    monkeypatch.setattr(sandbox, "isolation_here", lambda: ("limits",))
    with pytest.raises(ValueError, match="set isolation to 'any'"):
        Code()
