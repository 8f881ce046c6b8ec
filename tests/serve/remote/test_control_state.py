"""ControlState: which weights and which state a restarted engine is brought to."""

from __future__ import annotations

import asyncio

import pytest

from dovetail.serve.remote.control_state import ControlState, LoadedWeights, stamp_of


class FakeChild:
    """An engine process that records its calls."""

    def __init__(self):
        self.calls, self.version = [], None

    async def call(self, name, **args):
        self.calls.append((name, args))
        return 3

    def set_version(self, version):
        self.version = version

    def set_adapters(self, adapters):
        assert adapters == {}


@pytest.mark.parametrize("order", [("path", "keep_cache"), ("keep_cache", "path")])
def test_the_weights_of_any_order_of_arguments_are_loaded_again_after_a_restart(tmp_path, order):
    (tmp_path / "model.safetensors").write_bytes(b"1")
    given = {"path": str(tmp_path), "keep_cache": False}
    state, first, second, third = ControlState(), FakeChild(), FakeChild(), FakeChild()
    asyncio.run(state.control(first, "update_weights", **{name: given[name] for name in order}))  # type: ignore[arg-type]
    assert state._weights == LoadedWeights(str(tmp_path), 3, stamp_of(str(tmp_path))) and first.version == 3
    asyncio.run(state.restore(second))  # type: ignore[arg-type]
    assert second.calls == [("update_weights", {"path": str(tmp_path), "version": 3})]
    (tmp_path / "model.safetensors").write_bytes(b"12")
    asyncio.run(state.restore(third))  # type: ignore[arg-type]
    assert third.calls == [("update_weights", {"path": str(tmp_path), "version": 4})] and third.version == 4
