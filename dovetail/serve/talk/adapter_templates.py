"""Chat templates of adapters: requests for an adapter are written with the template that it was trained with."""

from __future__ import annotations

from pathlib import Path

from dovetail.io.tokenizer import Tokenizer
from dovetail.io.tokenizer_files import read_templates
from dovetail.serve.remote.backend import Backend


class AdapterTemplates:
    def __init__(self, tokenizer: Tokenizer, backend: Backend):
        self._tokenizer, self._backend = tokenizer, backend
        self._found: dict[tuple[str, int], Tokenizer] = {}

    def tokenizer(self, adapter: str | None) -> Tokenizer:
        """Return the model's tokenizer with the adapter's chat templates, where the adapter has any."""
        loaded = self._backend.info.adapters.get(adapter) if adapter else None
        if loaded is None:
            return self._tokenizer
        key = loaded.path, loaded.version
        if key not in self._found:
            templates = read_templates(Path(loaded.path))
            self._found[key] = self._tokenizer.with_templates(templates) if templates else self._tokenizer
        return self._found[key]
