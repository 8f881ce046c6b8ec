"""Read texts as rows of tokens, for calibration and for the held-out loss."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from dovetail.core.errors import UserError
from dovetail.data.readers import documents
from dovetail.data.settings import Source
from dovetail.data.sources import find, split
from dovetail.io.tokenizer import Tokenizer

LEAST_ROWS = 8  # of which one is held out


def rows_of(data: str, tokenizer: Tokenizer, length: int, most: int, text_key: str = "text") -> np.ndarray:
    """Return at most `most` rows [n, length] of the tokens of texts, one text after another.

    Args:
        data: What data.sources finds: a file, a folder, a built-in corpus, a dataset of the hub.
        tokenizer: The model's.
        length: Tokens of a row.
        most: Rows.
        text_key: The field of a record that holds its text.

    Raises:
        UserError: There are fewer than LEAST_ROWS rows.
    """
    ids: list[int] = []
    for text in _texts(data, text_key):
        ids += [*tokenizer.encode(text), tokenizer.eos_id or 0]
        if len(ids) >= most * length:
            break
    count = min(len(ids) // length, most)
    if count < LEAST_ROWS:
        raise UserError(
            f"`data` must have at least {LEAST_ROWS} rows of {length} tokens, got {len(ids):,} tokens in {data}: use "
            "more text, or a smaller --length",
            param="data",
        )
    return np.asarray(ids[: count * length], np.int32).reshape(count, length)


def _texts(data: str, text_key: str) -> Iterator[str]:
    source = Source(data, text_key=text_key)
    for span in split(find(source), source, largest=1 << 20):
        yield from (text for text, _ in documents(span, text_key) if text)
