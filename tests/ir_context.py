"""Share one MLIR context among many programs.

Jax makes a context for each program that it lowers, which takes 6 ms: a fifth of the time that a small operation takes
to compile.
"""

from __future__ import annotations

import threading

# A context keeps the constants of its programs, so it is replaced after so many.
PROGRAMS = 200


def share() -> None:
    """Let the programs that a thread lowers share a context."""
    from jax._src.interpreters import mlir

    made = mlir.ModuleContext.__init__
    if made.__name__ == "with_shared":
        return
    local = threading.local()

    def with_shared(self, *args, **kwargs):
        if kwargs.get("context") is None:
            local.left = getattr(local, "left", 0) - 1
            if local.left < 0:
                local.context, local.left = mlir.make_ir_context(), PROGRAMS
            kwargs["context"] = local.context
        made(self, *args, **kwargs)

    mlir.ModuleContext.__init__ = with_shared
