"""The recipe that a run records: every key with the value it had, so that a later default does not change the run.

`RUN/recipe.yaml` and each checkpoint hold the effective recipe. A checkpoint also holds `given`, the keys that differed
from the defaults of its version. A resumed run keeps a recorded value where neither then nor now anybody set the key.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from dovetail.core import recipe, yaml_text
from dovetail.core.training import Training

S = TypeVar("S", bound=Training)


def versions() -> dict[str, str]:
    import jax

    from dovetail import __version__

    return {"dovetail": __version__, "jax": jax.__version__}


def record(settings: Training) -> dict[str, Any]:
    """Return what a checkpoint's meta says of the recipe."""
    return {"recipe": recipe.whole(_lasting(settings)), "given": recipe.dump(settings), "versions": versions()}


def recipe_text(settings: Training) -> str:
    """Return the contents of `RUN/recipe.yaml`: a recipe that starts the same training again."""
    by = ", ".join(f"{name} {version}" for name, version in versions().items())
    head = f"# Written by {by}: every key of this run, defaults and derived values included.\n"
    return head + yaml_text.write(recipe.whole(_lasting(settings)))


def _lasting(settings: S) -> S:
    """Return the effective recipe without what is for one start only: the next one must ask again."""
    effective = settings.effective
    return replace(effective, checkpoint=replace(effective.checkpoint, allow_changed_inputs=False))


def newest_meta(folder: Path, durable: str = "") -> dict[str, Any] | None:
    """Return the meta of the newest readable checkpoint of a run in `folder`; None where there is none yet."""
    from dovetail.io.checkpoint_tier import manifests

    found = [each for where in (str(folder / "checkpoints"), durable) if where for each in manifests(where)]
    return max(found, key=lambda one: one.step).meta if found else None


def as_begun(settings: S, meta: Mapping[str, Any] | None) -> tuple[S, list[str]]:
    """Return the settings with the defaults that a run was begun with, and a line for each that is another today.

    meta: the run's newest checkpoint's; None for a new run. A checkpoint without `given` is from an earlier version,
    which did not record its defaults: nothing is kept.
    """
    if meta is None or "given" not in meta:
        return settings, []
    then, now = _flat(meta["recipe"]), _flat(recipe.whole(settings.effective))
    given = (*_flat(meta["given"]), *_flat(recipe.dump(settings)))
    kept = {key: then[key] for key in now if key in then and then[key] != now[key] and not _is_set(key, given)}
    by = meta.get("versions", {}).get("dovetail", "")
    lines = [
        f"{key} stays {value}, the default of dovetail {by} with which this run began; today's is {now[key]}: start a "
        "new --run-dir to use it"
        for key, value in kept.items()
    ]
    return recipe.change(settings, kept) if kept else settings, lines


def _is_set(key: str, given: tuple[str, ...]) -> bool:
    """Whether the key, a part of it or what it is part of was given."""
    return any(key == each or key.startswith(f"{each}.") or each.startswith(f"{key}.") for each in given)


def _flat(tree: Any, path: str = "") -> dict[str, Any]:
    """Dotted key -> value; an empty section or list is a value."""
    parts = tree.items() if isinstance(tree, Mapping) else enumerate(tree) if isinstance(tree, list | tuple) else ()
    found: dict[str, Any] = {}
    for key, part in parts:
        found |= _flat(part, f"{path}.{key}" if path else str(key))
    return found or {path: tree}
