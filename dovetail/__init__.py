"""Dovetail: pretrain, post-train, serve and run language models, in one JAX package.

    import dovetail as dt
    m = dt.load("smollm2-135m")
    m.logits(m.tokenizer.encode("Hello"))

Importing this module imports nothing heavy: jax comes with the first name that needs it.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dovetail.io.load import load as load

__version__ = "0.1.0"
__all__ = ["load", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "load":
        from dovetail.io.load import load

        return load
    raise AttributeError(f"module 'dovetail' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted(__all__)
