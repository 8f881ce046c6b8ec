"""ServerConfig: the options of a server: where it listens, who may use it, and its limits."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dovetail.core.errors import UserError

LONGEST_SECONDS = 30 * 24 * 3600  # an event loop's timers take no more than a few weeks


@dataclass(frozen=True, kw_only=True)
class ServerLimits:
    body_bytes: int = 16 * 2**20
    body_seconds: float = 30.0  # for a client to send the body
    prompt_tokens: int | None = None  # None: as many as the model takes
    n: int = 64
    queue: int = 1024  # prompts that wait for their first token
    connections: int = 4096  # open at once, idle ones included
    request_seconds: float = 600.0
    drain_seconds: float = 30.0  # after SIGTERM, for requests under way
    step_seconds: float = 300.0  # for one step of the engine, which then counts as dead; 0: no limit

    def __post_init__(self):
        for name in ("body_seconds", "request_seconds", "drain_seconds", "step_seconds"):
            seconds = getattr(self, name)
            if not 0 <= seconds <= LONGEST_SECONDS:
                raise UserError(f"{name} must be between 0 and {LONGEST_SECONDS:,} seconds; got {seconds}")


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    names: tuple[str, ...]  # the model's names in requests; answers give the first
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    admin_key: str | None = None  # None: there are no admin routes
    allow_unauthenticated: bool = False  # serve without a key on other interfaces than the loopback
    share_prefix_cache: bool = False  # requests of one key may find the prefixes of another's
    protect_metrics: bool = False  # whether /metrics needs a key too
    profile_dir: str | None = None  # where /start_profile, which needs the admin key, writes; None: no such route
    allow_origins: tuple[str, ...] = ()
    allow_request_template: bool = False
    special_tokens_in_text: bool = True  # a request's text that spells a special token becomes that token
    tool_format: str | None = None  # None: by the model's template
    reasoning_format: str | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of SamplingParams, for what a request leaves out
    limits: ServerLimits = field(default_factory=ServerLimits)

    @property
    def separates_callers(self) -> bool:
        """Whether each API key has prefixes of its own: by what is cached, and how fast, one could test what others
        asked."""
        return len(set(self.api_keys)) > 1 and not self.share_prefix_cache

    @property
    def is_open(self) -> bool:
        """Whether anybody who can reach it may use it: no key, and not on the loopback interface only."""
        return not self.api_keys and not is_loopback(self.host)


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
