"""Adapters of the embeddings and the head, and these weights whole (PEFT's `modules_to_save`), in PEFT's format.

PEFT's adapter of an embedding is turned round: `lora_embedding_A` [R, V] and `lora_embedding_B` [D, R] are our `lora_b`
and `lora_a`. A tied head is one weight with the embeddings here, and two modules with the same update there.

V vocabulary, D model dim, R rank.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dovetail.core.errors import UserError
from dovetail.core.types import Params
from dovetail.io.peft_config import AdapterConfig
from dovetail.models.config import ModelConfig
from dovetail.models.lora import OUTER, outer_modules
from dovetail.models.spec import spec

Pair = dict[str, np.ndarray]


def outer_tensors(cfg: ModelConfig, adapters: Params) -> tuple[dict[str, np.ndarray], dict[str, int], list[str]]:
    """Return PEFT's tensors by name, the ranks of the modules with an adapter, and the names of those saved whole."""
    tensors: dict[str, np.ndarray] = {}
    ranks: dict[str, int] = {}
    saved: list[str] = []
    for name, modules in outer_modules(cfg).items():
        for module in modules if name in adapters else ():
            value: Any = adapters[name]
            if not isinstance(value, dict):
                tensors[f"{module}.weight"] = np.asarray(value)
                saved.append(module.rpartition(".")[2])
                continue
            down, up = np.asarray(value["lora_a"]), np.asarray(value["lora_b"])
            ranks[module] = len(down)
            if _is_embedding(module):
                tensors |= {f"{module}.lora_embedding_A": up.T, f"{module}.lora_embedding_B": down.T}
            else:
                tensors |= {f"{module}.lora_A.weight": down, f"{module}.lora_B.weight": up}
    return tensors, ranks, saved


def take_outer(cfg: ModelConfig, config: AdapterConfig, found: dict[str, np.ndarray]) -> Params:
    """Return what an adapter has for the embeddings and the head, taken out of `found`."""
    tree = {}
    for name, modules in outer_modules(cfg).items():
        each = [_take(config, module, found, spec(cfg)[name].shape) for module in modules]
        given = [one for one in each if one is not None]
        if not given:
            continue
        if len(given) < len(each) or not all(_same(given[0], one) for one in given[1:]):
            raise UserError(
                f"{config.folder} changes embed_tokens and lm_head differently, and this model has one weight for "
                "both: train the adapter with ensure_weight_tying=True"
            )
        tree[name] = given[0]
    for name, theirs in OUTER.items():
        whole = tree.get("embed" if cfg.tied else name)
        if theirs in config.lora.modules_to_save and (whole is None or isinstance(whole, dict)):
            raise UserError(f"{config.folder}: modules_to_save names {theirs}, and its weights are not in the adapter")
    return tree


def _take(config: AdapterConfig, module: str, found: dict[str, np.ndarray], shape: tuple[int, ...]) -> Any:
    """The weight, or its pair; None where the adapter has neither."""
    found.pop(f"{module}.base_layer.weight", None)  # PEFT writes the base's embeddings beside an adapter of them
    weight = found.pop(f"{module}.weight", None)
    if weight is not None:
        _check_rows(config, module, weight.shape, shape)
        return weight
    if _is_embedding(module):
        names = f"{module}.lora_embedding_B", f"{module}.lora_embedding_A"
    else:
        names = f"{module}.lora_A.weight", f"{module}.lora_B.weight"
    if not any(name in found for name in names):
        return None
    try:
        down, up = (found.pop(name) for name in names)
    except KeyError as error:
        raise UserError(f"{config.folder}: {error} is missing; the adapter was not written whole") from None
    down, up = (down.T, up.T) if _is_embedding(module) else (down, up)
    _check_rows(config, module, (len(up), down.shape[1]), shape)
    gain = config.gain(module, len(down), up.shape[1])
    return {"lora_a": np.ascontiguousarray(down), "lora_b": np.ascontiguousarray(up) * up.dtype.type(gain)}


def _check_rows(config: AdapterConfig, module: str, theirs: tuple[int, ...], ours: tuple[int, ...]) -> None:
    if theirs != ours:
        raise UserError(
            f"{config.folder}: {module} is {' x '.join(map(str, theirs))} there, and {' x '.join(map(str, ours))} in "
            "this model: add the adapter's tokens to the model first (`dovetail convert --special-token`)"
        )


def _is_embedding(module: str) -> bool:
    return module.endswith(OUTER["embed"])


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, dict) != isinstance(other, dict):
        return False
    both = zip(one.values(), other.values(), strict=True) if isinstance(one, dict) else [(one, other)]
    return all(np.array_equal(a, b) for a, b in both)
