"""A model's own sampling defaults, from its generation_config.json, for fields that a request leaves out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dovetail.core.errors import UserError
from dovetail.engine.request.params import SamplingParams

# Their names there, and ours. The tokenizer brings the ids that end an answer. do_sample is not read: a server samples
# unless a request has temperature 0.
_NAMES = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


def read_defaults(path: Path) -> Mapping[str, Any]:
    """SamplingParams' fields; empty where the model has no such file."""
    file = path / "generation_config.json"
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text())
        values = {ours: found[theirs] for theirs, ours in _NAMES.items() if found.get(theirs) is not None}
        SamplingParams(**values)
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{file} cannot be used ({error}); mend it, or start with --generation-config none") from None
    return values
