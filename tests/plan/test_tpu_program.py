"""Test the parser with text that only libtpu writes, taken from compiled steps.

Kernels' metadata over several lines, loops without a trip count, sends through the host between slices, and a gather
written three times.
"""

from __future__ import annotations

import pytest

from dovetail.plan.collectives import collectives, groups_of, traffic
from dovetail.plan.hlo import kernels, read

PROGRAM = """
HloModule jit_step, is_scheduled=true, num_partitions=8

%condition (c: (s32[], f32[80,128])) -> pred[] {
  %bound = s32[]{:T(128)} constant(12)
  %c = (s32[]{:T(128)}, f32[80,128]{1,0:T(8,128)S(1)}) parameter(0)
  %counter = s32[]{:T(128)} get-tuple-element(%c), index=0
  ROOT %lt = pred[]{:T(512)} compare(%counter, %bound), direction=LT, metadata={op_name="jit(step)/while/cond/lt"}
}

%body (b: (s32[], f32[80,128])) -> (s32[], f32[80,128]) {
  %b = (s32[]{:T(128)}, f32[80,128]{1,0:T(8,128)S(1)}) parameter(0)
  %counter.1 = s32[]{:T(128)} get-tuple-element(%b), index=0
  %one = s32[]{:T(128)} constant(1), metadata={op_name="jit(step)/while/body/add"}
  %next = s32[]{:T(128)} add(%counter.1, %one), metadata={op_name="jit(step)/while/body/add"}
  %x = f32[80,128]{1,0:T(8,128)S(1)} get-tuple-element(%b), index=1
  %splash_mqa.3 = f32[80,128]{1,0:T(8,128)} custom-call(%x), custom_call_target="tpu_custom_call", \
frontend_attributes={kernel_metadata={
"xprof_metadata":"{\\"block_q\\": 256}"
}}, metadata={op_name="jit(step)/splash_mqa/pallas_call"}, backend_config={"flag_configs":[]}
  %after = token[] after-all()
  %send = (f32[80,128]{1,0:T(8,128)}, u32[], token[]) send(%splash_mqa.3, %after), channel_id=3, \
is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime",\
_xla_host_transfer_rendezvous="all-reduce.14_0",_xla_megascale_reduce_operation="SUM",\
_xla_megascale_target="{1,2}x{0:3}",_xla_megascale_transfer_type="ALL_REDUCE"}
  %recv = (f32[80,128]{1,0:T(8,128)}, u32[], token[]) recv(%after), channel_id=2, is_host_transfer=true, \
frontend_attributes={_xla_megascale_target="{1,2}x{0:3}",_xla_megascale_transfer_type="ALL_REDUCE"}
  %send-done = token[] send-done(%send), channel_id=3, is_host_transfer=true
  ROOT %t = (s32[], f32[80,128]) tuple(%next, %x)
}

ENTRY %main (p: f32[80,128]) -> f32[80,128] {
  %p = f32[80,128]{1,0:T(8,128)} parameter(0)
  %first = s32[]{:T(128)} constant(START)
  %copy.1 = s32[]{:T(128)} copy(%first), backend_config={"flag_configs":[]}
  %tuple.1 = (s32[]{:T(128)}, f32[80,128]{1,0:T(8,128)}) tuple(%copy.1, /*index=1*/%p)
  %while.1 = (s32[]{:T(128)}, f32[80,128]{1,0:T(8,128)}) while(%tuple.1), condition=%condition, body=%body
  ROOT %out = f32[80,128]{1,0:T(8,128)} get-tuple-element(%while.1), index=1
}
"""


@pytest.mark.parametrize(("start", "turns"), [("0", 12), ("1", 11)])
def test_a_loop_is_multiplied_out(start, turns):
    """By its own counter, of which a turn may have been taken out in front."""
    assert kernels(read(PROGRAM.replace("START", start))) == {"splash_mqa": turns}


@pytest.mark.parametrize(
    ("told", "instead"),
    [("direction=LT", "direction=NE"), ("constant(12)", "parameter(1)"), ("constant(START)", "parameter(1)")],
)
def test_an_unknown_loop_counts_as_one_iteration(told, instead):
    assert kernels(read(PROGRAM.replace(told, instead).replace("START", "0"))) == {"splash_mqa": 1}


def test_between_slices():
    """Sent and received is once; the two slices' devices stand one after the other in the mesh."""
    found = collectives(read(PROGRAM.replace("START", "0")), 8)
    (row,) = traffic(found, {"data": 2, "fsdp": 4}, [0, 0, 0, 0, 1, 1, 1, 1])
    assert (row.kind, row.axes, row.crosses, row.count) == ("all-reduce", ("data",), True, 12)
    assert row.bytes == 12 * 80 * 128 * 4
    assert groups_of('_xla_megascale_target="{1:3}x{0,1}"', 6) == ((0, 2, 4), (1, 3, 5))


UNDER_WAY = """
%fused_computation.7 (p: f32[8,32]) -> (f32[8,32], f32[8,128], u32[]) {
  %p = f32[8,32]{1,0} parameter(0)
  %all-gather.1 = f32[8,128]{1,0} all-gather(%p), channel_id=93, replica_groups={{0,1,2,3}}, dimensions={1}
  ROOT %begin = (f32[8,32], f32[8,128], u32[]) custom-call(%all-gather.1), custom_call_target="AsyncCollectiveStart"
}

%async_collective_fusion.4 (p: f32[8,32]) -> (f32[8,128], f32[8,32]) {
  %p.1 = f32[8,32]{1,0} parameter(0)
  %all-gather.2 = f32[8,128]{1,0} all-gather(%p.1), channel_id=93, replica_groups={{0,1,2,3}}, dimensions={1}
  ROOT %both = (f32[8,128], f32[8,32]) tuple(%all-gather.2, %p.1)
}

%fused_computation.9 (p: f32[8,32]) -> f32[8,128] {
  %p.2 = f32[8,32]{1,0} parameter(0)
  %all-gather.3 = f32[8,128]{1,0} all-gather(%p.2), channel_id=93, replica_groups={{0,1,2,3}}, dimensions={1}
  ROOT %end = f32[8,128] custom-call(%all-gather.3), custom_call_target="AsyncCollectiveDone"
}

ENTRY %main (p: f32[8,32]) -> f32[8,128] {
  %p.3 = f32[8,32]{1,0} parameter(0)
  %start = (f32[8,32], f32[8,128], u32[]) fusion(%p.3), kind=kCustom, calls=%fused_computation.7
  %fusion.4 = (f32[8,128], f32[8,32]) fusion(%p.3), kind=kOutput, calls=%async_collective_fusion.4
  ROOT %done = f32[8,128] fusion(%p.3), kind=kCustom, calls=%fused_computation.9
}
"""


def test_an_asynchronous_gather_is_counted_once():
    (found,) = collectives(read(UNDER_WAY), 4)
    assert (found.times, found.bytes) == (1, 8 * 128 * 4 * 3 / 4)


CHOICE = """
%skip (p: f32[8,32]) -> f32[8,32] {
  ROOT %p = f32[8,32]{1,0} parameter(0)
}

%draw (p: f32[8,32]) -> f32[8,32] {
  %p.1 = f32[8,32]{1,0} parameter(0)
  %noise = f32[8,32]{1,0} custom-call(%p.1), custom_call_target="tpu_custom_call"
  ROOT %sum = f32[8,32]{1,0} all-reduce(%noise), channel_id=1, replica_groups={{0,1,2,3}}, to_apply=%add
}

ENTRY %main (i: s32[], p: f32[8,32]) -> f32[8,32] {
  %i = s32[] parameter(0)
  %p.3 = f32[8,32]{1,0} parameter(1)
  ROOT %out = f32[8,32]{1,0} conditional(%i, %p.3, %p.3), branch_computations={%skip, %draw}
}
"""


def test_conditional_branches_count_as_kernels_and_not_as_traffic():
    module = read(CHOICE)
    assert kernels(module) == {"noise": 1}
    assert collectives(module, 4) == []
