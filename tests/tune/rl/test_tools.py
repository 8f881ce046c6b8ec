"""Tools: the schema of a typed function, the results of calls, and their tokens in an episode."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import pytest
from data.conftest import CHATML, small_tokenizer
from data.test_example_encoder import SPECIAL
from refusals import refuses
from tune.rl.environments import ASKED, begin, bytes_tokenizer, family, play, runner_of, write

from dovetail.core.errors import RecipeError, UserError
from dovetail.tune.rl.environment import Environment, Step, ToolEnvironment
from dovetail.tune.rl.tools import Tool

PRICES = {"apple": 2, "pear": 3}
CALLS = {  # as each family's models write one
    "smollm2": '<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>',
    "qwen2": '<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>',
    "qwen3": '<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>',
    "llama3": '{{"name": "{name}", "parameters": {arguments}}}',
}


def price(item: str, currency: Literal["eur", "usd"] = "eur") -> int:
    """The price of an item,
    as of today.

    item: its name, in the singular
    currency: what to pay in
    """
    return PRICES[item] * (1 if currency == "eur" else 10)


def total(numbers: list[float], label: str | None = None) -> dict[str, Any]:
    return {label or "total": sum(numbers)}


async def later(count: Annotated[int, "how often"]) -> str:
    return "later " * count


class Shop(ToolEnvironment):
    tools = (price, total)

    def score(self, turn):
        return float(turn.content.strip() == "5")


class Counting(ToolEnvironment):
    """A tool that needs the episode's state."""

    def reset(self, random):
        self.count = 0

    @property
    def tools(self):
        return [self.add]

    def add(self, much: int) -> int:
        """Add."""
        self.count += much
        return self.count

    def score(self, turn):
        return float(self.count)


def call_of(name: str, tool: str, **arguments: Any) -> str:
    return CALLS[name].format(name=tool, arguments=json.dumps(arguments))


# --- the schema of a function -----------------------------------------------------------------------------------------


def test_a_function_is_described_by_its_hints_and_its_docstring():
    assert Tool.of(price).schema == {
        "type": "function",
        "function": {
            "name": "price",
            "description": "The price of an item, as of today.",
            "parameters": {
                "type": "object",
                "properties": {
                    "item": {"type": "string", "description": "its name, in the singular"},
                    "currency": {"enum": ["eur", "usd"], "description": "what to pay in", "default": "eur"},
                },
                "required": ["item"],
            },
        },
    }
    described = Tool.of(total).schema["function"]
    assert "description" not in described
    assert described["parameters"]["properties"] == {
        "numbers": {"type": "array", "items": {"type": "number"}},
        "label": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
    }
    counted = Tool.of(later).schema["function"]["parameters"]
    assert counted["properties"] == {"count": {"type": "integer", "description": "how often"}}


def untyped(a): ...
def starred(*a: int): ...
def of_objects(a: complex): ...


@pytest.mark.parametrize(
    "function, naming",
    [
        (untyped, "untyped must have a type hint for each parameter; a has none"),
        (starred, "starred has *a"),
        (of_objects, "a of the tool of_objects must be str"),
        (lambda a: a, "not a lambda"),
    ],
)
def test_a_function_without_a_schema_is_refused(function, naming):
    with refuses("tools", naming=naming):
        Tool.of(function)


# --- calls ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tool, arguments, result",
    [
        (price, '{"item": "pear"}', "3"),
        (price, '{"item": "pear", "currency": "usd"}', "30"),
        (total, '{"numbers": [1, 2.5], "label": "sum"}', '{"sum": 3.5}'),
        (later, '{"count": 2}', "later later "),
        (price, '{"item": "fig"}', "error: KeyError: 'fig'"),
        (price, '{"item": 3}', 'error: item must fit {"type": "string"'),
        (price, '{"thing": "pear"}', "error: price has no parameter 'thing'"),
        (price, "{}", "error: price needs item"),
        (price, "[]", "error: arguments of price must be an object"),
    ],
)
def test_a_call_returns_its_result_or_its_error_as_text(tool, arguments, result):
    assert Tool.of(tool)(arguments).startswith(result)


# --- calls in an episode ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CALLS)
def test_calls_and_results_are_tokens_of_the_template(name):
    """The policy's sampled tokens stay as they are, the template's are around them; a turn without calls ends it."""
    tokenizer = family(name)
    runner, (task,) = runner_of(Shop, tokenizer)
    shown = tokenizer.decode(task.tokens, skip_special=False)
    assert '"name": "price"' in shown and '"item"' in shown  # in SmolLM2's, whose template knows no tools, spelled out
    episode, end = begin(task), tokenizer.eos
    written = [call_of(name, "price", item="apple"), call_of(name, "price", item="pear"), "5"]
    first, second = play(runner, episode, tokenizer, *(f"{text}{end}" for text in written))
    results = [tokenizer.decode(observation, skip_special=False) for observation in (first, second)]
    expected = [tool_turn(name, tokenizer, result) for result in ("2", "3")]
    assert results == expected
    sampled = tokenizer.decode(episode.tokens[episode.sampled], skip_special=False)
    assert sampled == "".join(f"{text}{end}" for text in written)
    assert episode.finish == "done" and episode.rewards == {"environment": 1.0}
    assert episode.messages is not None
    assert [m["role"] for m in episode.messages] == ["assistant", "tool", "assistant", "tool", "assistant"]
    assert episode.messages[0]["tool_calls"][0]["function"] == {"name": "price", "arguments": {"item": "apple"}}
    assert episode.messages[1]["content"] == "2" and episode.messages[1]["tool_call_id"] == "call01000"


def tool_turn(name, tokenizer, content) -> str:
    """By transformers' rule: what a render with the tool's message and the next prompt has over one without."""
    if name == "llama3":
        head = "<|start_header_id|>{}<|end_header_id|>\n\n"
        return head.format("ipython") + content + "<|eot_id|>" + head.format("assistant")
    inner = f"tool\n{content}" if name == "smollm2" else f"user\n<tool_response>\n{content}\n</tool_response>"
    return f"\n<|im_start|>{inner}<|im_end|>\n<|im_start|>assistant\n"


def test_several_calls_of_a_turn_are_run_in_order():
    tokenizer = family("qwen3")
    runner, (task,) = runner_of(Shop, tokenizer)
    episode = begin(task)
    both = call_of("qwen3", "price", item="apple") + "\n" + call_of("qwen3", "price", item="pear")
    (observation,) = play(runner, episode, tokenizer, f"{both}<|im_end|>")
    shown = "\n<tool_response>\n2\n</tool_response>\n<tool_response>\n3\n</tool_response>"
    assert shown in tokenizer.decode(observation, skip_special=False)


@pytest.mark.parametrize(
    "call, error",
    [
        (
            '<tool_call>{"name": "prize", "arguments": {}}</tool_call>',
            "there is no tool 'prize'; there are price, total",
        ),
        ('<tool_call>{"name": "price", "arguments": {"item": "ap</tool_call>', "not complete JSON"),
        ('<tool_call>{"name": "price", "arguments": {"item": "kiwi"}}</tool_call>', "KeyError"),
    ],
)
def test_a_wrong_call_returns_an_error_and_the_episode_goes_on(call, error):
    tokenizer = family("qwen2")
    runner, (task,) = runner_of(Shop, tokenizer)
    episode = begin(task)
    (observation,) = play(runner, episode, tokenizer, f"{call}<|im_end|>")
    assert (
        "error: " in tokenizer.decode(observation) and error in tokenizer.decode(observation) and not episode.problems
    )


def test_markers_that_are_special_tokens_reach_the_parser():
    """Where a vocabulary has <tool_call> as a special token, text without special tokens would show no call."""
    template = family("qwen2").chat_template or ""
    tokenizer = bytes_tokenizer(["<tool_call>", "</tool_call>", *SPECIAL["qwen2"]], template)
    runner, (task,) = runner_of(Shop, tokenizer)
    episode = begin(task)
    assert play(runner, episode, tokenizer, f"{call_of('qwen2', 'price', item='pear')}<|im_end|>")
    assert episode.messages is not None and episode.messages[1]["content"] == "3"


def test_a_method_is_a_tool_with_the_episodes_state():
    tokenizer = family("qwen2")
    runner, (task,) = runner_of(Counting, tokenizer)
    one, other = begin(task, 0), begin(task, 1)
    add = f"{call_of('qwen2', 'add', much=2)}<|im_end|>"
    play(runner, one, tokenizer, add, add, "done<|im_end|>")
    play(runner, other, tokenizer, add, "done<|im_end|>")
    assert (one.rewards, other.rewards) == ({"environment": 4.0}, {"environment": 2.0})


def test_an_episode_can_be_repeated():
    """Ids of calls, which some templates write, are not random."""
    tokenizer = family("qwen2")
    runner, (task,) = runner_of(Shop, tokenizer)
    found = []
    for _ in range(2):
        episode = begin(task)
        play(runner, episode, tokenizer, f"{call_of('qwen2', 'price', item='pear')}<|im_end|>", "5<|im_end|>")
        found.append((episode.tokens.tolist(), episode.messages))
    assert found[0] == found[1]


def test_a_call_that_was_cut_off_is_not_run():
    tokenizer = family("qwen2")
    runner, (task,) = runner_of(Counting, tokenizer)
    episode = begin(task)
    write(episode, tokenizer, call_of("qwen2", "add", much=2), finish="length")
    assert runner.reply(episode) is None and episode.rewards == {"environment": 0.0}


def test_an_environment_may_read_the_calls_itself():
    class Own(Environment):
        tools = (price,)

        def step(self, turn):
            return Step(reward=float(len(turn.calls)), done=True)

    tokenizer = family("qwen2")
    runner, (task,) = runner_of(Own, tokenizer)
    episode = begin(task)
    play(runner, episode, tokenizer, f"{call_of('qwen2', 'price', item='pear')}<|im_end|>")
    assert episode.rewards == {"environment": 1.0}


# --- refusals at the start --------------------------------------------------------------------------------------------


class Twice(ToolEnvironment):
    tools = (price, price)


@pytest.mark.parametrize(
    "environment, record, param",
    [
        (Shop, {"prompt": "plain text"}, "prompt"),
        (Shop, {"messages": ASKED, "tools": [Tool.of(price).schema]}, "tools"),
        (Twice, {"messages": ASKED}, "tools"),
    ],
)
def test_records_that_do_not_fit_the_environment_are_refused(environment, record, param):
    with refuses(param, UserError):
        runner_of(environment, small_tokenizer(), [record])


def test_a_template_without_an_end_token_after_calls_is_refused():
    template = CHATML.replace("<|im_end|>\\n", "\\n").replace(
        "(m.content or '')",
        "(m.content or '') + ('<tool_call>' + m.tool_calls[0].function.name if m.tool_calls else '')",
    )
    template = "{{- tools | tojson }}" + template
    with refuses("data.template", RecipeError, naming="the model's chat template writes no end token"):
        runner_of(Shop, small_tokenizer(template))
