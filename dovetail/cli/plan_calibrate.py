"""`dovetail plan --calibrate RUN_DIR`: what a run reached of its chips' peaks, kept for later plans."""

from pathlib import Path

from dovetail.core.errors import UserError


def calibrate(folder: str) -> None:
    """Learn from a run's metrics, and say what later plans will use."""
    from datetime import UTC, datetime

    from rich.console import Console

    from dovetail.plan.calibration import calibration_file, store
    from dovetail.plan.prediction import FILE, seconds_text
    from dovetail.train.report.split import split
    from dovetail.train.report.summary import read, step_seconds

    run = read(folder)
    measured = step_seconds(run)
    if run.prediction is None:
        raise UserError(f"{folder} has no {FILE}: a run writes it at its start where its chip is in the table")
    if measured is None or len(run.steps) < 4:
        raise UserError(f"{folder} has {len(run.steps)} reports: give a run of 4 or more, the first ones compile")
    if any(split(line) for line in run.steps):
        raise UserError(f"{folder} is a run that learns from its own answers, whose steps differ: give a training's")
    last = datetime.fromtimestamp(run.steps[-1].get("time", 0.0), UTC).strftime("%Y-%m-%d")
    one = run.prediction.observed(_name(folder), measured, last)
    known = store(one)
    parts = {"products": one.products, "memory": one.memory, "links": one.links}
    told = ", ".join(f"{name} {seconds_text(seconds)}" for name, seconds in parts.items() if seconds)
    console = Console(highlight=False)
    console.print(
        f"{_name(folder)}: a step takes {seconds_text(measured)} on {one.devices} x {one.chip}, bound by "
        f"{one.bound_by}; at the peaks {told}",
        markup=False, soft_wrap=True,
    )  # fmt: skip
    console.print(f"{one.chip}: {known.describe()}", markup=False, soft_wrap=True)
    console.print(f"later plans for {one.chip} use it; kept in {calibration_file()}", style="dim", soft_wrap=True)


def _name(folder: str) -> str:
    """As a person would find it again, without a path of this machine."""
    path = Path(folder).resolve()
    return f"{path.parent.name}/{path.name}" if path.parent.name else path.name
