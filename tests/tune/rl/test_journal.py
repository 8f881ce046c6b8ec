"""The journal's files: what a run that goes on reads of them."""

from __future__ import annotations

import numpy as np

from dovetail.tune.rl.episode import Place, begun
from dovetail.tune.rl.journal import Journal


def journal(folder, key=""):
    return Journal(folder / "rollouts", key)


def written(folder, key):
    """A journal with two rollouts, the first with the scores of two updates."""
    found = journal(folder, key)
    found.read(0)
    for rollout in (0, 1):
        found.write(rollout, [begun(0, Place(0, 0), [5, 6], rollout)])
        found.choose(rollout, [(0, 0)])
    found.write_scores(0, [{"old": np.array([0, -0.1], np.float32), "values": np.array([0, 1 / 3], np.float32)}, {}])
    found.close()


def test_scores_are_read_bit_for_bit_and_forgotten_with_their_rollout(tmp_path):
    written(tmp_path, "key")
    found = journal(tmp_path, "key")
    first, second = found.scores(0) or []
    assert first["old"].tobytes() == np.array([0, -0.1], np.float32).tobytes() and first["values"][1] == np.float32(
        1 / 3
    )
    assert second == {} and found.scores(1) is None
    found.forget(1)
    assert found.scores(0) is None and not found.read(0).episodes and found.read(1).chosen == [(0, 0)]


def test_what_other_settings_or_rewards_made_is_not_read(tmp_path):
    written(tmp_path, "key")
    assert journal(tmp_path, "key").read(1).chosen == [(0, 0)]
    journal(tmp_path, "another")  # refused before it reads: nothing is lost
    assert journal(tmp_path).read(1).chosen == [(0, 0)]
    assert journal(tmp_path, "another").read(1).chosen is None
    assert journal(tmp_path, "key").read(1).chosen is None
