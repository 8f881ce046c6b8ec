"""Several of our weights in one pair of PEFT's: which of its ranks are whose."""

from __future__ import annotations

import numpy as np


def own_ranks(ups: list[np.ndarray], rank: int) -> list[slice]:
    """Of weights whose parts of `lora_B` are these [.., R]: the ranks that each needs. Where we wrote them, `rank` of
    each side by side, they are its own, for all others of it are zero; a pair that PEFT made is shared."""
    own = [slice(i * rank, (i + 1) * rank) for i in range(len(ups))]
    apart = ups[0].shape[-1] == rank * len(ups)
    if apart and not any(np.delete(up, ranks, axis=-1).any() for up, ranks in zip(ups, own, strict=True)):
        return own
    return [slice(None)] * len(ups)
