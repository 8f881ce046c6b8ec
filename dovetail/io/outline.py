"""Find a model's architecture without its weights, for training, `plan`, `info` and `compile`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dovetail.core.choice import did_you_mean
from dovetail.core.errors import UserError
from dovetail.io.hub import CATALOGUE, HUB_ID, PUBLISHED, UNPUBLISHED, fetch_config, local, resolve
from dovetail.io.load import open_checkpoint, stored_dtype
from dovetail.models.config import ModelConfig
from dovetail.models.registry import read_config, read_model, shipped_models, shipped_shapes


def outline(x: str) -> tuple[ModelConfig, Any]:
    """Return the config of a model and the dtype of its weights, without reading a weight.

    The dtype is None if there is only a config, and it names none.

    Args:
        x: The model, as for `config_of`.
    """
    path = local(x)
    if path and (path.suffix == ".gguf" or any(path.glob("*.safetensors"))):
        checkpoint, cfg, _ = open_checkpoint(path)
        return cfg, stored_dtype(checkpoint, cfg, str(path))
    cfg = config_of(x)
    hf = cfg.to_hf()
    return cfg, hf.get("dtype") or hf.get("torch_dtype")


def config_of(x: str) -> ModelConfig:
    """Return the config of a model.

    It is that of a local folder, .gguf file or config.json, or of a shipped architecture, a catalogue name or a hub id,
    of which only the config.json is fetched.
    """
    if path := local(x):
        return open_checkpoint(path)[1] if path.suffix == ".gguf" else read_config(path)
    path, known = Path(x).expanduser(), (*shipped_models(), *shipped_shapes())
    if path.is_file() or x in known:
        return read_model(x)
    if x in CATALOGUE:
        return config_of(str(resolve(x)))
    if HUB_ID.fullmatch(x) and path.suffix not in (".gguf", ".json"):
        return read_config(fetch_config(x))
    raise UserError(
        f"{x!r} is not an existing folder, .gguf file or config.json, not a hub id (org/name) and not a shipped "
        f"architecture.{did_you_mean(x, known)} Shipped: {', '.join(known)}",
        param="model",
    )


def servable(x: str) -> tuple[str, str]:
    """Return the name under which `dovetail serve` serves a model of `outline`, or an empty name and why not."""
    path = Path(x).expanduser()
    if path.is_dir() or path.suffix == ".json":
        folder = path if path.is_dir() else path.parent
        has = any(folder.glob("*.safetensors"))
        return (str(folder), "") if has else ("", f"{folder} holds no *.safetensors: add the model's weights")
    if x in UNPUBLISHED:
        return "", UNPUBLISHED[x]
    return PUBLISHED.get(x, x), ""
