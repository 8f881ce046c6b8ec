"""Fetch a file over HTTP from an allowed host: check every redirect, and dial the address that was checked."""

from __future__ import annotations

import asyncio
import functools
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import httpcore

from dovetail.core.errors import UserError
from dovetail.serve.media.address import AllowedHosts, WebAddress, read_url

SECONDS = 10.0  # for one image, including its redirects
MAX_HOPS = 3  # redirects
AT_ONCE = 16  # fetches of the server
_REDIRECTS = {301, 302, 303, 307, 308}
_FAILED = (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException, httpcore.UnsupportedProtocol)
Resolve = Callable[[str, int], Awaitable[list[str]]]


async def resolve(host: str, port: int) -> list[str]:
    """Return the IP addresses of a host, as the system resolves it."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


class Fetcher:
    """Fetch files from the hosts of `--allowed-media-domains`.

    It uses no proxy of the environment, sends no cookies or keys, and asks for an uncompressed answer.

    Args:
        allowed: The entries of the option.
        max_bytes: The largest file.
        resolve: Returns the IP addresses of a host.
        network: Opens connections to IP addresses.
    """

    def __init__(
        self,
        allowed: Iterable[str],
        max_bytes: int,
        resolve: Resolve = resolve,
        network: httpcore.AsyncNetworkBackend | None = None,
    ):
        self._allowed, self._max_bytes = AllowedHosts(allowed), max_bytes
        self._network = _CheckedNetwork(self._allowed, resolve, network or httpcore.AnyIOBackend())  # type: ignore[arg-type]
        self._places = asyncio.Semaphore(AT_ONCE)

    async def fetch(self, url: str) -> bytes:
        """Return the file at `url`.

        Raises:
            UserError: The URL is not allowed, or the file cannot be fetched.
        """
        address = read_url(url)
        self._allowed.check(address)  # before it waits for its turn
        try:
            async with self._places, asyncio.timeout(SECONDS):
                for _ in range(MAX_HOPS + 1):
                    found = await self._get(address)
                    if isinstance(found, bytes):
                        return found
                    address = found
                    self._allowed.check(address)
        except TimeoutError:
            raise UserError(f"the image could not be fetched within {SECONDS:g} s") from None
        except (*_FAILED, OSError):  # its text may tell about the network
            raise UserError(f"the image could not be fetched: no connection to {address.authority}") from None
        raise UserError(f"the image could not be fetched: more than {MAX_HOPS} redirects")

    async def _get(self, address: WebAddress) -> bytes | WebAddress:
        """Return the file, or where the answer redirects to."""
        secure = await asyncio.to_thread(_ssl_context) if address.scheme == "https" else None
        url = httpcore.URL(scheme=address.scheme, host=address.host, port=address.port, target=address.target)
        headers = {"Host": address.authority, "Accept": "image/*", "Accept-Encoding": "identity", "Connection": "close"}
        async with (
            httpcore.AsyncConnectionPool(ssl_context=secure, network_backend=self._network) as pool,
            pool.stream("GET", url, headers=list(headers.items()), extensions={"timeout": _timeouts()}) as answer,
        ):
            given = {name.lower(): value.decode("latin-1") for name, value in answer.headers}
            if answer.status in _REDIRECTS and b"location" in given:
                return address.redirected(given[b"location"])
            if answer.status != 200:
                raise UserError(f"the image could not be fetched: {address.authority} answered with {answer.status}")
            return await self._body(answer, given.get(b"content-length", ""))

    async def _body(self, answer: httpcore.Response, length: str) -> bytes:
        message = f"the image file must have at most {self._max_bytes:,} bytes"
        too_large = UserError(message, code="image_file_too_large")
        if length.isdecimal() and int(length) > self._max_bytes:
            raise too_large
        body = bytearray()
        async for chunk in answer.aiter_stream():
            body += chunk
            if len(body) > self._max_bytes:
                raise too_large
        return bytes(body)


class _CheckedNetwork(httpcore.AsyncNetworkBackend):
    """Resolve a host once, check all its addresses, and connect to one of these.

    TLS and the Host header still use the name. Resolving it a second time could give another address (DNS rebinding).
    """

    def __init__(self, allowed: AllowedHosts, resolve: Resolve, network: httpcore.AsyncNetworkBackend):
        self._allowed, self._resolve, self._network = allowed, resolve, network

    async def connect_tcp(self, host: str, port: int, *args: Any, **kwargs: Any) -> httpcore.AsyncNetworkStream:
        """Return a connection to the first address of the host that answers."""
        addresses = await self._resolve(host, port)
        for each in addresses:
            self._allowed.check_ip(host, each)
        for each in addresses[:-1]:
            try:
                return await self._network.connect_tcp(each, port, *args, **kwargs)
            except _FAILED:
                continue  # a machine without IPv6 gets such addresses too
        return await self._network.connect_tcp(addresses[-1], port, *args, **kwargs)


def _timeouts() -> dict[str, float]:
    return dict.fromkeys(("connect", "read", "write", "pool"), SECONDS)


@functools.cache
def _ssl_context() -> ssl.SSLContext:
    """Return a context with the usual certificates; reading them takes tens of milliseconds."""
    return httpcore.default_ssl_context()
