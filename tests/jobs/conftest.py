"""Give each test its own folder of jobs, and a supervisor over it in a thread that ends with the test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from jobs.slurm_cluster import Unable, cluster
from jobs.watched import watched

from dovetail.jobs.store import JobStore


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("DOVETAIL_JOBS", str(tmp_path / "home"))
    monkeypatch.setattr("dovetail.jobs.presence.ensure", lambda root: None)  # a test that forgets its supervisor fails
    return tmp_path / "home"


@pytest.fixture
def store(home) -> Iterator[JobStore]:
    made = JobStore(home)
    yield made
    made.close()


@pytest.fixture
def supervised(home) -> Iterator[None]:
    with watched(home):
        yield


@pytest.fixture(scope="module")
def slurm(tmp_path_factory) -> Iterator[dict[str, str]]:
    """Two nodes on this machine; the variables by which its commands find it."""
    try:
        with cluster(tmp_path_factory.mktemp("slurm")) as environ:
            yield environ
    except Unable as why:
        pytest.skip(f"no Slurm here: {why}")


@pytest.fixture
def slurm_here(slurm, monkeypatch) -> None:
    for name, value in slurm.items():
        monkeypatch.setenv(name, value)
