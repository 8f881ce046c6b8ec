"""Test matrices: the corners run with every change, the whole with `make test-thorough`."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def corners(every: Iterable[Any], kept: Collection[Any]) -> list[Any]:
    """For pytest.mark.parametrize; a tuple has a value for each of several names."""
    return [one if one in kept else _param(one) for one in every]


def _param(one: Any) -> Any:
    return pytest.param(*(one if isinstance(one, tuple) else (one,)), marks=pytest.mark.thorough)
