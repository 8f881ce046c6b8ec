"""Agents kept by a grammar: what they write are calls, and the trainer knows the words that these were drawn from."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from tune.rl.staged import write
from tune.small_models import metrics

from dovetail.io.tokenizer import Tokenizer
from dovetail.models.registry import read_model
from dovetail.tune.rl.calls import Calls
from dovetail.tune.rl.environment import Environment, Step
from dovetail.tune.rl.episode import Episode, EpisodeId, new_episode
from dovetail.tune.rl.layout import lay_out
from dovetail.tune.rl.prompts import PromptRecord
from dovetail.tune.rl.rl import rl
from dovetail.tune.rl.sections import Sampling
from dovetail.tune.rl.settings import Rl
from dovetail.tune.rl.tools import Tool, results, tools_of

pytestmark = pytest.mark.slow
EXAMPLES = Path(__file__).parents[3] / "examples"
TASKS = [{"messages": [{"role": "user", "content": f"shop {i}"}]} for i in range(4)]


def buy(item: Literal["a", "b"]) -> str:
    """Buy it."""
    return f"1 {item}"


class Shop(Environment):
    """Paid for each a, by calls alone."""

    tools = (buy,)
    turns = 2

    def step(self, answer):
        bought = [json.loads(call.arguments)["item"] for call in answer.calls]
        return Step(results(answer.calls, tools_of(self)) or "buy", reward=bought.count("a") / 4)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Random weights: whatever of its answers has a form has it from the grammar."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        tiny = importlib.import_module("tiny")
    call = {"type": "function", "function": {"name": "buy", "arguments": {"item": "a"}}}
    chat = [*TASKS[0]["messages"], {"role": "assistant", "content": "", "tool_calls": [call]}]
    lesson = {"messages": chat, "tools": [Tool.of(buy).schema]}
    return tiny.tiny_model(tmp_path_factory.mktemp("calls") / "model", [lesson])


def run(model: str, folder: Path, **changes: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(its metrics, what was played)."""
    given: dict[str, Any] = dict(
        data=TASKS, environment=Shop, steps=2, prompts=2, num_generations=2, max_prompt_length=64,
        max_completion_length=160, show=False, optimizer={"lr": 3e-3}, precision={"compute": "f32"},
        schedule={"name": "constant"}, show_every=0, checkpoint={"every": 0}, engine={"max_num_seqs": 2},
    )  # fmt: skip
    assert rl(model=model, run_dir=folder, **given | changes).code == 0
    played = [json.loads(line) for line in (folder / "completions.jsonl").read_text().splitlines()]
    return metrics(folder), played


def test_required_calls_are_calls_and_the_trainer_knows_their_words(model, tmp_path):
    lines, played = run(model, tmp_path, sampling={"tool_choice": "required", "parallel_tool_calls": False})
    assert max(line["gap_max"] for line in lines) < 1e-4
    assert len(played) == 8 and any(line["grad_norm"] > 0 for line in lines)
    for each in played:
        assert [message["role"] for message in each["completion"]] == ["assistant", "tool"] * 2
        for told, result in zip(each["completion"][::2], each["completion"][1::2], strict=True):
            (call,) = told["tool_calls"]
            assert call["function"]["name"] == "buy" and told["content"] == ""
            assert result["content"] == f"1 {call['function']['arguments']['item']}"


@pytest.mark.thorough
def test_auto_among_few_words_at_another_temperature(model, tmp_path):
    """Both the words that top-k left and those that the grammar allows are known to the trainer."""
    sampling = {"tool_choice": "auto", "temperature": 0.8, "top_k": 10, "top_p": 0.9}
    lines, _ = run(model, tmp_path, updates=2, sampling=sampling, loss={"beta": 0.01})
    assert max(line["gap_max"] for line in lines) < 1e-4
    assert all(abs(line["ratio"] - 1) < 1e-4 for line in lines)


CALL = '<tool_call>\n{"name": "buy", "arguments": {"item": "a"}}\n</tool_call>'


ODD = {"type": "function", "function": {"name": "f", "parameters": {"type": "circle"}}}


def kept(model: str, choice: str, *turns: str) -> tuple[Tokenizer, Episode, dict[str, np.ndarray]]:
    """(its tokenizer, an episode of these turns, the words that were left to each of its tokens)."""
    tokenizer, cfg = Tokenizer.from_folder(model), read_model(model)
    task = PromptRecord(0, "", (1, 2, 3), {}, [Tool.of(buy).schema])
    settings = Rl(model=model, steps=1, sampling=Sampling(tool_choice=choice))
    calls = Calls.of(settings, tokenizer, cfg, [task])
    episode = new_episode(EpisodeId(0, 0), 0, task.tokens, 0)
    for i, turn in enumerate(turns):
        episode.extend([5, 6] if i else [])
        write(episode, tokenizer, turn)
    assert calls is not None
    return tokenizer, episode, calls.columns(lay_out([episode], 256, [1]), [episode])


def allowed(columns: dict[str, np.ndarray], place: int) -> set[int]:
    """The words that a token of the only episode was drawn from."""
    bits = columns["masks"][0, columns["mask"][0, place - 1]]
    return set(np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist())


def test_each_token_has_the_words_that_its_grammar_left(model):
    tokenizer, episode, columns = kept(model, "required", CALL, CALL)
    begins = tokenizer.encode("<tool_call>", add_special=False)[0]
    places = np.flatnonzero(episode.sampled).tolist()
    for place in places:
        words = allowed(columns, place)
        assert int(episode.tokens[place]) in words and len(words) < 20
    first, second = np.flatnonzero(np.diff(episode.sampled, prepend=False) & episode.sampled).tolist()
    assert begins in allowed(columns, first) and allowed(columns, first) == allowed(columns, second)
    assert not columns["mask"][0, [0, second - 2]].any()  # what nobody sampled may be anything
    assert len(allowed(columns, second - 1)) >= tokenizer.vocab_size
    assert sum(len(allowed(columns, place)) == 1 for place in places) >= 2  # what nothing else can stand for


def test_auto_leaves_text_free_until_a_call_opens(model):
    tokenizer, episode, columns = kept(model, "auto", "some text " + CALL)
    free, end = allowed(columns, 3), len(episode.tokens) - 1
    assert len(free) > tokenizer.vocab_size // 2 and tokenizer.eos_ids[0] in free
    assert len(allowed(columns, end)) < 20


@pytest.mark.parametrize(
    "choice, tools, told",
    [
        ("auto", [[]], "no prompt shows any"),
        ("required", [[], [Tool.of(buy).schema]], "in every prompt"),
        ("required", [[ODD]], "cannot be kept to"),
    ],
)
def test_what_no_grammar_can_keep_is_told(model, choice, tools, told):
    tasks = [PromptRecord(i, "", (1, 2), {}, each) for i, each in enumerate(tools)]
    settings = Rl(model=model, steps=1, sampling=Sampling(tool_choice=choice))
    with pytest.raises(ValueError, match=told):
        Calls.of(settings, Tokenizer.from_folder(model), read_model(model), tasks)
