"""Write arrays back into a torch module, and into files that torch reads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import ml_dtypes
import numpy as np

if TYPE_CHECKING:
    import torch

WEIGHTS = "model.safetensors"


def to_tensor(x: Any) -> torch.Tensor:
    """Return an array as a torch tensor: by dlpack, without a copy, where both see the device; else a copy."""
    import torch

    if isinstance(x, jax.Array) and x.is_fully_addressable and len(x.sharding.device_set) == 1:
        return torch.from_dlpack(x)
    host = np.asarray(x)
    if host.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(host.view(np.uint16).copy()).view(torch.bfloat16)
    return torch.from_numpy(np.array(host))


def from_tensor(x: Any) -> Any:
    """Return a torch tensor as a jax array, by dlpack without a copy where devices agree; other values as arrays."""
    import torch

    if not isinstance(x, torch.Tensor):
        return x if isinstance(x, jax.Array) else np.asarray(x)
    x = x.detach()
    if x.dtype == torch.int64 and not jax.config.read("jax_enable_x64"):
        x = x.to(torch.int32)
    return jax.dlpack.from_dlpack(x.contiguous())


def load_arrays(module: torch.nn.Module, arrays: Mapping[str, Any]) -> None:
    """Copy arrays, by the names of `from_module`, into a module; weights that are tied to them change too."""
    import torch

    own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    with torch.no_grad():
        for name, x in arrays.items():
            if name in own:
                own[name].copy_(to_tensor(x))


def save_module(module: torch.nn.Module, folder: Path, arrays: Mapping[str, Any]) -> None:
    """Write a module with these weights: a Hugging Face folder, or a `state_dict` in safetensors.

    The module itself is not changed.

    Args:
        module: The module that the weights belong to.
        folder: A new folder.
        arrays: Weights by name, on the host.
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    written = {name: to_tensor(x) for name, x in arrays.items()}
    tied = _first_names(module)
    state: dict[str, Any] = {
        name: written.get(tied.get(name, name), value) for name, value in module.state_dict().items()
    }
    if save_pretrained := getattr(module, "save_pretrained", None):
        save_pretrained(folder, state_dict=state)
        dtype = str(next(iter(written.values())).dtype).removeprefix("torch.")
        _set_dtype(folder / "config.json", dtype)
        return
    apart = {name: value.contiguous().clone() for name, value in state.items()}  # safetensors takes no shared memory
    save_file(apart, folder / WEIGHTS, metadata={"format": "pt"})


def _first_names(module: torch.nn.Module) -> dict[str, str]:
    """Return the name of each parameter -> the first name of the same parameter."""
    first: dict[int, str] = {}
    found = {}
    for name, weight in module.named_parameters(remove_duplicate=False):
        found[name] = first.setdefault(id(weight), name)
    return found


def _set_dtype(path: Path, dtype: str) -> None:
    """Record the dtype of the weights in a config.json: transformers writes the one of the module in memory."""
    import json

    if path.is_file():
        config = json.loads(path.read_text())
        config["dtype"] = dtype
        path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
