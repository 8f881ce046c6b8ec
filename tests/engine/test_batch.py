"""A plan packed as a step's input vector and read back as on the device: new pages and known ones."""

from __future__ import annotations

import numpy as np

from dovetail.engine.device.batch import UNKNOWN, Packer, Shape, sample_inputs, unpack
from dovetail.engine.device.sampler import Sampler
from dovetail.engine.request.params import SamplingParams
from dovetail.engine.request.sequence import Request, Sequence
from dovetail.engine.schedule.plan import PlanRow, StepPlan

SLOTS, VOCAB = 4, 50


def sequence(slot: int, tokens: int, pages: list[int], **params) -> Sequence:
    request = Request("r", tuple(range(1, tokens + 1)), SamplingParams(**params))
    return Sequence(request, slot=slot, pages=pages)


def packed(packer: Packer, plan: StepPlan, shape: Shape):
    flat, too_many = packer.pack(plan, shape, Sampler(VOCAB, SLOTS).inputs(plan, shape.rows))
    return unpack(flat, shape), too_many


def brought(arrays) -> list[tuple[int, ...]]:
    return [tuple(column) for column in np.asarray(arrays.new_pages).T.tolist() if column[0] < SLOTS]


def test_a_step_brings_only_pages_that_are_new():
    packer, seq = Packer(SLOTS), sequence(2, 20, [7, 9])
    prompt, _ = packed(packer, StepPlan([PlanRow(seq, 0, 20, True)]), Shape(32, 2, 8))
    assert prompt.tokens.tolist()[:21] == [*range(1, 21), 0] and prompt.kv_lens.tolist() == [20, 0]
    assert prompt.slots.tolist() == [2, SLOTS] and prompt.cu_q_lens.tolist() == [0, 20, 20]
    assert brought(prompt) == [(2, 0, 7), (2, 1, 9)]
    seq.pages.append(3)
    decode, _ = packed(packer, StepPlan([PlanRow(seq, 20, 1, True)]), Shape(2, 2, 8))
    assert decode.tokens.tolist() == [UNKNOWN, 0] and brought(decode) == [(2, 2, 3)]
    assert brought(packed(packer, StepPlan([PlanRow(seq, 21, 1, True)]), Shape(2, 2, 8))[0]) == []


def test_a_reused_slot_is_filled_again():
    packer, first, second = Packer(SLOTS), sequence(1, 3, [5]), sequence(1, 3, [6])
    for seq, page in ((first, 5), (second, 6), (first, 5)):
        arrays, _ = packed(packer, StepPlan([PlanRow(seq, 0, 3, True)]), Shape(16, 2, 8))
        assert brought(arrays) == [(1, 0, page)]
    first.preemptions += 1  # its pages were given away, and it has others now
    first.pages = [8]
    assert brought(packed(packer, StepPlan([PlanRow(first, 0, 3, True)]), Shape(16, 2, 8))[0]) == [(1, 0, 8)]


def test_more_pages_than_there_is_room_for_go_by_another_way():
    """A prompt of which almost all is in the prefix cache."""
    packer, long, short = Packer(SLOTS), sequence(0, 400, list(range(100, 125))), sequence(1, 3, [9])
    arrays, too_many = packed(
        packer, StepPlan([PlanRow(long, 399, 1, True), PlanRow(short, 0, 3, True)]), Shape(16, 2, 32)
    )
    assert too_many == [(0, long.pages)] and brought(arrays) == [(1, 0, 9)]


def test_rotary_positions_are_sent_for_rows_or_with_images_for_tokens():
    text, image = sequence(0, 3, [5]), sequence(1, 6, [6, 7])
    offsets = np.asarray([[0, 0, 0], [0, 0, 0], [-1, -1, 0], [-2, -1, -2], *[[-2, -2, -2]] * 3], np.int32)
    image.request = Request("r", image.request.prompt, image.request.params, offsets=offsets)
    rows = [PlanRow(text, 0, 3, True), PlanRow(image, 1, 5, True)]
    found, _ = packed(Packer(SLOTS), StepPlan(rows), Shape(16, 2, 8, images=True, mrope=True))
    assert np.array_equal(found.offsets, np.concatenate([np.zeros((3, 3)), offsets[1:6], np.zeros((8, 3))]))
    for start in (4, 6, 9):  # text after the image, and what is generated
        rows = [PlanRow(text, 3, 1, True), PlanRow(image, start, 1, True)]
        found, _ = packed(Packer(SLOTS), StepPlan(rows), Shape(4, 4, 8, mrope=True))
        assert found.offsets.tolist() == [0, -2, 0, 0] and found.index is None
    assert packed(Packer(SLOTS), StepPlan(rows), Shape(4, 4, 8))[0].offsets is None


def test_sampling_parameters_of_a_row_arrive_bit_for_bit():
    seq = sequence(3, 3, [5], temperature=0.7, top_p=0.9, min_p=0.01, top_k=11, seed=2**63 + 5, logprobs=2)
    seq.request = Request("r", (1, 2, 3), seq.request.params, seed=2**63 + 5)
    plan = StepPlan([PlanRow(seq, 0, 3, True)])
    given = Sampler(VOCAB, SLOTS).inputs(plan, 2)
    flat, _ = Packer(SLOTS).pack(plan, shape := Shape(16, 2, 8), given)
    arrays = dict(bias_ids=given.bias_ids, bias=given.bias, mask=given.mask)
    read = sample_inputs(unpack(flat, shape).numbers, arrays)
    for name in ("temperature", "top_p", "min_p", "top_k", "seed_hi", "seed_lo", "position", "slot", "top_logprobs"):
        ours, theirs = np.asarray(getattr(given, name)), np.asarray(getattr(read, name))
        assert ours.dtype == theirs.dtype and ours.tolist() == theirs.tolist(), name
