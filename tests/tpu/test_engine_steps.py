"""The engine's decode and prompt steps with default options, compiled for TPUs: no copy of the pool, and the kernel
that the table of `dovetail info --kernels tpu` names.

Only `make test-tpu` runs them: every family alone (v5e) and over eight devices (v6e, v5p, 7x).
"""

from __future__ import annotations

import pytest
from tpu.families import FAMILIES

from dovetail.engine.ahead import Ahead, ahead
from dovetail.engine.options import EngineOptions
from dovetail.models.registry import FAMILIES as REGISTERED
from dovetail.models.registry import parse_config
from dovetail.plan.counted import count
from dovetail.plan.topology import parse, tpu_devices

EIGHT = {"v5e": "v5e:2x4", "v6e": "v6e:2x4", "v5p": "v5p:2x2x2", "7x": "7x:2x2x1"}
LARGE = ("deepseek-v3",)  # four of its layers are 36 GiB, and a v5e has 16
MATRIX = [(name, "v5p" if name in LARGE else "v5e", 1) for name in FAMILIES]
MATRIX += [(name, chip, 8) for name in FAMILIES for chip in ("v6e", "v5p", "7x")]


def made(name: str, chip: str, tensor: int) -> Ahead:
    return ahead(
        parse_config(dict(FAMILIES[name])), EngineOptions(tensor_parallel=tensor), tpu_devices(parse(EIGHT[chip]))
    )


def test_every_family_is_there():
    families = {REGISTERED[parse_config(dict(hf)).family].architecture for hf in FAMILIES.values()}
    assert families == {family.architecture for family in REGISTERED.values()}


@pytest.mark.tpu
@pytest.mark.parametrize(("name", "chip", "tensor"), MATRIX)
def test_compiled(libtpu, name, chip, tensor):
    engine = made(name, chip, tensor)
    for shape in engine.corners():
        counted = count(engine.compile(shape), {"tensor": tensor}, engine.programs.devices, engine.layer_shapes)
        assert not counted.pool_copies, shape
        assert counted.memory["arguments"] == pytest.approx(engine.argument_bytes(shape), rel=0.02), shape
        assert not any(kernel.startswith("reference") for kernel in engine.kernels(shape)), shape
        assert counted.kernels, shape
        assert {one.axes for one in counted.traffic} <= {("tensor",)}
