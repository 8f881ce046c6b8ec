"""ServerConfig: where the server listens, who may use it, and its limits. `dovetail serve` is generated from it."""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dovetail.core.errors import UserError
from dovetail.core.option import check_options, option

LONGEST_SECONDS = 30 * 24 * 3600  # the timers of an event loop take no more than a few weeks
BODY_MB, BODY_MB_WITH_IMAGES = 16.0, 64.0  # 64 MiB of JSON hold 48 MiB of image files in base64
_ACCESS, _FORMAT, _LIMITS, _IMAGES = "Access", "Format", "Limits", "Images"


@dataclass(frozen=True, kw_only=True)
class ServerLimits:
    """Bound what one request and all requests together may take."""

    max_body_mb: float | None = option(
        None, "Maximum size of a request, in MiB. Default: 16, or 64 for a model that takes images.",
        least=0, above=True, panel=_LIMITS,
    )  # fmt: skip
    limit_mm_per_prompt: str = option(
        '{"image": 32}', "Maximum number of images in a prompt, as a JSON object.", metavar="JSON", panel=_LIMITS
    )
    max_prompt_tokens: int | None = option(
        None, "Maximum length of a prompt. Default: what the model takes.", least=1, panel=_LIMITS
    )
    max_n: int = option(64, "Maximum number of completions per prompt.", least=1, panel=_LIMITS)
    max_queue: int = option(
        1024, "Maximum number of waiting prompts; more are answered with HTTP 429.", least=1, panel=_LIMITS
    )
    max_connections: int = option(
        4096, "Maximum number of open connections; then idle ones are closed, or HTTP 503.", least=1, panel=_LIMITS
    )
    request_timeout: float = option(
        600.0, "Seconds that a request may take.", least=0, above=True, most=LONGEST_SECONDS, panel=_LIMITS
    )
    drain_timeout: float = option(
        30.0, "Seconds to finish running requests after SIGTERM.", least=0, most=LONGEST_SECONDS, panel=_LIMITS
    )
    step_timeout: float = option(
        300.0, "Seconds that one step may take before the engine is restarted. 0: no limit.",
        least=0, most=LONGEST_SECONDS, panel=_LIMITS,
    )  # fmt: skip
    body_timeout: float = option(
        30.0, "Seconds that a client may take to send a request's body.", least=0, above=True, most=LONGEST_SECONDS,
        panel=_LIMITS,
    )  # fmt: skip

    def __post_init__(self):
        check_options(self)
        self.max_images  # noqa: B018  refuses what is not valid

    def body_bytes(self, takes_images: bool) -> int:
        """Return the maximum size of a request's body."""
        most = (BODY_MB_WITH_IMAGES if takes_images else BODY_MB) if self.max_body_mb is None else self.max_body_mb
        return int(most * 2**20)

    @property
    def max_images(self) -> int:
        """Return the maximum number of images in a prompt."""
        try:
            found = json.loads(self.limit_mm_per_prompt)
        except ValueError:
            found = None
        if not (isinstance(found, dict) and set(found) == {"image"} and type(found["image"]) is int):
            message = """`limit_mm_per_prompt` must be a JSON object such as '{"image": 4}'"""
            raise UserError(f"{message}, got {self.limit_mm_per_prompt!r}", param="limit_mm_per_prompt")
        if found["image"] < 0:
            message = f"`limit_mm_per_prompt` must be at least 0, got {found['image']}"
            raise UserError(message, param="limit_mm_per_prompt")
        return found["image"]


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Configure the HTTP server; `names` are the model's names in requests, and answers give the first."""

    names: tuple[str, ...]
    host: str = option("127.0.0.1", "Address to listen on; 0.0.0.0: all interfaces, which requires an API key.")
    port: int = option(8000, "Port to listen on; 0: any free one.", least=0, most=65535)
    api_keys: tuple[str, ...] = ()
    admin_key: str | None = None  # None: there are no admin routes
    allow_unauthenticated: bool = option(False, "Listen beyond localhost without an API key.", panel=_ACCESS)
    share_prefix_cache: bool = option(False, "Share cached prefixes between API keys.", panel=_ACCESS)
    protect_metrics: bool = option(False, "Require an API key for /metrics.", panel=_ACCESS)
    profile_dir: str | None = option(
        None, "Folder for profiler traces, started by admin routes.", metavar="DIR", panel=_ACCESS
    )
    allowed_origins: tuple[str, ...] = option((), "Web origins that may send requests (CORS).", panel=_ACCESS)
    trust_request_chat_template: bool = option(
        False, "Accept a chat template in a request and render it.", panel=_ACCESS
    )
    special_tokens_in_text: bool = option(
        True, "Encode special tokens such as <|im_end|> in request text as such, not as plain text.", panel=_ACCESS
    )
    tool_call_parser: str | None = option(
        None, "Format of tool calls. Default: derived from the chat template.", metavar="NAME", panel=_FORMAT
    )
    reasoning_parser: str | None = option(
        None, "Format of reasoning. Default: derived from the chat template.", metavar="NAME", panel=_FORMAT
    )
    per_request_spec_decode_metrics: str = option(
        "none", "Counts of speculative decoding in answers, as `metrics.speculative_decoding`: none or summary.",
        choices=("none", "summary"), panel=_FORMAT,
    )  # fmt: skip
    allowed_media_domains: tuple[str, ...] = option(
        (), "Hosts from which images of requests are fetched; may be repeated. Default: none, only data: URLs.",
        metavar="HOST", panel=_IMAGES,
    )  # fmt: skip
    allowed_local_media_path: str | None = option(
        None, "Folder from which requests may read images by file:// URLs. Default: none.", metavar="DIR", panel=_IMAGES
    )
    mm_processor_cache_gb: float = option(
        1.0, "Memory for processed images that may be sent again, in GiB; 0: none.", least=0, panel=_IMAGES
    )
    defaults: Mapping[str, Any] = field(default_factory=dict)  # SamplingParams for what a request leaves out
    limits: ServerLimits = field(default_factory=ServerLimits)

    def __post_init__(self):
        check_options(self)

    @property
    def separates_callers(self) -> bool:
        """Return whether API keys have separate prefix caches, so that response times do not reveal others' prompts."""
        return len(set(self.api_keys)) > 1 and not self.share_prefix_cache

    @property
    def is_open(self) -> bool:
        """Return whether the server has no key and listens beyond the loopback interface."""
        return not self.api_keys and not is_loopback(self.host)


def is_loopback(host: str) -> bool:
    """Return whether `host` is a name or address of the loopback interface."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
