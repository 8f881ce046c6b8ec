"""Read and write adapters in PEFT's format: adapter_config.json and adapter_model.safetensors.

PEFT has one pair of matrices per module. Where a module holds several of our weights (a joined q, k and v), ours are
written as one pair with their ranks side by side; a pair that PEFT made is split by rows, and each part has all its
ranks. Those of experts are in io.peft_experts; a pair per expert, as earlier versions and PEFT before transformers 5
wrote them, is read too. Adapters of a reward model have its score beside them, whole, as PEFT's `modules_to_save`.

PEFT's adapter of an embedding is transposed: `lora_embedding_A` [R, V] and `lora_embedding_B` [D, R] are our `lora_b`
and `lora_a`. A tied head is one weight with the embeddings here, and two modules with the same update there.

V vocabulary, D model dim, R rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dovetail.core.errors import CheckpointError
from dovetail.core.spec import ParamSpec, is_spec, leaves
from dovetail.core.types import Params
from dovetail.io.adapter_folder import WEIGHTS
from dovetail.io.hf import StoredPart, name_table, plain_name
from dovetail.io.peft_config import AdapterConfig, read_config, write_config
from dovetail.io.peft_experts import Stack, current_name, own_ranks, stacked_tensors, stacks_of, take_stacked
from dovetail.io.safetensor_folder import SafetensorFolder
from dovetail.models.config import ModelConfig
from dovetail.models.family import VisionFamily
from dovetail.models.lora import OUTER, Lora, input_dims, outer_modules
from dovetail.models.registry import family_of, vision_family_of
from dovetail.models.spec import VISION, spec

PREFIX, SCORE = "base_model.model.", "score.weight"
BRANCHES = ("layers", VISION)  # of a model's tree whose modules may have adapters
Flat = dict[str, dict[str, np.ndarray]]  # path of a weight -> its lora_a, lora_b and magnitude


# --- writing ----------------------------------------------------------------------------------------------------------


def save_adapter(folder: str | Path, cfg: ModelConfig, adapters: Params, lora: Lora, base: str = "") -> None:
    """Write an adapter as PEFT does.

    Args:
        folder: The adapter's folder.
        cfg: The model.
        adapters: The tree that models.lora declares.
        lora: Its settings.
        base: The name of the model that it belongs to.
    """
    from safetensors.numpy import save

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    flat = _flat({name: adapters[name] for name in BRANCHES if name in adapters})
    modules, stacks = _modules(cfg), stacks_of(cfg)
    outer, outer_ranks, saved = outer_tensors(cfg, adapters)
    tensors, parameters = stacked_tensors(stacks, flat)
    ranks: dict[str, int] = {}
    for module, parts in modules.items():
        mine = [part for part in parts if part.path in flat and part.index is None]
        if mine:
            pair, ranks[module] = _module_tensors(mine, flat)
            tensors |= {f"{module}.{name}": value for name, value in pair.items()}
    if not lora.use_dora:  # which PEFT has for modules alone
        parameters |= {f"{module}.weight": ranks.pop(module) for module in list(ranks) if _is_renamed(cfg, module)}
    if "score" in adapters:
        tensors[SCORE] = np.asarray(adapters["score"])
        saved.append("score")
    tensors, ranks = tensors | outer, ranks | outer_ranks
    if vision := vision_family_of(cfg):
        tensors = {_their_name(name, vision): value for name, value in tensors.items()}
        ranks = {_their_name(module, vision): rank for module, rank in ranks.items()}
    tensors = {f"{PREFIX}{name}": np.ascontiguousarray(value) for name, value in tensors.items()}
    (folder / WEIGHTS).write_bytes(save(tensors, {"format": "pt"}))
    tied = cfg.tied and bool(outer)
    write_config(folder, lora, base, ranks, parameters, _parameters(modules, stacks), saved, tied, whole=bool(vision))


def _is_renamed(cfg: ModelConfig, module: str) -> bool:
    """Return whether PEFT would take a target of this name for the experts'.

    It does so in models whose checkpoints have tensors for each expert and that transformers stacks; their dense
    weights must be named as parameters.
    """
    experts = any(layer.moe for layer in cfg.layers) and family_of(cfg).experts == "each"
    return experts and module.rpartition(".")[2] in ("gate_proj", "up_proj", "down_proj")


def _module_tensors(parts: list[StoredPart], flat: Flat) -> tuple[dict[str, np.ndarray], int]:
    """Return PEFT's tensors of one module, and their rank."""
    pairs = [_of(flat[part.path]) for part in parts]
    rank = sum(down.shape[0] for down, _, _ in pairs)
    rows = parts[0].spec.stored.shape[0]
    up, magnitude, at = np.zeros((rows, rank), pairs[0][1].dtype), np.zeros(rows, np.float32), 0
    for part, (down, own, norms) in zip(parts, pairs, strict=True):
        hole = _rows(part.spec, up)[..., at : at + down.shape[0]]
        hole[...] = own.reshape(hole.shape)
        if norms is not None:
            place = _rows(part.spec, magnitude[:, None])
            place[...] = norms.reshape(place.shape)
        at += down.shape[0]
    tensors = {"lora_A.weight": np.concatenate([down for down, _, _ in pairs]), "lora_B.weight": up}
    return tensors | ({} if pairs[0][2] is None else {"lora_magnitude_vector": magnitude}), rank


def _of(pair: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Return (down [R, in], up [.., R], magnitude)."""
    return pair["lora_a"].reshape(pair["lora_a"].shape[0], -1), pair["lora_b"], pair.get("magnitude")


def _rows(leaf: ParamSpec, tensor: np.ndarray) -> np.ndarray:
    """Return the rows of a module's [out, n] that belong to one of our weights, as a view."""
    stored = leaf.stored
    view = (*stored.view[:-1], tensor.shape[-1]) if stored.view else tensor.shape
    return tensor.reshape(view)[stored.at[: len(view) - 1]]


# --- reading ----------------------------------------------------------------------------------------------------------


def read_adapter(folder: str | Path, cfg: ModelConfig, score: bool = False) -> tuple[Lora, Params]:
    """Read an adapter for this model; scales of single modules are multiplied into their `lora_b`.

    Args:
        folder: The adapter's folder.
        cfg: The model.
        score: Whether a reward model's score may come with it, as `score`.

    Returns:
        The adapter's settings and its tree.
    """
    folder = Path(folder)
    config = read_config(folder)
    stored = SafetensorFolder(folder)
    vision = vision_family_of(cfg)
    plain = {name: current_name(name).removeprefix(PREFIX) for name in stored.tensors()}
    found = {plain_name(own, vision) if vision else own: stored.read(name) for name, own in plain.items()}
    own = _score(folder, config.raw, found, score) | take_outer(cfg, config, found)
    modules, stacks = _modules(cfg), stacks_of(cfg)
    config.check_parameters(_parameters(modules, stacks))
    flat: Flat = take_stacked(stacks, found, config)
    names = {name.rpartition(".lora_")[0] for name in found}
    if unknown := sorted(names - set(modules)):
        raise CheckpointError(f"{folder} is an adapter for another model: this one has no module {unknown[0]}")
    for module in sorted(names):
        pairs = [_read_part(config, module, part, found) for part in modules[module]]
        ranks = own_ranks([pair["lora_b"] for pair in pairs], config.lora.r)
        for part, pair, kept in zip(modules[module], pairs, ranks, strict=True):
            _add(flat, part, pair | {"lora_a": pair["lora_a"][kept], "lora_b": pair["lora_b"][..., kept]})
    if not flat and not own:
        raise CheckpointError(f"{folder}: the adapter has no weights")
    return _named(config, cfg, flat), _tree(flat, cfg) | own


def _named(config: AdapterConfig, cfg: ModelConfig, flat: Flat) -> Lora:
    """Return the adapter's settings, with our names of the projections if it names parameters."""
    if not config.raw.get("target_parameters"):
        return config.lora
    modules = (leaf.stored.names[0].removesuffix(".weight") for path, leaf in leaves(spec(cfg)) if path in flat)
    return replace(config.lora, target_modules=tuple(sorted({module.rpartition(".")[2] for module in modules})))


def _score(folder: Path, raw: dict[str, Any], found: dict[str, np.ndarray], wanted: bool) -> Params:
    """Take the score of a reward model out of the tensors, if there is one."""
    saved = {name.rpartition(".")[2] for name in raw.get("modules_to_save") or []} - set(OUTER.values())
    own = {"score": found.pop(SCORE)} if SCORE in found else {}
    if saved and not (own and saved <= {"score", "classifier"}):  # the two that PEFT names for any classifier
        raise CheckpointError(
            f"{folder}: modules_to_save={sorted(saved)!r} is not supported; train the adapter without it"
        )
    if own and not wanted:
        raise CheckpointError(
            f"{folder} is the adapter of a reward model, with a score of its own: write it into its model with "
            "`dovetail merge`, and use that"
        )
    return own


def _read_part(
    config: AdapterConfig, module: str, part: StoredPart, found: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    try:
        down, up = found[f"{module}.lora_A.weight"], found[f"{module}.lora_B.weight"]
    except KeyError as error:
        raise CheckpointError(f"{config.folder}: {error} is missing; the adapter was not written whole") from None
    leaf, rank = part.spec, down.shape[0]
    rows, columns = leaf.stored.shape[0], leaf.stored.shape[-1]
    parameter = f"{module}.weight"
    gain = config.gain(parameter if config.is_parameter(parameter) else module, rank, up.shape[1])
    if down.shape[1] != columns or up.shape[0] != rows:
        raise CheckpointError(
            f"{config.folder} is an adapter for another model: {module} is {up.shape[0]} x {down.shape[1]} there, and "
            f"{rows} x {columns} here"
        )
    out = leaf.shape[1:-1] if input_dims(leaf) == 0 else leaf.shape[: len(leaf.shape) - input_dims(leaf)]
    inner = (columns,) if input_dims(leaf) == 0 else leaf.shape[len(out) :]
    pair = {"lora_a": down.reshape(rank, *inner), "lora_b": _rows(leaf, up).reshape(*out, rank) * up.dtype.type(gain)}
    if config.lora.use_dora:
        pair["magnitude"] = _rows(leaf, found[f"{module}.lora_magnitude_vector"].reshape(-1, 1)).reshape(out)
    return pair


def _add(flat: Flat, part: StoredPart, pair: dict[str, np.ndarray]) -> None:
    if part.index is None:
        flat[part.path] = pair
        return
    count = len(part.spec.stored.names)
    whole = flat.setdefault(part.path, {name: np.zeros((count, *x.shape), x.dtype) for name, x in pair.items()})
    for name, value in pair.items():
        whole[name][part.index] = value


# --- names ------------------------------------------------------------------------------------------------------------


def _modules(cfg: ModelConfig) -> dict[str, list[StoredPart]]:
    """Return the parts of our matrices by Hugging Face module."""
    table = {current_name(name): parts for name, parts in name_table(cfg).items() if name.endswith(".weight")}
    layers = {name: parts for name, parts in table.items() if parts[0].path.partition(".")[0] in BRANCHES}
    return {
        name.removesuffix(".weight"): parts for name, parts in layers.items() if len(parts[0].spec.stored.shape) == 2
    }


def _parameters(modules: Iterable[str], stacks: list[Stack]) -> list[str]:
    """Return everything that can be adapted, by the names in `target_parameters`."""
    return [*(stack.name for stack in stacks), *(f"{module}.weight" for module in modules)]


def _flat(adapters: Params) -> Flat:
    flat: Flat = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(adapters):
        *above, last = [str(getattr(key, "key", getattr(key, "idx", key))) for key in path]
        flat.setdefault(".".join(above), {})[last] = np.asarray(leaf)
    return flat


def _tree(flat: Flat, cfg: ModelConfig) -> Params:
    """Return the tree nested as in models.spec."""
    tree: dict[str, Any] = {}
    for path, pair in flat.items():
        *above, last = path.split(".")
        at = tree
        for name in above:
            at = at.setdefault(name, {})
        at[last] = pair
    return {name: _like(spec(cfg)[name], tree.get(name, {})) for name in BRANCHES if name == "layers" or name in tree}


def _like(specs: Any, tree: dict[str, Any]) -> Any:
    """Return the tree with tuples where the specs have them."""
    if isinstance(specs, tuple):
        return tuple(_like(part, tree.get(str(i), {})) for i, part in enumerate(specs))
    return tree if is_spec(specs) else {name: _like(specs[name], part) for name, part in tree.items()}


def _their_name(name: str, vision: VisionFamily) -> str:
    """Return transformers' name of a module, or of a tensor of it, in a model that sees images."""
    if name.startswith(("model.layers.", "model.embed_tokens")):
        nested = vision.text_prefix.startswith("model.") and vision.text_prefix != "model."
        return name.replace("model.", vision.text_prefix if nested else "model.language_model.", 1)
    return name if name.startswith(("model.", "lm_head")) else f"model.{name}"


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
    """Take the adapters, or whole weights, of the embeddings and the head out of `found`."""
    tree = {}
    for name, modules in outer_modules(cfg).items():
        each = [_take(config, module, found, spec(cfg)[name].shape) for module in modules]
        given = [one for one in each if one is not None]
        if not given:
            continue
        if len(given) < len(each) or not all(_same(given[0], one) for one in given[1:]):
            raise CheckpointError(
                f"{config.folder} changes embed_tokens and lm_head differently, and this model has one weight for "
                "both: train the adapter with ensure_weight_tying=True"
            )
        tree[name] = given[0]
    for name, theirs in OUTER.items():
        whole = tree.get("embed" if cfg.tied else name)
        if theirs in config.lora.modules_to_save and (whole is None or isinstance(whole, dict)):
            raise CheckpointError(
                f"{config.folder}: modules_to_save names {theirs}, and its weights are not in the adapter"
            )
    return tree


def _take(config: AdapterConfig, module: str, found: dict[str, np.ndarray], shape: tuple[int, ...]) -> Any:
    """Return the weight, or its pair; None if the adapter has neither."""
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
        raise CheckpointError(f"{config.folder}: {error} is missing; the adapter was not written whole") from None
    down, up = (down.T, up.T) if _is_embedding(module) else (down, up)
    _check_rows(config, module, (len(up), down.shape[1]), shape)
    gain = config.gain(module, len(down), up.shape[1])
    return {"lora_a": np.ascontiguousarray(down), "lora_b": np.ascontiguousarray(up) * up.dtype.type(gain)}


def _check_rows(config: AdapterConfig, module: str, theirs: tuple[int, ...], ours: tuple[int, ...]) -> None:
    if theirs != ours:
        raise CheckpointError(
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
