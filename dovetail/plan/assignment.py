"""The memory that a compiler assigned to a program's buffers, from the report that XLA writes when it is asked to.

`memory_analysis` does not say it for TPUs: the temporary memory that it gives has some of what loops carry more than
once (docs/tpu.md). libtpu refuses a program by what it assigned, arguments among it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

_IN_ALL = re.compile(r"Memory Space: default\b.*\nTotal bytes: (\d+)")


def written_to(folder: str | Path) -> dict[str, Any]:
    """Options for the compiler."""
    return {"xla_dump_to": str(folder), "xla_dump_hlo_as_text": True}


def assigned(folder: str | Path) -> int | None:
    """Bytes of a device's memory; None where no compiler has written of them."""
    texts = (path.read_text(errors="replace") for path in Path(folder).glob("*memory-usage-report.txt"))
    return max((int(found[1]) for text in texts if (found := _IN_ALL.search(text))), default=None)
