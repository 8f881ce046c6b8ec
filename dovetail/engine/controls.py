"""The controls of a running engine, each declared once: the method that carries it out, and what that needs. An
EngineLoop calls them by name, a server's process carries name and arguments to one, and the HTTP routes name them."""

from __future__ import annotations

from dataclasses import dataclass


class Later(Exception):
    """Raised by a control's method that has to wait for requests to end: an EngineLoop calls it again."""


class InUse(ValueError):
    """Requests under way need what a control, which was asked not to wait for them, would change."""


@dataclass(frozen=True)
class Control:
    method: str  # of Engine; called on the engine's thread, between two steps
    idle: bool = False  # no step may be under way: their tokens are taken in first
    prepare: str | None = None  # of Engine too: makes the method's arguments beforehand, on the caller's thread
    change: str | None = None  # what a request is told meanwhile, where no request is answered afterwards


CONTROLS = {
    "sleep": Control("sleep", idle=True, change="the engine is going to sleep"),
    "wake": Control("wake"),
    "pause": Control("pause", idle=True, change="the engine is being paused"),
    "resume": Control("resume"),
    "reset_prefix_cache": Control("reset_prefix_cache"),
    "update_weights": Control("swap_weights", idle=True, prepare="read_weights"),
    "load_adapter": Control("offer_adapter", prepare="read_adapter"),
    "unload_adapter": Control("drop_adapter"),
    "adapter_unused": Control("await_unused"),
    "adapter_place": Control("await_place"),
}


class EngineDied(RuntimeError):
    """The engine has ended: what it died of is the __cause__, where it is known; None if it was stopped."""
