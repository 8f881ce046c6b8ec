"""Kernels for NVIDIA GPUs, in Pallas (Triton and Mosaic GPU) and through cuDNN."""

from __future__ import annotations

import functools
import importlib
from contextlib import suppress


def ask_ptxas_once() -> None:
    """Let jax remember ptxas's version.

    While it lowers a kernel in Mosaic GPU, jax 0.10 to 0.12 starts `ptxas --version` for each conversion from or to a
    bool or a number of 8 bits: 73 times, or a second, for a step of prompts.
    """
    with suppress(ImportError, AttributeError):  # no plugin for GPUs, or a jax that does not ask
        extension = importlib.import_module("jax._src.lib.mosaic_gpu")._mosaic_gpu_ext
        extension._get_ptxas_isa_version = functools.cache(extension._get_ptxas_isa_version)


ask_ptxas_once()
