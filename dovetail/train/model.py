"""The architecture that a recipe names: a config.json that ships with the package, or one of the user's own."""

from __future__ import annotations

from pathlib import Path

from dovetail.core.choice import did_you_mean
from dovetail.core.recipe import SHIPPED
from dovetail.models.config import ModelConfig
from dovetail.models.registry import read_config


def shipped_models() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in (SHIPPED / "models").glob("*.json")))


def read_model(name_or_path: str) -> ModelConfig:
    """A shipped architecture by name, a config.json, or the folder that holds one."""
    if name_or_path in shipped_models():
        return read_config(SHIPPED / "models" / f"{name_or_path}.json")
    path = Path(name_or_path).expanduser()
    if not path.exists():
        raise ValueError(
            f"model {name_or_path!r} is neither shipped nor a folder with a config.json."
            f"{did_you_mean(name_or_path, shipped_models())} Shipped: {', '.join(shipped_models())}"
        )
    return read_config(path)
