"""Tools: what the model is told of a typed function, what its calls do, and how they stand in an episode."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import pytest
from data.conftest import CHATML, small_tokenizer
from data.test_example_encoder import SPECIAL
from tune.rl.staged import ASKED, begin, bytes_tokenizer, family, play, staged, write

from dovetail.tune.rl.environment import Environment, Step
from dovetail.tune.rl.tools import Tool, ToolEnvironment

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

    def score(self, answer):
        return float(answer.content.strip() == "5")


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

    def score(self, answer):
        return float(self.count)


def call_of(name: str, tool: str, **arguments: Any) -> str:
    return CALLS[name].format(name=tool, arguments=json.dumps(arguments))


# --- what the model is told -------------------------------------------------------------------------------------------


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
    told = Tool.of(total).schema["function"]
    assert "description" not in told
    assert told["parameters"]["properties"] == {
        "numbers": {"type": "array", "items": {"type": "number"}},
        "label": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
    }
    counted = Tool.of(later).schema["function"]["parameters"]
    assert counted["properties"] == {"count": {"type": "integer", "description": "how often"}}


def untyped(a): ...
def starred(*a: int): ...
def of_objects(a: complex): ...


@pytest.mark.parametrize(
    "function, why",
    [
        (untyped, "untyped must have a type hint for each parameter; a has none"),
        (starred, r"given by name; the tool starred has \*a"),
        (of_objects, "a of the tool of_objects must be str"),
        (lambda a: a, "not a lambda"),
    ],
)
def test_what_cannot_be_described_is_refused(function, why):
    with pytest.raises(ValueError, match=why):
        Tool.of(function)


# --- what a call does -------------------------------------------------------------------------------------------------


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
def test_a_call_gives_text_and_so_does_its_failure(tool, arguments, result):
    assert Tool.of(tool)(arguments).startswith(result)


# --- a call in an episode ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CALLS)
def test_calls_and_results_stand_as_the_template_writes_them(name):
    """The policy's own tokens as it wrote them, around them what the template adds; its answer ends the episode."""
    tokenizer = family(name)
    stage, (task,) = staged(Shop, tokenizer)
    shown = tokenizer.decode(task.tokens, skip_special=False)
    assert '"name": "price"' in shown and '"item"' in shown  # in SmolLM2's, whose template knows no tools, spelled out
    episode, end = begin(task), tokenizer.eos
    written = [call_of(name, "price", item="apple"), call_of(name, "price", item="pear"), "5"]
    first, second = play(stage, episode, tokenizer, *(f"{text}{end}" for text in written))
    results = [tokenizer.decode(said, skip_special=False) for said in (first, second)]
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


def test_several_calls_of_one_answer_are_answered_in_order():
    tokenizer = family("qwen3")
    stage, (task,) = staged(Shop, tokenizer)
    episode = begin(task)
    both = call_of("qwen3", "price", item="apple") + "\n" + call_of("qwen3", "price", item="pear")
    (said,) = play(stage, episode, tokenizer, f"{both}<|im_end|>")
    shown = "\n<tool_response>\n2\n</tool_response>\n<tool_response>\n3\n</tool_response>"
    assert shown in tokenizer.decode(said, skip_special=False)


@pytest.mark.parametrize(
    "call, told",
    [
        (
            '<tool_call>{"name": "prize", "arguments": {}}</tool_call>',
            "there is no tool 'prize'; there are price, total",
        ),
        ('<tool_call>{"name": "price", "arguments": {"item": "ap</tool_call>', "not whole JSON"),
        ('<tool_call>{"name": "price", "arguments": {"item": "kiwi"}}</tool_call>', "KeyError"),
    ],
)
def test_a_wrong_call_is_told_and_the_episode_goes_on(call, told):
    tokenizer = family("qwen2")
    stage, (task,) = staged(Shop, tokenizer)
    episode = begin(task)
    (said,) = play(stage, episode, tokenizer, f"{call}<|im_end|>")
    assert "error: " in tokenizer.decode(said) and told in tokenizer.decode(said) and not episode.problems


def test_markers_that_are_special_tokens_reach_the_parser():
    """Where a vocabulary has <tool_call> as a special token, text without special tokens would show no call."""
    template = family("qwen2").chat_template or ""
    tokenizer = bytes_tokenizer(["<tool_call>", "</tool_call>", *SPECIAL["qwen2"]], template)
    stage, (task,) = staged(Shop, tokenizer)
    episode = begin(task)
    assert play(stage, episode, tokenizer, f"{call_of('qwen2', 'price', item='pear')}<|im_end|>")
    assert episode.messages is not None and episode.messages[1]["content"] == "3"


def test_a_method_is_a_tool_with_the_episodes_state():
    tokenizer = family("qwen2")
    stage, (task,) = staged(Counting, tokenizer)
    one, other = begin(task, 0), begin(task, 1)
    add = f"{call_of('qwen2', 'add', much=2)}<|im_end|>"
    play(stage, one, tokenizer, add, add, "done<|im_end|>")
    play(stage, other, tokenizer, add, "done<|im_end|>")
    assert (one.rewards, other.rewards) == ({"environment": 4.0}, {"environment": 2.0})


def test_an_episode_is_the_same_again():
    """Ids of calls, which some templates write, are no chance."""
    tokenizer = family("qwen2")
    stage, (task,) = staged(Shop, tokenizer)
    found = []
    for _ in range(2):
        episode = begin(task)
        play(stage, episode, tokenizer, f"{call_of('qwen2', 'price', item='pear')}<|im_end|>", "5<|im_end|>")
        found.append((episode.tokens.tolist(), episode.messages))
    assert found[0] == found[1]


def test_a_call_that_was_cut_off_is_not_run():
    tokenizer = family("qwen2")
    stage, (task,) = staged(Counting, tokenizer)
    episode = begin(task)
    write(episode, tokenizer, call_of("qwen2", "add", much=2), finish="length")
    assert stage.reply(episode) is None and episode.rewards == {"environment": 0.0}


def test_an_environment_of_ones_own_may_read_the_calls():
    class Own(Environment):
        tools = (price,)

        def step(self, answer):
            return Step(reward=float(len(answer.calls)), done=True)

    tokenizer = family("qwen2")
    stage, (task,) = staged(Own, tokenizer)
    episode = begin(task)
    play(stage, episode, tokenizer, f"{call_of('qwen2', 'price', item='pear')}<|im_end|>")
    assert episode.rewards == {"environment": 1.0}


# --- what is refused at the start -------------------------------------------------------------------------------------


class Twice(ToolEnvironment):
    tools = (price, price)


@pytest.mark.parametrize(
    "environment, record, why",
    [
        (Shop, {"prompt": "plain text"}, "needs a chat template to show them"),
        (Shop, {"messages": ASKED, "tools": [Tool.of(price).schema]}, "leave the record's out"),
        (Twice, {"messages": ASKED}, "price comes twice"),
    ],
)
def test_what_does_not_go_together_is_refused(environment, record, why):
    with pytest.raises(ValueError, match=why):
        staged(environment, small_tokenizer(), [record])


def test_a_template_that_ends_no_turn_of_calls_is_refused():
    template = CHATML.replace("<|im_end|>\\n", "\\n").replace(
        "(m.content or '')",
        "(m.content or '') + ('<tool_call>' + m.tool_calls[0].function.name if m.tool_calls else '')",
    )
    template = "{{- tools | tojson }}" + template
    with pytest.raises(ValueError, match="the model's chat template writes no end token after a turn of tool calls"):
        staged(Shop, small_tokenizer(template))
