"""Compiling for TPUs that are not here takes libtpu, and nothing else of a TPU's machine."""

from __future__ import annotations

import importlib.util

import pytest

from dovetail.plan.topology import without_hardware

NO_LIBTPU = "libtpu is not installed: pip install -e '.[dev]' brings it on x86-64 Linux, and only there is it made"


@pytest.fixture
def libtpu(optimised):
    """What is compiled is optimised: XLA's flags of the tests, meant for CPUs, would reach libtpu too."""
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip(NO_LIBTPU)
    without_hardware()  # libtpu reads it when it is loaded, with the first topology
