"""Who may use the page of jobs: browsers that have its token and ask this machine by its own name.

On a shared login node every user can connect to 127.0.0.1, so being there is no permission. The token is in the address
that is printed, as Jupyter's; the first answer moves it into a cookie, so that it does not stay in the address bar.
"""

from __future__ import annotations

import re
import secrets
from email.message import Message
from http.cookies import CookieError, SimpleCookie

OWN = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:\d+)?")
# A page of another origin may not send a header of its own without asking first, which is never granted here.
MARK, MARKED = "X-Dovetail", "jobs"


class Access:
    """The token of one server. A port's cookie has the port in its name: cookies are shared by all ports of a host."""

    def __init__(self, port: int, token: str = "") -> None:
        self.token = token or secrets.token_urlsafe(24)
        self._cookie = f"dovetail-jobs-{port}"

    def is_own_name(self, headers: Message) -> bool:
        """Whether the address names this machine; a name that leads here by DNS is a page elsewhere (rebinding)."""
        return OWN.fullmatch(headers.get("Host") or "") is not None

    def is_token(self, given: str) -> bool:
        return secrets.compare_digest(given.encode(), self.token.encode())

    def has_cookie(self, headers: Message) -> bool:
        try:
            found = SimpleCookie(headers.get("Cookie") or "").get(self._cookie)
        except CookieError:
            return False
        return found is not None and self.is_token(found.value)

    def may_change(self, headers: Message) -> bool:
        """Whether our own page asks, and not another one with this browser's cookie."""
        origin = headers.get("Origin")
        return headers.get(MARK) == MARKED and origin in (None, f"http://{headers.get('Host')}")

    @property
    def set_cookie(self) -> str:
        return f"{self._cookie}={self.token}; Path=/; HttpOnly; SameSite=Strict"
