"""Agents constrained by a grammar: they write calls, and the trainer knows the tokens that were allowed."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from refusals import refuses
from tune.rl.environments import write
from tune.small_models import metrics

from dovetail.core.errors import RecipeError
from dovetail.io.tokenizer import Tokenizer
from dovetail.models.registry import read_model
from dovetail.tune.rl.environment import Environment, Step
from dovetail.tune.rl.episode import Episode, EpisodeId, new_episode
from dovetail.tune.rl.layout import lay_out
from dovetail.tune.rl.prompts import PromptRecord
from dovetail.tune.rl.rl import rl
from dovetail.tune.rl.sections import Sampling
from dovetail.tune.rl.settings import Rl
from dovetail.tune.rl.tool_grammars import ToolGrammars
from dovetail.tune.rl.tools import Tool, call_tools, tools_of

pytestmark = pytest.mark.slow
EXAMPLES = Path(__file__).parents[3] / "examples"
TASKS = [{"messages": [{"role": "user", "content": f"shop {i}"}]} for i in range(4)]


def buy(item: Literal["a", "b"]) -> str:
    """Buy it."""
    return f"1 {item}"


class Shop(Environment):
    """Reward each call that buys a."""

    tools = (buy,)
    turns = 2

    def step(self, turn):
        bought = [json.loads(call.arguments)["item"] for call in turn.calls]
        return Step(call_tools(turn.calls, tools_of(self)) or "buy", reward=bought.count("a") / 4)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Random weights: only the grammar gives the turns a form."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        tiny = importlib.import_module("tiny")
    call = {"type": "function", "function": {"name": "buy", "arguments": {"item": "a"}}}
    chat = [*TASKS[0]["messages"], {"role": "assistant", "content": "", "tool_calls": [call]}]
    lesson = {"messages": chat, "tools": [Tool.of(buy).schema]}
    return tiny.tiny_model(tmp_path_factory.mktemp("calls") / "model", [lesson])


def run(model: str, folder: Path, **changes: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the metrics and the completions of a run."""
    given: dict[str, Any] = dict(
        data=TASKS, environment=Shop, steps=2, prompts=2, num_generations=2, max_prompt_length=64,
        max_completion_length=160, show=False, optimizer={"lr": 3e-3}, precision={"compute": "f32"},
        schedule={"name": "constant"}, show_every=0, checkpoint={"every": 0}, engine={"max_num_seqs": 2},
    )  # fmt: skip
    assert rl(model=model, run_dir=folder, **given | changes).code == 0
    played = [json.loads(line) for line in (folder / "completions.jsonl").read_text().splitlines()]
    return metrics(folder), played


def test_required_calls_are_calls_and_the_trainer_knows_the_allowed_tokens(model, tmp_path):
    lines, played = run(model, tmp_path, sampling={"tool_choice": "required", "parallel_tool_calls": False})
    assert max(line["gap_max"] for line in lines) < 1e-4
    assert len(played) == 8 and any(line["grad_norm"] > 0 for line in lines)
    for each in played:
        assert [message["role"] for message in each["completion"]] == ["assistant", "tool"] * 2
        for message, result in zip(each["completion"][::2], each["completion"][1::2], strict=True):
            (call,) = message["tool_calls"]
            assert call["function"]["name"] == "buy" and message["content"] == ""
            assert result["content"] == f"1 {call['function']['arguments']['item']}"


@pytest.mark.thorough
def test_auto_with_top_k_and_another_temperature(model, tmp_path):
    """The trainer knows both the tokens of top-k and those that the grammar allows."""
    sampling = {"tool_choice": "auto", "temperature": 0.8, "top_k": 10, "top_p": 0.9}
    lines, _ = run(model, tmp_path, updates=2, sampling=sampling, loss={"beta": 0.01})
    assert max(line["gap_max"] for line in lines) < 1e-4
    assert all(abs(line["ratio"] - 1) < 1e-4 for line in lines)


CALL = '<tool_call>\n{"name": "buy", "arguments": {"item": "a"}}\n</tool_call>'


ODD = {"type": "function", "function": {"name": "f", "parameters": {"type": "circle"}}}


def masked(model: str, choice: str, *turns: str) -> tuple[Tokenizer, Episode, dict[str, np.ndarray]]:
    """Return the tokenizer, an episode of these turns, and the masks of its tokens."""
    tokenizer, cfg = Tokenizer.from_folder(model), read_model(model)
    task = PromptRecord(0, "", (1, 2, 3), {}, [Tool.of(buy).schema])
    settings = Rl(model=model, steps=1, sampling=Sampling(tool_choice=choice))
    grammars = ToolGrammars.from_settings(settings, tokenizer, cfg, [task])
    episode = new_episode(EpisodeId(0, 0), 0, task.tokens, 0)
    for i, turn in enumerate(turns):
        episode.extend([5, 6] if i else [])
        write(episode, tokenizer, turn)
    assert grammars is not None
    return tokenizer, episode, grammars.columns(lay_out([episode], 256, [1]), [episode])


def allowed(columns: dict[str, np.ndarray], place: int) -> set[int]:
    """Return the tokens that were allowed at a position of the only episode."""
    bits = columns["masks"][0, columns["mask"][0, place - 1]]
    return set(np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist())


def test_each_token_has_the_mask_of_its_grammar(model):
    tokenizer, episode, columns = masked(model, "required", CALL, CALL)
    begins = tokenizer.encode("<tool_call>", add_special=False)[0]
    places = np.flatnonzero(episode.sampled).tolist()
    for place in places:
        words = allowed(columns, place)
        assert int(episode.tokens[place]) in words and len(words) < 20
    first, second = np.flatnonzero(np.diff(episode.sampled, prepend=False) & episode.sampled).tolist()
    assert begins in allowed(columns, first) and allowed(columns, first) == allowed(columns, second)
    assert not columns["mask"][0, [0, second - 2]].any()  # observations have no mask
    assert len(allowed(columns, second - 1)) >= tokenizer.vocab_size
    assert sum(len(allowed(columns, place)) == 1 for place in places) >= 2  # forced tokens


def test_auto_leaves_text_free_until_a_call_opens(model):
    tokenizer, episode, columns = masked(model, "auto", "some text " + CALL)
    free, end = allowed(columns, 3), len(episode.tokens) - 1
    assert len(free) > tokenizer.vocab_size // 2 and tokenizer.eos_ids[0] in free
    assert len(allowed(columns, end)) < 20


@pytest.mark.parametrize(
    "choice, tools, naming",
    [
        ("auto", [[]], "no prompt shows any"),
        ("required", [[], [Tool.of(buy).schema]], "in every prompt"),
        ("required", [[ODD]], "no grammar"),
    ],
)
def test_prompts_without_a_grammar_are_refused(model, choice, tools, naming):
    tasks = [PromptRecord(i, "", (1, 2), {}, each) for i, each in enumerate(tools)]
    settings = Rl(model=model, steps=1, sampling=Sampling(tool_choice=choice))
    with refuses("sampling.tool_choice", RecipeError, naming=naming):
        ToolGrammars.from_settings(settings, Tokenizer.from_folder(model), read_model(model), tasks)
