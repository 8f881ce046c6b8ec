"""Where compiled programs are kept, so that a second start takes seconds."""

from __future__ import annotations

import jax

from dovetail.io.hub import home


def keep_compiled() -> None:
    """Keep compiled programs on disk, unless the user has set a folder for them or turned that off."""
    if jax.config.jax_compilation_cache_dir is None:  # type: ignore[attr-defined]
        jax.config.update("jax_compilation_cache_dir", str(home() / "xla"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
