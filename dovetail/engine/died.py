"""EngineDied: what calls to an engine raise when it has ended. Apart from the loop, because a process that only
talks to an engine catches it too, and need not import jax for that."""


class EngineDied(RuntimeError):
    """The engine has ended: what it died of is the __cause__, where it is known; None if it was stopped."""
