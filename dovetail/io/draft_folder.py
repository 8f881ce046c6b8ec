"""Read and write draft models in their published formats.

A draft model may use weights of its target: its `may_share` names entries of its spec (the embedding, the head) that a
checkpoint may leave out, and its `shared` those that this one does leave out, which its spec then does not have.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dovetail.core.errors import CheckpointError
from dovetail.core.mesh import Placement
from dovetail.core.reporter import Progress
from dovetail.core.spec import init, leaves
from dovetail.core.types import Params
from dovetail.io.hf import TensorSource, match_names, match_specs, read_specs, text_name, write_specs
from dovetail.io.hub import HUB_ID, fetch_config, local, resolve
from dovetail.io.load import config_of, open_checkpoint, whole_folder
from dovetail.io.safetensor_folder import SafetensorFolder, write_shards
from dovetail.models.config import ModelConfig
from dovetail.models.draft.draft import DraftModel
from dovetail.models.draft.mtp import NEXTN, QWEN, Mtp, native_names
from dovetail.models.draft.plain import plain_draft
from dovetail.models.draft.registry import PLAIN, draft_kind, parse_draft
from dovetail.models.registry import read_json

# tables that follow from others or, of a whole vocabulary, say nothing; copies of the target's tensors
UNUSED = (r"[dt]2[dt]", r"verifier_.*", r".*\.?rotary_emb\.inv_freq")


@dataclass(frozen=True)
class DraftCheckpoint:
    """Hold a draft model whose weights have not been read."""

    draft: DraftModel
    source: TensorSource | None  # None: random weights
    names: dict[str, str]  # of its tensors, by the names of its spec

    def read(self, dtype: Any, placement: Placement | None = None, progress: Progress | None = None) -> Params:
        """Read the weights.

        Args:
            dtype: The type of the weights.
            placement: The mesh and its rules; None for one device.
            progress: Called with a name, the bytes done and all bytes.
        """
        specs = self.draft.spec()
        if self.source is None:
            return init(specs, jax.random.key(0), dtype, shardings=placement.shardings(specs) if placement else None)
        return read_specs(self.source, specs, self.names, dtype, placement, progress)


def open_draft(
    path_or_name: str | Path, target: ModelConfig, method: str | None = None, dummy: bool = False
) -> DraftCheckpoint:
    """Open a draft model: a folder, a hub id or, if it is an ordinary model, all that `load` takes.

    Args:
        path_or_name: The draft model; with method mtp perhaps the target itself, whose own layers are used.
        target: The model that it drafts for.
        method: The kind of draft model, in vLLM's words; None for what its config.json says.
        dummy: Whether to use its config.json alone, with random weights; of a hub id only that is fetched.

    Raises:
        CheckpointError: It is a draft for another model or of another kind, or its weights do not match its config.
        UserError: There is no such model, or its config is not supported.
    """
    where, hf = _config(path_or_name, dummy)
    path, kind = Path(where), draft_kind(hf, where)
    is_own = method == "mtp" and kind == PLAIN  # the layers of an ordinary model's own checkpoint
    if is_own and not dummy:
        if (own := own_mtp(path, target)) is None:
            raise _without_mtp(where)
        return own
    if not is_own and method not in (None, kind):
        raise CheckpointError(
            f"`speculative_config.method` must be {kind}, which {where} is, got {method!r}",
            param="speculative_config.method",
        )
    if dummy:
        return DraftCheckpoint(_dummy_mtp(hf, target, where) if is_own else parse_draft(hf, target, where), None, {})
    if kind == PLAIN:
        source, cfg, _ = open_checkpoint(path)
        return DraftCheckpoint(plain_draft(cfg, target, where), source, match_names(source, cfg, where))
    source = SafetensorFolder(path)
    draft = _without_shared(parse_draft(hf, target, where), source)
    names = match_specs(source, draft.spec(), f"{where} does not fit its config.", _unused(draft), _plain)
    return DraftCheckpoint(draft, source, names)


def load_draft(
    path_or_name: str | Path,
    target: ModelConfig,
    dtype: Any,
    placement: Placement | None = None,
    method: str | None = None,
) -> tuple[DraftModel, Params]:
    """Load a draft model; see `open_draft` and `DraftCheckpoint.read`."""
    opened = open_draft(path_or_name, target, method)
    return opened.draft, opened.read(dtype, placement)


def has_weights(path_or_name: str | Path) -> bool:
    """Return whether a draft model is on this machine with its weights."""
    path = local(str(path_or_name))
    return path is not None and (path.suffix == ".gguf" or any(path.glob("*.safetensors")))


def _config(path_or_name: str | Path, dummy: bool) -> tuple[str, dict[str, Any]]:
    """Return where a draft model is and its config.json; with `dummy`, nothing else of it is fetched."""
    name = str(path_or_name)
    if dummy and local(name) is None:
        return name, read_json(fetch_config(name)) if HUB_ID.fullmatch(name) else config_of(name).to_hf()
    path = resolve(path_or_name)
    return str(path), {} if path.suffix == ".gguf" else read_json(path / "config.json")


def _dummy_mtp(hf: dict[str, Any], target: ModelConfig, where: str) -> Mtp:
    """Return the MTP layers that a model's config.json names."""
    names = QWEN if hf.get("mtp_num_hidden_layers") else NEXTN
    if names == NEXTN and not hf.get("num_nextn_predict_layers"):
        raise _without_mtp(where)
    return Mtp(target, names)


def _without_mtp(where: str) -> CheckpointError:
    return CheckpointError(
        f"{where} has no MTP layers: use another method, or name a draft model", param="speculative_config.method"
    )


def own_mtp(path_or_name: str | Path, target: ModelConfig) -> DraftCheckpoint | None:
    """Open the layers of multi-token prediction that a model's own checkpoint has; None if it has none."""
    path = resolve(path_or_name)
    source = None if path.suffix == ".gguf" else SafetensorFolder(path)
    names = native_names(text_name(name) for name in source.tensors()) if source else None
    if source is None or names is None:
        return None
    draft = Mtp(target, names)
    found = match_specs(source, draft.spec(), f"{path}: its MTP layers do not fit its config.", [".*"], text_name)
    return DraftCheckpoint(draft, source, found)


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
        for _ in write_shards(folder, tensors, max_shard_bytes=total + 1):  # readers expect one file
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
