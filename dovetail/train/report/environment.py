"""Where a run ran, in words: for its report, and to repeat it."""

from __future__ import annotations

import platform
import sys
from importlib.metadata import PackageNotFoundError, version

import jax

PACKAGES = ("dovetail", "jax", "jaxlib", "optax", "orbax-checkpoint", "grain", "libtpu", "jax-cuda13-plugin")


def environment() -> dict[str, str]:
    """Names and values, without a path or a user's name: a report is handed on."""
    kinds: dict[str, int] = {}
    for device in jax.devices():
        kinds[device.device_kind] = kinds.get(device.device_kind, 0) + 1
    found = {
        "devices": ", ".join(f"{count} × {kind}" for kind, count in kinds.items()),
        "backend": jax.default_backend(),
        "processes": str(jax.process_count()),
        "host": platform.node(),
        "python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
    }
    return found | {package: _version(package) for package in PACKAGES if _version(package)} | {"command": _command()}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _command() -> str:
    program = sys.argv[0].replace("\\", "/").rpartition("/")[2] if sys.argv else ""
    return " ".join([program, *sys.argv[1:]]).strip()
