"""libtpu on a machine without a TPU: it prints a page of warnings when jax asks it for chips, unless it is told that
there is nothing to look for."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import MutableMapping
from pathlib import Path

GOOGLE = "0x1ae0"  # the PCI vendor of TPUs, by which jax finds them too
# Neither chips nor metadata to look for.
NO_CHIPS = {
    "TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost", "TPU_ACCELERATOR_TYPE": "v4-8",
    "TPU_MIN_LOG_LEVEL": "3", "TPU_STDERR_LOG_LEVEL": "3",
}  # fmt: skip


def quiet_libtpu(environ: MutableMapping[str, str] = os.environ, root: Path = Path("/")) -> None:
    """Keep libtpu quiet where it is installed and no TPU is there. Before jax is imported; what is set stays."""
    if "JAX_FORCE_TPU_INIT" in environ or importlib.util.find_spec("libtpu") is None or _has_tpu(root):
        return
    for name, value in NO_CHIPS.items():
        environ.setdefault(name, value)


def _has_tpu(root: Path) -> bool:
    vendors = (root / "sys/bus/pci/devices").glob("*/vendor")
    return any(vendor.read_text().strip() == GOOGLE for vendor in vendors) or bool(list((root / "dev").glob("accel*")))
