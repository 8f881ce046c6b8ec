"""Storage formats of weights: which arrays a quantised weight consists of, and how many bytes they take.

A quantised weight [*out, *in] is packed row by row: each of its arrays has the dims of `out`, and one more. So rows can
be cut, reordered, joined, stacked and split over devices without unpacking, in every format alike. A scale that a
checkpoint has for several rows, or for the whole tensor, is repeated for each row.

What the numbers mean is in ops.quant.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import ml_dtypes  # noqa: F401 - gives numpy the names of fp8
import numpy as np

# format: (dtype of its codes, values in each)
CODES = {
    "int8": ("int8", 1), "w8a8": ("int8", 1), "fp8": ("float8_e4m3fn", 1), "int4": ("uint8", 2), "uint4": ("uint8", 2),
    "nf4": ("uint8", 2), "mxfp4": ("uint8", 2), "nvfp4": ("uint8", 2),
}  # fmt: skip
# blocks of a GGUF file: (values, bytes)
BLOCKS = {
    "q4_0": (32, 18), "q4_1": (32, 20), "q5_0": (32, 22), "q5_1": (32, 24), "q8_0": (32, 34),
    "q4_k": (256, 144), "q5_k": (256, 176), "q6_k": (256, 210),
}  # fmt: skip
# how pages of a KV cache may be stored, by the names of `--kv-cache-dtype`: (dtype, bytes of the scale that follows the
# values of each head of a token)
KV_DTYPES = {"fp8": ("float8_e4m3fn", 0), "fp8_e4m3": ("float8_e4m3fn", 0), "int8": ("int8", 4)}
KV_SCALES = dict(KV_DTYPES.values())  # the bytes by dtype
LEAST_GROUP = 16  # values: smaller groups spend more on scales than on codes


@dataclass(frozen=True)
class Format:
    """Describe how the rows of a weight are stored.

    Attributes:
        name: A key of CODES or BLOCKS.
        group: Values along the input that share a scale; 0: the whole row. Blocks have their own.
        scale: The dtype of the scales.
        activations: "int8" if a kernel may round the other factor of a product to it; "" if it may not.
    """

    name: str
    group: int = 0
    scale: str = "float32"
    activations: str = ""

    @property
    def stored(self) -> Format:
        """Return the format without what a kernel may do with activations: equal for equal arrays."""
        return replace(self, activations="")

    @property
    def unit(self) -> int:
        """Return the values of a row that cannot be separated."""
        if self.name in BLOCKS:
            return BLOCKS[self.name][0]
        return math.lcm(self.group or 1, CODES[self.name][1])

    def lengths(self, size: int) -> dict[str, tuple[int, np.dtype]]:
        """Return the length and dtype of each array for a row of `size` values."""
        if self.name in BLOCKS:
            values, nbytes = BLOCKS[self.name]
            return {"blocks": (size // values * nbytes, np.dtype(np.uint8))}
        dtype, each = CODES[self.name]
        groups = -(-size // self.group) if self.group else 1
        found = {"codes": (size // each, np.dtype(dtype)), "scale": (groups, np.dtype(self.scale))}
        if self.name == "uint4":
            found["zero"] = groups, np.dtype(np.uint8)
        if self.name == "nvfp4":
            found["global"] = 1, np.dtype(np.float32)
        return found

    def size(self, lengths: dict[str, int]) -> int:
        """Return the values of a row whose arrays have these lengths."""
        if self.name in BLOCKS:
            values, nbytes = BLOCKS[self.name]
            return lengths["blocks"] // nbytes * values
        return lengths["codes"] * CODES[self.name][1]

    def fits(self, size: int) -> bool:
        """Return whether rows of `size` values can be stored; the last group of an fp8 row may be short."""
        return size % (1 if self.name == "fp8" else self.unit) == 0

    def row_bytes(self, size: int) -> int:
        """Return the bytes of a row of `size` values."""
        return sum(length * dtype.itemsize for length, dtype in self.lengths(size).values())

    def describe(self) -> str:
        """Return the format in words."""
        return f"{self.name} in groups of {self.group}" if self.group else self.name


# What weights are rounded to, by the names of `--quantization`.
ROUNDED = {
    "int8": Format("int8"),
    "w8a8": Format("w8a8"),
    "fp8": Format("fp8"),
    "fp8_block": Format("fp8", 128),
    "int4": Format("int4", 128, "float16"),
    "int4_asym": Format("uint4", 128, "float16"),
    "nf4": Format("nf4", 64),
    "mxfp4": Format("mxfp4", 32, "uint8"),
}
# Schemes that keep the blocks of a .gguf file; with the second, a CPU's products round activations to int8.
KEPT = ("gguf", "gguf_int8")


def fitted(scheme: str, size: int) -> Format | None:
    """Return the format of a scheme of ROUNDED for rows of `size` values; None if such rows stay as they are.

    Where the scheme's group does not divide the row, the greatest common divisor is the group.
    """
    own = ROUNDED[scheme]
    if own.fits(size):
        return own
    group = math.gcd(own.group, size)
    return replace(own, group=group) if own.name != "mxfp4" and group >= LEAST_GROUP else None
