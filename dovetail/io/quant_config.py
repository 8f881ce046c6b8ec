"""Read `quantization_config` of a Hugging Face config.json: how each method stores a quantised tensor.

A method says which tensors belong to a module (`TensorLayout.parts`), the format of its weight, and how the stored
tensors become the arrays of that format (core.formats). Which modules are quantised follows from the tensors that a
checkpoint has: a module of an `ignore` list has a plain weight. Activations are computed in the model's dtype, also
where the checkpoint was made for rounded ones.

O out, I in, E experts, g values of a group.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dovetail.core.errors import CheckpointError, UnsupportedError
from dovetail.core.formats import Format
from dovetail.ops.quant.unpack import NF4_VALUES

Arrays = dict[str, np.ndarray]
Shape = tuple[int, ...]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column of each nibble
# tensors of a module that do not change its weight: scales of static activations and of a KV cache
ACTIVATIONS = re.compile(r".*\.(input_scale|input_global_scale|k_scale|v_scale|q_scale|output_scale|weight_format)")


@dataclass(frozen=True)
class TensorLayout:
    """Describe how one module's weight is stored."""

    form: Format
    shape: Shape  # of the weight as a plain tensor
    parts: tuple[str, ...]  # suffixes of the stored tensors
    decode: Callable[[Arrays], Arrays]  # the stored tensors, by suffix, to the arrays of the format
    transposed: bool = False  # a plain tensor would be [.., in, out]


Below = Mapping[str, tuple[Shape, np.dtype]]  # the shapes and dtypes of a module's tensors, by suffix
Read = Callable[[str], np.ndarray]  # reads one of them
Method = Callable[[Mapping[str, Any], str, Below, Read], TensorLayout | None]


def layout_of(config: Mapping[str, Any], module: str, below: Below, read: Read) -> TensorLayout | None:
    """Return the layout of a module's weight; None if it is not quantised.

    Args:
        config: The `quantization_config`.
        module: The module's name.
        below: Its tensors.
        read: Reads one of its tensors.

    Raises:
        UnsupportedError: The module is quantised in a way that cannot be read; `param` is quantization_config.
    """
    return METHODS[config["quant_method"]](config, module, below, read)


def refuse(what: str) -> UnsupportedError:
    """Return the error of a kind of quantisation that cannot be read."""
    return UnsupportedError(f"quantization_config: {what} is not supported", param="quantization_config")


# --- compressed-tensors -----------------------------------------------------------------------------------------------


def _compressed(config: Mapping[str, Any], module: str, below: Below, _read: Read) -> TensorLayout | None:
    if ".weight_packed" not in below and ".weight_scale" not in below:
        return None
    group = _group_of(config, module)
    kind, args = group.get("format") or config.get("format"), group.get("weights") or {}
    if ".weight_g_idx" in below:
        raise refuse("compressed-tensors with actorder 'group'")
    if kind == "pack-quantized":
        return _packed_integers(module, args, below)
    if kind in ("int-quantized", "float-quantized", "naive-quantized"):
        if ".weight_zero_point" in below:
            raise refuse(f"compressed-tensors '{kind}' with zero points")
        blocks = args.get("block_structure")
        blocks = [int(x) for x in blocks.split("x")] if isinstance(blocks, str) else blocks
        return _scaled(module, below, ".weight_scale", blocks or [None, args.get("group_size")])
    if kind in ("nvfp4-pack-quantized", "mxfp4-pack-quantized"):
        return _packed_floats(kind, below)
    raise refuse(f"compressed-tensors format {kind!r}")


def _group_of(config: Mapping[str, Any], module: str) -> Mapping[str, Any]:
    """Return the group of settings whose targets name the module; a class name such as Linear is any module."""
    groups = list(dict(config.get("config_groups") or {}).values())
    for group in groups:
        for target in group.get("targets") or ():
            pattern = target.removeprefix("re:") if target.startswith("re:") else None
            if re.match(pattern, module) if pattern else module == target or module.endswith(f".{target}"):
                return group
    if not groups:
        raise refuse("compressed-tensors without config_groups")
    return groups[0]


def _packed_integers(module: str, args: Mapping[str, Any], below: Below) -> TensorLayout:
    bits, symmetric = args.get("num_bits"), args.get("symmetric", True)
    if args.get("type", "int") != "int" or (bits, symmetric) not in ((4, True), (4, False), (8, True)):
        kind = "symmetric" if symmetric else "asymmetric"
        raise refuse(f"compressed-tensors 'pack-quantized' with {kind} weights of {bits} bits")
    (O, words), (scales, dtype) = below[".weight_packed"][0], below[".weight_scale"]
    size = words * 32 // bits  # type: ignore[operator]
    group = _group(module, size, scales[-1], args.get("group_size"))
    name = "int8" if bits == 8 else "int4" if symmetric else "uint4"

    def decode(t: Arrays) -> Arrays:
        codes = np.ascontiguousarray(t[".weight_packed"]).view(np.uint8)
        arrays = {"codes": (codes ^ 128).view(np.int8) if bits == 8 else codes}
        arrays["scale"] = _by_row(t[".weight_scale"], O)
        if not symmetric:
            arrays["zero"] = _nibbles(t[".weight_zero_point"].T)[:, :O].T
        return arrays

    parts = (".weight_packed", ".weight_scale", ".weight_shape", ".weight_zero_point")
    return TensorLayout(Format(name, group, dtype.name), (O, size), parts, decode)


def _packed_floats(kind: str, below: Below) -> TensorLayout:
    (O, half), (scales, _) = below[".weight_packed"][0], below[".weight_scale"]
    is_nv, group = kind.startswith("nvfp4"), half * 2 // scales[-1]

    def decode(t: Arrays) -> Arrays:
        arrays = {"codes": t[".weight_packed"], "scale": t[".weight_scale"]}
        if is_nv:
            arrays["global"] = np.full((O, 1), 1 / np.float32(t[".weight_global_scale"].reshape(-1)[0]), np.float32)
        return arrays

    form = Format("nvfp4", group, "float8_e4m3fn") if is_nv else Format("mxfp4", group, "uint8")
    return TensorLayout(form, (O, half * 2), (".weight_packed", ".weight_scale", ".weight_global_scale"), decode)


def _scaled(module: str, below: Below, scale: str, blocks: Sequence[Any]) -> TensorLayout:
    """Return the layout of int8 or e4m3 numbers with a scale for the tensor, each row, or each block [rows, values]."""
    (O, size), kind = below[".weight"]
    scales = below[scale][0]
    names = {"int8": "int8", "float8_e4m3fn": "fp8"}
    if kind.name not in names:
        raise refuse(f"{module} in {kind.name}")
    is_grid = len(scales) == 2 and (scales[-1] > 1 or bool(blocks[1]))
    group = _group(module, size, scales[-1], blocks[1]) if is_grid else 0

    def decode(t: Arrays) -> Arrays:
        return {"codes": t[".weight"], "scale": _by_row(t[scale], O, blocks[0]).astype(np.float32)}

    return TensorLayout(Format(names[kind.name], group), (O, size), (".weight", scale), decode)


def _group(module: str, size: int, groups: int, given: Any) -> int:
    """Return the values of a group, of which the config gives the number; 0 if the row is one."""
    if isinstance(given, int) and given > 0 and -(-size // given) == groups:
        return given if groups > 1 or size == given else 0
    if size % groups:
        raise CheckpointError(f"{module}: {groups} scales do not divide rows of {size} values")
    return size // groups if groups > 1 else 0


def _by_row(scale: np.ndarray, rows: int, block: Any = None) -> np.ndarray:
    """Return scales [rows, n] of one for the tensor, of one for each row, or of one for each block of rows."""
    scale = scale.reshape(1, 1) if scale.size == 1 else scale.reshape(len(scale), -1)
    each = rows // len(scale) if len(scale) in (1, rows) else block
    if not each or -(-rows // each) != len(scale):
        raise ValueError(f"{len(scale)} rows of scales for {rows} rows")
    return np.repeat(scale, each, axis=0)[:rows]


# --- gptq and awq -----------------------------------------------------------------------------------------------------


def _gptq(config: Mapping[str, Any], module: str, below: Below, _read: Read) -> TensorLayout | None:
    if ".qweight" not in below:
        return None
    bits, symmetric = config.get("bits"), bool(config.get("sym", True))
    if (bits, symmetric) not in ((4, True), (4, False), (8, True)) or config.get("dynamic"):
        kind = "symmetric" if symmetric else "asymmetric"
        raise refuse(f"gptq with {'rules for modules (dynamic)' if config.get('dynamic') else f'{kind} {bits} bits'}")
    (words, O), (groups, _) = below[".qweight"][0], below[".scales"][0]
    size, added = words * 32 // bits, 0 if config.get("checkpoint_format") == "gptq_v2" else 1  # type: ignore[operator]
    group = _group(module, size, groups, config.get("group_size"))
    name = "int8" if bits == 8 else "int4" if symmetric else "uint4"

    def decode(t: Arrays) -> Arrays:
        if ".g_idx" in t and not np.array_equal(t[".g_idx"], np.arange(size) // (group or size)):
            raise refuse("gptq with desc_act, whose groups are not neighbours,")
        zero = _values(t[".qzeros"], bits).reshape(groups, O).astype(np.int32) + added
        if symmetric and (zero != 1 << (bits - 1)).any():  # type: ignore[operator]
            raise CheckpointError(f"{module}: quantization_config says sym, and its zero points are not the middle")
        codes = _values(t[".qweight"].T, bits)  # [O, I]
        arrays = {"codes": (codes ^ 128).view(np.int8) if bits == 8 else _pairs(codes), "scale": t[".scales"].T}
        return arrays if symmetric else arrays | {"zero": zero.T.astype(np.uint8)}

    form = Format(name, group, below[".scales"][1].name)
    return TensorLayout(form, (O, size), (".qweight", ".qzeros", ".scales", ".g_idx"), decode)


def _awq(config: Mapping[str, Any], module: str, below: Below, _read: Read) -> TensorLayout | None:
    if ".qweight" not in below:
        return None
    if config.get("bits") != 4 or str(config.get("version", "gemm")).lower() != "gemm":
        raise refuse(f"awq of version {config.get('version')} with {config.get('bits')} bits")
    (size, words), (groups, _) = below[".qweight"][0], below[".scales"][0]
    symmetric, O = ".qzeros" not in below, words * 8
    back = np.argsort(AWQ_ORDER)

    def columns(words: np.ndarray) -> np.ndarray:
        return _nibbles(words).reshape(len(words), -1, 8)[:, :, back].reshape(len(words), O)

    def decode(t: Arrays) -> Arrays:
        arrays = {"codes": _pairs(columns(t[".qweight"]).T), "scale": t[".scales"].T}
        return arrays if symmetric else arrays | {"zero": columns(t[".qzeros"]).T}

    group = _group(module, size, groups, config.get("group_size"))
    form = Format("int4" if symmetric else "uint4", group, below[".scales"][1].name)
    return TensorLayout(form, (O, size), (".qweight", ".qzeros", ".scales"), decode)


def _nibbles(words: np.ndarray) -> np.ndarray:
    """Return the 4-bit numbers [R, 8 n] of int32 [R, n], the lowest first."""
    return _values(words, 4)


def _values(words: np.ndarray, bits: Any) -> np.ndarray:
    """Return the numbers of `bits` bits in each row of int32, the lowest first."""
    found = np.ascontiguousarray(words).view(np.uint8).reshape(len(words), -1)
    return found if bits == 8 else np.stack([found & 15, found >> 4], axis=-1).reshape(len(words), -1)


def _pairs(codes: np.ndarray) -> np.ndarray:
    """Return bytes of two 4-bit codes each, the first in the lower half."""
    return codes[:, ::2] | codes[:, 1::2] << 4


# --- fp8, mxfp4, bitsandbytes -----------------------------------------------------------------------------------------


def _fp8(config: Mapping[str, Any], module: str, below: Below, _read: Read) -> TensorLayout | None:
    scale = next((name for name in (".weight_scale_inv", ".weight_scale") if name in below), None)
    blocks = config.get("weight_block_size") or [None, None]
    return _scaled(module, below, scale, blocks) if scale else None  # both multiply


def _mxfp4(config: Mapping[str, Any], module: str, below: Below, _read: Read) -> TensorLayout | None:
    if "_blocks" not in below:
        return None
    E, rows, groups, half = below["_blocks"][0]

    def decode(t: Arrays) -> Arrays:
        return {"codes": t["_blocks"].reshape(E, rows, groups * half), "scale": t["_scales"]}

    form, size = Format("mxfp4", 2 * half, "uint8"), groups * half * 2
    return TensorLayout(form, (E, size, rows), ("_blocks", "_scales"), decode, transposed=True)


def _bitsandbytes(config: Mapping[str, Any], module: str, below: Below, read: Read) -> TensorLayout | None:
    if ".SCB" in below:
        return TensorLayout(Format("int8"), below[".weight"][0], (".weight", ".SCB"), _bitsandbytes_int8)
    state = next((name for name in below if name.startswith(".weight.quant_state.")), None)
    if state is not None and not state.endswith("__nf4"):
        raise refuse(f"bitsandbytes {state.rpartition('__')[2]!r}")
    return _nf4(read(state), tuple(below)) if state else None


def _bitsandbytes_int8(t: Arrays) -> Arrays:
    return {"codes": t[".weight"], "scale": t[".SCB"].reshape(-1, 1).astype(np.float32) / np.float32(127)}


def _nf4(state: np.ndarray, parts: tuple[str, ...]) -> TensorLayout:
    """Return the layout of a weight whose shape is in its state, a JSON text."""
    found = json.loads(state.tobytes())
    (O, size), block = found["shape"], found["blocksize"]
    if size % block:
        raise refuse(f"bitsandbytes nf4 with blocks of {block} that cross rows of {size} values")

    def decode(t: Arrays) -> Arrays:
        if not np.allclose(t[".weight.quant_map"], NF4_VALUES, atol=1e-6):
            raise refuse("bitsandbytes with a quant_map other than nf4's")
        scale = t[".weight.absmax"]
        if ".weight.nested_absmax" in t:
            nested = np.repeat(t[".weight.nested_absmax"], found["nested_blocksize"])[: scale.size]
            scale = t[".weight.nested_quant_map"][scale] * nested + np.float32(found["nested_offset"])
        return {"codes": t[".weight"].reshape(O, size // 2), "scale": scale.reshape(O, -1).astype(np.float32)}

    return TensorLayout(Format("nf4", block), (O, size), parts, decode)


METHODS: dict[str, Method] = {
    "compressed-tensors": _compressed, "gptq": _gptq, "awq": _awq, "fp8": _fp8, "mxfp4": _mxfp4,
    "bitsandbytes": _bitsandbytes,
}  # fmt: skip
