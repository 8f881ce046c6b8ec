"""libtpu is silenced on machines without a TPU only."""

import importlib.util

import pytest

from dovetail.core.host import NO_CHIPS, quiet_libtpu


@pytest.fixture
def pci(tmp_path):
    (tmp_path / "sys/bus/pci/devices/0").mkdir(parents=True)
    return tmp_path / "sys/bus/pci/devices/0/vendor"


def test_libtpu_is_silenced_only_without_a_tpu(tmp_path, pci, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    for vendor, quiet in (("0x8086\n", True), ("0x1ae0\n", False)):
        pci.write_text(vendor)
        environ = {"TPU_MIN_LOG_LEVEL": "0"}
        quiet_libtpu(environ, tmp_path)
        assert environ == (NO_CHIPS if quiet else {}) | {"TPU_MIN_LOG_LEVEL": "0"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    pci.write_text("0x8086\n")
    environ = {}
    quiet_libtpu(environ, tmp_path)
    assert environ == {}
