"""A run's weights as a Hugging Face folder, which transformers, `dovetail serve` and `dovetail eval` load at once."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
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
    host = jax.tree.map(lambda x: np.asarray(whole(x.astype(dtype))), params)
    if jax.process_index() == 0:
        if folder.exists():
            shutil.rmtree(folder)
        save(folder, cfg, host, tokenizer)


def whole(x: jax.Array) -> Any:
    if jax.process_count() == 1:
        return x
    from jax.experimental import multihost_utils

    return multihost_utils.process_allgather(x, tiled=True)


class Command:
    """What a recipe runs on exported folders (`eval.command`), beside the training and one at a time. What it prints is
    kept in RUN/eval."""

    def __init__(self, line: str, folder: Path, remark: Callable[[str], object]):
        self._line, self._folder, self._remark = line, folder / "eval", remark
        self._process: subprocess.Popen | None = None

    def start(self, exported: Path) -> None:
        self.wait()
        self._folder.mkdir(exist_ok=True)
        line = self._line.replace("{folder}", str(exported))
        with (self._folder / f"{exported.name}.txt").open("w") as file:
            self._process = subprocess.Popen(line, shell=True, stdout=file, stderr=subprocess.STDOUT)

    def wait(self) -> None:
        if self._process is not None and (code := self._process.wait()):
            self._remark(f"eval.command exited with {code}: see {self._folder}")
        self._process = None
