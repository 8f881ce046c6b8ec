"""The other end of a remote function: every process runs it, and the first one's value goes back.

python -m dovetail.jobs.call FOLDER
"""

from __future__ import annotations

import io
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from dovetail.jobs import parcel

CALL, RESULT = "call.pkl", "result.pkl"
FAILED = 1


def main(folder: Path) -> int:
    import cloudpickle

    for stream in (sys.stdout, sys.stderr):  # into a log, which is shown as it grows
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    key = os.environ.pop(parcel.VARIABLE, "")  # not for the programs that the function starts
    function, args, kwargs = cloudpickle.loads(parcel.read(folder / CALL, key))
    try:
        value = function(*args, **kwargs)
    except Exception as error:
        traceback.print_exc()
        _answer(folder, key, {"error": error, "traceback": traceback.format_exc()})
        return FAILED
    if _is_first():
        _answer(folder, key, {"value": value})
    return 0


def _answer(folder: Path, key: str, answer: dict[str, Any]) -> None:
    """A value or an exception that cannot travel is an exception too, which says so."""
    import cloudpickle

    try:
        data = cloudpickle.dumps(answer)
    except Exception as error:
        what = "exception" if "error" in answer else "return value"
        kind = type(answer.get("error", answer.get("value"))).__name__
        refused = TypeError(f"the {what} of the remote function ({kind}) cannot be sent back: {error}")
        data = cloudpickle.dumps({"error": refused, "traceback": answer.get("traceback", str(refused))})
    parcel.write(folder / _name(), data, key)


def _name() -> str:
    """One per attempt, and for a failing rank its own: a retry does not read what was before it."""
    number = os.environ.get("DOVETAIL_ATTEMPT", "1")
    return f"{number}.{RESULT}" if _is_first() else f"{number}.{_rank()}.{RESULT}"


def _rank() -> str:
    names = ("DOVETAIL_RANK", "SLURM_PROCID", "JOB_COMPLETION_INDEX", "TPU_WORKER_ID")
    return next((os.environ[name] for name in names if name in os.environ), "0")


def _is_first() -> bool:
    return _rank() == "0"


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
