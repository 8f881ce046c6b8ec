"""Test that a resumed run compares its inputs with the recorded ones."""

from __future__ import annotations

import pytest

from dovetail.train.saves import changed_inputs


@pytest.mark.parametrize(
    ("stored", "now", "changed"),
    [
        ({"data a": "1"}, {"data a": "1"}, []),
        ({"data a": "1", "data b": "2"}, {"data a": "1", "data b": "3"}, ["data b"]),
        ({"reward x": "1"}, {"reward y": "1"}, ["reward x", "reward y"]),
        (None, {"data a": "1"}, []),  # saved before there were fingerprints
    ],
)
def test_which_inputs_changed(stored, now, changed):
    assert changed_inputs(stored, now) == changed
