"""The files of the journal, as a resumed run reads them."""

from __future__ import annotations

import numpy as np

from dovetail.tune.rl.episode import EpisodeId, new_episode
from dovetail.tune.rl.journal import Journal


def journal(folder, key=""):
    return Journal(folder / "rollouts", key)


def written(folder, key):
    """Write a journal with two rollouts, the first with the scores of two updates."""
    found = journal(folder, key)
    found.read(0)
    for rollout in (0, 1):
        episode = new_episode(EpisodeId(0, 0), 0, [5, 6], rollout)
        episode.images = ["AAE="] * rollout
        found.write_episodes(rollout, [episode])
        found.write_trained_groups(rollout, [(0, 0)])
    found.write_scores(0, [{"old": np.array([0, -0.1], np.float32), "values": np.array([0, 1 / 3], np.float32)}, {}])
    found.close()


def test_scores_are_read_bit_for_bit_and_removed_with_their_rollout(tmp_path):
    written(tmp_path, "key")
    found = journal(tmp_path, "key")
    first, second = found.scores(0) or []
    assert first["old"].tobytes() == np.array([0, -0.1], np.float32).tobytes() and first["values"][1] == np.float32(
        1 / 3
    )
    assert second == {} and found.scores(1) is None
    found.remove(1)
    assert found.scores(0) is None and not found.read(0).episodes and found.read(1).trained == [(0, 0)]


def test_a_journal_with_another_key_is_not_read(tmp_path):
    written(tmp_path, "key")
    assert journal(tmp_path, "key").read(1).trained == [(0, 0)]
    assert journal(tmp_path, "key").read(1).episodes[EpisodeId(0, 0)].images == ["AAE="]
    journal(tmp_path, "another")  # not read yet: nothing is removed
    assert journal(tmp_path).read(1).trained == [(0, 0)]
    assert journal(tmp_path, "another").read(1).trained is None
    assert journal(tmp_path, "key").read(1).trained is None
