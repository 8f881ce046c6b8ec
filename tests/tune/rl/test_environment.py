"""Episodes in environments: tokens between the policy's turns, randomness, and environments that fail."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from data.conftest import CHATML, small_tokenizer
from data.test_example_encoder import SPECIAL
from refusals import refuses
from tune.rl.environments import ASKED, SETTINGS, begin, family, play, runner_of, write

from dovetail.core.errors import RecipeError
from dovetail.data.settings import TuningData
from dovetail.tune.rl.environment import Environment, Step
from dovetail.tune.rl.episode import from_json, to_json
from dovetail.tune.rl.failures import Failures


class Echo(Environment):
    """Repeat the policy's text; end at "stop"."""

    turns = 3

    def step(self, turn):
        if turn.content.strip() == "stop":
            return Step(reward=2.0, done=True)
        return Step(f"you said {turn.content}", reward=0.5)


class Dice(Environment):
    def reset(self, random):
        return f"The target is {random.integers(1000)}."

    def step(self, turn):
        return Step(str(self.random.integers(1000)))


# --- tokens -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SPECIAL)
def test_an_episode_is_the_conversation_as_the_template_writes_it(name):
    """Token for token; the mask covers the policy's text with its end tokens."""
    tokenizer = family(name)
    runner, (task,) = runner_of(Echo, tokenizer)
    episode = begin(task)
    end = tokenizer.eos or ""
    play(runner, episode, tokenizer, f"Sunny{end}", f"Rain.{end}", f"stop{end}")
    after = [("assistant", "Sunny"), ("user", "you said Sunny"), ("assistant", "Rain."), ("user", "you said Rain."),
              ("assistant", "stop")]  # fmt: skip
    talk = [*ASKED, *({"role": role, "content": content} for role, content in after)]
    whole = tokenizer.apply_chat(talk, add_generation_prompt=False)
    if name == "qwen3":  # it thinks only in a conversation's last turn; the policy did not
        whole = whole.replace("<think>\n\n</think>\n\n", "")
    expected = tokenizer.encode(whole, add_special=False)
    assert episode.tokens.tolist() == expected[: len(episode.tokens)]
    assert tokenizer.decode(expected[len(episode.tokens) :]).strip() == ""  # the line's end after the last turn
    written = "".join(tokenizer.decode([t], skip_special=False) for t in episode.tokens[episode.sampled])
    assert written.replace("▁", " ") == f"Sunny{end}Rain.{end}stop{end}"
    assert episode.messages == talk[2:] and episode.finish == "done"
    assert episode.rewards == {"environment": 3.0} and not episode.problems


@pytest.mark.parametrize("name", ["smollm2", "llama3"])
def test_a_stop_string_leaves_the_end_token_to_the_template(name):
    tokenizer = family(name)
    runner, (task,) = runner_of(Echo, tokenizer)
    one, other = begin(task, 0), begin(task, 1)
    (ended,) = play(runner, one, tokenizer, f"a;{tokenizer.eos}")
    (stopped,) = play(runner, other, tokenizer, "a;")
    assert stopped == [tokenizer.eos_id, *ended]
    assert one.tokens.tolist() == other.tokens.tolist() and other.sampled.sum() == one.sampled.sum() - 1


def test_plain_text_continues_without_a_template():
    tokenizer = small_tokenizer()
    runner, (task,) = runner_of(Echo, tokenizer, [{"prompt": "the dog:"}])
    episode = begin(task)
    (observation,) = play(runner, episode, tokenizer, " hello")
    assert tokenizer.decode(observation) == "you said  hello" and episode.messages is None
    assert observation == tokenizer.encode("you said  hello", add_special=False)


def test_the_environment_does_not_see_the_reasoning():
    tokenizer = family("qwen3")
    runner, (task,) = runner_of(Echo, tokenizer)
    episode = begin(task)
    (observation,) = play(runner, episode, tokenizer, "<think>\nwhat now\n</think>\n\nleft<|im_end|>")
    assert "you said left<" in tokenizer.decode(observation, skip_special=False)
    assert episode.messages is not None and episode.messages[0]["reasoning_content"] == "what now"


@pytest.mark.parametrize(
    "template, why",
    [
        (CHATML.replace("(m.content or '')", "(m.content if m.role != 'assistant' else '...')"), "does not write the"),
        (CHATML.replace("'<|im_end|>\\n'", "('<|im_end|>\\n' if loop.last else '<|end|>\\n')"), "ends an assistant's"),
    ],
)
def test_a_template_in_which_turns_cannot_be_separated_is_refused(template, why):
    with refuses("data.template", RecipeError, naming=f"the model's chat template {why}"):
        runner_of(Echo, small_tokenizer(template))


def test_the_recipes_own_template_is_used_and_named(tmp_path):
    path = tmp_path / "mine.jinja"
    path.write_text(CHATML.replace("m.role", "m.role|upper"))
    settings = replace(SETTINGS, data=TuningData(template=str(path)))
    tokenizer = small_tokenizer()
    runner, (task,) = runner_of(Echo, tokenizer, settings=settings)
    (observation,) = play(runner, begin(task), tokenizer, "a<|im_end|>")
    assert "<|im_start|>USER\nyou said a<|im_end|>" in tokenizer.decode(observation, skip_special=False)
    path.write_text(CHATML.replace("(m.content or '')", "''"))
    with refuses("data.template", RecipeError, naming="mine.jinja does not write"):
        runner_of(Echo, tokenizer, settings=settings)


# --- the end of an episode --------------------------------------------------------------------------------------------


def test_an_episode_ends_after_its_turns_with_its_reward():
    tokenizer = small_tokenizer()
    runner, (task,) = runner_of(Echo, tokenizer)
    episode = begin(task)
    assert len(play(runner, episode, tokenizer, *["go<|im_end|>"] * 5)) == 2
    assert episode.finish == "turns" and episode.rewards == {"environment": 1.5}
    assert episode.messages is not None and [m["role"] for m in episode.messages] == ["assistant", "user"] * 3


def test_the_environment_does_not_step_after_a_truncated_turn():
    tokenizer = small_tokenizer()
    runner, (task,) = runner_of(Echo, tokenizer)
    episode = begin(task)
    write(episode, tokenizer, "stop", finish="length")
    assert runner.reply(episode) is None
    assert episode.finish == "length" and episode.rewards == {"environment": 0.0}
    assert episode.messages == [{"role": "assistant", "content": "stop"}]


def test_an_episode_without_room_for_a_turn_is_truncated():
    tokenizer = small_tokenizer()
    runner, (task,) = runner_of(Echo, tokenizer, settings=replace(SETTINGS, max_completion_length=20))
    episode = begin(task)
    assert not play(runner, episode, tokenizer, "the quick fox<|im_end|>")
    assert episode.truncated and episode.rewards == {"environment": 0.5}


class Raises(Environment):
    def step(self, turn):
        raise RuntimeError("the world broke")


class Silent(Environment):
    def step(self, turn):
        return Step()


class NotAStep(Environment):
    def step(self, turn):
        return ("hello", 1.0, True)


class Infinite(Environment):
    def step(self, turn):
        return Step(reward=float("nan"), done=True)


class Objects(Environment):
    def step(self, turn):
        return Step([{"role": "user", "content": object()}])


FAILING = {
    Raises: "RuntimeError: the world broke",
    Silent: "with an observation or with done=True",
    NotAStep: "must return a Step",
    Infinite: "finite reward",
    Objects: "expected 'content' to be text",
}


@pytest.mark.parametrize("environment", FAILING)
def test_an_environment_that_fails_ends_its_own_episode_only(environment):
    tokenizer = small_tokenizer()
    log: list[str] = []
    failures = Failures(log.append)
    runner, (task,) = runner_of(environment, tokenizer, failures=failures)
    episode = begin(task)
    write(episode, tokenizer, "go<|im_end|>")
    assert runner.reply(episode) is None
    assert len(log) == 1 and log[0].startswith("the environment failed: ") and FAILING[environment] in log[0]
    assert "Traceback (most recent call last)" in log[0]
    if environment is Raises:  # where every episode ends so, the run stops with the traceback
        with pytest.raises(ValueError, match=r"(?s)The first failure: the environment.*in step\n.*the world broke"):
            failures.end_rollout(False, rollouts=1)
    assert episode.rewards == {"environment": None} and FAILING[environment] in episode.problems["environment"]
    assert episode.finish == "error"
    assert from_json(json.loads(to_json([episode])))[0].problems == episode.problems
    assert not episode.loss_mask(False).any()


# --- randomness -------------------------------------------------------------------------------------------------------


def test_episodes_of_a_prompt_start_alike_and_then_differ():
    tokenizer = small_tokenizer()
    runner, tasks = runner_of(Dice, tokenizer, [{"prompt": "roll: "}, {"prompt": "roll: "}])
    first, second = (tokenizer.decode(task.tokens) for task in tasks)
    assert first.startswith("roll: The target is ") and first != second
    rolled = {
        (task.index, turn, member): tokenizer.decode(play(runner, begin(task, member, turn), tokenizer, "go")[0])
        for task in tasks for turn in range(2) for member in range(3)
    }  # fmt: skip
    assert len(set(rolled.values())) > 9


def test_a_resumed_run_repeats_the_same_random_numbers():
    """Another runner, other threads and another order give the same episodes."""
    tokenizer = small_tokenizer()
    records = [{"messages": ASKED}] * 3

    def transcripts(order):
        runner, tasks = runner_of(Dice, tokenizer, records)
        episodes = {(t.index, m): begin(t, m) for t in tasks for m in range(4)}
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(lambda key: play(runner, episodes[key], tokenizer, *["x<|im_end|>"] * 4), order(episodes)))
        assert not any(e.problems for e in episodes.values())
        return {key: e.tokens.tolist() for key, e in episodes.items()}

    assert transcripts(sorted) == transcripts(lambda keys: sorted(keys, reverse=True))


def test_the_first_observation_is_a_message_of_the_prompt():
    tokenizer = small_tokenizer()
    _, (task,) = runner_of(Dice, tokenizer)
    assert [m["role"] for m in task.prompt] == ["system", "user", "user"]
    assert list(task.tokens) == tokenizer.encode_chat(task.prompt)


# --- locations --------------------------------------------------------------------------------------------------------


def test_a_recipe_names_a_class_by_its_file(tmp_path):
    (tmp_path / "world.py").write_text(
        "from dovetail.tune.rl.environment import Environment, Step\n"
        "class World(Environment):\n"
        "    def step(self, turn):\n"
        "        return Step(reward=float(self.columns['worth']), done=True)\n"
    )
    tokenizer = small_tokenizer()
    runner, (task,) = runner_of(f"{tmp_path}/world.py:World", tokenizer, [{"prompt": "a", "worth": 4}])
    episode = begin(task)
    play(runner, episode, tokenizer, "b")
    assert episode.rewards == {"environment": 4.0}
    with refuses("environment", RecipeError, naming="Did you mean 'World'"):
        runner_of(f"{tmp_path}/world.py:Wrold", tokenizer)
    with refuses("environment", RecipeError):
        runner_of(3, tokenizer)


def test_a_function_may_create_the_environment():
    tokenizer = small_tokenizer()
    runner, (task,) = runner_of(lambda columns, random: Echo(columns, random), tokenizer)
    assert len(play(runner, begin(task), tokenizer, "a<|im_end|>")) == 1
    with refuses("environment", RecipeError, naming="got 'echo'"):
        runner_of(lambda columns, random: "echo", tokenizer)
