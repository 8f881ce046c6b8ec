"""Matrices whose corners run with every change, and the whole with `make test-thorough`."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def corners(every: Iterable[Any], kept: Collection[Any]) -> list[Any]:
    return [one if one in kept else pytest.param(one, marks=pytest.mark.thorough) for one in every]
