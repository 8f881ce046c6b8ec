"""A rollout that is broken off goes on from what the journal has of it: nothing is sampled twice, and all is equal."""

from __future__ import annotations

import contextlib
import time

import numpy as np
import pytest
from tune.small_models import model_folder

from dovetail import LLM
from dovetail.engine.request.outputs import PartialOutput
from dovetail.engine.request.params import StructuredOutputsParams
from dovetail.tune.rl import drafts as drafts_module
from dovetail.tune.rl.draft import Draft
from dovetail.tune.rl.drafts import Drafts
from dovetail.tune.rl.episode import Episode, Place, begun
from dovetail.tune.rl.journal import Journal
from dovetail.tune.rl.parts import Sampling
from dovetail.tune.rl.player import Player, Start
from dovetail.tune.rl.settings import Rl
from dovetail.tune.rl.task import Task

pytestmark = pytest.mark.slow
MEMBERS, PROMPTS, LONGEST, VERSION = 4, 2, 24, 7
TASKS = [Task(i, "", tuple(range(3 + i, 9 + i)), {}) for i in range(PROMPTS)]


class BrokenOff(Exception):
    pass


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = model_folder(tmp_path_factory.mktemp("drafts"))
    llm = LLM(folder, dtype="f32", max_model_len=64, max_num_seqs=8, max_num_batched_tokens=32)
    llm.engine._steps_wanted = lambda: 1  # how many it would take per dispatch depends on the machine
    return llm


@pytest.fixture(autouse=True)
def at_every_step(monkeypatch):
    monkeypatch.setattr(drafts_module, "SECONDS", 0.0)
    monkeypatch.setattr(drafts_module, "SHARE", float("inf"))


def settings_of(**changes) -> Rl:
    return Rl(model="none", prompts=PROMPTS, group_size=MEMBERS, max_prompt=16, max_tokens=LONGEST, steps=1, **changes)


def thrice(episode: Episode) -> list[int] | None:
    """An environment that says something of what it heard, until the policy has had three turns."""
    turns = int(np.diff(episode.sampled.astype(int), prepend=0).clip(0).sum())
    return None if turns == 3 or episode.truncated else [10 + int(episode.tokens[-1]) % 7, 11]


KINDS = {
    "plain": ({}, None, None),
    "words and stop strings": (
        {"sampling": Sampling(temperature=1.3, top_k=6, top_p=0.9, stop=("er", "!"))}, None, None
    ),
    "an environment": ({"sampling": Sampling(stop=("e", "t", "a"))}, thrice, None),
    "a grammar": ({}, None, lambda episode: StructuredOutputsParams(regex="([a-z]{2} ){4,9}[.]")),
}  # fmt: skip


def play(llm: LLM, settings: Rl, reply=None, grammar=None, journal: Journal | None = None, looks: int = 0):
    """The episodes, and how many tokens were sampled for them. `looks`: after which it is broken off."""
    llm.engine.reset_prefix_cache()
    before, seen = llm.engine.stats().generated_tokens, []
    found = journal.read(0) if journal else None
    ended = dict(found.episodes) if found else {}

    def keep(episodes: list[Episode]) -> None:
        ended.update({each.place: each for each in episodes})
        if journal:
            journal.write(0, episodes)

    def drafted(more: list) -> None:
        assert journal
        journal.write_drafts(0, more)
        seen.append(1)
        if len(seen) == looks:
            raise BrokenOff

    player = Player(llm, settings, reply, grammar)
    starts = [Start(task, 0, i, range(MEMBERS), 100 + i) for i, task in enumerate(TASKS)]
    starts = [Start(s.task, 0, s.group, [m for m in s.members if s.place(m) not in ended], s.seed) for s in starts]
    with contextlib.suppress(BrokenOff):
        player.play(starts, VERSION, keep, found.drafts if found else {}, drafted if journal else None)
    return ended, llm.engine.stats().generated_tokens - before


def assert_equal(found: dict, expected: dict) -> None:
    """To the last token; log-probabilities by what rounding makes of batches of another size."""
    assert found.keys() == expected.keys()
    for place, one in expected.items():
        for name, value in vars(one).items():
            if name == "logprobs":
                np.testing.assert_allclose(found[place].logprobs, value, atol=1e-5)
            else:
                np.testing.assert_array_equal(getattr(found[place], name), value, err_msg=f"{place} {name}")


def logprobs_of(draft: Draft) -> np.ndarray:
    return np.concatenate([np.asarray(values, np.float32) for values, *_ in draft.written.scores or ()])


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_written_is_not_sampled_again(llm, tmp_path, kind):
    changes, reply, grammar = KINDS[kind]
    settings, journal = settings_of(**changes), Journal(tmp_path)
    straight, all_of_them = play(llm, settings, reply, grammar)
    assert all_of_them == sum(e.written for e in straight.values())
    sampled = sum(
        play(llm, settings, reply, grammar, journal, looks)[1] for looks in (3, 6)
    )  # the second goes on from the first
    found = journal.read(0)
    drafted = sum(len(draft.written.tokens) for draft in found.drafts.values())
    kept = drafted + sum(e.written for e in found.episodes.values())
    assert drafted > 0 and kept < all_of_them and kept <= sampled
    resumed, sampled = play(llm, settings, reply, grammar, journal)
    journal.close()
    assert sampled == all_of_them - kept
    assert_equal(resumed, straight)
    assert any(draft.finish for draft in found.drafts.values()) == (reply is not None)  # whole turns
    if reply is None:  # what is known of the tokens is kept bit for bit
        for turn, draft in found.drafts.items():
            whole, known = resumed[turn.place], logprobs_of(draft)
            np.testing.assert_array_equal(whole.logprobs[whole.prompt :][: len(known)], known)


def test_drafts_of_other_weights_or_prompts_are_left(llm, tmp_path):
    journal = Journal(tmp_path)
    play(llm, settings_of(), journal=journal, looks=4)
    journal.close()
    drafts = journal.read(0).drafts
    assert drafts
    table = Drafts(llm.engine, drafts, None)
    same = begun(0, Place(0, 0, 0), TASKS[0].tokens, VERSION)
    assert table.of(same) is not None
    assert table.of(begun(0, Place(0, 0, 0), TASKS[0].tokens, VERSION + 1)) is None
    assert table.of(begun(0, Place(0, 0, 0), TASKS[1].tokens, VERSION)) is None


def test_a_line_that_a_kill_cut_short_costs_that_line(llm, tmp_path):
    journal = Journal(tmp_path)
    play(llm, settings_of(), journal=journal, looks=4)
    journal.close()
    path = tmp_path / "00000000.jsonl"
    whole = journal.read(0).drafts
    path.write_bytes(path.read_bytes()[:-20])
    shorter = journal.read(0).drafts
    counts = [sum(len(draft.written.tokens) for draft in each.values()) for each in (whole, shorter)]
    assert 0 < counts[1] < counts[0]


def test_they_take_no_more_than_their_share(llm, tmp_path, monkeypatch):
    """Where writing is slow, it is done less often."""
    monkeypatch.setattr(drafts_module, "SHARE", 0.01)
    seen = []

    def slow(more: list) -> None:
        seen.append(more)
        time.sleep(0.05)

    starts = [Start(TASKS[0], 0, 0, range(MEMBERS), 1)]
    began = time.monotonic()
    Player(llm, settings_of()).play(starts, VERSION, lambda episode: None, drafted=slow)
    assert len(seen) <= 1 + (time.monotonic() - began) / 5.0


@pytest.mark.parametrize(
    "written, told",
    [(PartialOutput([5] * LONGEST, [([-1.0] * LONGEST, [1] * LONGEST, None)]), "more than the 24 tokens"),
     (PartialOutput([5, 6], [([-1.0], [1], None)]), "requires the log-probabilities")],
)  # fmt: skip
def test_what_no_answer_can_go_on_from_is_refused(llm, written, told):
    params = Player(llm, settings_of()).params(LONGEST)
    with pytest.raises(ValueError, match=told):
        llm.engine.add("refused", [3, 4], params, {0: written}, text=False)
    assert not llm.engine.has_work
