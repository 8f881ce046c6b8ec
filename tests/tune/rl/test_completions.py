"""Completions: each step once in completions.jsonl, and tables of the best and the worst."""

import io
import json

import numpy as np
from rich.console import Console

from dovetail.core.recipe import create
from dovetail.tune.rl.completions import Completions, passage_of, table_of
from dovetail.tune.rl.episode import Episode, EpisodeId
from dovetail.tune.rl.prompts import PromptRecord
from dovetail.tune.rl.settings import Rl

RECORDS = {i: PromptRecord(i, f"say {i}", (1, 2), {}) for i in range(3)}


def settings(**changes) -> Rl:
    return create(Rl, {"model": "m", "steps": 10, "data": {"path": "p.jsonl"}, **changes})


def groups(count: int = 2, size: int = 2) -> list[list[Episode]]:
    def episode(group: int, member: int) -> Episode:
        sampled = np.asarray([False, False, True, True, True])
        return Episode(
            EpisodeId(0, group, member), group, 2, np.arange(5, dtype=np.int32), sampled, np.zeros(5, np.float32),
            text=f"answer {member}", finish="stop", rewards={"right": float(member)}, reward=float(member),
        )  # fmt: skip

    return [[episode(group, member) for member in range(size)] for group in range(count)]


def line(reward: float | None, text: object = "an answer", **more) -> dict:
    known = {"step": 7, "group": 0, "member": 0, "prompt": "a question", "completion": text, "reward": reward}
    return known | {"rewards": {"right": reward, "brief": 0.25}, "problems": {}, "tokens": 3, "finish": "stop"} | more


def drawn(lines: list[dict], width: int = 100) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(table_of(7, lines))
    return out.getvalue()


def test_completions_jsonl_has_a_line_per_completion(tmp_path):
    Completions(tmp_path, settings(), RECORDS).add(1, groups())
    lines = [json.loads(each) for each in (tmp_path / "completions.jsonl").read_text().splitlines()]
    assert [(one["group"], one["member"], one["prompt"], one["completion"], one["reward"]) for one in lines] == [
        (0, 0, "say 0", "answer 0", 0.0), (0, 1, "say 0", "answer 1", 1.0),
        (1, 0, "say 1", "answer 0", 0.0), (1, 1, "say 1", "answer 1", 1.0),
    ]  # fmt: skip
    assert lines[0]["tokens"] == 3 and lines[0]["rewards"] == {"right": 0.0}


def test_a_resume_or_a_rollback_replaces_the_lines_of_later_steps(tmp_path):
    first = Completions(tmp_path, settings(), RECORDS)
    for step in (1, 2, 3, 4):
        first.add(step, groups())
    with (tmp_path / "completions.jsonl").open("a") as file:
        file.write('{"step": 5, "gro')  # a kill truncated this line
    again = Completions(tmp_path, settings(), RECORDS)
    again.add(3, groups())  # resumed from step 2
    again.add(4, groups())
    again.add(4, groups())  # the batch of a step that went wrong is replaced
    lines = [json.loads(each)["step"] for each in (tmp_path / "completions.jsonl").read_text().splitlines()]
    assert lines == [step for step in (1, 2, 3, 4) for _ in range(4)]


def test_tables_are_shown_every_show_every_steps(tmp_path):
    def due(steps: range, **changes) -> list[int]:
        of = Completions(tmp_path, settings(**changes), RECORDS)
        return [step for step in steps if of.add(step, groups())]

    assert due(range(1, 11), show_every=5) == [1, 5, 10]
    assert due(range(1, 11, 2), show_every=4, updates=2) == [1, 3, 7]  # rollouts whose updates are 3 and 4, 7 and 8
    assert due(range(1, 11), show_every=0) == []


def test_table_has_the_best_and_the_worst_with_each_reward():
    lines = [line(float(i), f"answer number {i}") for i in range(8)] + [line(None, problems={"right": "took too long"})]
    text = drawn(lines)
    assert max(map(len, text.splitlines())) <= 100
    assert text.count("best") == 2 and text.count("worst") == 2
    shown = [f"answer number {i}" in text for i in range(8)]
    assert shown == [True, True, False, False, False, False, True, True]
    assert "step 7: reward 3.5 of 9 completions, 1 without one (right: took too long)" in text
    assert "right 7" in text and "brief 0.25" in text and "a question" in text


def test_control_characters_and_markup_are_not_interpreted():
    said = "[red]\x1b[2J\x07 **bold**\n# heading " + "long " * 500
    text = drawn([line(1.0, said), line(0.0, "", finish="length")])
    assert "\x1b" not in text and "\x07" not in text and "[red]␛[2J␇ **bold**" in text
    assert "cut off at 3 tokens" in text and len(text.splitlines()) < 30
    markdown = passage_of(7, [line(1.0, said), line(0.0, "")]).markdown
    assert "\n    # heading" in markdown and "\n    (nothing)" in markdown


def test_table_shows_a_conversation_by_its_turns_after_the_prompt():
    asked = [{"role": "user", "content": "how many?"}]
    call = {"type": "function", "function": {"name": "count", "arguments": {"of": "geese"}}}
    conversation = [*asked, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "3"}]
    text = drawn([line(1.0, conversation, prompt=asked)])
    assert text.count("how many?") == 1 and 'assistant: count({"of": "geese"})' in text and "tool: 3" in text


def test_table_without_any_reward():
    assert "2 completions, 2 without one" in drawn([line(None), line(None)])
