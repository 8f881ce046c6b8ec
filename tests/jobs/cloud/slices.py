"""Share helpers of the cloud tests: an attempt, and TPU VMs that are local folders."""

import os
import sys
from pathlib import Path

from dovetail.jobs.backends.tpu_ssh import Ssh, TpuHost
from dovetail.jobs.job import Attempt
from dovetail.jobs.spec import Spec, make

OWNER = "lab"
PROJECT = "p"
ZONE = "us-east5-b"


def spec(**given) -> Spec:
    usual = {
        "name": "try", "command": "true", "backend": "gcp-tpu", "accelerator": "v5litepod-8", "zones": [ZONE],
        "gcp": {"project": PROJECT},
    }  # fmt: skip
    return make({**usual, **given})


def attempt(home: Path, number: int = 1, **given) -> Attempt:
    one = spec(**given)
    return Attempt("a1b2", number, one, home, OWNER, one.zones[0] if one.zones else "")


def vms(root: Path) -> Ssh:
    """Give every VM its own home, where lines run in a shell, as over ssh."""

    def command(worker: TpuHost, line: str | None) -> list[str]:
        home = root / f"vm{worker.rank}"
        home.mkdir(parents=True, exist_ok=True)
        path = f"PATH={Path(sys.executable).parent}:{os.environ['PATH']}"
        return ["env", "-i", f"HOME={home}", path, "sh", *(["-c", line] if line is not None else [])]

    return command
