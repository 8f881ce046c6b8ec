"""The arguments of rewards, rewards that raise, and runs without any reward: no engine."""

from __future__ import annotations

from concurrent.futures import Future

import pytest
from refusals import refuses

from dovetail.tune.rl.episode import EpisodeId, new_episode
from dovetail.tune.rl.failures import MAX_UNREWARDED, Failures, traceback_of
from dovetail.tune.rl.prompts import PromptRecord
from dovetail.tune.rl.reward_assigner import RewardAssigner
from dovetail.tune.rl.rewards.code_reward import CodeReward
from dovetail.tune.rl.rewards.completion import NoReward, Problem, Scored
from dovetail.tune.rl.rewards.model_rewards import JudgeReward, ModelReward
from dovetail.tune.rl.rewards.pool import Rewards
from dovetail.tune.rl.rewards.reward import KINDS, reward_of

pytestmark = pytest.mark.slow

CHAT = [{"role": "user", "content": "2+2?"}]


class Pool:
    """A stand-in for rewards.pool.Rewards that records its arguments; every reward fails."""

    def __init__(self):
        self.problems = []

    def submit(self, prompts, completions, columns):
        self.given = prompts, completions, columns
        done: Future[list[Scored]] = Future()
        done.set_result([Scored({"mine": None}, None, {"mine": "raised: oh"})] * len(completions))
        self.problems = [Problem("mine", "raised", "TypeError: oh", 2, "Traceback: mine")]
        return done


def judged(prompt, referee, messages=None):
    episode = new_episode(EpisodeId(0, 0), 0, [5, 6], 0)
    episode.text, episode.messages = "It is 4", messages
    referee.assign([episode], referee.submit(PromptRecord(0, prompt, (5, 6), {"answer": "4"}), [episode]))
    return episode


def test_completions_are_messages_where_prompts_are():
    pool = Pool()
    referee = RewardAssigner(pool, None)  # type: ignore[arg-type]
    judged("2+2?", referee)
    assert pool.given[:2] == (["2+2?"], ["It is 4"])
    judged(CHAT, referee)
    assert pool.given[:2] == ([CHAT], [[{"role": "assistant", "content": "It is 4"}]])
    turns = [{"role": "assistant", "content": "f(2)"}, {"role": "tool", "content": "4"}]
    judged(CHAT, referee, turns)
    assert pool.given[1] == [turns]


class Scores:
    def score(self, texts):
        return [float(len(text)) for text in texts]


SETTINGS = {
    "regex": {"pattern": r"\d$"}, "json": {"schema": {"type": "object"}}, "length": {"most": 3, "unit": "words"},
    "format": {"tags": ["a"]}, "judge": {"url": "http://127.0.0.1:9", "model": "m"}, "model": {"model": Scores()},
}  # fmt: skip
TEXTS = ["4", "five", "It is 4", '```json\n{"n": 4}\n```', "<a>4</a>", "```python\nx = 4\n```"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_scores_a_message_like_its_text(kind, monkeypatch):
    """The sandbox and the judge's requests are replaced: only their arguments are compared."""
    reward = reward_of({"kind": kind, **SETTINGS.get(kind, {})}).function
    monkeypatch.setattr(CodeReward, "_passed", lambda self, program, tests, end: [program == "x = 4\n"])

    async def score(self, client, gate, text):
        return float(len(text))

    monkeypatch.setattr(JudgeReward, "_score", score)
    columns = {name: [["4"] if name == "tests" else "4"] * len(TEXTS) for name in getattr(reward, "columns", ())}
    messages = [[{"role": "assistant", "content": text}] for text in TEXTS]
    by_text, by_message = (_called(reward, given, columns) for given in (TEXTS, messages))
    assert by_text == by_message and len(set(by_text)) > 1
    if isinstance(reward, ModelReward):
        assert reward([CHAT], [messages[0]]) == [2.0]  # a conversation of two messages


def _called(reward, completions, columns):
    import asyncio
    import inspect

    found = reward(["2+2?"] * len(completions), completions, **columns)
    return asyncio.run(_awaited(found)) if inspect.isawaitable(found) else found


async def _awaited(found):
    return await found


def raises_runtime_error(prompts, completions):
    raise RuntimeError("the model server is down")


def raises_value_error(prompts, completions):
    raise ValueError("operands could not be broadcast")


def lengths(prompts, completions):
    return [float(len(completion)) for completion in completions]


def test_a_reward_that_raises_is_lost_with_its_traceback_in_the_log_and_the_run_goes_on():
    log: list[str] = []
    failures = Failures(log.append)
    with Rewards([raises_runtime_error, raises_value_error, lengths], workers=1) as rewards:
        for _ in range(2):  # the next prompt is scored as the first
            episode = judged("2+2?", RewardAssigner(rewards, None, failures))  # type: ignore[arg-type]
            assert episode.rewards == {"raises_runtime_error": None, "raises_value_error": None, "lengths": 7.0}
            assert episode.reward == 7.0 and set(episode.problems) == {"raises_runtime_error", "raises_value_error"}
            failures.end_rollout(True, rollouts=100)
    assert len(log) == 2
    for text, name, error in zip(
        log, ("raises_runtime_error", "raises_value_error"), ("RuntimeError", "ValueError"), strict=True
    ):
        assert text.startswith(f"the reward {name!r} failed: {error}: ")
        assert "Traceback (most recent call last)" in text and f"in {name}\n" in text


def test_another_exception_of_the_same_reward_is_logged_too():
    log: list[str] = []
    failures = Failures(log.append)
    for message in ("RuntimeError: a", "ValueError: b", "ValueError: c"):
        failures.add("the reward 'mine'", "raised", message, f"Traceback\n{message}")
    assert [text.splitlines()[-1] for text in log] == ["RuntimeError: a", "ValueError: b"]


def raises():
    raise TypeError("string indices must be integers")


def test_rollouts_without_a_reward_stop_the_run_with_the_first_traceback():
    log: list[str] = []
    failures = Failures(log.append)
    referee = RewardAssigner(Pool(), None, failures)  # type: ignore[arg-type]
    for _ in range(MAX_UNREWARDED - 1):
        assert judged("2+2?", referee).reward is None
        failures.end_rollout(False, rollouts=100)
    assert log == ["the reward 'mine' failed: TypeError: oh (completions.jsonl has each case)\nTraceback: mine"]
    failures.end_rollout(True, rollouts=100)  # a reward: the count begins again, and so does what is shown at the end
    try:
        raises()
    except TypeError as error:
        failures.add("the environment", "TypeError", str(error), traceback_of(error, __file__))
    with refuses("rewards", code="no_rewards", naming="of the last 3 rollouts") as stopped:
        for _ in range(MAX_UNREWARDED):
            failures.end_rollout(False, rollouts=100)
    assert "the environment: string indices" in str(stopped.value) and "in raises\n" in str(stopped.value)
    assert "Traceback: mine" not in str(stopped.value)


def test_a_run_of_fewer_rollouts_stops_at_its_last():
    failures = Failures()
    failures.end_rollout(False, rollouts=2)
    with refuses("rewards", code="no_rewards", naming="every reward returned None"):
        failures.end_rollout(False, rollouts=2)


def test_a_traceback_begins_with_the_users_code():
    try:
        raises()
    except TypeError as error:
        assert traceback_of(error).count("  File ") == 2
        shown = traceback_of(error, "somewhere else", traceback_of.__code__.co_filename)
        assert shown.endswith("TypeError: string indices must be integers")
    assert NoReward("raised", "oh") == NoReward("raised", "oh", "")
