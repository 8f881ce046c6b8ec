"""Dovetail: pretrain, post-train, serve and run language models, in one JAX package.

    import dovetail as dt
    m = dt.load("smollm2-135m")
    m.logits(m.tokenizer.encode("Hello"))
    llm = dt.LLM("smollm2-135m")
    llm.generate(["The capital of France is"], dt.SamplingParams(temperature=0))[0].outputs[0].text
    dt.pretrain("tiny", steps=20, optimizer={"lr": 1e-3}, run_dir="runs/first").metrics["loss"]

Importing this module imports nothing heavy: jax comes with the first name that needs it.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dovetail.engine.llm import LLM as LLM
    from dovetail.engine.request.params import SamplingParams as SamplingParams
    from dovetail.io.load import load as load
    from dovetail.jobs.remote import remote as remote
    from dovetail.train.pretrain import pretrain as pretrain
    from dovetail.tune.api import distill as distill
    from dovetail.tune.api import dpo as dpo
    from dovetail.tune.api import merge as merge
    from dovetail.tune.api import reward as reward
    from dovetail.tune.api import sft as sft
    from dovetail.tune.draft.draft import draft as draft
    from dovetail.tune.quantize.quantize import quantize as quantize
    from dovetail.tune.rl.rl import rl as rl

__version__ = "0.1.0"
# When jax starts, it takes 75% of a GPU unless one of these says otherwise.
_MEMORY_SETTINGS = (
    "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_PREALLOCATE",
    "XLA_PYTHON_CLIENT_ALLOCATOR",
)  # fmt: skip
if not any(name in os.environ for name in _MEMORY_SETTINGS):
    os.environ["XLA_CLIENT_MEM_FRACTION"] = "0.95"

_HOMES = {
    "LLM": "dovetail.engine.llm",
    "SamplingParams": "dovetail.engine.request.params",
    "load": "dovetail.io.load",
    "pretrain": "dovetail.train.pretrain",
    "sft": "dovetail.tune.api",
    "dpo": "dovetail.tune.api",
    "distill": "dovetail.tune.api",
    "reward": "dovetail.tune.api",
    "draft": "dovetail.tune.draft.draft",
    "rl": "dovetail.tune.rl.rl",
    "merge": "dovetail.tune.api",
    "quantize": "dovetail.tune.quantize.quantize",
    "remote": "dovetail.jobs.remote",
}
__all__ = [
    "LLM", "SamplingParams", "distill", "dpo", "draft", "load", "merge", "pretrain", "quantize", "remote", "reward",
    "rl", "sft", "__version__",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'dovetail' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted(__all__)
