"""Read a Hugging Face folder of quantised weights under the names of the plain ones (io.hf.QuantizedSource)."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dovetail.core.errors import CheckpointError, UnsupportedError, UserError
from dovetail.core.formats import Format
from dovetail.io.quant_config import ACTIVATIONS, METHODS, Arrays, TensorLayout, layout_of, refuse
from dovetail.io.safetensor_folder import SafetensorFolder
from dovetail.models.formats import Formats, rounded_formats
from dovetail.models.registry import read_json
from dovetail.ops.quant.unpack import unpack

# the name of a module and of one of its tensors; a weight is a module's too
OF_MODULE = re.compile(
    r"(?P<module>.*?)(?P<suffix>\.weight(_packed|_scale|_scale_inv|_shape|_zero_point|_g_idx|_global_scale)?"
    r"|\.weight\.(absmax|quant_map|nested_absmax|nested_quant_map|quant_state\..*)"
    r"|\.(qweight|qzeros|scales|g_idx|SCB)|_blocks|_scales)"
)
UNREAD = ("sparsity_config", "transform_config")  # of compressed-tensors: they change the weights


class QuantizedFolder:
    """Read the tensors of a checkpoint folder; quantised ones appear as plain tensors of the model's dtype."""

    def __init__(self, folder: SafetensorFolder, config: Mapping[str, Any], dtype: str | None):
        """Find the quantised tensors.

        Args:
            folder: The stored tensors.
            config: The `quantization_config`.
            dtype: The model's dtype, of its config.json.
        """
        self._folder, self._dtype = folder, jnp.dtype(dtype or "bfloat16")
        check_config(config, str(folder.folder))
        stored, modules = folder.tensors(), {}
        for name in stored:
            if match := OF_MODULE.fullmatch(name):
                modules.setdefault(match["module"], {})[match["suffix"]] = stored[name]
        self._layouts: dict[str, tuple[str, TensorLayout]] = {}  # by plain name, with the module
        taken = set()
        for module, below in modules.items():
            with self._naming(module):
                layout = layout_of(config, module, below, lambda suffix, module=module: folder.read(module + suffix))
            if layout is not None:
                self._layouts[module if layout.transposed else f"{module}.weight"] = module, layout
                taken |= {f"{module}{part}" for part in layout.parts}
        self._plain = {n: t for n, t in stored.items() if n not in taken and not ACTIVATIONS.fullmatch(n)}

    def tensors(self) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        """Return (shape, dtype) by name, without reading a tensor."""
        return self._plain | {name: (layout.shape, self._dtype) for name, (_, layout) in self._layouts.items()}

    def formats(self) -> dict[str, Format]:
        """Return the formats of the quantised tensors by name."""
        return {name: layout.form for name, (_, layout) in self._layouts.items()}

    def packed(self, name: str) -> Arrays:
        """Return the arrays of a quantised tensor (core.formats)."""
        module, layout = self._layouts[name]
        known = self._folder.tensors()
        parts = {part: self._folder.read(module + part) for part in layout.parts if module + part in known}
        with self._naming(module):
            return layout.decode(parts)

    def read(self, name: str) -> np.ndarray:
        """Return a tensor: a view of the file, or a quantised one unpacked to f32."""
        if name not in self._layouts:
            return self._folder.read(name)
        layout = self._layouts[name][1]
        with jax.default_device(jax.devices("cpu")[0]):
            rows = np.asarray(_unpack(layout.form, {key: np.asarray(x) for key, x in self.packed(name).items()}))
        return rows.swapaxes(-1, -2) if layout.transposed else rows

    @contextlib.contextmanager
    def _naming(self, module: str) -> Iterator[None]:
        """Name the folder in errors about a module."""
        try:
            yield
        except UserError as error:
            raise type(error)(f"{self._folder.folder}: {error}", param=error.param) from None
        except (KeyError, ValueError, IndexError) as error:
            where = f"{self._folder.folder}: {module}"
            raise CheckpointError(f"{where} is not stored as its config says: {error!r}") from None


_unpack = jax.jit(unpack, static_argnums=0)


def formats_of_config(model: str | Path, specs: Any) -> Formats:
    """Return the formats that `quantization_config` of a model's config.json gives its weights.

    Raises:
        UserError: They follow from the stored tensors.
    """
    path = Path(model)
    config = read_json(path / "config.json" if path.is_dir() else path).get("quantization_config")
    if not config:
        return ()
    check_config(config, str(model))
    if config["quant_method"] != "mxfp4":
        raise UserError(
            f"{model}: which weights are in {config['quant_method']} follows from the stored tensors, which "
            "load_format=dummy does not read: choose `quantization`, such as fp8, or none for plain weights",
            param="quantization",
        )
    return tuple((name, form) for name, form in rounded_formats(specs, "mxfp4") if ".experts." in name)


def check_config(config: Any, where: str) -> None:
    """Refuse a `quantization_config` that cannot be read, by name."""
    method = config.get("quant_method", "unknown") if isinstance(config, Mapping) else config
    if method not in METHODS:
        raise UnsupportedError(
            f"{where}: quantization_config: the weights are quantised by {method!r}, which is not supported; take a "
            f"copy in bf16, or one of {', '.join(METHODS)}",
            param="quantization_config",
        )
    for key in UNREAD:
        if config.get(key) and config[key].get("format", "dense") != "dense":
            raise refuse(f"{method} with {key}")
