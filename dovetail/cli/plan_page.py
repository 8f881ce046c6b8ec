"""`--html` of `dovetail plan train` and `dovetail plan serve`: the pictures of a plan, as one page."""

from typing import Any


def write_training(path: str, plans: list[Any]) -> None:
    """`plans`: plan.train_plan's, the best first."""
    from dovetail.plan.page.training import training_page

    _write(path, training_page(plans))


def write_serving(path: str, model: str, plans: list[Any], start: Any) -> None:
    """`plans`: plan.serve_plan's, the best first. `start`: how to start one, in words."""
    from dovetail.plan.page.serving import serving_page

    _write(path, serving_page(model, plans, start))


def _write(path: str, page: Any) -> None:
    import sys

    from dovetail.core.files import write_atomic
    from dovetail.plan.page import html

    # beside the plan itself, which may be JSON that a program reads
    print(f"pictures: {write_atomic(path, html(page))}", file=sys.stderr)
