"""Write quantised weights as compressed-tensors: the tensors of each module, and the `quantization_config`.

io.quant_config reads them. O out, I in.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from dovetail.core.errors import UnsupportedError
from dovetail.core.formats import Format

# format: (compressed-tensors' name of the layout, arguments of its weights)
WRITTEN: dict[str, tuple[str, dict[str, Any]]] = {
    "int8": ("int-quantized", {"num_bits": 8, "type": "int", "symmetric": True}),
    "w8a8": ("int-quantized", {"num_bits": 8, "type": "int", "symmetric": True}),
    "fp8": ("float-quantized", {"num_bits": 8, "type": "float", "symmetric": True}),
    "int4": ("pack-quantized", {"num_bits": 4, "type": "int", "symmetric": True}),
    "uint4": ("pack-quantized", {"num_bits": 4, "type": "int", "symmetric": False}),
}
ROUNDED_INPUTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


def check_writable(name: str, form: Format, shape: tuple[int, ...]) -> None:
    """Raise UnsupportedError if compressed-tensors cannot hold a weight of this name, format and shape."""
    if form.name not in WRITTEN or len(shape) != 2 or not name.endswith(".weight"):
        raise UnsupportedError(
            f"{name} in {form.describe()} cannot be written as compressed-tensors, which has {', '.join(WRITTEN)} for "
            "weights of linear layers: load the model with quantization=none, and write it plain or quantise it again",
            param="quantization",
        )


def encode(name: str, form: Format, arrays: Mapping[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (name, tensor) for the stored tensors of a module's weight.

    Args:
        name: The name of the plain weight, which ends with `.weight`.
        form: Its format.
        arrays: The arrays of the format (core.formats), each [O, n].
    """
    codes = arrays["codes"]
    if form.name not in ("int4", "uint4"):
        yield name, codes
    else:
        rows, size = len(codes), form.size({"codes": codes.shape[1]})
        words = np.pad(codes, [(0, 0), (0, -codes.shape[1] % 4)])
        yield f"{name}_packed", np.ascontiguousarray(words).view(np.int32)
        yield f"{name}_shape", np.array([rows, size], np.int64)
    yield f"{name}_scale", arrays["scale"]
    if form.name == "uint4":
        yield f"{name}_zero_point", _by_column(arrays["zero"])


def _by_column(zero: np.ndarray) -> np.ndarray:
    """Return zero points [O, n] as int32 [O / 8, n], the first of each eight in the lowest bits."""
    padded = np.pad(zero, [(0, -len(zero) % 8), (0, 0)]).astype(np.uint32)
    eights = padded.reshape(-1, 8, zero.shape[1]) << (4 * np.arange(8, dtype=np.uint32))[:, None]
    return np.bitwise_or.reduce(eights, axis=1).view(np.int32)


def quantization_config(formats: Mapping[str, Format], plain: Iterable[str]) -> dict[str, Any]:
    """Return the `quantization_config` of a folder.

    Args:
        formats: The format of each quantised module.
        plain: The modules of linear layers that are not quantised.
    """
    modules: dict[Format, list[str]] = {}
    for module, form in formats.items():
        modules.setdefault(form, []).append(module)
    kinds = {WRITTEN[form.name][0] for form in modules}
    groups = {f"group_{i}": _group(form, _targets(form, modules)) for i, form in enumerate(modules)}
    return {
        "quant_method": "compressed-tensors",
        "format": kinds.pop() if len(kinds) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": sorted(set(plain)),
        "kv_cache_scheme": None,
    }


def _group(form: Format, targets: list[str]) -> dict[str, Any]:
    kind, args = WRITTEN[form.name]
    strategy = {"strategy": "group", "group_size": form.group} if form.group else {"strategy": "channel"}
    inputs = ROUNDED_INPUTS if form.name == "w8a8" else None
    weights = args | strategy | {"dynamic": False}
    return {"targets": targets, "format": kind, "weights": weights, "input_activations": inputs}


def _targets(form: Format, modules: Mapping[Format, list[str]]) -> list[str]:
    """Return what names the modules of a format: every linear layer, the last parts of names, or whole names."""
    if len(modules) == 1:
        return ["Linear"]
    own = {module.rpartition(".")[2] for module in modules[form]}
    others = {module.rpartition(".")[2] for other, found in modules.items() if other != form for module in found}
    if own & others:
        return sorted(modules[form])
    return [f"re:.*\\.({'|'.join(sorted(map(re.escape, own)))})$"]
