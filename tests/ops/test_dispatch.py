"""What a kernel cannot do is not given to it."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from dovetail.core.types import Packed, Paged
from dovetail.ops.dispatch import rotates_and_stores
from dovetail.ops.rope import Rope

NONE = jnp.zeros((1,), jnp.int32)


def paged(platform: str) -> Paged:
    return Paged(NONE[None], NONE, NONE, NONE, platform=platform)


REFUSED = {
    "a part of the head turns": dict(rope=Rope(10_000.0, 32)),
    "neighbouring pairs turn": dict(rope=Rope(10_000.0, 64, interleaved=True)),
    "nothing turns": dict(rope=None),
    "one norm over all heads": dict(norms="all"),
    "values are normed": dict(v_norm=True),
    "a head that is no power of two": dict(rope=Rope(10_000.0, 96), head_dim=96),
    "training": dict(ctx=Packed(NONE[None], platform="cuda")),
    "another platform": dict(ctx=paged("tpu")),
}


@pytest.mark.parametrize("case", REFUSED)
def test_the_kernel_that_rotates_and_stores(case):
    usual = dict(ctx=paged("cuda"), rope=Rope(10_000.0, 64), head_dim=64, norms="head", v_norm=False)
    assert rotates_and_stores(**usual)
    assert rotates_and_stores(**usual | {"norms": ""})
    assert not rotates_and_stores(**usual | REFUSED[case])
