"""Start the assistant, in the repository's root: python -m examples.assistant [--model LABEL=URL|MODEL ...]"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path

from examples.assistant.app import create_app
from examples.assistant.foods import BUNDLED
from examples.assistant.model import ModelChoice
from examples.assistant.server import AssistantServer
from examples.assistant.started import started

DESCRIPTION = """Start the assistant. A model is the URL of a server of OpenAI's API, or one that `dovetail serve`
takes, whose server is then started. Without one, the two tiny models of train.py are served, and trained first."""
RUNS = Path("runs/assistant")
TINY = {"after": "after RL", "before": "before RL"}  # folders that train.py writes, and their labels


def main() -> None:
    """Start the models that are not running yet, and serve the page until Ctrl-C."""
    args = parse()
    named = dict(args.model) or tiny_models()
    with ExitStack() as servers:
        urls = servers.enter_context(started([each for each in named.values() if not is_url(each)]))
        models = [choice(label, each, urls.get(each, each), args) for label, each in named.items()]
        args.database.parent.mkdir(parents=True, exist_ok=True)
        app = create_app(models, args.database, args.foods)
        if args.host not in ("127.0.0.1", "localhost", "::1"):
            print(f"Everyone who can reach {args.host}:{args.port} can read and change the diary.")
        print(f"The assistant runs at http://{args.host}:{args.port}. Ctrl-C stops it.", flush=True)
        with suppress(KeyboardInterrupt):  # uvicorn raises it again after it has stopped
            AssistantServer(app, args.host, args.port).run()


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m examples.assistant", description=DESCRIPTION)
    parser.add_argument(
        "--model", action="append", default=[], type=labelled, metavar="LABEL=URL|MODEL",
        help="a model of the page's switch and its label there, such as large=http://127.0.0.1:8000; may be repeated",
    )  # fmt: skip
    for flag, help in (
        ("--images", "this model reads images (default: what its server lists)"),
        ("--require-tools", "this model must begin each answer with a tool call"),
    ):
        parser.add_argument(flag, action="append", default=[], metavar="LABEL", help=help)
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen on")
    parser.add_argument("--port", type=int, default=8090, help="the port to listen on")
    parser.add_argument("--database", type=Path, default=RUNS / "diary.db", help="the SQLite file")
    parser.add_argument("--foods", type=Path, default=BUNDLED, help="the food table")
    args = parser.parse_args(arguments)
    labels = [label for label, _ in args.model] or list(TINY.values())
    for label in (*args.images, *args.require_tools):
        if label not in labels:
            parser.error(f"no model has the label {label!r}; the labels are {', '.join(map(repr, labels))}")
    return args


def labelled(argument: str) -> tuple[str, str]:
    """Read LABEL=URL|MODEL."""
    label, equals, model = argument.partition("=")
    if not (label and equals and model):
        raise argparse.ArgumentTypeError(f"write LABEL=URL or LABEL=MODEL, got {argument!r}")
    return label, model


def tiny_models() -> dict[str, str]:
    """Return the tiny models by their labels, after training them where they are missing."""
    if not all((RUNS / folder).is_dir() for folder in TINY):
        print("Training a tiny model, once: some minutes on two cores. Ctrl-C stops it.", flush=True)
        # Another process, so that the app does not hold what training needs.
        done = subprocess.run([sys.executable, "-m", "examples.assistant.train", "--no-evaluate"])
        if done.returncode:
            sys.exit(f"The training ended with status {done.returncode}; its last lines say why.")
    return {label: str(RUNS / folder) for folder, label in TINY.items()}


def is_url(model: str) -> bool:
    """Return whether a model is the URL of a server."""
    return model.startswith(("http://", "https://"))


def choice(label: str, model: str, url: str, args: argparse.Namespace) -> ModelChoice:
    """Return a model of the page's switch."""
    return ModelChoice(
        label, url, key=os.environ.get("ASSISTANT_API_KEY", "") if is_url(model) else "",
        images=True if label in args.images else None,
        tool_choice="required" if label in args.require_tools else "auto",
    )  # fmt: skip


if __name__ == "__main__":
    main()
