"""Test how a mesh is laid over links: as jax does, with the bandwidths of "How to Scale Your Model"."""

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
from refusals import refuses

from dovetail.core.accelerator import of_devices, parse
from dovetail.core.chips import CHIPS
from dovetail.core.errors import RecipeError
from dovetail.core.mesh import MESH_AXES, _by_hand, assign, lay_out
from dovetail.plan.links import AXES, joined, layout, wraps


def spans(on: str, **axes: int):
    return {span.axis: span for span in layout(parse(on), axes)}


def test_the_axes_are_the_trainers():
    assert AXES == MESH_AXES


@pytest.mark.parametrize("shape", [(4, 4), (16, 16), (8, 16), (4, 4, 4), (4, 4, 8), (2, 2, 4, 2)])
def test_a_mesh_is_laid_over_a_torus_as_jax_does(shape):
    """Every way to split it in powers of two over three axes; its own function also has a name of its own in jax."""
    from jax._src.mesh_utils import _create_device_mesh_for_nd_torus as lay

    total = math.prod(shape)
    powers = [2**i for i in range(total.bit_length())]
    for first, second in itertools.product(powers, powers):
        if first * second > total:
            continue
        for sizes in ((total // first // second, first, 1, 1, second), (1, first, second, 1, total // first // second)):
            _, taken = lay(np.arange(total).reshape(shape), sizes, allow_split_physical_axes=True)
            assert assign(shape, sizes) == tuple(tuple(int(x) for x in taken[:, i]) for i in range(5)), sizes


def pod(*sides: int, kind: str = "TPU v5p") -> list[SimpleNamespace]:
    """TPU devices that are nothing but a place, in jax's order."""
    places = itertools.product(*(range(side) for side in reversed(sides)))
    return [
        SimpleNamespace(platform="tpu", device_kind=kind, coords=tuple(reversed(place)), core_on_chip=0, slice_index=0)
        for place in places
    ]


def test_a_whole_v5p_pod_can_be_laid_out():
    """jax alone finds no way to split a side of 28 (its list of prime factors is incomplete); where it does, a mesh by
    hand is the same."""
    laid = lay_out([35, 8, 1, 2, 16], pod(16, 20, 28))
    assert laid.shape == (35, 8, 1, 2, 16) and len({device.coords for device in laid.flat}) == 8960
    assert [device.coords for device in laid[3, 5, 0, 1]] == [(x, *laid[3, 5, 0, 1][0].coords[1:]) for x in range(16)]
    small = pod(4, 4, 8)
    theirs, ours = lay_out([4, 8, 1, 1, 4], small), _by_hand([4, 8, 1, 1, 4], small)
    assert [one.coords for one in theirs.flat] == [one.coords for one in ours.flat]


@pytest.mark.parametrize(
    ("on", "closed"),
    [
        ("v5e-256", (True, True)), ("v5e-128", (False, True)), ("v5e-16", (False, False)), ("v6e-256", (True, True)),
        ("v4-128", (True, True, True)), ("v4-64", (False, False, False)), ("v5p-17920", (True, True, True)),
        ("v5p-8", (False, False, False)), ("tpu7x-4x4x8", (True, True, True)), ("h100x8", (False,)),
    ],
)  # fmt: skip
def test_sides_that_close_to_a_ring(on, closed):
    assert wraps(parse(on)) == closed


def test_bandwidths_of_a_torus():
    """A ring sends both ways; a part of a side does not close, and what lies across it shares its links."""
    assert spans("v5e-256", fsdp=256)["fsdp"].bandwidth == 4 * 45e9
    assert spans("v5p-128", fsdp=64)["fsdp"].bandwidth == 6 * 90e9
    assert spans("v5e-256", data=16, tensor=16)["tensor"].bandwidth == 2 * 45e9
    split = spans("v5e-256", fsdp=64, tensor=4)
    assert split["tensor"].sides == ((0, 4),) and split["tensor"].bandwidth == 45e9
    assert split["fsdp"].sides == ((0, 4), (1, 16)) and split["fsdp"].bandwidth == 2 * 45e9 / 4 + 2 * 45e9
    assert spans("v5e-16", fsdp=16)["fsdp"].bandwidth == 2 * 45e9  # nothing closes


def test_slices_are_joined_by_data_alone():
    two = spans("2 x v5e-256", data=4, fsdp=128)
    assert (two["data"].over, two["data"].far, two["data"].near, two["data"].far_bandwidth) == ("DCN", 2, 2, 3.1e9)
    assert (two["fsdp"].over, two["fsdp"].far) == ("ICI", 1)
    with refuses("mesh.data", RecipeError, naming="2 slices"):
        layout(parse("2 x v5e-256"), {"data": 1, "fsdp": 512})


def test_gpus_fill_their_nvlink_domain_from_the_last_axis():
    eight = spans("h100x64", data=2, fsdp=8, tensor=4)
    assert (eight["tensor"].over, eight["tensor"].far) == ("NVLink", 1)
    assert (eight["fsdp"].over, eight["fsdp"].near, eight["fsdp"].far) == ("NIC", 2, 4)
    assert (eight["data"].over, eight["data"].near, eight["data"].bandwidth) == ("NIC", 1, 50e9)
    assert spans("gb200x72", fsdp=72)["fsdp"].over == "NVLink"
    assert spans("gb200x144", fsdp=144)["fsdp"].far == 2


def test_two_devices_of_a_chip_share_its_links():
    one = spans("tpu7x-4x4x4", fsdp=128)["fsdp"]
    assert (
        one.sides == ((0, 4), (1, 4), (2, 4), (3, 2)) and one.bandwidth == 600e9
    )  # both in the group: all links serve it
    split = spans("tpu7x-4x4x4", fsdp=64, tensor=2)
    assert (split["tensor"].over, split["fsdp"].bandwidth) == ("memory", 300e9)
    again = spans("tpu7x-4x4x4", fsdp=64, context=2)
    both = joined((again["fsdp"], again["context"]))
    assert both is not None and both.bandwidth == one.bandwidth, "what is on the chip does not bring in more"


def test_axes_together():
    two = spans("v5e-256", fsdp=16, context=16)
    whole = joined((two["fsdp"], two["context"]))
    assert whole is not None and (whole.size, whole.bandwidth, whole.axis) == (256, 180e9, "fsdp+context")
    assert joined(()) is None
    gpus = spans("h100x64", fsdp=16, context=4)
    both = joined((gpus["fsdp"], gpus["context"]))
    assert both is not None and (both.near, both.far, both.bandwidth) == (8, 8, 450e9)


def test_a_mesh_of_another_size_is_refused():
    with refuses("mesh", RecipeError, naming="16 devices of v5litepod-16"):
        layout(parse("v5e-16"), {"fsdp": 8})


def test_devices_known_by_their_kind_alone():
    assert of_devices(CHIPS["v5e"], 512, 2) == parse("2 x v5e-256")
    assert of_devices(CHIPS["TPU7x"], 128) == parse("tpu7x-4x4x4")
    assert of_devices(CHIPS["H100"], 64) == parse("h100x64")
    assert of_devices(CHIPS["v5e"], 6) is None
