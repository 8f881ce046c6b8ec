"""Check what the CPU's product with quantised weights requires; importing the kernel compiles it."""

from __future__ import annotations

from dovetail.core.formats import BLOCKS, Format

FORMATS = {"int8", "int4", "uint4", *BLOCKS}  # that it unpacks


def why_not_packed(form: Format, size: int) -> str | None:
    """Return why rows of `size` values in this format cannot be multiplied by the kernel, or None."""
    if form.name not in FORMATS:
        return f"no kernel for {form.name}"
    if size % 32 and (form.name != "int8" or size % 16):
        return "rows are not whole vectors"
    return f"groups of {form.group}" if form.group % 16 or (form.group and size % form.group) else None
