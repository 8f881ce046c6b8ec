"""Declare the controls of a running engine, and the errors that callers catch. Plain data, no jax.

An EngineLoop calls controls by name; a server's process passes name and arguments on to it.
"""

from __future__ import annotations

from dataclasses import dataclass


class EngineDied(RuntimeError):
    """Report that the engine has ended; `__cause__` is the cause if known, or None if the engine was stopped."""


class Later(Exception):
    """Signal that a control's method must wait for requests to end; an EngineLoop calls it again."""


@dataclass(frozen=True)
class Control:
    """Describe one control."""

    method: str  # of Engine; called on the engine's thread between two steps
    idle: bool = False  # whether steps in flight are committed first
    prepare: str | None = None  # of Engine; makes the method's arguments first, on the caller's thread
    change: str | None = None  # the message for requests that arrive meanwhile, if none is answered afterwards


CONTROLS = {
    "sleep": Control("sleep", idle=True, change="the engine is going to sleep"),
    "wake_up": Control("wake_up"),
    "pause": Control("pause", idle=True, change="the engine is being paused"),
    "resume": Control("resume"),
    "reset_prefix_cache": Control("reset_prefix_cache"),
    "update_weights": Control("swap_weights", idle=True, prepare="read_weights"),
    "load_adapter": Control("offer_adapter", prepare="read_adapter"),
    "unload_adapter": Control("drop_adapter"),
    "adapter_unused": Control("await_unused"),
    "adapter_place": Control("await_place"),
}
