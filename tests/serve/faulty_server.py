"""Run `dovetail` with functions that raise on demand: `python faulty_server.py FILE serve MODEL ...`.

While FILE exists, the function that it names raises the exception that it names: "Scheduler.schedule ValueError". The
engine's process runs this program too, as `python faulty_server.py FILE engine FD`.
"""

import builtins
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
from few_programs import APPLY

from dovetail.serve.remote import child, process

FILE = Path(sys.argv[1])
MESSAGE = "operands could not be broadcast"


def make_faulty(kind: type, name: str) -> None:
    """Let a method raise while FILE names it."""
    method = getattr(kind, name)

    def faulty(*args, **more):
        named, _, error = FILE.read_text().partition(" ") if FILE.exists() else ("", "", "")
        if named == f"{kind.__name__}.{name}":
            raise getattr(builtins, error)(MESSAGE)
        return method(*args, **more)

    setattr(kind, name, faulty)


def run_engine(fd: int) -> None:
    """Run the engine's process on the socket `fd`."""
    from dovetail.engine.request.intake import Intake
    from dovetail.engine.schedule.scheduler import Scheduler

    make_faulty(Intake, "request")
    make_faulty(Scheduler, "add")
    make_faulty(Scheduler, "schedule")
    make_faulty(Scheduler, "commit")
    exec(APPLY)
    process.main(fd)


def run_server() -> None:
    """Run the command line; the engine that it starts is faulty too."""
    from dovetail.cli.main import main
    from dovetail.serve.talk.prompts import Prompts

    make_faulty(Prompts, "encode")
    child.COMMAND = (sys.executable, __file__, str(FILE), "engine")
    sys.argv[1:] = sys.argv[2:]
    main()


if __name__ == "__main__":
    run_engine(int(sys.argv[3])) if sys.argv[2] == "engine" else run_server()
