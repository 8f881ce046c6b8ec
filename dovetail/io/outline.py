"""A model's outline: its config and the type of its weights, of all that `load` takes, and no weight is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dovetail.io.hub import HUB_ID, fetch_config
from dovetail.io.load import open_checkpoint, stored_dtype
from dovetail.models.config import ModelConfig
from dovetail.models.registry import read_model


def outline(x: str) -> tuple[ModelConfig, Any]:
    """Of a shipped architecture, a config.json, a folder, a .gguf file or a hub id, of which the config.json alone is
    fetched. The type is None where there is nothing but a config, and that names none."""
    path = Path(x).expanduser()
    if path.suffix == ".gguf" or (path.is_dir() and any(path.glob("*.safetensors"))):
        checkpoint, cfg, _ = open_checkpoint(path)
        return cfg, stored_dtype(checkpoint, cfg, str(path))
    cfg = read_model(str(fetch_config(x)) if HUB_ID.fullmatch(x) and not path.exists() else x)
    hf = cfg.to_hf()
    return cfg, hf.get("dtype") or hf.get("torch_dtype")
