"""Placement of devices in a mesh. Objects with the attributes of TPUs stand in for them."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
from refusals import refuses

from dovetail.core.mesh import MESH_AXES, lay_out, make_mesh, num_slices


def tpus(x: int, y: int, slices: int = 1) -> list:
    """Slices of x by y chips, in jax's order: slice by slice, x fastest."""
    return [
        SimpleNamespace(
            platform="tpu", device_kind="TPU v4", coords=(i, j, 0), core_on_chip=0, slice_index=s, process_index=s,
            id=(s * y + j) * x + i,
        )
        for s in range(slices) for j in range(y) for i in range(x)
    ]  # fmt: skip


def coords(devices: np.ndarray) -> list[tuple[int, int]]:
    return [device.coords[:2] for device in devices.ravel()]


def test_a_mesh_has_all_axes():
    mesh = make_mesh(dict(context=4, tensor=2))
    assert mesh.axis_names == MESH_AXES
    assert dict(mesh.shape) == dict(data=1, fsdp=1, expert=1, context=4, tensor=2)


def test_tensor_is_laid_along_the_links():
    """The last axis gets a line of chips that are neighbours, not the order in which jax lists them."""
    placed = lay_out([1, 4, 1, 1, 4], tpus(4, 4))
    assert placed.shape == (1, 4, 1, 1, 4)
    for group in placed.reshape(4, 4):
        columns, rows = zip(*coords(group), strict=True)
        assert len(set(columns)) == 1 or len(set(rows)) == 1


def test_axes_that_split_a_line_of_chips():
    placed = lay_out([2, 2, 1, 2, 2], tpus(4, 4))
    assert len({d.id for d in placed.ravel()}) == 16


def test_data_alone_crosses_slices():
    placed = lay_out([4, 2, 1, 1, 2], tpus(4, 2, slices=2))
    assert placed.shape == (4, 2, 1, 1, 2)
    assert [{d.slice_index for d in group.ravel()} for group in placed] == [{0}, {0}, {1}, {1}]
    assert num_slices(tpus(4, 2, slices=2)) == 2


def test_a_data_axis_that_does_not_cover_the_slices():
    with refuses("data", naming="2 slices"):
        lay_out([1, 8, 1, 1, 2], tpus(4, 2, slices=2))


def test_some_chips_of_a_slice():
    """An engine may take three chips of eight, which form no box: they keep their order."""
    placed = lay_out([1, 1, 1, 1, 3], tpus(2, 4)[:3])
    assert coords(placed) == [(0, 0), (1, 0), (0, 1)]


def test_other_machines_keep_their_order():
    gpus = [SimpleNamespace(platform="gpu", slice_index=i // 4, id=i) for i in range(8)]
    assert [d.id for d in lay_out([2, 2, 1, 1, 2], gpus).ravel()] == list(range(8))
    assert num_slices(gpus) == 1
