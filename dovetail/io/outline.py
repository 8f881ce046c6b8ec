"""The one resolver of commands that need a model's architecture and not its weights: `plan`, `info`, `compile`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dovetail.core.choice import did_you_mean
from dovetail.io.hub import HUB_ID, fetch_config
from dovetail.io.load import open_checkpoint, stored_dtype
from dovetail.models.config import ModelConfig
from dovetail.models.published import PUBLISHED, UNPUBLISHED
from dovetail.models.registry import read_model, shipped_models, shipped_shapes


def outline(x: str) -> tuple[ModelConfig, Any]:
    """Return the config of a model and the type of its weights; no weight is read.

    `x`: a shipped architecture, a config.json, a folder, a .gguf file, or a hub id, of which the config.json alone is
    fetched. The type is None where there is only a config, and that names none.
    """
    path = Path(x).expanduser()
    if (path.is_file() and path.suffix == ".gguf") or (path.is_dir() and any(path.glob("*.safetensors"))):
        checkpoint, cfg, _ = open_checkpoint(path)
        return cfg, stored_dtype(checkpoint, cfg, str(path))
    known = (*shipped_models(), *shipped_shapes())
    if x in known or path.exists():
        cfg = read_model(x)
    elif HUB_ID.fullmatch(x) and path.suffix not in (".gguf", ".json"):
        cfg = read_model(str(fetch_config(x)))
    else:
        raise ValueError(
            f"{x!r} is no folder or .gguf file that exists, no config.json, no hub id (org/name) and no shipped "
            f"architecture.{did_you_mean(x, known)} Shipped: {', '.join(known)}"
        )
    hf = cfg.to_hf()
    return cfg, hf.get("dtype") or hf.get("torch_dtype")


def servable(x: str) -> tuple[str, str]:
    """Return what `dovetail serve` takes to serve a model that `outline` takes; empty, and why, if there is nothing."""
    path = Path(x).expanduser()
    if path.is_dir() or path.suffix == ".json":
        folder = path if path.is_dir() else path.parent
        has = any(folder.glob("*.safetensors"))
        return (str(folder), "") if has else ("", f"{folder} holds no *.safetensors: add the model's weights")
    if x in UNPUBLISHED:
        return "", UNPUBLISHED[x]
    return PUBLISHED.get(x, x), ""
