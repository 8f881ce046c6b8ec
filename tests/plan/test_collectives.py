"""Test the parser of compiled programs: groups in every notation, loops, bytes, axes, copies of a pool."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dovetail.core.chips import CHIPS
from dovetail.plan.collectives import Traffic, collectives, groups_of, traffic
from dovetail.plan.compiled import predict
from dovetail.plan.hlo import copies_of, kernels, read

PAIRS = ((0, 1), (2, 3), (4, 5), (6, 7))
FAR = ((0, 4), (1, 5), (2, 6), (3, 7))

PROGRAM = """
HloModule jit_step, is_scheduled=true, num_partitions=8

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

%all-reduce-scatter.1 (p: f32[64,32]) -> f32[32,32] {
  %p = f32[64,32]{1,0:T(8,128)} parameter(0)
  %all-reduce.9 = f32[64,32]{1,0:T(8,128)} all-reduce(%p), channel_id=9, replica_groups=[4,2]<=[8], to_apply=%add
  ROOT %part = f32[32,32]{1,0:T(8,128)} dynamic-slice(%all-reduce.9)
}

%wrapped (p: bf16[8,16]) -> bf16[8,16] {
  %p.1 = bf16[8,16]{1,0} parameter(0)
  ROOT %all-to-all.1 = bf16[8,16]{1,0} all-to-all(%p.1), channel_id=4, replica_groups={{0,1},{2,3},{4,5},{6,7}}
}

%fused_copy (p: bf16[100,16,8,128]) -> bf16[100,16,8,128] {
  %p.2 = bf16[100,16,8,128]{3,2,1,0} parameter(0)
  ROOT %transpose = bf16[100,16,8,128]{3,1,2,0} transpose(%p.2), dimensions={0,1,2,3}
}

%fused_update (p: bf16[100,16,8,128]) -> bf16[100,16,8,128] {
  %p.3 = bf16[100,16,8,128]{3,2,1,0} parameter(0)
  %inner = bf16[100,16,8,128]{3,2,1,0} copy(%p.3)
  ROOT %scatter = bf16[100,16,8,128]{3,2,1,0} scatter(%p.3), to_apply=%add
}

%body (s: (s32[], bf16[8,16])) -> (s32[], bf16[8,16]) {
  %s = (s32[], bf16[8,16]{1,0:T(8,128)(2,1)}) parameter(0)
  %start = ((bf16[8,16]{1,0}), (bf16[16,16]{1,0}), u32[]{:S(2)}) all-gather-start(%s), channel_id=1, \
replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}, use_global_device_ids=true
  %done = bf16[16,16]{1,0} all-gather-done(%start)
  %a2a = ((bf16[8,16]{1,0}), bf16[8,16]{1,0}, u32[]) async-start(%s), calls=%wrapped
  %a2a.done = bf16[8,16]{1,0} async-done(%a2a), calls=%wrapped
  ROOT %t = (s32[], /*index=1*/bf16[8,16]{1,0:T(8,128)(2,1)}) tuple(%s, %s)
}

%condition (s: (s32[], bf16[8,16])) -> pred[] {
  %s.1 = (s32[], bf16[8,16]{1,0}) parameter(0)
  ROOT %less = pred[] compare(%s.1, %s.1), direction=LT
}

ENTRY %main (p: bf16[8,16], pool: bf16[100,16,8,128]) -> bf16[8,16] {
  %p.5 = bf16[8,16]{1,0} parameter(0)
  %pool = bf16[100,16,8,128]{3,2,1,0} parameter(1)
  %loop = (s32[], bf16[8,16]{1,0}) while(%p.5), condition=%condition, body=%body, \
backend_config={"known_trip_count":{"n":"12"},"known_init_step":{"init":"0","step":"1"}}
  %scattered = f32[32,32]{1,0} fusion(%p.5), kind=kCustom, calls=%all-reduce-scatter.1
  %perm = (bf16[8,16]{1,0}, bf16[8,16]{1,0}, u32[], u32[]) collective-permute-start(%p.5), channel_id=2, \
source_target_pairs={{0,4},{4,0}}
  %ragged_paged_attention_kernel.2 = bf16[8,16]{1,0:T(8,128)(2,1)S(1)} custom-call(%p.5, %pool), \
custom_call_target="tpu_custom_call", metadata={op_name="jit(step)/ragged_paged_attention_kernel/pallas_call"}
  %moved = bf16[100,16,8,128]{3,1,2,0} fusion(%pool), kind=kLoop, calls=%fused_copy
  %updated = bf16[100,16,8,128]{3,2,1,0} fusion(%pool), kind=kLoop, calls=%fused_update
  %again = (bf16[12800,128]{1,0}, bf16[12800,128]{1,0}, u32[]) copy-start(%pool)
  ROOT %out = bf16[8,16]{1,0} copy(%p.5)
}
"""


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("replica_groups={{0,1},{2,3},{4,5},{6,7}}, x", PAIRS),
        ("replica_groups=[4,2]<=[8], x", PAIRS),
        ("replica_groups=[4,2]<=[2,4]T(1,0), x", FAR),
        ("replica_groups=mesh['axis_0'=4,'axis_1'=2] {'axis_1'}, x", PAIRS),
        ("replica_groups=mesh['a'=2,'b'=4] {'a'}", FAR),
        ("replica_groups=mesh['a'=2,'b'=4] {'b':(2)2}", PAIRS),
        ("replica_groups=mesh['a'=2,'b'=4], device_ids=([2,2,2]T(0,2,1)) {'b':(1)2}", PAIRS),
        ("replica_groups=mesh['a'=2,'b'=2,'c'=2] {'a','c'}", ((0, 1, 4, 5), (2, 3, 6, 7))),
        ("channel_id=1, replica_groups={}, x", (tuple(range(8)),)),
        ("source_target_pairs={{0,0},{1,2}}, x", ((1, 2),)),
    ],
)
def test_groups_in_every_notation(text, groups):
    assert groups_of(text, 8) == groups


def test_collectives_of_a_program():
    """Twelve turns of a loop, starts without their dones, and an all-reduce of which each keeps a part."""
    found = {one.kind: one for one in collectives(read(PROGRAM), 8)}
    assert {kind: one.times for kind, one in found.items()} == {
        "all-gather": 12, "all-to-all": 12, "all-reduce": 1, "collective-permute": 1,
    }  # fmt: skip
    assert found["all-gather"].groups == FAR
    assert found["all-gather"].bytes == pytest.approx(16 * 16 * 2 / 2, rel=0.02)
    assert found["all-to-all"].bytes == 8 * 16 * 2 / 2
    assert found["all-reduce"].bytes == 64 * 32 * 4 / 2, "as a reduce-scatter"
    assert found["collective-permute"].bytes == pytest.approx(8 * 16 * 2, rel=0.02)


def test_by_axis_and_slice():
    rows = traffic(collectives(read(PROGRAM), 8), {"data": 2, "fsdp": 2, "tensor": 2}, [0, 0, 0, 0, 1, 1, 1, 1])
    assert {(row.kind, row.axes, row.crosses) for row in rows} == {
        ("all-gather", ("data",), True), ("collective-permute", ("data",), True),
        ("all-to-all", ("tensor",), False), ("all-reduce", ("tensor",), False),
    }  # fmt: skip
    assert rows == sorted(rows, key=lambda row: -row.bytes)


def test_copies_of_a_pool_and_no_update_in_place():
    found = copies_of(read(PROGRAM), (100, 16, 8, 128))
    assert [line.split()[0] for line in found] == ["moved", "again"]
    assert copies_of(read(PROGRAM), (1000, 16, 8, 128)) == []


def test_kernels():
    assert kernels(read(PROGRAM)) == {"ragged_paged_attention_kernel": 1}


@pytest.mark.parametrize("axis", ["a", "b", "c"])
def test_collectives_as_xla_writes_them(axis):
    """A sum over one axis of a mesh is found along that axis, and moves what it should."""
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("a", "b", "c"))
    x = jax.ShapeDtypeStruct((64, 128), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(axis)))
    whole = NamedSharding(mesh, PartitionSpec())
    module = read(jax.jit(lambda x: x.sum(0), out_shardings=whole).lower(x).compile().as_text() or "")
    (row,) = traffic(collectives(module, 8), dict(mesh.shape))
    assert (row.kind, row.axes, row.crosses) == ("all-reduce", (axis,), False)
    assert row.bytes == 2 * 128 * 4 / 2


def test_a_loop_is_counted_by_its_trip_count():
    mesh = Mesh(np.array(jax.devices()).reshape(8), ("a",))
    x = jax.ShapeDtypeStruct((64, 128), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("a")))

    def turns(x):
        return jax.lax.fori_loop(0, 5, lambda i, y: y + jnp.sin(y * i).sum(0), x)

    found = collectives(read(jax.jit(turns).lower(x).compile().as_text() or ""), 8)
    assert sum(one.times for one in found if one.kind == "all-reduce") == 5


class TestTime:
    chip = CHIPS["v5e"]

    def sent(self, size: float, crosses: bool) -> Traffic:
        return Traffic("all-reduce", ("data",), crosses, ((0, 1),), 1, size)

    def test_the_slowest_part_bounds_it(self):
        found = predict(self.chip, 197e12, (0.41e12, 0.82e12), [self.sent(18e9, False)])
        assert (found.products, found.memory) == (1.0, (0.5, 1.0))
        assert found.links == pytest.approx(0.1)
        assert (found.least, found.bound_by) == (1.0, "products")
        assert found.most == pytest.approx(1.1)

    def test_between_slices_the_slower_network_is_taken(self):
        found = predict(self.chip, 0, (0, 0), [self.sent(3.1e9, True)])
        assert (found.slices, found.links, found.bound_by) == (pytest.approx(1.0), 0, "slices")

    def test_a_group_along_one_side_of_the_torus_has_that_sides_links(self):
        class At:
            def __init__(self, *coords):
                self.coords = coords

        row = [At(0, 0, 0), At(1, 0, 0)]
        assert predict(self.chip, 0, (0, 0), [self.sent(90e9, False)], row).links == pytest.approx(1.0)
        corner = [At(0, 0, 0), At(1, 1, 0)]
        assert predict(self.chip, 0, (0, 0), [self.sent(180e9, False)], corner).links == pytest.approx(1.0)
