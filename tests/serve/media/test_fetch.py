"""Fetches of images: URLs, hosts and addresses that are refused. Resolver and sockets are replaced; nothing is sent."""

from __future__ import annotations

import asyncio
import time

import httpcore
import pytest
from refusals import refuses

from dovetail.serve.media import fetch
from dovetail.serve.media.address import AllowedHosts, as_ip, is_public, read_url
from dovetail.serve.media.fetch import Fetcher

PUBLIC = "93.184.216.34"
PNG = b"\x89PNG picture"
MAX_BYTES = 1000


def answer(status: int = 200, body: bytes = PNG, **headers: str) -> bytes:
    lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    return f"HTTP/1.1 {status} X\r\n{lines}Content-Length: {len(body)}\r\n\r\n".encode() + body


def redirect(to: str) -> bytes:
    return answer(302, b"", Location=to)


class Network(httpcore.AsyncNetworkBackend):
    """Answer by Host header and path, and note the addresses that are dialled."""

    def __init__(self, **pages: bytes):
        self.pages, self.dialled, self.tls, self.closed = pages, [], [], 0
        self.dead: set[str] = set()  # addresses that do not answer

    async def connect_tcp(self, host, port, timeout=None, local_address=None, socket_options=None):
        self.dialled.append((host, port))
        if host in self.dead:
            raise httpcore.ConnectError("secret text of the system")
        return Stream(self)


class Stream(httpcore.AsyncNetworkStream):
    def __init__(self, network: Network):
        self._network, self.sent, self._rest = network, b"", None

    async def write(self, buffer, timeout=None):
        self.sent += buffer

    async def read(self, max_bytes, timeout=None):
        if self._rest is None:
            lines = self.sent.decode().split("\r\n")
            hosts = [line.split(": ")[1] for line in lines if line.lower().startswith("host:")]
            self._rest = self._network.pages[hosts[0] + lines[0].split(" ")[1]]
        if self._rest == b"forever":
            await asyncio.sleep(60)
        found, self._rest = self._rest[:max_bytes], self._rest[max_bytes:]
        return found

    async def aclose(self):
        self._network.closed += 1

    async def start_tls(self, ssl_context, server_hostname=None, timeout=None):
        self._network.tls.append(server_hostname)
        return self

    def get_extra_info(self, info):
        return None


def fetched(url: str, network: Network, allowed=("a.com",), names=None) -> bytes:
    """Fetch with a resolver that knows `names`: a list of addresses, or one such list for each time it is asked."""
    times = {name: list(found) for name, found in (names or {"a.com": [PUBLIC]}).items()}

    async def resolve(host, port):
        if as_ip(host):
            return [host]
        found = times[host]
        return found.pop(0) if isinstance(found[0], list) else found

    return asyncio.run(Fetcher(allowed, MAX_BYTES, resolve, network).fetch(url))


def test_a_listed_host_is_dialled_by_the_address_that_was_checked():
    network = Network(**{"a.com/x.png?y=1": answer()})
    assert fetched("https://a.com/x.png?y=1", network) == PNG
    assert (network.dialled, network.tls) == ([(PUBLIC, 443)], ["a.com"])


def test_nothing_is_fetched_by_default():
    with refuses() as caught:
        fetched("https://a.com/", Network(), allowed=())
    assert "--allowed-media-domains" in str(caught.value) and "data:" in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "https://b.com/", "https://sub.a.com/", "https://a.com.b.com/", "https://a.com:8443/", "http://a.com:443/",
        "https://a.com@b.com/", "https://b.com\\@a.com/", "https://a.com\\@b.com/", "https://b.com#@a.com/",
        "https://user:key@a.com/", "https://a.com./", "https://a.com:0x50/", "https://a.com:99999/", "https:///x",
        "https://a.com/a b", "https://a.com/\r\nHost: b.com", "https://аpple.com/", "https://a.com%2f@b.com/",
        "ftp://a.com/", "gopher://a.com/", "//a.com/", "a.com/x.png", "", "javascript:alert(1)", "HTTPS://[a.com]/",
        "http://2130706433/", "http://0x7f.1/", "http://127.1/", "http://[::ffff:127.0.0.1]/", "http://127.0.0.1/",
    ],
)  # fmt: skip
def test_other_urls_are_refused_before_anything_is_dialled(url):
    network = Network()
    with refuses():
        fetched(url, network)
    assert not network.dialled


PRIVATE = [
    "127.0.0.1", "127.8.8.8", "0.0.0.0", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1",
    "224.0.0.1", "240.0.0.1", "255.255.255.255", "192.0.2.1", "198.18.0.1", "::", "::1", "fe80::1", "fe80::1%eth0",
    "fc00::1", "ff02::1", "::ffff:10.0.0.1", "::ffff:93.184.216.34", "64:ff9b::7f00:1", "2002:7f00:1::", "2001::1",
    "2001:db8::1", "::7f00:1",
]  # fmt: skip


@pytest.mark.parametrize("ip", PRIVATE)
def test_a_name_with_an_address_that_is_not_public_is_refused(ip):
    network = Network(**{"a.com/": answer()})
    with refuses() as caught:
        fetched("http://a.com/", network, names={"a.com": [PUBLIC, ip]})  # also as one of several
    assert not network.dialled and ip not in str(caught.value)


def test_public_addresses():
    assert all(is_public(ip) for text in (PUBLIC, "8.8.8.8", "2606:4700::1111") if (ip := as_ip(text)))


@pytest.mark.parametrize(
    "to", ["http://127.0.0.1/", "http://169.254.169.254/latest/meta-data", "http://b.com/", "//b.com/", "file:///etc/passwd",
           "http://a.com:22/", "http://a.com\\@b.com/", "data:image/png;base64,AAAA"]
)  # fmt: skip
def test_redirects_are_checked_as_the_first_url(to):
    network = Network(**{"a.com/": redirect(to)})
    with refuses():
        fetched("http://a.com/", network)
    assert len(network.dialled) == 1


def test_a_name_that_changes_its_address_between_hops_is_checked_again():
    network = Network(**{"a.com/": redirect("/two"), "a.com/two": answer()})
    assert fetched("http://a.com/", network) == PNG
    with refuses():
        fetched("http://a.com/", network, names={"a.com": [[PUBLIC], ["127.0.0.1"]]})
    assert ("127.0.0.1", 80) not in network.dialled
    # asked once for each hop: what a second look would answer does not matter
    assert fetched("http://a.com/two", network, names={"a.com": [[PUBLIC], ["127.0.0.1"]]}) == PNG


def test_redirects_end():
    with refuses() as caught:
        fetched("http://a.com/", Network(**{"a.com/": redirect("/")}))
    assert "redirects" in str(caught.value)


def test_an_address_that_is_listed_itself_may_be_private():
    network = Network(**{"127.0.0.1:9000/": answer(), "[::1]/": answer()})
    assert fetched("http://127.0.0.1:9000/", network, ["127.0.0.1:9000"]) == PNG
    assert fetched("http://[::1]/", network, ["[::1]"]) == PNG
    assert network.dialled == [("127.0.0.1", 9000), ("::1", 80)]


def test_the_next_address_is_tried_and_no_text_of_the_system_is_shown():
    network = Network(**{"a.com/": answer()})
    network.dead = {"2606:4700::1111"}
    assert fetched("http://a.com/", network, names={"a.com": ["2606:4700::1111", PUBLIC]}) == PNG
    network.dead = {PUBLIC}
    with refuses() as caught:
        fetched("http://a.com/", network)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "page", [answer(404), answer(body=bytes(MAX_BYTES + 1)), answer(500), b"", b"HTTP/1.1 200 X\r\nbroken", b"\0" * 99,
             b"HTTP/1.1 200 X\r\n\r\n" + bytes(MAX_BYTES + 1), redirect("http://[")]
)  # fmt: skip
def test_answers_that_are_refused(page):
    network = Network(**{"a.com/": page})
    with refuses(code=None if b"\0" * 500 not in page else "image_file_too_large"):
        fetched("http://a.com/", network)
    assert network.closed


def test_time_is_limited_and_the_connection_closed(monkeypatch):
    monkeypatch.setattr(fetch, "SECONDS", 0.1)
    network, start = Network(**{"a.com/": b"forever"}), time.monotonic()
    with refuses() as caught:
        fetched("http://a.com/", network)
    assert "within" in str(caught.value) and time.monotonic() - start < 5 and network.closed


def test_cancellation_ends_a_fetch():
    network = Network(**{"a.com/": b"forever"})

    async def resolve(host, port):
        return [PUBLIC]

    async def main():
        task = asyncio.create_task(Fetcher(["a.com"], MAX_BYTES, resolve, network).fetch("http://a.com/"))
        while not network.dialled:
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return task.cancelled()

    assert asyncio.run(main()) and network.closed


def test_proxies_of_the_environment_are_not_used(monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://10.0.0.1:3128")
    network = Network(**{"a.com/": answer()})
    assert fetched("http://a.com/", network) == PNG and network.dialled == [(PUBLIC, 80)]


@pytest.mark.parametrize("entry", ["", "https://a.com", "a.com/x", "a.com/", "*.a.com", "a.com:x", "a b", "u@a.com"])
def test_entries_of_the_list_are_hosts(entry):
    with refuses("allowed_media_domains"):
        AllowedHosts([entry])


def test_parts_of_a_url():
    address = read_url("HTTP://A.com:8080/x?y#z")
    assert (address.scheme, address.host, address.port, address.target) == ("http", "a.com", 8080, "/x?y")
