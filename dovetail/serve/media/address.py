"""Web addresses of images: how a URL is read, which hosts are allowed, and which IP addresses may be dialled.

A client chooses the URL, so without these rules the server would be its way into the operator's network.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import urljoin, urlsplit

from dovetail.core.errors import UserError

DEFAULT_PORTS = {"http": 80, "https": 443}
_URL = re.compile(r"[!#$%&'()*+,\-./0-9:;=?@A-Z\[\]_a-z~]+")  # RFC 3986: no space, backslash, quote or non-ASCII
_LABEL = r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?"
_NAME = re.compile(rf"{_LABEL}(\.{_LABEL})*")
_PUBLIC_V6 = ipaddress.ip_network("2000::/3")
IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True)
class WebAddress:
    """Hold the parts of a URL. The request is made from these parts: no second parser reads the URL."""

    scheme: str  # http or https
    host: str  # a lower-case name, or an IP address without brackets
    port: int
    target: str  # path and query

    @property
    def authority(self) -> str:
        """Return the value of the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == DEFAULT_PORTS[self.scheme] else f"{host}:{self.port}"

    def redirected(self, location: str) -> WebAddress:
        """Return the address that a Location header of this address names; `read_url` lists the errors."""
        try:
            url = urljoin(f"{self.scheme}://{self.authority}{self.target}", location)
        except ValueError:
            raise UserError("the server of the image redirects to an invalid URL") from None
        return read_url(url)


def read_url(url: str) -> WebAddress:
    """Return the parts of an http or https URL.

    Raises:
        UserError: It has characters that must be percent-encoded, a user name, or a host that is not a plain name or
            IP address: parsers of URLs disagree on these.
    """
    if not _URL.fullmatch(url):
        raise UserError("the URL must be ASCII without spaces, quotes or backslashes: percent-encode them")
    try:
        parts = urlsplit(url)
        port, host = parts.port, parts.hostname or ""
    except ValueError:
        raise UserError("the URL has an invalid host or port") from None
    if parts.scheme not in DEFAULT_PORTS:
        raise UserError("the URL must begin with data:, http:// or https://")
    if "@" in parts.netloc:
        raise UserError("the URL must not have a user name or password")
    if not host or not (_NAME.fullmatch(host) or as_ip(host)):
        raise UserError("the URL must name a host by a DNS name or an IP address")
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return WebAddress(parts.scheme, host, DEFAULT_PORTS[parts.scheme] if port is None else port, target)


class AllowedHosts:
    """Hold the hosts of `--allowed-media-domains`.

    An entry is HOST, for the ports 80 and 443, or HOST:PORT. A name stands for itself and not for its subdomains. A
    name may have public addresses only; to reach an address of a private network, list the address itself.
    """

    def __init__(self, entries: Iterable[str]):
        self._hosts = {_read_entry(entry) for entry in entries}

    def check(self, address: WebAddress) -> None:
        """Raise UserError unless the host and the port are listed."""
        port = None if address.port == DEFAULT_PORTS[address.scheme] else address.port
        if (address.host, port) in self._hosts or (address.host, address.port) in self._hosts:
            return
        if not self._hosts:
            raise UserError(
                "the server fetches no images: send the image as a data: URL, or start the server with "
                "--allowed-media-domains"
            )
        raise UserError(f"the host {address.authority} is not one of --allowed-media-domains")

    def check_ip(self, host: str, ip: str) -> None:
        """Raise UserError unless `ip`, to which `host` has been resolved, is public or is itself listed."""
        found = as_ip(ip)
        is_listed = as_ip(host) is not None  # `check` has found it in the list
        if found is None or not (is_listed or is_public(found)):
            raise UserError(f"the host {host} must have a public IP address")


def is_public(ip: IpAddress) -> bool:
    """Return whether an address belongs to the public internet.

    IPv6 addresses that stand for an IPv4 address (mapped, 6to4, Teredo, NAT64) are not public here.
    """
    if isinstance(ip, ipaddress.IPv6Address):
        is_plain = ip in _PUBLIC_V6 and ip.sixtofour is None and ip.teredo is None
        return is_plain and ip.is_global and not ip.is_multicast
    return ip.is_global and not ip.is_multicast and not ip.is_reserved


def as_ip(text: str) -> IpAddress | None:
    """Return an IP address in its usual spelling; None for a name and for spellings such as 0x7f.1."""
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def _read_entry(entry: str) -> tuple[str, int | None]:
    """Return the host and the port of an entry; None for the default ports."""
    try:
        address = read_url(f"http://{entry}")
        has_port = urlsplit(f"http://{entry}").port is not None
    except UserError:
        address, has_port = None, False
    if address is None or address.target != "/" or entry.endswith("/"):
        raise UserError(
            f"`allowed_media_domains` must be hosts such as example.com or example.com:8443, got {entry!r}",
            param="allowed_media_domains",
        )
    return address.host, address.port if has_port else None
