"""New weights for a running engine. Its steps are compiled for one form (tree, shapes, types, placement), so what comes
is checked and placed before it takes the old weights' place."""

from __future__ import annotations

from typing import Any

import jax

from dovetail.core.types import Params
from dovetail.models.fuse import fuse


def form_of(params: Params) -> Any:
    """The same tree with what the steps are compiled for in place of each array."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params)


def is_form(params: Params) -> bool:
    """Whether this is the form alone: the arrays have been dropped."""
    return any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(params))


def placed(params: Params, form: Any) -> Params:
    """The arrays where the form says they lie; those that lie there already are taken as they are."""
    return jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), params, form)


def fitted(params: Params, form: Any, fused: bool) -> Params:
    """The weights in that form. Taken, not copied, where they fit: who donates them to another computation takes them
    from the engine too."""
    try:
        params = fuse(params) if fused else params
        given = _by_name(params)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"weights come as the tree that dt.load gives; this is none ({error!r})") from None
    wanted = _by_name(form)
    for name in [*wanted, *given]:
        want, got = _said(wanted.get(name)), _said(given.get(name))
        if want != got:
            raise ValueError(f"weights{name}: the engine was started with {want}, and {got} came")
    return placed(params, form)


def _by_name(tree: Any) -> dict[str, Any]:
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _said(leaf: Any) -> str:
    return "nothing" if leaf is None else f"{leaf.dtype}{list(leaf.shape)}"
