"""The codes a training process exits with, for the job runner: above 2 (a user's mistake), below 128 (signals)."""

PREEMPTED = 85
QUARANTINE = 86
HUNG = 87
TROUBLE = 88
LOST = 89
ABORTED = 134  # as a shell shows SIGABRT

MEANING = {
    PREEMPTED: "stopped in good order and saved: start it again",
    QUARANTINE: "this host's hardware is at fault: start again without it",
    HUNG: "no step ended for too long, and every thread's stack was written: start it again",
    TROUBLE: "the health budget is spent: a person has to look at health.jsonl",
    LOST: "another process of the run was lost: start it again",
    ABORTED: "XLA ended the process",
}


def meaning(code: int) -> str:
    """One line for a message: 'exit 87: ...'."""
    return f"exit {code}: {MEANING.get(code, 'done' if code == 0 else 'failed')}"
