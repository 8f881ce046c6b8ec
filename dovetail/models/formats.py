"""Choose the storage formats of a model's weights: those of a checkpoint, or a scheme of core.formats.ROUNDED.

Projections of layers are quantised. Norms, biases and routers are arrays in every model; embeddings and heads are
quantised only if the checkpoint has them so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax

from dovetail.core.formats import ROUNDED, Format, fitted
from dovetail.core.spec import ParamSpec, is_spec, leaves, path_name
from dovetail.core.types import Params
from dovetail.ops.quant.weight import is_quantized

Formats = tuple[tuple[str, Format], ...]  # the path and format of each quantised weight; hashable
TABLES = ("embed", "head")


def may_quantize(path: str, leaf: ParamSpec) -> bool:
    """Return whether a weight is used through ops.linear alone, so that it may be quantised."""
    is_matrix = leaf.active > 0 and len(leaf.shape) > 1 and leaf.dtype is None
    return path in TABLES or (path.startswith("layers.") and is_matrix and not path.endswith(".router"))


def rounded_formats(specs: Any, scheme: str) -> Formats:
    """Return the formats of a model whose projections are rounded to a scheme; none for a name not in ROUNDED."""
    if scheme not in ROUNDED:
        return ()
    given = [(path, leaf) for path, leaf in leaves(specs) if path not in TABLES and may_quantize(path, leaf)]
    chosen = ((path, fitted(scheme, leaf.rows[1])) for path, leaf in given)
    return tuple((path, form) for path, form in chosen if form is not None)


def with_formats(specs: Any, formats: Formats | Mapping[str, Format]) -> Any:
    """Return the specs with the formats of these paths, and of no other."""
    found = dict(formats)

    def one(path: tuple, leaf: ParamSpec) -> ParamSpec:
        form = found.get(path_name(path))
        return leaf if leaf.format == form else replace(leaf, format=form)

    return jax.tree_util.tree_map_with_path(one, specs, is_leaf=is_spec)


def formats_of(params: Params) -> Formats:
    """Return the formats of the weights in a tree, also of one whose projections are joined (models.publish)."""
    found = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_quantized)
    named = ((*path_name(path).rpartition("."), leaf) for path, leaf in found if is_quantized(leaf))
    return tuple((f"{above}{dot}{name}", leaf.format) for above, dot, last, leaf in named for name in last.split("+"))
