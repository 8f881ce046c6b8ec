"""Low-rank adapters of a model's projections: which weights have one, their specs, and how they are attached.

The tree of an adapter is the model's own (models.spec) with a dict for each adapted weight and nothing for the others:

    {"layers": ({"attn": {"q": {"lora_a": [R, in], "lora_b": [out, R]}}}, ...), "embed": {"lora_a": ..., "lora_b": ...}}

The embeddings and the head may be arrays: they are then trained whole (`modules_to_save`). The tree is initialised,
laid out, saved and counted like any weights.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from dovetail.core.choice import one_of, require
from dovetail.core.errors import UserError
from dovetail.core.spec import ParamSpec, is_spec, leaves, path_name
from dovetail.core.types import Params
from dovetail.models.config import ModelConfig
from dovetail.models.spec import VISION, spec
from dovetail.ops.adapter import Adapted, merged, row_norms

ALL = "all-linear"
OUTER = {"embed": "embed_tokens", "head": "lm_head"}  # the weights outside of the layers that may be trained


@dataclass(frozen=True)
class Lora:
    """Configure LoRA adapters, under PEFT's names."""

    r: int = 16  # rank of the adapter matrices
    lora_alpha: float = 32.0  # the update is multiplied by lora_alpha / r
    # suffixes of Hugging Face module names (q_proj), or full patterns; of a vision tower: names that no layer has
    target_modules: tuple[str, ...] = (ALL,)
    lora_dropout: float = 0.0  # dropout of the adapters' inputs
    use_rslora: bool = False  # multiply by lora_alpha / sqrt(r) instead
    use_dora: bool = False  # train the norm of each weight row separately from its direction (DoRA)
    modules_to_save: tuple[str, ...] = ()  # weights to train whole and save with the adapters: embed_tokens, lm_head

    def __post_init__(self) -> None:
        require(self.r >= 1, f"r must be at least 1; got {self.r}", param="r")
        require(self.lora_alpha > 0, f"lora_alpha must be above 0; got {self.lora_alpha}", param="lora_alpha")
        require(
            0 <= self.lora_dropout < 1,
            f"lora_dropout must be at least 0 and below 1; got {self.lora_dropout}",
            param="lora_dropout",
        )
        require(
            bool(self.target_modules),
            "target_modules must name projections (q_proj) or all-linear; it is empty",
            param="target_modules",
        )
        for name in self.modules_to_save:
            one_of("modules_to_save", name, OUTER.values())

    @property
    def scale(self) -> float:
        """Return the factor of the adapters' update."""
        return self.lora_alpha / (math.sqrt(self.r) if self.use_rslora else self.r)

    def adapts(self, module: str) -> bool:
        """Return whether a projection of the layers is adapted."""
        return ALL in self.target_modules or self.names(module)

    def names(self, module: str) -> bool:
        """Return whether `target_modules` names the module; all-linear names the layers' projections alone."""
        given = [t for t in self.target_modules if t != ALL]
        return any(module == t or module.endswith(f".{t}") or re.fullmatch(t, module) for t in given)


def outer_modules(cfg: ModelConfig) -> dict[str, tuple[str, ...]]:
    """Return Hugging Face's modules of the weights outside the layers that may be trained, by our names.

    A tied head and the embeddings are one weight.
    """
    tree = spec(cfg)
    found = {name: (_module(tree[name]),) for name in OUTER if name in tree}
    return {"embed": (*found["embed"], OUTER["head"])} if cfg.tied and not cfg.scored else found


def saved_names(cfg: ModelConfig, lora: Lora) -> list[str]:
    """Return which of OUTER are trained whole."""
    ends = {name: [module.rpartition(".")[2] for module in given] for name, given in outer_modules(cfg).items()}
    for wanted in lora.modules_to_save:
        if not any(wanted in modules for modules in ends.values()):
            raise UserError(
                f"lora.modules_to_save names {wanted}, and this model has no such weight; leave it out",
                param="lora.modules_to_save",
            )
    return [name for name, modules in ends.items() if set(modules) & set(lora.modules_to_save)]


def outer_names(cfg: ModelConfig, lora: Lora) -> list[str]:
    """Return which of OUTER have an adapter."""
    found = [name for name, given in outer_modules(cfg).items() if any(map(lora.names, given))]
    saved = saved_names(cfg, lora)
    for name in found:
        require(
            name not in saved,
            f"lora.target_modules and modules_to_save both name {OUTER[name]}: leave one out",
            param="lora.target_modules",
        )
    require(
        not found or not (lora.use_dora or lora.lora_dropout),
        "lora.target_modules with embed_tokens or lm_head go with neither use_dora nor lora_dropout: leave one out",
        param="lora.target_modules",
    )
    return found


def lora_spec(cfg: ModelConfig, lora: Lora) -> dict[str, Any]:
    """Return the specs of the adapters' weights."""
    whole = spec(cfg)
    tree: dict[str, Any] = {"layers": tuple(_select(layer, lora) for layer in whole["layers"])}
    tree |= {name: _pair(whole[name], lora) for name in outer_names(cfg, lora)}
    tree |= {name: whole[name] for name in saved_names(cfg, lora)}
    if VISION in whole and (tower := _select_tower(whole[VISION], lora, _layer_modules(cfg))):
        tree[VISION] = tower
    if not any(is_spec(leaf) for leaf in jax.tree.leaves(tree, is_leaf=is_spec)):
        names = ", ".join(sorted(_layer_modules(cfg)))
        raise UserError(
            f"lora.target_modules={list(lora.target_modules)}: no projection of this model is called so; it has "
            f"{names}",
            param="lora.target_modules",
        )
    return tree


def attach(params: Params, adapters: Params, lora: Lora, key: jax.Array | None = None) -> Params:
    """Return the model's weights with the adapters attached; `key` is that of this step's dropout."""
    count = 0

    def put(name: str, p: Any, a: Any) -> Any:
        nonlocal count
        if name in OUTER:  # which are looked up and chunked as arrays
            update = jnp.tensordot(a["lora_b"], a["lora_a"], axes=1, preferred_element_type=jnp.float32)
            return (p.astype(jnp.float32) + lora.scale * update).astype(p.dtype)
        count += 1
        own = jax.random.fold_in(key, count) if key is not None and lora.lora_dropout else None
        up = a["lora_b"] * jnp.asarray(lora.scale, a["lora_b"].dtype)
        return Adapted(p, a["lora_a"], up, None, a.get("magnitude"), own, lora.lora_dropout)

    return on_each(params, adapters, put)


def on_each(params: Any, adapters: Any, put: Callable[[str, Any, dict[str, Any]], Any], name: str = "") -> Any:
    """Return the weights with put(name, weight, pair) for each adapted one, and with the adapter's own arrays.

    `params` and `adapters` are trees, or the subtrees and leaves of a call on a part.
    """
    if isinstance(adapters, tuple):
        return tuple(on_each(*pair, put) for pair in zip(params, adapters, strict=True))
    if not isinstance(adapters, dict):
        return adapters.astype(params.dtype)
    if "lora_b" in adapters:
        return put(name, params, adapters)
    return {**params, **{name: on_each(params[name], part, put, name) for name, part in adapters.items()}}


def merge(params: Params, adapters: Params, cfg: ModelConfig, lora: Lora) -> Params:
    """Return the weights with the adapters merged into them, in the dtype of `params`."""
    specs = dict(leaves(spec(cfg)))

    def one(path: tuple, leaf: Any) -> Any:
        if not isinstance(leaf, Adapted):
            return leaf
        dims = input_dims(specs[path_name(path)])
        whole = merged(leaf.base.astype(jnp.float32), leaf.down, leaf.up, dims)
        if leaf.magnitude is not None:
            gain = leaf.magnitude / row_norms(whole, dims)
            whole = whole * gain.reshape(*gain.shape, *[1] * dims)
        return whole.astype(leaf.base.dtype)

    with jax.default_matmul_precision("highest"):
        on = attach(params, adapters, lora)
        return jax.tree_util.tree_map_with_path(one, on, is_leaf=lambda x: isinstance(x, Adapted))


def input_dims(leaf: ParamSpec) -> int:
    """Return how many of a weight's last dims are its input's; 0 for the weights of experts."""
    return 0 if leaf.axes[0] == "experts" else leaf.input_dims


# --- declaring --------------------------------------------------------------------------------------------------------


def _select(tree: dict[str, Any], lora: Lora) -> dict[str, Any]:
    """Return a layer's tree without what is not adapted."""
    kept: dict[str, Any] = {}
    for name, part in tree.items():
        if not is_spec(part):
            kept[name] = _select(part, lora)
        elif is_projection(name, part) and lora.adapts(_module(part)):
            kept[name] = _pair(part, lora)
    return {name: part for name, part in kept.items() if part}


def _select_tower(tree: Any, lora: Lora, taken: set[str]) -> Any:
    """Return the tree of a vision tower without what is not adapted; a name in `taken` is that of the layers alone."""
    if is_spec(tree):
        is_linear = len(tree.stored.shape) == 2 and tree.active > 0 and tree.stored.names[0].endswith(".weight")
        own = tuple(target for target in lora.target_modules if target not in taken)
        return _pair(tree, lora) if is_linear and own and replace(lora, target_modules=own).names(_module(tree)) else {}
    if isinstance(tree, tuple):
        parts = tuple(_select_tower(part, lora, taken) for part in tree)
        return parts if any(parts) else {}
    kept = {name: _select_tower(part, lora, taken) for name, part in tree.items()}
    return {name: part for name, part in kept.items() if part}


def _layer_modules(cfg: ModelConfig) -> set[str]:
    """Return the last parts of the names of the layers' projections, such as q_proj."""
    return {_module(leaf).rpartition(".")[2] for leaf in _candidates(cfg)}


def _pair(leaf: ParamSpec, lora: Lora) -> dict[str, ParamSpec]:
    dims, R = input_dims(leaf), lora.r
    experts = dims == 0
    cut = len(leaf.shape) - dims  # where the input dims start
    if experts:
        (E, out, n), (e, o, i) = leaf.shape, leaf.axes
        down, up = ((E, R, n), (e, None, i)), ((E, out, R), (e, o, None))
    else:
        down = (R, *leaf.shape[cut:]), (None, *leaf.axes[cut:])
        up = (*leaf.shape[:cut], R), (*leaf.axes[:cut], None)
        n = math.prod(leaf.shape[cut:])
    pair = {
        "lora_a": replace(leaf, shape=down[0], axes=down[1], init=f"uniform:{n**-0.5}"),
        "lora_b": replace(leaf, shape=up[0], axes=up[1], init="zeros"),
    }
    if lora.use_dora:
        require(
            not experts,
            "lora.use_dora does not support experts: leave their projections out of lora.target_modules",
            param="lora.use_dora",
        )
        pair["magnitude"] = replace(leaf, shape=leaf.shape[:cut], axes=leaf.axes[:cut], init="ones", dtype="float32")
    return pair


def _candidates(cfg: ModelConfig) -> list[ParamSpec]:
    found = [(path.rpartition(".")[2], leaf) for path, leaf in leaves(spec(cfg)["layers"])]
    return [leaf for name, leaf in found if is_projection(name, leaf)]


def is_projection(name: str, leaf: ParamSpec) -> bool:
    """Return whether a weight of a layer may be adapted."""
    return leaf.active > 0 and len(leaf.shape) > 1 and name != "router"


def _module(leaf: ParamSpec) -> str:
    return leaf.stored.names[0].removesuffix(".weight")
