"""Accelerator names: their meaning, their one spelling, and errors that list the known ones."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.core.accelerator import Accelerator, parse
from dovetail.core.chips import CHIPS, FAMILIES, usual_sides

# name -> chips, cores, VMs, topology, runtime, GKE label, chips per VM, machine: one slice's
TABLE = {
    "v2-8": (4, 8, 1, "2x2", "tpu-ubuntu2204-base", None, 4, None),
    "v3-8": (4, 8, 1, "2x2", "tpu-ubuntu2204-base", "tpu-v3-slice", 4, "ct3p-hightpu-4t"),
    "v3-32": (16, 32, 4, "4x4", "tpu-ubuntu2204-base", "tpu-v3-slice", 4, "ct3p-hightpu-4t"),
    "v4-8": (4, 8, 1, "2x2x1", "tpu-ubuntu2204-base", "tpu-v4-podslice", 4, "ct4p-hightpu-4t"),
    "v4-64": (32, 64, 8, "2x4x4", "tpu-ubuntu2204-base", "tpu-v4-podslice", 4, "ct4p-hightpu-4t"),
    "v5litepod-1": (1, 1, 1, "1x1", "v2-alpha-tpuv5-lite", "tpu-v5-lite-podslice", 1, "ct5lp-hightpu-1t"),
    "v5litepod-8": (8, 8, 1, "2x4", "v2-alpha-tpuv5-lite", "tpu-v5-lite-podslice", 8, "ct5lp-hightpu-8t"),
    "v5litepod-16": (16, 16, 4, "4x4", "v2-alpha-tpuv5-lite", "tpu-v5-lite-podslice", 4, "ct5lp-hightpu-4t"),
    "v5p-8": (4, 8, 1, "2x2x1", "v2-alpha-tpuv5", "tpu-v5p-slice", 4, "ct5p-hightpu-4t"),
    "v5p-128": (64, 128, 16, "4x4x4", "v2-alpha-tpuv5", "tpu-v5p-slice", 4, "ct5p-hightpu-4t"),
    "v6e-256": (256, 256, 64, "16x16", "v2-alpha-tpuv6e", "tpu-v6e-slice", 4, "ct6e-standard-4t"),
    "tpu7x-2x2x2": (8, 16, 2, "2x2x2", None, "tpu7x", 4, "tpu7x-standard-4t"),
    "h200x8": (8, 8, 1, "8", None, "nvidia-h200-141gb", 8, "a3-ultragpu-8g"),
    "gb200x4": (4, 4, 1, "4", None, "nvidia-gb200", 4, "a4x-highgpu-4g"),
    "gb200x72": (72, 72, 18, "72", None, "nvidia-gb200", 4, "a4x-highgpu-4g"),
    "a100-40gbx4": (4, 4, 1, "4", None, "nvidia-tesla-a100", 4, "a2-highgpu-4g"),
}


@pytest.mark.parametrize("name", TABLE)
def test_the_meaning_of_accelerator_names(name):
    a = parse(name)
    said = (
        a.chips, a.cores, a.hosts, a.topology, a.runtime_version, a.gke_label, a.chips_per_host, a.machine_type,
    )  # fmt: skip
    assert said == TABLE[name]
    assert (a.name, a.slices) == (name, 1)
    assert a.accelerator_type == (name if a.runtime_version else None)


@pytest.mark.parametrize(
    ("written", "name"),
    {
        "v5e-16": "v5litepod-16",
        "V5E:4x4": "v5litepod-16",
        "tpu-v5e-4": "v5litepod-4",
        "v4:2x2x1": "v4-8",
        "v4:4x4x2": "v4-64",
        "v6e:4x4x1": "v6e-16",
        "7x:4x4x4": "tpu7x-4x4x4",
        "tpu7x-128": "tpu7x-4x4x4",  # cores
        "2xv5p-128": "2 x v5p-128",
        "2 x 7x-16": "2 x tpu7x-2x2x2",
        "8t:4x4x4": "tpu8t-4x4x4",
        "2 x 8t-4x4x4": "2 x tpu8t-4x4x4",
        "gb200x144": "2 x gb200x72",
        "2 x gb200x64": "2 x gb200x64",
        "h200": "h200x1",
        "H200 x 8": "h200x8",
        "h100:8": "h100x8",
        "h200x16": "2 x h200x8",
        "3 x A100-40GB x 4": "3 x a100-40gbx4",
    }.items(),
)
def test_every_spelling_has_one_name(written, name):
    assert parse(written).name == name
    assert parse(name) == parse(written)


def test_every_chip_has_a_name():
    assert FAMILIES.keys() == CHIPS.keys()


def test_slices_add_up_and_a_gpus_slice_is_one_machine():
    two = parse("2 x v5p-128")
    assert (two.slices, two.chips, two.total_chips, two.hosts, two.total_hosts) == (2, 64, 128, 16, 32)
    gpus = parse("h200x16")
    assert (gpus.total_chips, gpus.total_hosts, gpus.chips_per_host) == (16, 2, 8)
    assert parse("tpu7x-2x2x2").total_devices == 16  # two jax devices a chip


def test_a_machine_without_accelerators():
    assert parse("") == parse("cpu")
    four = parse("4 x CPU")
    assert (four.name, four.chip, four.total_hosts, four.is_tpu, four.dollars()) == ("4 x cpu", None, 4, False, None)
    assert parse(four.name) == four and "no accelerator, on 4 machines" in four.explain()


def test_the_price_is_that_of_all_chips():
    assert parse("2 x v6e-8").dollars() == pytest.approx(16 * CHIPS["v6e"].dollars)
    assert parse("v6e-8").dollars(spot=True) == pytest.approx(8 * CHIPS["v6e"].spot)
    assert parse("tpu7x-2x2x1").dollars() is None


@pytest.mark.parametrize(
    ("chips", "sides"),
    {8: (2, 2, 2), 16: (2, 2, 4), 192: (4, 4, 12), 320: (4, 4, 20), 384: (4, 8, 12), 768: (8, 8, 12)}.items(),
)
def test_the_usual_topology_of_v5p(chips, sides):
    assert usual_sides(CHIPS["v5p"], chips) == sides


def test_an_unusual_topology_keeps_its_name_and_has_no_accelerator_type():
    long = parse("v4:4x16x4")
    assert (long.name, long.chips, long.accelerator_type) == ("v4-4x4x16", 256, None)
    assert parse(long.name) == long


def test_it_explains_itself():
    said = parse("2 x v4-64").explain()
    for words in ("2 slices of 32 chips of v4", "counts cores, 2 per chip", "2x4x4", "8 VMs of 4 chips", "64 chips"):
        assert words in said


@pytest.mark.parametrize(
    ("written", "words"),
    {
        "v4-12": ("counts cores, 2 per chip", "v4-8 and v4-16"),
        "v5e-12": ("counts chips", "v5litepod-8 and v5litepod-16"),
        "v3-16": ("v3-8 and v3-32",),
        "v6e-512": ("v6e-256",),
        "v5e-4x5": ("no slice 4x5",),
        "v4-6x6x6": ("no slice 6x6x6",),
        "v6e": ("no size", "v6e-16"),
        "h200x9": ("whole machines of 8",),
        "h200x2x4": ("no topology",),
        "gb200x70": ("multiples of 4 up to 72", "racks of 72"),
        "0 x v5p-8": ("no slices",),
        "v5litepd-8": ("Did you mean 'v5litepod'?",),
        "tpu": ("such as v5litepod-16",),
    }.items(),
)
def test_an_error_lists_the_known_names(written, words):
    with pytest.raises(ValueError) as error:
        parse(written)
    for word in words:
        assert word in str(error.value)


@st.composite
def accelerators(draw):
    chip = CHIPS[draw(st.sampled_from(sorted(FAMILIES)))]
    gpus = [*range(1, max(FAMILIES[chip.name].hosts) + 1), chip.domain]
    counts = [n for n in range(1, 520) if usual_sides(chip, n)] if FAMILIES[chip.name].sides else gpus
    sides = usual_sides(chip, draw(st.sampled_from(list(counts))))
    return Accelerator(chip, sides, draw(st.integers(1, 9)))


@given(accelerators())
def test_a_name_round_trips_through_parse(accelerator):
    assert parse(accelerator.name) == accelerator
    assert accelerator.hosts * accelerator.chips_per_host == accelerator.chips


def test_it_needs_no_jax():
    code = "import sys, dovetail.core.accelerator as a; a.parse('v4-8'); sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
