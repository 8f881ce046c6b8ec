"""Exit codes: 2 and one line for a user's error, 1 and a traceback for a fault of Dovetail, 130 for ctrl-C."""

import errno

import numpy as np
import pytest

from dovetail.cli import main, models
from dovetail.core.errors import FileError, MissingPackageError, UserError


@pytest.fixture
def explain(capsys, monkeypatch):
    """Return a function that runs a command raising an error; it returns the exit code and stderr."""
    monkeypatch.delenv("DOVETAIL_TRACEBACK", raising=False)

    def run(error: BaseException) -> tuple[int, str]:
        def command():
            raise error

        with pytest.raises(SystemExit) as stop:
            main.run(command)
        return stop.value.code, capsys.readouterr().err

    return run


@pytest.mark.parametrize("kind", [UserError, FileError, MissingPackageError])
def test_a_users_error_is_one_line(kind, explain):
    assert explain(kind("what was expected [not markup]")) == (2, "error: what was expected [not markup]\n")


@pytest.mark.parametrize(
    "number, words",
    [(errno.ENOENT, "no file or folder"), (errno.EACCES, "permission denied"), (errno.ENOSPC, "no space")],
)
def test_an_error_of_the_operating_system_is_a_sentence(number, words, explain):
    code, said = explain(OSError(number, "x", "/some/file"))
    assert code == 2 and words in said and "/some/file" in said and "Traceback" not in said


@pytest.mark.parametrize("error", [KeyError("oops"), ValueError("oops"), RuntimeError("oops"), ImportError("oops")])
def test_any_other_error_is_internal(error, explain):
    code, said = explain(error)
    assert code == 1 and f"internal error: {type(error).__name__}: " in said and "Traceback" in said


def test_a_fault_inside_a_command_is_not_a_users_error(monkeypatch, capsys):
    """A ValueError of NumPy, thrown where the command line reads a size, is shown with its traceback."""
    monkeypatch.setattr(models, "parse_bytes", lambda text: np.zeros(2) + np.zeros(3))
    with pytest.raises(SystemExit) as stop:
        main.run(lambda: main.app(["convert", "a", "b"]))
    assert stop.value.code == 1
    said = capsys.readouterr().err
    assert "operands could not be broadcast" in said and "Traceback" in said


def test_an_interrupt_prints_nothing(explain):
    assert explain(KeyboardInterrupt()) == (130, "")


def test_the_traceback_of_a_users_error_on_request(explain, monkeypatch):
    monkeypatch.setenv("DOVETAIL_TRACEBACK", "1")
    code, said = explain(UserError("shown"))
    assert code == 2 and "Traceback" in said and said.endswith("error: shown\n")
