"""Adapters in PEFT's format, both ways: adapter_config.json and adapter_model.safetensors.

PEFT has one pair of matrices per module. Where a module holds several of our weights (a joined q, k and v), ours are
written as one pair whose ranks lie side by side; a pair that is read is cut by rows, and each part has all its ranks.
The adapters of a reward model have its score beside them, whole, as PEFT's `modules_to_save`.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dovetail.core.spec import ParamSpec
from dovetail.core.types import Params
from dovetail.io.hf import StoredPart, name_table
from dovetail.io.safetensor_folder import SafetensorFolder
from dovetail.io.whole_file import write_whole
from dovetail.models.config import ModelConfig
from dovetail.models.lora import ALL, Lora, input_dims

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX, SCORE = "base_model.model.", "score.weight"
Flat = dict[str, dict[str, np.ndarray]]  # path of a weight -> its lora_a, lora_b and magnitude
# what an adapter may be asked to do besides, and we do not
REFUSED = (
    "layers_to_transform",
    "layer_replication",
    "target_parameters",
    "trainable_token_indices",
)


# --- writing ----------------------------------------------------------------------------------------------------------


def save_adapter(folder: str | Path, cfg: ModelConfig, adapters: Params, lora: Lora, base: str = "") -> None:
    """`adapters` as models.lora declares them; `base` is the name of the model that they belong to."""
    from safetensors.numpy import save

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    flat, tensors, ranks = _flat({"layers": adapters["layers"]}), {}, {}
    for module, parts in _modules(cfg).items():
        mine = [part for part in parts if part.path in flat]
        if mine:
            pair, rank = _module_tensors(mine, flat)
            ranks[module] = rank
            tensors |= {f"{PREFIX}{module}.{name}": np.ascontiguousarray(value) for name, value in pair.items()}
    config = _config(lora, ranks, base)
    if "score" in adapters:
        tensors[f"{PREFIX}{SCORE}"] = np.ascontiguousarray(adapters["score"])
        config |= {"task_type": "SEQ_CLS", "modules_to_save": ["score"]}
    (folder / WEIGHTS).write_bytes(save(tensors, {"format": "pt"}))
    write_whole(folder / CONFIG, json.dumps(config, indent=2) + "\n")


def _module_tensors(parts: list[StoredPart], flat: Flat) -> tuple[dict[str, np.ndarray], int]:
    """(PEFT's tensors of one module, their rank)."""
    pairs = [_of(flat[part.path], part) for part in parts]
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


def _of(pair: dict[str, np.ndarray], part: StoredPart) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """(down [R, in], up [.., R], magnitude) of one module: of one expert, where the weight is of several."""
    if part.index is not None:
        pair = {name: value[part.index] for name, value in pair.items()}
    down = pair["lora_a"].reshape(pair["lora_a"].shape[0], -1)
    return down, pair["lora_b"], pair.get("magnitude")


def _rows(leaf: ParamSpec, tensor: np.ndarray) -> np.ndarray:
    """The rows of a module's [out, n] that belong to one of our weights: a view."""
    stored = leaf.stored
    view = (*stored.view[:-1], tensor.shape[-1]) if stored.view else tensor.shape
    return tensor.reshape(view)[stored.at[: len(view) - 1]]


def _config(lora: Lora, ranks: dict[str, int], base: str) -> dict[str, Any]:
    odd = {module: rank for module, rank in ranks.items() if rank != lora.rank}
    alphas = {m: lora.scale * (math.sqrt(rank) if lora.rslora else rank) for m, rank in odd.items()}
    targets = sorted({module.rpartition(".")[2] for module in ranks})
    return {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "r": lora.rank,
        "lora_alpha": lora.alpha, "lora_dropout": lora.dropout, "target_modules": targets, "bias": "none",
        "use_rslora": lora.rslora, "use_dora": lora.dora, "rank_pattern": odd, "alpha_pattern": alphas,
        "fan_in_fan_out": False, "inference_mode": True,
    }  # fmt: skip


# --- reading ----------------------------------------------------------------------------------------------------------


def read_adapter(folder: str | Path, cfg: ModelConfig, score: bool = False) -> tuple[Lora, Params]:
    """An adapter for this model; what each module says of its own scale is in its `up`. `score`: a reward model's may
    come with it, as `score`."""
    folder = Path(folder)
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise ValueError(f"{folder} is no adapter: expected {CONFIG} and {WEIGHTS} as PEFT writes them, no {name}")
    lora, said = _read_config(folder)
    stored = SafetensorFolder(folder)
    found = {name.removeprefix(PREFIX): stored.read(name) for name in stored.tensors()}
    own = _score(folder, said, found, score)
    modules, flat = _modules(cfg), {}
    names = {name.rpartition(".lora_")[0] for name in found}
    if unknown := sorted(names - set(modules)):
        raise ValueError(f"{folder} is an adapter for another model: this one has no module {unknown[0]}")
    for module in sorted(names):
        for part in modules[module]:
            _add(flat, part, _read_part(folder, module, part, found, lora, said))
    if not flat:
        raise ValueError(f"{folder}: the adapter has no weights")
    return lora, _tree(flat, len(cfg.layers)) | own


def _score(folder: Path, said: dict[str, Any], found: dict[str, np.ndarray], wanted: bool) -> Params:
    """The score of a reward model, taken out of what was found; nothing of another."""
    saved = said.get("modules_to_save") or []
    own = {"score": found.pop(SCORE)} if SCORE in found else {}
    if saved and not (own and set(saved) <= {"score", "classifier"}):  # the two that PEFT names for any classifier
        raise ValueError(f"{folder}: modules_to_save={saved!r} is not supported; train the adapter without it")
    if own and not wanted:
        raise ValueError(
            f"{folder} is the adapter of a reward model, with a score of its own: write it into its model with "
            "`dovetail merge`, and use that"
        )
    return own


def _read_config(folder: Path) -> tuple[Lora, dict[str, Any]]:
    said = json.loads((folder / CONFIG).read_text())
    if said.get("peft_type") != "LORA":
        raise ValueError(f"{folder} is an adapter of kind {said.get('peft_type')}; LORA is the kind that can be used")
    for name in REFUSED:
        if said.get(name):
            raise ValueError(f"{folder}: {name}={said[name]!r} is not supported; train the adapter without it")
    if said.get("bias", "none") != "none" or said.get("lora_bias"):
        raise ValueError(f"{folder}: it has biases, which are not supported; train the adapter with bias='none'")
    targets = said.get("target_modules") or [ALL]
    targets = (targets,) if isinstance(targets, str) else tuple(sorted(targets))
    lora = Lora(
        said["r"], float(said["lora_alpha"]), targets, float(said.get("lora_dropout") or 0),
        bool(said.get("use_rslora")), bool(said.get("use_dora")),
    )  # fmt: skip
    return lora, said


def _read_part(
    folder: Path, module: str, part: StoredPart, found: dict[str, np.ndarray], lora: Lora, said: dict[str, Any]
) -> dict[str, np.ndarray]:
    try:
        down, up = found[f"{module}.lora_A.weight"], found[f"{module}.lora_B.weight"]
    except KeyError as error:
        raise ValueError(f"{folder}: {error} is missing; the adapter was not written whole") from None
    leaf, rank = part.spec, down.shape[0]
    wanted = _pattern(said.get("rank_pattern"), module, lora.rank)
    rows, columns = leaf.stored.shape[0], leaf.stored.shape[-1]
    if not rank == up.shape[1] == wanted:
        raise ValueError(f"{folder}: {module} has ranks {rank} and {up.shape[1]} and its config says {wanted}")
    if down.shape[1] != columns or up.shape[0] != rows:
        raise ValueError(
            f"{folder} is an adapter for another model: {module} is {up.shape[0]} x {down.shape[1]} there, and "
            f"{rows} x {columns} here"
        )
    alpha = _pattern(said.get("alpha_pattern"), module, lora.alpha)
    scale = alpha / (math.sqrt(rank) if lora.rslora else rank) / lora.scale
    out = leaf.shape[1:-1] if input_dims(leaf) == 0 else leaf.shape[: len(leaf.shape) - input_dims(leaf)]
    inner = (columns,) if input_dims(leaf) == 0 else leaf.shape[len(out) :]
    pair = {"lora_a": down.reshape(rank, *inner), "lora_b": _rows(leaf, up).reshape(*out, rank) * up.dtype.type(scale)}
    if lora.dora:
        pair["magnitude"] = _rows(leaf, found[f"{module}.lora_magnitude_vector"].reshape(-1, 1)).reshape(out)
    return pair


def _pattern(patterns: dict[str, Any] | None, module: str, otherwise: Any) -> Any:
    """PEFT's rule: a key is a pattern for the end of a module's name."""
    found = [value for key, value in (patterns or {}).items() if re.match(rf"(.*\.)?({key})$", module)]
    return found[0] if found else otherwise


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
    """Hugging Face's module -> the parts of our weights that it holds; matrices alone."""
    table = name_table(cfg)
    named = {name.removesuffix(".weight"): parts for name, parts in table.items() if name.endswith(".weight")}
    layers = {module: parts for module, parts in named.items() if parts[0].path.startswith("layers.")}
    return {module: parts for module, parts in layers.items() if len(parts[0].spec.stored.shape) == 2}


def _flat(adapters: Params) -> Flat:
    flat: Flat = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(adapters):
        *above, last = [str(getattr(key, "key", getattr(key, "idx", key))) for key in path]
        flat.setdefault(".".join(above), {})[last] = np.asarray(leaf)
    return flat


def _tree(flat: Flat, layers: int) -> Params:
    """Nested as models.spec is."""
    tree: dict[str, Any] = {}
    for path, pair in flat.items():
        *above, last = path.split(".")
        at = tree
        for name in above:
            at = at.setdefault(name, {})
        at[last] = pair
    return {"layers": tuple(tree["layers"].get(str(i), {}) for i in range(layers))}
