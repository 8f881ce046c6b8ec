"""The chip table: lookup by jax's device kinds, plausible figures, None for unknown chips."""

import re
from types import SimpleNamespace

import jax
import pytest
from refusals import refuses

from dovetail.core.chips import CHIPS, GIB, chip_named, chip_of, cpu_chip, usable_bytes
from dovetail.core.cloud import rate

KINDS = {
    "TPU v2": "v2", "TPU v3": "v3", "TPU v4": "v4", "TPU v5 lite": "v5e", "TPU v5e": "v5e", "TPU v5": "v5p",
    "TPU v5p": "v5p", "TPU v6 lite": "v6e", "TPU7x": "TPU7x", "NVIDIA H100 80GB HBM3": "H100", "NVIDIA H200": "H200",
    "NVIDIA A100-SXM4-80GB": "A100", "NVIDIA A100-SXM4-40GB": "A100-40GB", "NVIDIA B200": "B200",
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_device_is_found_by_its_kind(kind):
    chip = chip_of(SimpleNamespace(device_kind=kind))
    assert chip is not None and chip.name == KINDS[kind]


@pytest.mark.parametrize("kind", ["cpu", "NVIDIA H100 PCIe", "NVIDIA GeForce RTX 4090", "TPU v9", ""])
def test_a_device_without_table_entry_is_unknown(kind):
    assert chip_of(SimpleNamespace(device_kind=kind)) is None


def test_this_machine_is_a_cpu():
    assert chip_of(jax.devices()[0]) is None
    assert usable_bytes(jax.devices()[0]) is None


def test_the_driver_says_what_may_be_used():
    device = SimpleNamespace(platform="gpu", memory_stats=lambda: {"bytes_limit": 100})
    assert usable_bytes(device) == 100
    assert usable_bytes(SimpleNamespace(platform="gpu", memory_stats=lambda: None)) is None


def test_figures():
    assert CHIPS["H200"].bf16 == 989e12 and CHIPS["H200"].hbm == 141 * GIB
    assert CHIPS["v5p"].network == 540e9 and CHIPS["H100"].network == 450e9
    # tokens per device at which gathering weights hides behind products, as the scaling book has it: 2550 over 3 axes
    assert CHIPS["v5p"].bf16 / CHIPS["v5p"].network == pytest.approx(850)
    assert CHIPS["H100"].bf16 / CHIPS["H100"].network == pytest.approx(2198, rel=1e-3)


def test_two_devices_on_one_chip_halve_its_figures():
    chip = CHIPS["TPU7x"]
    assert (chip.device_hbm, chip.device_bf16) == (96 * GIB, 2307e12 / 2)
    assert CHIPS["v5p"].device_hbm == CHIPS["v5p"].hbm


def test_every_figure_is_plausible():
    for chip in CHIPS.values():
        assert 40e12 < chip.bf16 < 4e15 and 15 * GIB < chip.hbm < 300 * GIB and 0.5e12 < chip.bandwidth < 10e12
        assert chip.source and re.search(r"20\d\d", chip.source), "each figure has a source and a date"
        assert chip.network and chip.dcn and chip.dcn < chip.network
        assert chip.provisional == (chip.name in ("TPU8t", "TPU8i"))
        assert chip.dollars is None or (chip.spot is not None and 0 < chip.spot < chip.dollars)


def test_chip_names_ignore_case():
    assert chip_named("h200") is CHIPS["H200"] and chip_named("tpu7x") is CHIPS["TPU7x"]
    with refuses("chip", naming="'H200'"):
        chip_named("H20O")


def test_a_cpu_is_a_chip_to_plan_on():
    chip = cpu_chip(2, 8 * GIB)
    assert chip.bf16 == pytest.approx(63e9) and chip.bandwidth == pytest.approx(16e9) and chip.hbm == 8 * GIB


def test_prices_by_region_and_given():
    v5e = CHIPS["v5e"]
    assert rate(v5e).dollars == v5e.dollars and rate(v5e, spot=True).dollars == v5e.spot
    assert rate(v5e, region="europe-west4").dollars == 1.56 and "europe-west4" in rate(v5e, region="europe-west4").says
    assert rate(v5e, spot=True, region="europe-west4").dollars == pytest.approx(0.34 * 1.3)
    assert rate(v5e, region="us-west4").dollars == v5e.dollars
    assert rate(CHIPS["TPU7x"]).dollars is None and "--price" in rate(CHIPS["TPU7x"]).says
    assert rate(None, given=2.5).dollars == rate(CHIPS["TPU7x"], given=2.5).dollars == 2.5
    with refuses("price"):
        rate(v5e, given=-1)
