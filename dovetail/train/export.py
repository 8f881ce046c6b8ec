"""A run's weights as a Hugging Face folder, which transformers, `dovetail serve` and `dovetail eval` load at once."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dovetail.core.types import Params
from dovetail.io.load import save
from dovetail.io.tokenizer import Tokenizer
from dovetail.models.config import ModelConfig


def export(folder: Path, cfg: ModelConfig, params: Params, tokenizer: Tokenizer | None, dtype: Any) -> None:
    """All processes call it; the first writes. A folder of an earlier attempt is replaced."""
    host = jax.tree.map(lambda x: np.asarray(_whole(x.astype(dtype))), params)
    if jax.process_index() == 0:
        if folder.exists():
            shutil.rmtree(folder)
        save(folder, cfg, host, tokenizer)


def _whole(x: jax.Array) -> Any:
    if jax.process_count() == 1:
        return x
    from jax.experimental import multihost_utils

    return multihost_utils.process_allgather(x, tiled=True)
