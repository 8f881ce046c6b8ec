"""Episodes in environments: what is said between the policy's turns is exactly the template's, and only that; chance
follows from the seed and the episode's place; an environment that fails costs its own episode."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from data.conftest import CHATML, small_tokenizer
from data.test_example_encoder import SPECIAL
from tune.rl.staged import ASKED, SETTINGS, begin, family, play, staged, write

from dovetail.data.settings import TuningData
from dovetail.tune.rl.environment import Environment, Step
from dovetail.tune.rl.episode import from_json, to_json
from dovetail.tune.rl.failures import Failures


class Echo(Environment):
    """Says the answer back; ends at "stop"."""

    turns = 3

    def step(self, answer):
        if answer.content.strip() == "stop":
            return Step(reward=2.0, done=True)
        return Step(f"you said {answer.content}", reward=0.5)


class Dice(Environment):
    def reset(self, random):
        return f"The target is {random.integers(1000)}."

    def step(self, answer):
        return Step(str(self.random.integers(1000)))


# --- token in, token out ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SPECIAL)
def test_an_episode_is_the_conversation_as_the_template_writes_it(name):
    """Token for token, and the mask is what the policy wrote, with its end tokens."""
    tokenizer = family(name)
    stage, (task,) = staged(Echo, tokenizer)
    episode = begin(task)
    end = tokenizer.eos or ""
    play(stage, episode, tokenizer, f"Sunny{end}", f"Rain.{end}", f"stop{end}")
    spoken = [("assistant", "Sunny"), ("user", "you said Sunny"), ("assistant", "Rain."), ("user", "you said Rain."),
              ("assistant", "stop")]  # fmt: skip
    talk = [*ASKED, *({"role": role, "content": content} for role, content in spoken)]
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
    stage, (task,) = staged(Echo, tokenizer)
    one, other = begin(task, 0), begin(task, 1)
    (ended,) = play(stage, one, tokenizer, f"a;{tokenizer.eos}")
    (stopped,) = play(stage, other, tokenizer, "a;")
    assert stopped == [tokenizer.eos_id, *ended]
    assert one.tokens.tolist() == other.tokens.tolist() and other.sampled.sum() == one.sampled.sum() - 1


def test_plain_text_goes_on_as_it_is():
    tokenizer = small_tokenizer()
    stage, (task,) = staged(Echo, tokenizer, [{"prompt": "the dog:"}])
    episode = begin(task)
    (said,) = play(stage, episode, tokenizer, " hello")
    assert tokenizer.decode(said) == "you said  hello" and episode.messages is None
    assert said == tokenizer.encode("you said  hello", add_special=False)


def test_reasoning_is_kept_from_the_environment():
    tokenizer = family("qwen3")
    stage, (task,) = staged(Echo, tokenizer)
    episode = begin(task)
    (said,) = play(stage, episode, tokenizer, "<think>\nwhat now\n</think>\n\nleft<|im_end|>")
    assert "you said left<" in tokenizer.decode(said, skip_special=False)
    assert episode.messages is not None and episode.messages[0]["reasoning_content"] == "what now"


@pytest.mark.parametrize(
    "template, why",
    [
        (CHATML.replace("(m.content or '')", "(m.content if m.role != 'assistant' else '...')"), "does not write what"),
        (CHATML.replace("'<|im_end|>\\n'", "('<|im_end|>\\n' if loop.last else '<|end|>\\n')"), "ends an assistant's"),
    ],
)
def test_a_template_in_which_the_turns_cannot_be_told_is_refused(template, why):
    with pytest.raises(ValueError, match=f"the model's chat template {why}"):
        staged(Echo, small_tokenizer(template))


def test_the_recipes_own_template_is_used_and_named(tmp_path):
    path = tmp_path / "mine.jinja"
    path.write_text(CHATML.replace("m.role", "m.role|upper"))
    settings = replace(SETTINGS, data=TuningData(template=str(path)))
    tokenizer = small_tokenizer()
    stage, (task,) = staged(Echo, tokenizer, settings=settings)
    (said,) = play(stage, begin(task), tokenizer, "a<|im_end|>")
    assert "<|im_start|>USER\nyou said a<|im_end|>" in tokenizer.decode(said, skip_special=False)
    path.write_text(CHATML.replace("(m.content or '')", "''"))
    with pytest.raises(ValueError, match=r"the chat template .*mine\.jinja does not write"):
        staged(Echo, tokenizer, settings=settings)


# --- the ends of an episode -------------------------------------------------------------------------------------------


def test_an_episode_ends_after_its_turns_with_what_it_had_earned():
    tokenizer = small_tokenizer()
    stage, (task,) = staged(Echo, tokenizer)
    episode = begin(task)
    assert len(play(stage, episode, tokenizer, *["go<|im_end|>"] * 5)) == 2
    assert episode.finish == "turns" and episode.rewards == {"environment": 1.5}
    assert episode.messages is not None and [m["role"] for m in episode.messages] == ["assistant", "user"] * 3


def test_an_answer_that_was_cut_off_is_not_played():
    tokenizer = small_tokenizer()
    stage, (task,) = staged(Echo, tokenizer)
    episode = begin(task)
    write(episode, tokenizer, "stop", finish="length")
    assert stage.reply(episode) is None
    assert episode.finish == "length" and episode.rewards == {"environment": 0.0}
    assert episode.messages == [{"role": "assistant", "content": "stop"}]


def test_an_episode_without_room_for_an_answer_is_too_long():
    tokenizer = small_tokenizer()
    stage, (task,) = staged(Echo, tokenizer, settings=replace(SETTINGS, max_completion_length=20))
    episode = begin(task)
    assert not play(stage, episode, tokenizer, "the quick fox<|im_end|>")
    assert episode.truncated and episode.rewards == {"environment": 0.5}


class Raises(Environment):
    def step(self, answer):
        raise RuntimeError("the world broke")


class Silent(Environment):
    def step(self, answer):
        return Step()


class NotAStep(Environment):
    def step(self, answer):
        return ("hello", 1.0, True)


class Infinite(Environment):
    def step(self, answer):
        return Step(reward=float("nan"), done=True)


class Objects(Environment):
    def step(self, answer):
        return Step([{"role": "user", "content": object()}])


FAILING = {
    Raises: "RuntimeError: the world broke",
    Silent: "must say something",
    NotAStep: "must return a Step",
    Infinite: "finite reward",
    Objects: "expected 'content' to be text",
}


@pytest.mark.parametrize("environment", FAILING)
def test_an_environment_that_fails_costs_its_episode_alone(environment):
    tokenizer = small_tokenizer()
    told: list[str] = []
    failures = Failures(told.append)
    stage, (task,) = staged(environment, tokenizer, failures=failures)
    episode = begin(task)
    write(episode, tokenizer, "go<|im_end|>")
    assert stage.reply(episode) is None
    assert len(told) == 1 and told[0].startswith("the environment failed: ") and FAILING[environment] in told[0]
    if environment is Raises:  # where every episode ends so, the run stops and shows where
        with pytest.raises(ValueError, match=r"(?s)The first failure: the environment.*in step\n.*the world broke"):
            failures.end_rollout(False, rollouts=1)
    assert episode.rewards == {"environment": None} and FAILING[environment] in episode.problems["environment"]
    assert episode.finish == "error"
    assert from_json(json.loads(to_json([episode])))[0].problems == episode.problems
    assert not episode.loss_mask(False).any()


# --- chance -----------------------------------------------------------------------------------------------------------


def test_a_task_starts_alike_and_its_episodes_go_their_own_ways():
    tokenizer = small_tokenizer()
    stage, tasks = staged(Dice, tokenizer, [{"prompt": "roll: "}, {"prompt": "roll: "}])
    first, second = (tokenizer.decode(task.tokens) for task in tasks)
    assert first.startswith("roll: The target is ") and first != second
    rolled = {
        (task.index, turn, member): tokenizer.decode(play(stage, begin(task, member, turn), tokenizer, "go")[0])
        for task in tasks for turn in range(2) for member in range(3)
    }  # fmt: skip
    assert len(set(rolled.values())) > 9


def test_a_run_that_is_resumed_meets_the_same_chance():
    """A stage of a new process, other threads, another order: the episodes say the same."""
    tokenizer = small_tokenizer()
    records = [{"messages": ASKED}] * 3

    def transcripts(order):
        stage, tasks = staged(Dice, tokenizer, records)
        episodes = {(t.index, m): begin(t, m) for t in tasks for m in range(4)}
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(lambda key: play(stage, episodes[key], tokenizer, *["x<|im_end|>"] * 4), order(episodes)))
        assert not any(e.problems for e in episodes.values())
        return {key: e.tokens.tolist() for key, e in episodes.items()}

    assert transcripts(sorted) == transcripts(lambda keys: sorted(keys, reverse=True))


def test_the_opening_is_a_message_of_the_prompt():
    tokenizer = small_tokenizer()
    _, (task,) = staged(Dice, tokenizer)
    assert [m["role"] for m in task.prompt] == ["system", "user", "user"]
    assert list(task.tokens) == tokenizer.encode_chat(task.prompt)


# --- how it is named --------------------------------------------------------------------------------------------------


def test_a_recipe_names_a_class_by_its_file(tmp_path):
    (tmp_path / "world.py").write_text(
        "from dovetail.tune.rl.environment import Environment, Step\n"
        "class World(Environment):\n"
        "    def step(self, answer):\n"
        "        return Step(reward=float(self.columns['worth']), done=True)\n"
    )
    tokenizer = small_tokenizer()
    stage, (task,) = staged(f"{tmp_path}/world.py:World", tokenizer, [{"prompt": "a", "worth": 4}])
    episode = begin(task)
    play(stage, episode, tokenizer, "b")
    assert episode.rewards == {"environment": 4.0}
    with pytest.raises(ValueError, match="environment: 'Wrold' is not there"):
        staged(f"{tmp_path}/world.py:Wrold", tokenizer)
    with pytest.raises(ValueError, match="environment must be a class"):
        staged(3, tokenizer)


def test_a_function_may_make_it():
    tokenizer = small_tokenizer()
    stage, (task,) = staged(lambda columns, random: Echo(columns, random), tokenizer)
    assert len(play(stage, begin(task), tokenizer, "a<|im_end|>")) == 1
    with pytest.raises(ValueError, match="it made 'echo': derive from it"):
        staged(lambda columns, random: "echo", tokenizer)
