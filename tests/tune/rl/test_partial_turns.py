"""An interrupted rollout continues from the journal: nothing is sampled twice, and the episodes are the same."""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace

import numpy as np
import pytest
from refusals import refuses
from tune.small_models import model_folder

from dovetail import LLM
from dovetail.core.errors import RequestError
from dovetail.engine.request.outputs import PartialOutput
from dovetail.engine.request.params import StructuredOutputsParams
from dovetail.tune.rl import partial_turns
from dovetail.tune.rl.episode import Episode, EpisodeId, new_episode
from dovetail.tune.rl.episode_runner import EpisodeGroup, EpisodeRunner
from dovetail.tune.rl.journal import Journal
from dovetail.tune.rl.partial_turns import PartialTurn, PartialTurns
from dovetail.tune.rl.prompts import PromptRecord
from dovetail.tune.rl.sections import Sampling
from dovetail.tune.rl.settings import Rl

pytestmark = pytest.mark.slow
MEMBERS, PROMPTS, MAX_LENGTH, VERSION = 4, 2, 24, 7
RECORDS = [PromptRecord(i, "", tuple(range(3 + i, 9 + i)), {}) for i in range(PROMPTS)]


class Interrupted(Exception):
    pass


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = model_folder(tmp_path_factory.mktemp("partial"))
    llm = LLM(folder, dtype="f32", max_model_len=64, max_num_seqs=8, max_num_batched_tokens=32)
    llm.engine._steps_wanted = lambda: 1  # the number of steps per dispatch depends on the machine
    return llm


@pytest.fixture(autouse=True)
def write_after_every_step(monkeypatch):
    monkeypatch.setattr(partial_turns, "WRITE_SECONDS", 0.0)
    monkeypatch.setattr(partial_turns, "MAX_SHARE", float("inf"))


def settings_of(**changes) -> Rl:
    return Rl(
        model="none", prompts=PROMPTS, num_generations=MEMBERS, max_prompt_length=16, max_completion_length=MAX_LENGTH,
        steps=1, **changes,
    )  # fmt: skip


def three_turns(episode: Episode) -> list[int] | None:
    """Reply with tokens that depend on the policy's last one, until it has had three turns."""
    turns = int(np.diff(episode.sampled.astype(int), prepend=0).clip(0).sum())
    return None if turns == 3 or episode.truncated else [10 + int(episode.tokens[-1]) % 7, 11]


KINDS = {
    "plain": ({}, None, None),
    "top_k and stop strings": (
        {"sampling": Sampling(temperature=1.3, top_k=6, top_p=0.9, stop=("er", "!"))}, None, None
    ),
    "environment": ({"sampling": Sampling(stop=("e", "t", "a"))}, three_turns, None),
    "grammar": ({}, None, lambda episode: StructuredOutputsParams(regex="([a-z]{2} ){4,9}[.]")),
}  # fmt: skip


def run(llm: LLM, settings: Rl, reply=None, grammar=None, journal: Journal | None = None, writes: int = 0):
    """Return the episodes, and the number of tokens sampled for them; interrupt after `writes` writes."""
    llm.engine.reset_prefix_cache()
    before, seen = llm.engine.stats().generated_tokens, []
    found = journal.read(0) if journal else None
    ended = dict(found.episodes) if found else {}

    def on_end(episodes: list[Episode]) -> None:
        ended.update({each.id: each for each in episodes})
        if journal:
            journal.write_episodes(0, episodes)

    def on_partial(more: list) -> None:
        assert journal
        journal.write_partial_turns(0, more)
        seen.append(1)
        if len(seen) == writes:
            raise Interrupted

    runner = EpisodeRunner(llm, settings, reply, grammar)
    groups = [EpisodeGroup(record, 0, i, range(MEMBERS), 100 + i) for i, record in enumerate(RECORDS)]
    groups = [replace(each, members=[m for m in each.members if each.id(m) not in ended]) for each in groups]
    with contextlib.suppress(Interrupted):
        runner.run(groups, VERSION, on_end, found.partial if found else {}, on_partial if journal else None)
    return ended, llm.engine.stats().generated_tokens - before


def assert_equal(found: dict, expected: dict) -> None:
    """Compare all fields; log-probabilities within the rounding errors of batches of other sizes."""
    assert found.keys() == expected.keys()
    for id, one in expected.items():
        for name, value in vars(one).items():
            if name == "logprobs":
                np.testing.assert_allclose(found[id].logprobs, value, atol=1e-5)
            else:
                np.testing.assert_array_equal(getattr(found[id], name), value, err_msg=f"{id} {name}")


def logprobs_of(part: PartialTurn) -> np.ndarray:
    return np.concatenate([np.asarray(values, np.float32) for values, *_ in part.written.scores or ()])


@pytest.mark.parametrize("kind", KINDS)
def test_journaled_tokens_are_not_sampled_again(llm, tmp_path, kind):
    changes, reply, grammar = KINDS[kind]
    settings, journal = settings_of(**changes), Journal(tmp_path)
    straight, total = run(llm, settings, reply, grammar)
    assert total == sum(e.completion_length for e in straight.values())
    # The second run continues from the first.
    sampled = sum(run(llm, settings, reply, grammar, journal, writes)[1] for writes in (3, 6))
    found = journal.read(0)
    partial = sum(len(part.written.tokens) for part in found.partial.values())
    kept = partial + sum(e.completion_length for e in found.episodes.values())
    assert partial > 0 and kept < total and kept <= sampled
    resumed, sampled = run(llm, settings, reply, grammar, journal)
    journal.close()
    assert sampled == total - kept
    assert_equal(resumed, straight)
    assert any(part.finish for part in found.partial.values()) == (reply is not None)  # whole turns
    if reply is None:  # journaled log-probabilities are kept bit for bit
        for turn, part in found.partial.items():
            whole, known = resumed[turn.episode], logprobs_of(part)
            np.testing.assert_array_equal(whole.logprobs[whole.prompt_length :][: len(known)], known)


def test_partial_turns_of_other_weights_or_prompts_are_not_used(llm, tmp_path):
    journal = Journal(tmp_path)
    run(llm, settings_of(), journal=journal, writes=4)
    journal.close()
    found = journal.read(0).partial
    assert found
    turns, id = PartialTurns(llm.engine, found, None), EpisodeId(0, 0, 0)
    assert turns.find(new_episode(id, 0, RECORDS[0].tokens, VERSION)) is not None
    assert turns.find(new_episode(id, 0, RECORDS[0].tokens, VERSION + 1)) is None
    assert turns.find(new_episode(id, 0, RECORDS[1].tokens, VERSION)) is None


def test_a_truncated_line_costs_only_that_line(llm, tmp_path):
    journal = Journal(tmp_path)
    run(llm, settings_of(), journal=journal, writes=4)
    journal.close()
    path = tmp_path / "00000000.jsonl"
    whole = journal.read(0).partial
    path.write_bytes(path.read_bytes()[:-20])
    shorter = journal.read(0).partial
    counts = [sum(len(part.written.tokens) for part in each.values()) for each in (whole, shorter)]
    assert 0 < counts[1] < counts[0]


def test_slow_writes_come_less_often(llm, monkeypatch):
    monkeypatch.setattr(partial_turns, "MAX_SHARE", 0.01)
    seen = []

    def slow(more: list) -> None:
        seen.append(more)
        time.sleep(0.05)

    groups = [EpisodeGroup(RECORDS[0], 0, 0, range(MEMBERS), 1)]
    began = time.monotonic()
    EpisodeRunner(llm, settings_of()).run(groups, VERSION, lambda episode: None, on_partial=slow)
    assert len(seen) <= 1 + (time.monotonic() - began) / 5.0


@pytest.mark.parametrize(
    "written, param",
    [(PartialOutput([5] * MAX_LENGTH, [([-1.0] * MAX_LENGTH, [1] * MAX_LENGTH, None)]), "max_tokens"),
     (PartialOutput([5, 6], [([-1.0], [1], None)]), "logprobs")],
)  # fmt: skip
def test_engine_refuses_a_partial_output_that_cannot_continue(llm, written, param):
    params = EpisodeRunner(llm, settings_of()).params(MAX_LENGTH)
    with refuses(param, RequestError):
        llm.engine.add("refused", [3, 4], params, {0: written}, text=False)
    assert not llm.engine.has_work
