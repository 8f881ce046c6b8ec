"""Start the assistant, in the repository's root: python -m examples.assistant [--large URL] [--small URL]"""

from __future__ import annotations

import argparse
import os
from contextlib import ExitStack, suppress
from pathlib import Path

from examples.assistant.app import create_app
from examples.assistant.foods import BUNDLED
from examples.assistant.model import ModelChoice
from examples.assistant.server import AssistantServer
from examples.assistant.started import started

DESCRIPTION = """Start the assistant. A model is the URL of a server of OpenAI's API, or one that `dovetail serve`
takes, whose server is then started."""
LABELS = ("large", "small")
TRAINED = Path("runs/assistant/model")  # train.py writes it


def main() -> None:
    """Start the models that are not running yet, and serve the page until Ctrl-C."""
    args = parse()
    with ExitStack() as servers:
        models = [choice(label, args, servers) for label in LABELS if getattr(args, label)]
        app = create_app(models, args.database, args.foods)
        if args.host not in ("127.0.0.1", "localhost", "::1"):
            print(f"Everyone who can reach {args.host}:{args.port} can read and change the diary.")
        print(f"The assistant runs at http://{args.host}:{args.port}. Ctrl-C stops it.", flush=True)
        with suppress(KeyboardInterrupt):  # uvicorn raises it again after it has stopped
            AssistantServer(app, args.host, args.port).run()


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.assistant", description=(__doc__ or "").partition("\n")[2]
    )
    parser.add_argument("--large", default="", metavar="URL|MODEL", help="the large model")
    parser.add_argument("--small", default="", metavar="URL|MODEL", help="the small model")
    add_labels(parser, "--images", "this model reads images (default: what its server lists)")
    add_labels(parser, "--require-tools", "this model must begin each answer with a tool call")
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen on")
    parser.add_argument("--port", type=int, default=8090, help="the port to listen on")
    parser.add_argument("--database", type=Path, default=Path("runs/assistant/diary.db"), help="the SQLite file")
    parser.add_argument("--foods", type=Path, default=BUNDLED, help="the food table")
    args = parser.parse_args(arguments)
    if not args.large and not args.small:
        args.small = str(TRAINED) if TRAINED.is_dir() else "smollm2-135m"
        if args.small == "smollm2-135m":  # it seldom calls a tool by itself
            args.require_tools.append("small")
    args.database.parent.mkdir(parents=True, exist_ok=True)
    return args


def add_labels(parser: argparse.ArgumentParser, flag: str, help: str) -> None:
    """Add a flag that names models and may be repeated."""
    parser.add_argument(flag, action="append", default=[], choices=LABELS, help=help)


def choice(label: str, args: argparse.Namespace, servers: ExitStack) -> ModelChoice:
    """Return the model of a label, after starting its server where it is not a URL."""
    named, is_url = getattr(args, label), getattr(args, label).startswith(("http://", "https://"))
    return ModelChoice(
        label, named if is_url else servers.enter_context(started(named)),
        key=os.environ.get("ASSISTANT_API_KEY", "") if is_url else "",
        images=True if label in args.images else None,
        tool_choice="required" if label in args.require_tools else "auto",
    )  # fmt: skip


if __name__ == "__main__":
    main()
