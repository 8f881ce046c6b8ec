"""Adapters: the low-rank adapters that an engine has loaded, each in a slot of the tables beside its weights.

A step computes all of them at once (see models.serving_lora), so requests of different adapters share a batch. What an
adapter is called, and which load of it this is, is in its Adapter: its prefixes are found by requests of the same only.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import jax

from dovetail.core.errors import UserError
from dovetail.core.mesh import param_sharding
from dovetail.core.spec import ParamSpec, tree_map
from dovetail.core.types import Params
from dovetail.engine.options import EngineOptions
from dovetail.engine.request.sequence import Adapter
from dovetail.io.peft import read_adapter
from dovetail.models.config import ModelConfig
from dovetail.models.lora import Lora
from dovetail.models.serving_lora import (
    SlotLayout,
    check_served,
    empty_tables,
    greatest_rank,
    slot_values,
    tables_spec,
    write_slot,
)
from dovetail.models.widened import rewrite, widen, with_tables

RANK = 16  # there is room for, unless told or given more


class Adapters:
    def __init__(self, form: SlotLayout, dtype: Any):
        self.form, self._dtype = form, dtype
        self.tables: Params = empty_tables(form, dtype) if form.slots else {}
        self._loaded: dict[str, Adapter] = {}
        self._loads = 0

    @property
    def names(self) -> list[str]:
        return list(self._loaded)

    def join(self, params: Params) -> Params:
        """Published weights as the engine keeps them (see models.widened); those given are used up."""
        return widen(params, self.tables) if self.form.slots else params

    def on(self, params: Params) -> Params:
        """The engine's weights as a step takes them."""
        return with_tables(params, self.tables, self.form.slots) if self.form.slots else params

    def rewrite(self, params: Params, values: Params, adapter: Adapter) -> Params:
        """The engine's weights, after `put` has brought these values."""
        return rewrite(params, values, adapter.number - 1, self.form.slots)

    def find(self, name: str) -> Adapter:
        if name not in self._loaded:
            known = f"there are {', '.join(self._loaded)}" if self._loaded else "none is"
            raise UserError(f"adapter {name!r} is not loaded: {known}")
        return self._loaded[name]

    def read(self, name: str, path: str) -> Params:
        """What `put` writes; any thread may ask for it."""
        if not isinstance(name, str) or not name:
            raise UserError(f"an adapter's name is a text of its own; got {name!r}")
        if not self.form.slots:
            raise UserError("the engine was built without room for adapters: give it max_loras")
        lora, tree = read_adapter(path, self.form.cfg)
        return slot_values(self.form, tree, lora, self._dtype)

    def place(self, name: str, used: Collection[int] = ()) -> int | None:
        """Return the slot for a load of this name: that of the adapter it replaces, or a free one. None: there is none.
        `used`: slots that requests under way run on, whose adapters may be unloaded or replaced already."""
        own = self._loaded[name].number if name in self._loaded else None
        if own is not None and own not in used:
            return own
        taken = {*used, *(each.number for each in self._loaded.values())}
        return next((number for number in range(1, self.form.slots + 1) if number not in taken), None)

    def put(self, name: str, values: Params, version: int | None = None, used: Collection[int] = ()) -> Adapter:
        """Write an adapter into its slot (see `place`); requests that are added later get this one."""
        number = self.place(name, used)
        if number is None:
            why = ", and requests under way need them" if self.place(name) is not None else ""
            raise UserError(f"all {self.form.slots} places for adapters are taken{why}: unload one, or raise max_loras")
        self.tables = write_slot(self.tables, values, number - 1)
        self._loads = max(self._loads + 1, version or 0)
        self._loaded[name] = Adapter(name, version or self._loads, number)
        return self._loaded[name]

    def drop(self, name: str) -> Adapter:
        """Forget an adapter. What is written in its slot stays there for the requests that run on it."""
        return self._loaded.pop(self.find(name).name)


def adapters_for(cfg: ModelConfig, options: EngineOptions, dtype: Any, placement: Any = None) -> Adapters:
    """With those that the options name, and room for as many as they say."""
    form, read = _room(cfg, options, placement)
    adapters = Adapters(form, dtype)
    for name, (lora, tree) in read.items():
        adapters.put(name, slot_values(form, tree, lora, dtype))
    return adapters


def with_adapters(params: Any, cfg: ModelConfig, options: EngineOptions, dtype: Any, placement: Any = None) -> Any:
    """The weights' forms as a step of such an engine takes them."""
    form = check_adapters(cfg, options, placement)
    if not form.slots:
        return params

    def one(leaf: ParamSpec) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=param_sharding(placement, leaf))

    tables = tree_map(one, tables_spec(form))
    return with_tables(widen(params, tables), tables, form.slots)


def check_adapters(cfg: ModelConfig, options: EngineOptions, placement: Any = None) -> SlotLayout:
    """Return what there is room for. ValueError, with its name, for an adapter that an engine of this model could not
    load."""
    form, read = _room(cfg, options, placement)
    for name, (lora, tree) in read.items():
        try:
            check_served(tree, lora, form.rank)
        except ValueError as error:
            raise UserError(f"adapter {name!r} ({options.lora_modules[name]}): {error}") from None
    return form


def _room(
    cfg: ModelConfig, options: EngineOptions, placement: Any
) -> tuple[SlotLayout, dict[str, tuple[Lora, Params]]]:
    """What there is room for, and what is read to be put there."""
    read = {name: read_adapter(path, cfg) for name, path in options.lora_modules.items()}
    ranks = [greatest_rank(tree) for _, tree in read.values()]
    slots = len(read) if options.max_loras is None else options.max_loras
    return SlotLayout(cfg, slots, options.max_lora_rank or max(ranks, default=RANK), placement), read
