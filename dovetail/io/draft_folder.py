"""Read and write draft models in their published formats.

A draft model may use weights of its target: its `may_share` names entries of its spec (the embedding, the head) that a
checkpoint may leave out, and its `shared` those that this one does leave out, which its spec then does not have.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from dovetail.core.errors import CheckpointError
from dovetail.core.mesh import Placement
from dovetail.core.reporter import Progress
from dovetail.core.spec import leaves
from dovetail.core.types import Params
from dovetail.io.hf import TensorSource, match_specs, read_params, read_specs, text_name, write_specs
from dovetail.io.hub import resolve
from dovetail.io.load import open_checkpoint, whole_folder
from dovetail.io.safetensor_folder import SafetensorFolder, write_shards
from dovetail.models.config import ModelConfig
from dovetail.models.draft.draft import DraftModel
from dovetail.models.draft.mtp import Mtp, native_names
from dovetail.models.draft.registry import PLAIN, draft_kind, parse_draft
from dovetail.models.registry import read_json

# tables that follow from others or, of a whole vocabulary, say nothing; copies of the target's tensors
UNUSED = (r"[dt]2[dt]", r"verifier_.*", r".*\.?rotary_emb\.inv_freq")


def load_draft(
    path_or_name: str | Path,
    target: ModelConfig,
    dtype: Any,
    placement: Placement | None = None,
    progress: Progress | None = None,
) -> tuple[DraftModel, Params]:
    """Load a draft model from a folder, a hub id or, if it is an ordinary model, from all that `load` takes.

    Args:
        path_or_name: The draft model.
        target: The model that it drafts for.
        dtype: The type of the weights.
        placement: The mesh and its rules; None for one device.
        progress: Called with a name, the bytes done and all bytes.

    Raises:
        CheckpointError: It is a draft for another model, or its weights do not match its config.
        UserError: There is no such model, or its config is not supported.
    """
    path = resolve(path_or_name, progress)
    where, is_gguf = str(path), path.suffix == ".gguf"
    hf = {} if is_gguf else read_json(path / "config.json")
    if is_gguf or draft_kind(hf, where) == PLAIN:
        source, cfg, _ = open_checkpoint(path)
        return parse_draft(cfg.to_hf(), target, where), read_params(source, cfg, dtype, where, placement, progress)
    draft, source = parse_draft(hf, target, where), SafetensorFolder(path)
    draft = _without_shared(draft, source)
    names = match_specs(source, draft.spec(), f"{where} does not fit its config.", _unused(draft), _plain)
    return draft, read_specs(source, draft.spec(), names, dtype, placement, progress)


def load_mtp(
    target_path: str | Path,
    target: ModelConfig,
    dtype: Any,
    placement: Placement | None = None,
    progress: Progress | None = None,
) -> tuple[DraftModel, Params]:
    """Load the layers of multi-token prediction that a model's own checkpoint has.

    Args:
        target_path: The model.
        target: Its config.
        dtype: The type of the weights.
        placement: The mesh and its rules; None for one device.
        progress: Called with a name, the bytes done and all bytes.

    Raises:
        CheckpointError: The checkpoint has no such layers, or they do not match the config.
    """
    path = resolve(target_path, progress)
    source = None if path.suffix == ".gguf" else SafetensorFolder(path)
    names = native_names(text_name(name) for name in source.tensors()) if source else None
    if source is None or names is None:
        raise CheckpointError(
            f"{path} has no MTP layers: use another method, or `model` with a draft model", param="method"
        )
    draft = Mtp(target, names)
    found = match_specs(source, draft.spec(), f"{path}: its MTP layers do not fit its config.", [".*"], text_name)
    return draft, read_specs(source, draft.spec(), found, dtype, placement, progress)


def save_draft(dst: str | Path, draft: DraftModel, params: Params, config: dict[str, Any]) -> None:
    """Write a draft model as a folder in the format of `speculators`, which appears complete or not at all.

    Args:
        dst: The folder, which must not exist or be empty.
        draft: The draft model.
        params: Its weights.
        config: The contents of config.json.
    """
    vocab = config["transformer_layer_config"]["vocab_size"]
    tensors = list(_tensors(draft, params, vocab))
    with whole_folder(Path(dst)) as folder:
        (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        total = sum(size for _, size, _ in tensors)
        for _ in write_shards(folder, tensors, total, max_shard_bytes=total + 1):  # readers expect one file
            pass


def _tensors(draft: DraftModel, params: Params, vocab: int) -> Iterator[tuple[str, int, np.ndarray]]:
    """Yield the tensors of a checkpoint; of a reduced vocabulary both tables, d2t as int64 and t2d."""
    for name, size, array in write_specs(draft.spec(), params, {}):
        if name != "d2t":
            yield name, size, array
            continue
        offsets, drafted = array.astype(np.int64), np.zeros(vocab, bool)
        drafted[np.arange(len(offsets)) + offsets] = True
        yield "d2t", offsets.nbytes, offsets
        yield "t2d", drafted.nbytes, drafted


def _without_shared(draft: DraftModel, source: TensorSource) -> Any:
    """Return the draft model without the weights that the checkpoint leaves to the target."""
    found = {_plain(name) for name in source.tensors()}
    absent = [
        key
        for key in getattr(draft, "may_share", ())
        if not any(set(leaf.stored.names) <= found for _, leaf in leaves({key: draft.spec()[key]}))
    ]
    return dataclasses.replace(draft, shared=tuple(absent)) if absent else draft  # type: ignore[type-var]


def _unused(draft: DraftModel) -> tuple[str, ...]:
    return (*UNUSED, *getattr(draft, "unused", ()))


def _plain(name: str) -> str:
    """Return a tensor's name in the format of `speculators`; EAGLE-3's original one has another for its layer."""
    return re.sub(r"^midlayer\.", "layers.0.", name)
