"""Episodes in the rows of a batch."""

from __future__ import annotations

import numpy as np
import pytest

from dovetail.tune.rl.episode import Episode, EpisodeId, new_episode
from dovetail.tune.rl.layout import lay_out

LENGTH = 64


def episodes(sizes: list[int]) -> list[Episode]:
    """Return episodes of these numbers of positions."""
    return [new_episode(EpisodeId(0, i), i, np.arange(size + 1).tolist(), 0) for i, size in enumerate(sizes)]


def sizes_of(kind: str) -> list[int]:
    rng = np.random.default_rng(0)
    match kind:
        case "short":
            return rng.integers(3, 12, 64).tolist()
        case "mixed":
            return rng.integers(3, 60, 30).tolist()
        case _:  # they fill their rows completely, in one way only
            return [40, 24, 40, 24, 30, 34, 50, 14]


@pytest.mark.parametrize("kind", ["short", "mixed", "full"])
def test_put_and_take_are_inverse(kind):
    given = episodes(sizes_of(kind))
    layout = lay_out(given, LENGTH, [4, 16, 32])
    values = [np.arange(len(each.tokens), dtype=np.float32) * (i + 1) for i, each in enumerate(given)]
    put = layout.put(values)
    assert put.shape == (layout.rows, LENGTH)
    assert np.count_nonzero(put) == sum(layout.sizes)  # no two overlap
    for found, value in zip(layout.take(put), values, strict=True):
        np.testing.assert_array_equal(found, value)
    segments = layout.batch(given, values).segment_ids
    assert np.asarray(segments).max() == layout.documents


def test_short_episodes_are_spread_over_the_rows():
    """No row holds three episodes while another has none: every document of a row costs attention time."""
    layout = lay_out(episodes([8] * 32), LENGTH, [16, 32])
    assert layout.rows == 16 and layout.documents == 2


def test_layout_uses_no_more_rows_than_first_fit():
    layout = lay_out(episodes(sizes_of("full")), LENGTH, [4, 8])
    assert layout.rows == 4
