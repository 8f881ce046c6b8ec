"""Adapters: the LoRA adapters that an engine has loaded.

An engine has tables of a few slots, each with room for an adapter up to a rank, beside the weights (see
models.serving_lora). A step computes all of them at once, so requests of different adapters share a batch. An Adapter
names one load: cached prefixes are shared only among requests of the same one.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import jax

from dovetail.core.errors import CheckpointError, RequestError, UnsupportedError, UserError
from dovetail.core.mesh import param_sharding
from dovetail.core.spec import ParamSpec, tree_map
from dovetail.core.types import Params
from dovetail.engine.options import EngineOptions
from dovetail.engine.request.sequence import Adapter
from dovetail.io.peft import read_adapter
from dovetail.models.config import ModelConfig
from dovetail.models.formats import Formats, formats_of
from dovetail.models.lora import Lora
from dovetail.models.serving_lora import (
    SlotLayout,
    check_served,
    empty_tables,
    greatest_rank,
    rewrite,
    slot_values,
    tables_spec,
    widen,
    with_tables,
    write_slot,
)
from dovetail.models.spec import VISION

RANK = 16  # of the slots, if neither an option nor a loaded adapter gives more


class Adapters:
    """Manage the loaded adapters and their tables on the device."""

    def __init__(self, layout: SlotLayout, dtype: Any):
        self.layout, self._dtype = layout, dtype
        self.tables: Params = empty_tables(layout, dtype) if layout.slots else {}
        self._loaded: dict[str, Adapter] = {}
        self._loads = 0

    @property
    def names(self) -> list[str]:
        """Return the names of the loaded adapters."""
        return list(self._loaded)

    def join(self, params: Params) -> Params:
        """Return published weights as the engine keeps them (see models.widened); `params` are consumed."""
        return widen(params, self.tables) if self.layout.slots else params

    def on(self, params: Params) -> Params:
        """Return the engine's weights as a step takes them."""
        return with_tables(params, self.tables, self.layout.slots) if self.layout.slots else params

    def rewrite(self, params: Params, values: Params, adapter: Adapter) -> Params:
        """Return the engine's weights after `put` has written these values."""
        return rewrite(params, values, adapter.number - 1, self.layout.slots)

    def find(self, name: str) -> Adapter:
        """Return a loaded adapter."""
        if name not in self._loaded:
            known = ", ".join(self._loaded) or "none"
            raise RequestError(f"adapter {name!r} is not loaded; loaded: {known}", param="adapter")
        return self._loaded[name]

    def read(self, name: str, path: str) -> Params:
        """Read an adapter for `put`; any thread may call this."""
        if not isinstance(name, str) or not name:
            raise UserError(f"`name` of an adapter must be a non-empty string, got {name!r}", param="name")
        if not self.layout.slots:
            raise UserError("the engine has no slots for adapters: start it with max_loras", param="max_loras")
        lora, tree = _read(path, self.layout.cfg)
        return slot_values(self.layout, tree, lora, self._dtype)

    def place(self, name: str, used: Collection[int] = ()) -> int | None:
        """Return the slot for a load of this name: its own, or a free one; None if there is neither.

        Args:
            name: The adapter's name.
            used: Slots of requests in progress, whose adapters may be unloaded or replaced already.
        """
        own = self._loaded[name].number if name in self._loaded else None
        if own is not None and own not in used:
            return own
        taken = {*used, *(each.number for each in self._loaded.values())}
        return next((number for number in range(1, self.layout.slots + 1) if number not in taken), None)

    def put(self, name: str, values: Params, version: int | None = None, used: Collection[int] = ()) -> Adapter:
        """Write an adapter into its slot (see `place`); later requests of that name get this one."""
        number = self.place(name, used)
        if number is None:
            why = ", some by requests in progress" if self.place(name) is not None else ""
            raise UserError(
                f"all {self.layout.slots} adapter slots are in use{why}: unload one, or raise max_loras",
                param="max_loras",
            )
        self.tables = write_slot(self.tables, values, number - 1)
        self._loads = max(self._loads + 1, version or 0)
        self._loaded[name] = Adapter(name, version or self._loads, number)
        return self._loaded[name]

    def drop(self, name: str) -> Adapter:
        """Forget an adapter; its slot keeps its values for the requests that use it."""
        return self._loaded.pop(self.find(name).name)


def adapters_for(
    cfg: ModelConfig, options: EngineOptions, dtype: Any, placement: Any = None, formats: Formats = ()
) -> Adapters:
    """Return the adapters of an engine whose weights have `formats`: `lora_modules` loaded, with `max_loras` slots."""
    layout, read = _layout(cfg, options, placement)
    layout = replace(layout, formats=formats)
    adapters = Adapters(layout, dtype)
    for name, (lora, tree) in read.items():
        adapters.put(name, slot_values(layout, tree, lora, dtype))
    return adapters


def with_adapters(params: Any, cfg: ModelConfig, options: EngineOptions, dtype: Any, placement: Any = None) -> Any:
    """Return abstract weights as a step of such an engine takes them."""
    layout = replace(check_adapters(cfg, options, placement), formats=formats_of(params))
    if not layout.slots:
        return params

    def one(leaf: ParamSpec) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=param_sharding(placement, leaf))

    tables = tree_map(one, tables_spec(layout))
    return with_tables(widen(params, tables), tables, layout.slots)


def check_adapters(cfg: ModelConfig, options: EngineOptions, placement: Any = None) -> SlotLayout:
    """Return the layout of the slots.

    Raises:
        CheckpointError: If an engine of this model cannot load one of the adapters.
    """
    layout, read = _layout(cfg, options, placement)
    for name, (lora, tree) in read.items():
        try:
            check_served(tree, lora, layout.rank)
        except UserError as error:
            raise CheckpointError(
                f"adapter {name!r} ({options.lora_modules[name]}): {error}", param="lora_modules"
            ) from None
    return layout


def _read(path: str, cfg: ModelConfig) -> tuple[Lora, Params]:
    """Read an adapter; refuse one of the vision tower, whose features all requests share."""
    lora, tree = read_adapter(path, cfg)
    if VISION in tree:
        raise UnsupportedError(
            f"{path} adapts the vision tower or its projector, and the engine serves adapters of the language model "
            "alone: write it into the model with `dovetail merge`",
            param="lora_modules",
        )
    return lora, tree


def _layout(
    cfg: ModelConfig, options: EngineOptions, placement: Any
) -> tuple[SlotLayout, dict[str, tuple[Lora, Params]]]:
    """Return the layout of the slots, and the adapters that were read to be put there."""
    read = {name: _read(path, cfg) for name, path in options.lora_modules.items()}
    ranks = [greatest_rank(tree) for _, tree in read.values()]
    slots = len(read) if options.max_loras is None else options.max_loras
    return SlotLayout(cfg, slots, options.max_lora_rank or max(ranks, default=RANK), placement), read
