"""The reward for working code."""

import json

import pytest
from refusals import refuses

from dovetail.core.errors import RecipeError, UnsupportedError
from dovetail.tune.rl.rewards import code_reward, sandbox
from dovetail.tune.rl.rewards.code_reward import CodeReward
from dovetail.tune.rl.rewards.completion import NoReward, block_of
from dovetail.tune.rl.rewards.sandbox import isolation_here
from dovetail.tune.rl.rewards.worker import time_limit

pytestmark = pytest.mark.slow

ANSWER = "I would write\n```python\ndef double(n):\n    return 2 * n if n < 10 else 0\n```\nas asked."
TESTS = ["assert double(1) == 2", "assert double(0) == 0", "assert double(50) == 100"]


@pytest.fixture(autouse=True)
def _needs_kernel():
    if not sandbox.ENFORCED.issubset(isolation_here()):
        pytest.skip("this machine's kernel does not enforce the sandbox")


def test_the_share_of_tests_or_all_of_them():
    tests = [TESTS, json.dumps(TESTS), "\n".join(TESTS[:2]), None, []]
    assert CodeReward()([""] * 5, [ANSWER] * 5, tests=tests) == [2 / 3, 2 / 3, 1, None, None]
    assert CodeReward(score="all", column="checks")([""] * 2, [ANSWER] * 2, checks=[TESTS, TESTS[:2]]) == [0, 1]


def test_the_output_of_a_program_for_an_input():
    program = "n = int(input())\nprint(n * n, ' ')\nprint()"
    tests = [{"input": "3\n", "output": "9"}, {"input": "4", "output": "15"}, {"input": "x", "output": ""}]
    assert CodeReward()([""], [program], tests=[tests]) == [1 / 3]


def test_a_bad_program_gets_0_and_does_not_affect_others():
    texts = ["while True: pass", "def double(n): bytearray(10 * 2**30)", "import os; os._exit(0)", "nonsense(", ANSWER]
    assert CodeReward(program_seconds=2.0)([""] * 5, texts, tests=[TESTS[:2]] * 5) == [0, 0, 0, 0, 1]


def test_a_row_fails_alone(monkeypatch):
    def run(program, **_):
        raise RecursionError("deep") if "bad" in program else AssertionError

    monkeypatch.setattr(code_reward, "run_python", run)
    bad, _ = CodeReward()([""] * 2, ["bad", "also"], tests=[TESTS] * 2)
    assert bad == NoReward("sandbox", "RecursionError: deep")


def test_thousands_of_open_blocks_take_linear_time():
    """A search for the end of each block would take half a minute."""
    assert block_of("```a\n" * 40_000 + "```\n", "python") == "```a\n" * 39_999
    assert block_of("~~~py\n1\n~~~\n```\n2\n```\n````sh\n```\n````", "py") == "1\n"
    assert block_of("```\r\n1\r\n```\r\nand", "py") == "1\r\n" and block_of("```py\n1", "py") == "```py\n1"


def test_a_row_beyond_the_time_limit_has_a_reason():
    with time_limit(1.0):
        (found,) = CodeReward(program_seconds=2.0)([""], [ANSWER], tests=[TESTS])
    assert found == NoReward("time", "no time was left to run the program")


def test_wrong_settings_and_tests_are_refused(monkeypatch):
    with refuses("program_seconds", RecipeError):
        CodeReward(program_seconds=0)
    with refuses("score", RecipeError):
        CodeReward(score="most")
    bad, good = CodeReward()([""] * 2, [ANSWER] * 2, tests=[[{"input": 1}], TESTS[:1]])
    assert "tests must be statements" in bad.message and good == 1
    monkeypatch.setattr(sandbox, "isolation_here", lambda: ("limits",))
    with refuses("isolation", UnsupportedError):
        CodeReward()
