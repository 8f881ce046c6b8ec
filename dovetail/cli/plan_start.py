"""How to start what `dovetail plan serve` planned: a command that runs as it is printed, or why there is none."""

from collections.abc import Callable
from typing import Any


def starter(model: str, stored: Any) -> Callable[[Any], str]:
    """Return a function that says how to start a plan of `model`, whose weights are stored in the type `stored`."""
    from dovetail.core.compute import compute_of
    from dovetail.io.hub import CATALOGUE
    from dovetail.io.outline import servable

    source, why = servable(model)
    # Published weights are in bf16; those of the catalogue may come as a .gguf file, whose type is another.
    own = compute_of(stored).name if stored else "" if source in CATALOGUE else "bf16"

    def start(plan: Any) -> str:
        if plan.unserved:
            return f"no command starts it: {plan.unserved}{_instead(plan)}"
        if not source:
            return f"no command starts it: {why}"
        replica = plan.replica
        usual = own if replica.accelerator.chip.kinds else "f32"  # a CPU's, whatever is stored
        dtype = "" if replica.dtype == usual else replica.dtype
        many = (
            f" (each of the {plan.replicas:,} replicas, on devices and a port of its own)" if plan.replicas > 1 else ""
        )
        return f"start it{many}: {plan.command(source, dtype)}"

    return start


def _instead(plan: Any) -> str:
    """Return on which single machines it would fit, if it spans several."""
    from dovetail.plan.serve_plan import elsewhere

    replica = plan.replica
    if replica.machines == 1:
        return ""
    found = elsewhere(replica.cfg, plan.workload, replica.dtype, replica.kv, replica.accelerator)
    return f"; one machine of {' or '.join(found)} holds it" if found else "; no single machine known here holds it"
